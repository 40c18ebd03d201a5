"""Whether a ComfyUI still has what this pack overrides, wraps, or calls and cannot do without; else its nodes refuse.
Newer parameters that we leave out are no change, unless ComfyUI passes them to a function of ours. Functions that other
packs have put in place of ComfyUI's are not judged. tests/comfy/comfyui_api.txt lists what else the code uses.
`python compat.py FOLDER` asks a ComfyUI that does not run; the doctor starts it with that ComfyUI's own Python. This
module imports nothing of ComfyUI's or of the pack's until it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TESTED_VERSION = "0.33.0"
_log = logging.getLogger(__name__)
_SHOWN = 3
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SPLIT = ("DeviceBridgeSplitModel", "DeviceBridgeLoadDiffusionModelSplit")
_TRAINING = "LoadModelForTraining Quantize TrainingDataset CacheCaptionsAndLatents DatasetFromLatents PlanTraining "
_TRAINING += "TrainLora TrainLoraSimple ImagesToCaption WriteCaptions"
_NODES = (*(f"DeviceBridge{name}" for name in _TRAINING.split()), *_SPLIT)
# The parts of the pack that may be refused, and the nodes that need each, or what else does.
PARTS: dict[str, tuple[str, ...]] = {
    "schemas": ("every node",),
    "nodes": _NODES,
    "encoders": ("DeviceBridgeCacheCaptionsAndLatents", "DeviceBridgeTrainLoraSimple"),
    "split": _SPLIT,
    "training": ("training of ComfyUI's own models",),
    "page": ("the page DeviceBridge",),
}

# part -> "module:class" -> functions: parameters by place, "name=" by name, "..." for further ones.
_CALLED = {
    "schemas": {
        "comfy_api.v0_0_2:io": "NodeOutput(..., ui=); Schema(node_id=, display_name=, category=, description=, "
        "search_aliases=, is_output_node=, is_experimental=, is_input_list=, inputs=, outputs=, hidden=)"
    },
    "nodes": {
        "comfy.utils:ProgressBar": "__init__(total, node_id=); update_absolute(value, total, preview=)",
        "comfy.model_management": "interrupt_current_processing(value); processing_interrupted(); "
        "unload_all_models(); soft_empty_cache(); get_torch_device(); get_all_torch_devices(); is_device_cpu(device)",
        "server:PromptServer": "send_progress_text(text, node_id); send_sync(event, data, sid)",
        "folder_paths": "get_folder_paths(folder_name); get_filename_list(folder_name); "
        "get_full_path(folder_name, filename)",
    },
    "encoders": {
        "comfy.sd": "load_clip(ckpt_paths, embedding_directory=, clip_type=); CLIP.tokenize(text); "
        "CLIP.encode_from_tokens_scheduled(tokens); VAE.encode(pixel_samples)"
    },
    "split": {
        "comfy.model_patcher:ModelPatcher": "__init__(model, load_device, offload_device); loaded_size(); "
        "get_wrappers(wrapper_type, key); set_injections(key, injections); "
        "add_wrapper_with_key(wrapper_type, key, wrapper)",
        "comfy.model_management": "LoadedModel.model_unload(); get_free_memory(dev); get_total_memory(dev)",
        "comfy.patcher_extension": "PatcherInjection(inject=, eject=)",
        "comfy.lora": "calculate_weight(patches, weight, key, intermediate_dtype, original_weights)",
        "comfy.weight_adapter.lora": "LoRAAdapter(loaded_keys, weights)",
        "comfy.samplers": "_calc_cond_batch(model, conds, x_in, timestep, model_options)",
        "comfy.sampler_helpers": "_prepare_sampling(model, noise_shape, conds, ...)",
        "comfy.sd": "load_diffusion_model(unet_path, model_options=, disable_dynamic=)",
        "comfy.utils": "get_attr(obj, attr); set_attr(obj, attr, value); set_attr_param(obj, attr, value); "
        "repeat_to_batch_size(tensor, batch_size)",
    },
    "training": {
        "comfy.model_base:BaseModel": "apply_model(x, t, transformer_options=)",
        "comfy.model_detection": "model_config_from_unet(state_dict, unet_key_prefix, metadata=)",
        "comfy.supported_models_base:BASE": "get_model(state_dict, prefix, device=); "
        "set_inference_dtype(dtype, manual_cast_dtype); process_unet_state_dict(state_dict)",
        "comfy.model_sampling:CONST": "calculate_denoised(sigma, model_output, model_input); "
        "noise_scaling(sigma, noise, latent_image, max_denoise)",
        "comfy.samplers": "encode_model_conds(model_function, conds, noise, device, prompt_type, ...)",
        "comfy.utils": "load_torch_file(ckpt, return_metadata=)",
    },
    "page": {
        "server:PromptServer": "send_sync(event, data, sid)",
        "execution:PromptQueue": "set_flag(name, data); get_tasks_remaining()",
    },
}
# The same for functions that ComfyUI calls ours in place of, or through: ours take no more than this.
_OVERRIDDEN = {
    "schemas": {
        "comfy_api.v0_0_2:ComfyExtension": "get_node_list()",
        "comfy_api.v0_0_2:io.ComfyNode": "define_schema(); execute(...); fingerprint_inputs(...); "
        "validate_inputs(...); check_lazy_status(...)",
    },
    "split": {
        "comfy.model_patcher:ModelPatcher": "add_object_patch(name, obj); apply_hooks(...); cleanup(); "
        "clone(disable_dynamic, model_override, force_deepcopy); deepclone_multigpu(...); eject_model(); "
        "get_all_callbacks(call_type); get_free_memory(device); get_key_patches(filter_prefix); inject_model(); "
        "load(...); model_patches_models(); model_size(); model_state_dict_for_saving(...); "
        "partially_load(device_to, extra_memory, force_patch_weights); partially_unload(...); patch_model(...); "
        "patch_cached_hook_weights(cached_weights, key, ...); patch_weight_to_device(key, device_to, ...); "
        "patch_hook_weight_to_device(hooks, combined_patches, key, ...); unpatch_hooks(...); patch_hooks(hooks); "
        "unpatch_model(device_to, unpatch_weights)",
        "comfy.model_patcher:ModelPatcherDynamic": "get_non_dynamic_delegate(); load(...); patch_model(...); "
        "partially_load(device_to, extra_memory, force_patch_weights); partially_unload(...); "
        "unpatch_model(device_to, unpatch_weights)",
        "comfy.samplers": _CALLED["split"]["comfy.samplers"],
        "comfy.sampler_helpers": _CALLED["split"]["comfy.sampler_helpers"],
    },
}


class Need(NamedTuple):
    """A function or class of ComfyUI's, as in the tables above; is_overridden: ComfyUI calls ours in its place."""

    part: str
    place: str
    name: str
    form: tuple[str, ...]
    is_overridden: bool = False


