"""GGUF files through ComfyUI-GGUF's own loader and patcher: quantized tensors that a layer dequantizes at every use.

Every reference is the same file loaded anew by the same node and run on one card, unsplit.
"""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import comfy
import torch
from devicebridge.tests.comfy.split_cases import Case, case, split
from devicebridge.tests.comfy.split_cases_weights import NAME, _sample_scheduled, _with_loras
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, offloaded_layers
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, make_weights
from devicebridge.tests.comfy_host import find_gguf_pack
from devicebridge.tests.emulated import EmulatedTensor
from devicebridge.tests.gguf_files import KINDS, random_blocks, write_gguf
from torch.utils._python_dispatch import _disable_current_modes

FILES = ((NAME, "Q8_0"), (NAME, "Q4_0"), (NAME, "Q4_K"), (NAME, "F16"), ("wan", "Q8_0"))


@functools.cache
def _pack() -> Any:
    """The real pack, imported as ComfyUI imports custom nodes."""
    folder = find_gguf_pack(Path(comfy.__path__[0]).parent)
    assert folder is not None, "the test asks for this case only where the pack is"
    name = "comfyui_gguf"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    _emulate(_tensor_class())
    return sys.modules[name]


def _tensor_class() -> type[torch.Tensor]:
    return sys.modules["comfyui_gguf.ops"].GGMLTensor


def _emulate(tensor_class: Any) -> None:
    """torch makes no tensor of a subclass while a dispatch mode, the emulation's, looks on."""
    make = tensor_class.__new__

    def make_outside(cls: type, data: torch.Tensor, **options: Any) -> Any:
        if isinstance(data, EmulatedTensor):
            return data.as_subclass(cls)
        with _disable_current_modes():
            return make(cls, data, **options)

    tensor_class.__new__ = make_outside


def _load(host: Host, name: str = NAME, kind: str = "Q8_0", node: str = "UnetLoaderGGUF", **choices: Any) -> Any:
    """The MODEL that the pack's loader makes of a tiny file."""
    import folder_paths

    loader, file = _pack().NODE_CLASS_MAPPINGS[node](), f"{name}-{kind}.gguf"
    folder_paths.add_model_folder_path("diffusion_models", str(host.folder))
    if not (host.folder / file).exists():
        tensors, blocks = dict[str, Any](), FAMILIES[name].block_lists
        for seed, (key, each) in enumerate(make_weights(FAMILIES[name]).items()):
            tensors[key] = _packed(kind if key.startswith(blocks) else "", each, seed)
        write_gguf(host.folder / file, tensors, {"general.architecture": name.removesuffix("1")})
    return loader.load_unet(file, **choices)[0]


def _packed(kind: str, weight: torch.Tensor, seed: int) -> Any:
    """Matrices of blocks are packed where rows divide, and else in halves."""
    if not kind or weight.ndim != 2:
        return weight.float()
    if kind not in KINDS or weight.shape[1] % KINDS[kind].values:
        return weight.half()
    return kind, tuple(weight.shape), random_blocks(kind, tuple(weight.shape), seed)


def _references(host: Host, *loras: tuple[int, ...], name: str = NAME, kind: str = "Q8_0") -> dict[Any, torch.Tensor]:
    model = _load(host, name, kind)
    found = {seeds: host.sample(_with_loras(host, model, *seeds, name=name), name) for seeds in loras}
    host.unload_all()
    return found


def _quantized(model: Any, device: torch.device) -> int:
    weights = [p for p in model.model.parameters() if isinstance(p, _tensor_class()) and p.device == device]
    return sum(weight.dtype == torch.uint8 or weight.dtype == torch.float16 for weight in weights)


def _shared(plain: Any, divided: Any) -> bool:
    """Whether both trees have one storage and two tensors for every weight; for trees that are on no card."""
    pairs = list(zip(plain.model.parameters(), divided.model.parameters(), strict=True))
    return all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)


@case
def gguf_files(case: Case, host: Host) -> None:
    """Every kind of weight, without a second copy in host memory; with LoRA, which the pack adds as a layer dequantizes
    a weight, and bakes into those of F16."""
    for name, kind in FILES:
        file, lora = f"{name} {kind}", functools.partial(_with_loras, host, name=name)
        found = _references(host, (), (1,), (1, 2), name=name, kind=kind)
        case.differs(f"{file}: a LoRA does something", found[1,], found[()])
        plain = _load(host, name, kind)
        divided = split(plain)
        case.check(f"{file}: the pack's own patcher", isinstance(divided, type(plain)), type(divided).__mro__)
        case.check(f"{file}: one copy in host memory, two sets of tensors", _shared(plain, divided))
        case.equal(f"{file}: as unsplit", host.sample(divided, name), found[()])
        for device in (HOME, OTHER):
            case.check(f"{file}: {device} holds weights as they are in the file", _quantized(divided, device) > 5)
        host.unload_all()
        case.check(f"{file}: one copy after the return, too", _shared(plain, divided))
        case.equal(f"{file}: a LoRA after the split", host.sample(lora(divided, 1), name), found[1,])
        case.equal(f"{file}: without it again", host.sample(divided, name), found[()])
        before = split(lora(plain, 1))
        case.equal(f"{file}: before the split", host.sample(before, name), found[1,])
        case.equal(f"{file}: before and after", host.sample(lora(before, 2), name), found[1, 2])
        case.equal(f"{file}: the given MODEL has none", host.sample(plain, name), found[()])
        host.unload_all()


@case
def gguf_eviction_and_return(case: Case, host: Host) -> None:
    """Weights that came back to host memory are streamed, a LoRA hung on them: on the split's tensors, no other's."""
    found, plain = _references(host, (), (1,)), _load(host)
    divided = split(plain)
    patched = _with_loras(host, divided, 1)
    for device in (OTHER, HOME):
        for seeds, model in {(): divided, (1,): patched}.items():
            case.equal(f"LoRAs {seeds}", host.sample(model, NAME), found[seeds])
            host.free(device)
            case.equal(f"LoRAs {seeds} after {device} was cleared", host.sample(model, NAME), found[seeds])
    shard = patched.companions[0]
    freed = shard.partially_unload(shard.offload_device, int(shard.model_size()) // 2)
    case.check("half of the card's weights went", 0 < freed < shard.model_size(), freed)
    case.equal("after that", host.sample(patched, NAME), found[1,])
    host.unload_all()
    case.equal("clean after everything was unloaded", host.sample(divided, NAME), found[()])
    host.unload_all()
    with host.machine.room_for(int(shard.model_size()) // 2, OTHER):
        case.equal("streamed, with a LoRA", host.sample(patched, NAME), found[1,])
        case.check("layers wait in host memory", len(offloaded_layers(patched, OTHER)) > 3)
        case.equal("the given MODEL meanwhile", host.sample(plain, NAME), found[()])
        case.equal("streamed, without it", host.sample(divided, NAME), found[()])
        case.equal("the given MODEL with it", host.sample(_with_loras(host, plain, 1), NAME), found[1,])
        case.equal("streamed, without it, once more", host.sample(divided, NAME), found[()])


@case
def gguf_scheduled_lora(case: Case, host: Host) -> None:
    """It is written into weights in place: into F16 ones, never into the mapped file. Q8_0 the pack cannot do."""
    reference = _sample_scheduled(host, _load(host, kind="F16"), keyframes=True)
    host.unload_all()
    plain = _load(host, kind="F16")
    divided = split(plain, overlap=False)
    case.equal("F16", _sample_scheduled(host, divided, keyframes=True), reference)
    host.unload_all()
    case.check("the weights are the file's again", _shared(plain, divided))
    with host.machine.room_for(int(divided.companions[0].model_size()) // 3, OTHER):
        case.equal("F16, streamed", _sample_scheduled(host, divided, keyframes=True), reference)
    host.unload_all()
    for what, model in {"unsplit": _load(host), "split": split(_load(host))}.items():
        case.refused(
            f"Q8_0, {what}", lambda m=model: _sample_scheduled(host, m, keyframes=False), AttributeError, "temp"
        )
        host.unload_all()


@case
def gguf_choices_of_the_advanced_loader(case: Case, host: Host) -> None:
    """What the loader's user chose holds on every card: where a LoRA waits, and the type it is added in."""
    choices = {"dequant_dtype": "bfloat16", "patch_dtype": "target", "patch_on_device": True}
    found = {}
    try:
        for what, divide in {"unsplit": lambda model: model, "split": split}.items():
            loaded = _load(host, node="UnetLoaderGGUFAdvanced", **choices)
            model = _with_loras(host, divide(loaded), 1)
            found[what] = host.sample(model, NAME)
            for patcher in getattr(model, "companions", ()):
                case.check(f"the choice of {patcher.load_device}", patcher.patch_on_device is True)
            host.unload_all()
    finally:
        _load(host, node="UnetLoaderGGUFAdvanced")  # it keeps the types on the pack's class
    case.equal("as unsplit", found["split"], found["unsplit"])
    case.differs("the choices do something", found["split"], _references(host, (1,))[1,])