def _needs(table: dict[str, dict[str, str]], is_overridden: bool) -> Iterator[Need]:
    for part, places in table.items():
        for place, text in places.items():
            for entry in text.split("; "):
                name, _, form = entry.removesuffix(")").partition("(")
                yield Need(part, place, name, tuple(filter(None, form.split(", "))), is_overridden)


NEEDS = (*_needs(_CALLED, False), *_needs(_OVERRIDDEN, True))


def find_faults(needs: Iterable[Need] = NEEDS) -> list[tuple[str, str]]:
    """Each part and what the ComfyUI of this process has changed of it; modules that it lacks yet are imported."""
    return [(need.part, text) for need in needs if (text := _fault(need))]


def check(part: str) -> None:
    """Raises: RuntimeError if this ComfyUI has changed something that a part of the pack relies on."""
    texts = [text for _, text in find_faults(need for need in NEEDS if need.part == part)]
    if texts:
        raise RuntimeError(_refusal(texts))


def refusals(faults: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Why nodes, or other things of PARTS, do not work on this ComfyUI; what works is left out."""
    found: dict[str, list[str]] = {}
    for part, text in faults:
        for name in PARTS[part]:
            found.setdefault(name, []).append(text)
    return {name: _refusal(texts) for name, texts in found.items()}


def version() -> str:
    with contextlib.suppress(Exception):
        return str(importlib.import_module("comfyui_version").__version__)
    return "of unknown version"


def _refusal(texts: list[str]) -> str:
    texts = list(dict.fromkeys(texts))
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return (
        f"ComfyUI {version()} changed what DeviceBridge relies on here: {'; '.join(texts[:_SHOWN])}{more}. Update "
        f"DeviceBridge, or use ComfyUI {TESTED_VERSION}, with which this version of it was tested"
    )


def _fault(need: Need) -> str:
    """What has changed of it; "" for nothing, and where another pack has made it so that nobody can tell."""
    module, _, inner = need.place.partition(":")
    *owners, last = ".".join(filter(None, (inner, need.name))).split(".")
    path = ".".join((module, *owners, last)).removesuffix(".__init__")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        found = inspect.getattr_static(owner, last) if _is_own(owner, module) else None
        signature = _own_signature(found, owner, module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    except AttributeError:
        return f"{path} is gone"
    except Exception as error:  # what other packs put there may fail when it is looked at
        _log.debug("%s cannot be examined (%s: %s)", path, type(error).__name__, error)
        return ""
    if signature is None:
        return ""
    ours = [name for name in need.form if name != "..." and not name.endswith("=")]
    theirs = [each.name for each in signature.parameters.values() if each.kind not in _MANY]
    changes = [f"{path} takes {b!r} where {a!r} was" for a, b in zip(ours, theirs, strict=False) if a != b]
    if not need.is_overridden:
        try:
            named = {name.rstrip("="): None for name in need.form if name.endswith("=")}
            (signature.bind_partial if "..." in need.form else signature.bind)(*ours, **named)
        except TypeError as error:
            changes.append(f"{path}: {error}")
    elif "..." not in need.form:
        changes += [f"{path} now also takes {name!r}" for name in theirs if name not in ours]
    return next(iter(changes), "")


def _is_own(found: object, module: str) -> bool:
    """Whether ComfyUI's package that this module is in has defined it."""
    origin = found.__name__ if isinstance(found, types.ModuleType) else str(getattr(found, "__module__", ""))
    return origin.partition(".")[0] == module.partition(".")[0]


def _own_signature(found: object, owner: object, module: str) -> inspect.Signature | None:
    """How ComfyUI's function is called, without self; None for what another pack has put in its place."""
    if isinstance(found, type):
        found, owner = inspect.getattr_static(found, "__init__"), found
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    if not isinstance(function, types.FunctionType) or not _is_own(function, module):
        return None
    signature = inspect.signature(function)
    is_bound = isinstance(owner, type) and not isinstance(found, staticmethod)
    return signature.replace(parameters=list(signature.parameters.values())[is_bound:])


def main(folder: str) -> None:
    """Print what a ComfyUI on the disk has changed, as JSON; it sets up no device and serves nothing."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [folder, *(place for place in sys.path if Path(place).resolve() != here)]
    sys.argv = ["main.py", "--cpu"]
    with contextlib.redirect_stdout(sys.stderr):
        with contextlib.suppress(ImportError):
            importlib.import_module("comfy.options").enable_args_parsing()
        fault = ""  # what keeps this Python from importing ComfyUI, which then says nothing of ComfyUI itself
        try:
            importlib.import_module("comfy.model_management")
        except (ImportError, OSError) as error:
            package = (getattr(error, "name", None) or "").partition(".")[0]
            is_own = package == "comfy" or any(Path(folder, name).exists() for name in (package, f"{package}.py"))
            if isinstance(error, OSError) or package and not is_own:
                fault = f"{sys.executable} cannot import ComfyUI ({error}). Name its own with COMFYUI_PYTHON"
        faults = [] if fault else find_faults()
        texts = list(dict.fromkeys(text for _, text in faults))
        answer = {"version": version(), "import_fault": fault, "faults": texts, "refused": refusals(faults)}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
