"""A file, or a stock MODEL, as a CheckpointInfo of a family that ComfyUI itself builds. Reads headers, no weights."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.checkpoint import OF_PAIR, WAN_22, CheckpointInfo
from ....checkpoints.fingerprint import settings_fingerprint
from ....checkpoints.header import FLOAT_TYPES, TORCH_TYPES, TensorRecord, read_header
from ....checkpoints.model_class import described, differences
from ....checkpoints.model_files import first
from ....checkpoints.quantized_files import pair_scales
from ....checkpoints.weight_file import read_records
from ....families import spec
from ....families.comfy.conditions import VISION
from ....families.comfy.native import NativeModel
from ....families.comfy.registry import find_native
from ....families.registry import COMFYUI
from ....parallel.block_lists import members, tail_parameters
from ..comfy_encoders import AS_LOADED, attached_to
from .drawing import FLOWS, time_at
from .files import AGAIN, ask_comfyui, given_to_loader
from .model import ComfyModel, build, channels_of, kind_of, silence_of

_log = logging.getLogger(__name__)
_Row = tuple[str, int]  # a tensor of the file and a row of it
_PICTURE_STEPS = 20
_CLIPS = (1, 17, 33)  # frames; all classes take these
_CODES = "which a language model made of its text, not of its LATENT; turn off generate_audio_codes of its encoder"
_CLEAN = "which has clean frames in the place of noisy ones; leave Kandinsky5ImageToVideo out and train a video of text"
_REFUSED = {"ACEStep15": {"audio_codes": _CODES}, "Kandinsky5": {"time_dim_replace": _CLEAN}}
_OF_AUDIO = ("ACEStep15",)  # models whose latents have no sides but time
# Sides of the sound beside a video, 0 for its length, which model classes hold as numbers.
_SOUND = {"LTXAV": (8, 0, 16), "MiniMaxH3": (32, 2, 0)}
# Columns of latents per second of sound: the samples per second of its VAE over those that a column stands for.
_SOUND_RATES = {"ACEStep": 44100 / 4096, "ACEStep15": 48000 / 1920, "LTXAV": 16000 / 640, "MiniMaxH3": 32000 / 800}
# Where models hold how many cells of a latent a token is wide. Those that are packed call by this name how their
# autoencoder packs, and a token is a cell; a UNet has no name for it, and halves its sides.
_PATCH_NAMES = ("patch_size", "patch_spatial", "patch")
_PACKED = ("Ideogram4Transformer2DModel", "LensTransformer2DModel", "QwenImage21Transformer2DModel")
_OF_UNETS = 2
# What a model is given beside the noise, as its CONDITIONING calls it, where concat_cond does not tell. HunyuanVideo
# 1.5 makes videos of text with the weights that take an image; HuMo fills the channels itself, and SCAIL can.
_NEEDS = {
    **dict.fromkeys(("HunyuanVideo15", "WAN21_SCAIL", "WAN21_SCAIL2"), ()),
    "WAN21_HuMo": ("audio_embed", "reference_latents"),
    "WAN21_Vace": ("vace_frames",),
    "WAN21_Camera": ("concat_latent_image", "camera_conditions"),
    "WAN22_S2V": ("control_video",),
}
# Of model_base, those that were published as two experts; a file of Wan 2.1 has the same class, and often its shapes.
_PAIRS = ("WAN21", "WAN21_Camera", "WAN21_Vace")
_FROM_TEXT, _FROM_IMAGES = 0.875, 0.9  # noise level where the published pairs change from high to low noise
_NO_NEXT_LEVEL = ("HunyuanImage21Refiner",)  # its extra_conds turn that input off
_MOST_BLOCKS = 1000
_MOST_READ = 2**14  # numbers of a tensor that is read to tell the model by, such as a norm's weights
# What a whole checkpoint says of its model beside the weights: how it predicts, and from how much noise.
_SAYS = frozenset(("v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min"))


def path_of_model(model: Any) -> Path:
    """The file that a stock MODEL came from. Raises: ValueError if something was done to it since, or nobody knows."""
    found = ["object_patches"] * bool(model.object_patches) + attached_to(model)
    if found := [each for each in found if each != "additional_models"]:  # copies on other cards
        what = f"the stock MODEL has {', '.join(found)} (a LoRA's, say), which training would leave out"
        raise ValueError(f"{what}; {AS_LOADED}")
    given = given_to_loader(model, "load_diffusion_model", "load_checkpoint_guess_config")
    if given is None:
        instead = "choose its file, also a GGUF, in Load Model for Training Across GPUs"
        raise ValueError(f"this MODEL does not come from Load Diffusion Model or Load Checkpoint; {instead}")
    return Path(given[0])


def read_native(path: Path, dtype: str, like: Any = None) -> CheckpointInfo:
    """What ComfyUI finds in a file. dtype: that the model will compute in. like: the stock MODEL that was loaded of it.
    Raises: ValueError for a file that ComfyUI does not know, or a class that cannot be trained here."""
    header = read_header(path, is_model=True)
    everything = header.records()
    prefixes = ("model.diffusion_model.", "diffusion_model.")
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in everything)), "")
    records = {name.removeprefix(prefix): each for name, each in everything.items() if name.startswith(prefix)}
    for name in records:  # ComfyUI counts blocks by reading all names for each
        if any(part.isdecimal() and (len(part) > 4 or int(part) >= _MOST_BLOCKS) for part in name.split(".")):
            raise ValueError(f"{path} has {name[:200]}, and no model has more than {_MOST_BLOCKS} blocks")
    said = {name: record for name, record in everything.items() if name in _SAYS}
    records = pair_scales(path, records, [header.metadata])
    names = _read_small({**{f"{prefix}{name}": record for name, record in records.items()}, **said})
    config = _detect(path, names, prefix, dict(header.metadata))
    config.set_inference_dtype(getattr(torch, dtype), None)
    make = functools.partial(build, config, names, prefix, torch.device("meta"))
    base = ask_comfyui(path, "build the model of", make)
    from ..split.deriving import with_derived_rows  # which bring ComfyUI
    from ..split.plan import layout_of

    row = trained_row(find_native(type(base.diffusion_model)) or layout_of(base.diffusion_model))
    row = with_derived_rows(row, base.diffusion_model)
    if reason := _why_not(base, row):
        raise ValueError(f"{type(base.diffusion_model).__name__} cannot be trained here: {reason}")
    tensors = ask_comfyui(path, "rename the tensors of", functools.partial(follow, config, records))
    if made := [name for name, record in tensors.items() if record is None]:
        what = f"ComfyUI's loader cuts, joins or makes tensors of {path} ({made[0]}), which training does not do"
        raise ValueError(f"{what}; use a file with the model's own layout")
    both = [base] if like is None else [base, like.model]
    kinds = [(type(each), type(each.diffusion_model).__name__, kind_of(each)) for each in both]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"{path} is read as {kinds[0]}, but the MODEL is {kinds[-1]}; load it again")
    needed = dict(base.diffusion_model.named_parameters())
    buffers = dict(base.diffusion_model.named_buffers())
    kept = {name: record for name, record in tensors.items() if name in needed or name in buffers}
    own = needed | {name: each for name, each in buffers.items() if name in kept}  # others are computed
    if found := differences({name: tuple(each.shape) for name, each in own.items()}, kept):
        whole = f"no whole {row.class_name}, which has {len(own)} tensors"
        raise ValueError(f"{path} is {whole}: {described(found)}; {AGAIN}")
    if left := sorted(tensors.keys() - kept.keys()):
        _log.warning("%s: %d tensors have no place in this %s: %s", path, len(left), row.class_name, first(left))
    family, variant = _family_of(path, base, row, ComfyModel(config, names, prefix, row))
    facts = {"in_channels": channels_of(base.latent_format), "class": row.class_name, "dtype": dtype}
    facts["shapes"] = settings_fingerprint({name: list(record.shape) for name, record in kept.items()})
    return CheckpointInfo(path, family, variant, facts, "original", kept, None)


def _read_small(records: dict[str, TensorRecord]) -> dict[str, Tensor]:
    """Every tensor without its numbers, but for vectors: ComfyUI tells some models by the spread of a norm or bias."""
    types = {n: torch.bfloat16 if r.is_quantized else TORCH_TYPES[r.dtype] for n, r in records.items()}
    names = {n: torch.empty(r.shape, dtype=types[n], device="meta") for n, r in records.items()}
    is_small = {n: r for n, r in records.items() if len(r.shape) < 2 and math.prod(r.shape) <= _MOST_READ}
    return names | dict(read_records({n: r for n, r in is_small.items() if r.dtype in FLOAT_TYPES}))


def _detect(path: Path, names: dict[str, Tensor], prefix: str, metadata: dict[str, str]) -> Any:
    import comfy.model_detection

    detect = comfy.model_detection.model_config_from_unet
    config = ask_comfyui(path, "tell what model is in", lambda: detect(dict(names), prefix, metadata=metadata))
    if config is None:
        found = f"{len(names)} tensors: {first(names)}"
        raise ValueError(f"{path} holds no diffusion model that ComfyUI knows, or a part of one, but {found}")
    return config


def trained_row(row: NativeModel) -> NativeModel:
    """The row as training goes by it: blocks that follow others (VACE's) stay on the main device and get no LoRA."""
    is_sequential = row.is_sequential and not row.forgets_if_patched  # which leaves nothing for the next microbatch
    return replace(row, is_sequential=is_sequential, transport="relay" if row.follows else row.transport)


def _why_not(base: Any, row: NativeModel) -> str:
    if row.refusal or row.untrained:
        return row.refusal or row.untrained
    if row.is_derived and not row.trained_inputs:
        said = "nobody has described it, and nobody has compared its gradients"
        return f"{said}; `devicebridge examine` with its file does that, and what is proved is trained"
    if row.per_device or row.remembers and not row.forgets_if_patched:
        return "its blocks share what they compute, or add to others, and nobody has compared its gradients"
    if (kind := kind_of(base)).startswith("IMG_TO_IMG") or kind.endswith("_AV") and not silence_of(base.latent_format):
        return f"a model of type {kind} needs more than a caption and one latent"
    if base.latent_format.latent_dimensions not in (2, 3) and type(base).__name__ not in _OF_AUDIO:
        return "its latents are neither pictures nor videos, and nobody has compared its gradients"
    if type(base.diffusion_model).__name__ == "UNetModel":
        # Classes that make channels in extra_conds, not in concat_cond, take an empty picture where none is given.
        known = base.latent_format.latent_channels + _beside(base)
        if others := int(base.diffusion_model.in_channels) - known:
            given = f"{others} channels of another picture beside the noise, which no dataset here holds"
            instead = "for clips from a first frame train Wan I2V, else one that draws from text alone"
            return f"{type(base).__name__} is given {given}; {instead}"
    if type(base).__name__ == "StableCascade_B":
        return "stage B draws from what stage C has made, and no dataset here holds that; train stage C"
    if base.model_config.unet_config.get("meanflow") and type(base).__name__ not in _NO_NEXT_LEVEL:
        # HunyuanVideo's class with MeanFlow says the mean velocity to the sampler's next noise level.
        said = "it is distilled to jump to the sampler's next noise level (time_r_in), and training has none"
        return f"{said}; train the model that it was distilled from, whose LoRA loads on this one, too"
    return ""


def _latent_of(base: Any, row: NativeModel) -> spec.LatentSpec:
    form, config = base.latent_format, base.model_config.unet_config
    dims = form.latent_dimensions
    if "audio_model" in config:  # cells are counted as they are, for nobody asks for pixels; ACE-Step 1's are columns
        sides = config.get("patch_size") or 1
        return spec.LatentSpec(
            channels=form.latent_channels,
            spatial_stride=1,
            size_multiple=1,
            num_tokens_per_cell=1 / math.prod(sides if isinstance(sides, (tuple, list)) else (sides,)),
            audio_rows=int(config.get("max_height") or 16) if dims == 2 else 1,
            sound_rate=_SOUND_RATES.get(type(base).__name__, 0.0),
        )
    patch = _patch_of(base.diffusion_model)
    stride = int(form.spacial_downscale_ratio)
    # Wan 2.2's 5B is known by its latents.
    fps = (24.0 if type(form).__name__ == "Wan22" else row.fps) if dims == 3 else 0.0
    made = spec.LatentSpec(
        channels=channels_of(form),
        spatial_stride=stride,
        frame_stride=int(form.temporal_downscale_ratio) if dims == 3 else 1,
        size_multiple=stride * patch,
        num_tokens_per_cell=1 / patch**2,
        fps=fps,
        frame_lengths=_CLIPS if fps else (1,),
        sound_rate=_SOUND_RATES.get(type(base).__name__, 0.0),
    )
    if not row.clip_steps:
        return made
    frames, *steps = row.clip_steps
    longer = tuple(steps[0] + frames * n for n in range(1, len(_CLIPS)))
    return replace(made, frame_stride=frames, clip_steps=tuple(steps), frame_lengths=(1, *longer))  # type: ignore[arg-type]


def _patch_of(model: Any) -> int:
    if type(model).__name__ in _PACKED:
        return 1
    holder = getattr(model, "patchifier", model)
    for name in _PATCH_NAMES:
        held = getattr(holder, name, None)
        if isinstance(held, (int, tuple, list)):
            return int(held if isinstance(held, int) else held[-1])
    return _OF_UNETS


def _family_of(path: Path, base: Any, row: NativeModel, host: ComfyModel) -> tuple[spec.ModelFamily, spec.Variant]:
    model, form = base.diffusion_model, base.latent_format
    dims = form.latent_dimensions
    # ComfyUI's own range has the model's shift in it; a shift of ours would come on top.
    timesteps = spec.TimestepSpec("uniform", "none", {"none": spec.ShiftRule("constant")})
    beside = _beside(base)
    boundary, is_expert = _expert_of(base, beside, path)
    variant = spec.Variant(
        name=f"comfyui-{type(base.model_config).__name__}",
        transformer_config={"in_channels": channels_of(form)},
        text_encoders=(),
        training_guidance=1.0 if base.model_config.unet_config.get("guidance_embed") else None,
        boundary=boundary,
        is_expert=is_expert,
    )
    lists = tuple(name for name in row.main_lists if members(model, name))
    of_samples = row.linears.sample_modules
    every = (*lists, *(name for name in row.follows if hasattr(model, name)))
    unused: Any = dict.fromkeys(("make_inputs", "read_prediction", "encode_latents", "decode_latents"), _unused)
    family = spec.ModelFamily(
        name=COMFYUI,
        title=f"ComfyUI's {row.class_name}",
        transformer_class=row.class_name,
        vae_class="",
        block_lists=tuple(replace(row.linears, name=name) for name in lists),
        tail=(*(name for each in row.tail for name, _ in members(model, each)), *tail_parameters(model, row)),
        read_by_tail=row.read_by_tail,
        keep_full_precision=(*_outside(model, every), *(f"{name}.*.{p}" for name in every for p in of_samples)),
        lora_targets=tuple(f"{name}.*" for name in lists),
        latent=_latent_of(base, row),
        timesteps=timesteps,
        variants=(variant,),
        renames=(),
        modelspec_architecture=row.class_name.lower(),
        ss_base_model_version=row.class_name.lower(),
        **unused,
        comfy=spec.ComfyInputs(
            "cond",
            "",
            _normaliser(form, dims),
            latent_dims=dims,
            refused=_REFUSED.get(type(base).__name__, {}),
            sound=_SOUND.get(type(base).__name__, ()),
            silence=silence_of(form),
            reads_all=True,
            needs=_needs(base, beside),
            beside=beside,
        ),
        native=row,
        host=host,
        prediction_target=kind_of(base),
        tensor=row.tensor,
        sampling=None if silence_of(form) else _sampling(base, variant),  # a picture of it has a sound as well
    )
    return family, variant


def _sampling(base: Any, variant: spec.Variant) -> spec.SamplingSpec:
    """A guidance input gets what ComfyUI gives it where a CONDITIONING says nothing."""
    if variant.training_guidance is not None:
        usual = 6.0 if type(base).__name__.startswith("HunyuanVideo") else 3.5
    else:  # of classifier-free guidance, for models that are not distilled
        usual = 4.0 if kind_of(base) in FLOWS else 7.0
    return spec.SamplingSpec(_PICTURE_STEPS, usual, lambda num_tokens, steps: 1.0)


def _needs(base: Any, beside: int) -> tuple[str, ...]:
    """Wan's blocks take the text for an image where its image embedder is given nothing."""
    needs = _NEEDS.get(type(base).__name__, _concat_needs(base) if beside else ())
    return needs if getattr(base.diffusion_model, "img_emb", None) is None else (*needs, VISION)


def _concat_needs(base: Any) -> tuple[str, ...]:
    """Options without which its concat_cond fills these channels as if there were no picture. A mask counts where the
    picture is not read without one; without either Cosmos-Predict2 and Kandinsky 5 make a video of text."""
    one = torch.ones(_some_latents(base))
    image, mask = {"concat_latent_image": one}, {"concat_mask": one[:, :1] / 2}

    def made(**options: Tensor) -> Any:
        given = {name: each.clone() for name, each in options.items()}  # Wan's writes into what it is given
        return base.concat_cond(noise=one, latent_image=torch.zeros_like(one), device=one.device, **given)

    def is_read(**beside: Tensor) -> bool:
        return not torch.equal(made(**beside, **image), made(**beside))

    if is_read():
        return tuple(image)
    return (*image, *mask) if is_read(**mask) else ()


def _some_latents(base: Any) -> tuple[int, ...]:
    """Of clips an odd number of frames: HunyuanImage's refiner pairs them, the first one with itself."""
    form = base.latent_format
    frames = (9,) if form.latent_dimensions == 3 else ()
    return (1, form.latent_channels, *frames, *(8,) * (form.latent_dimensions - len(frames)))


def _beside(base: Any) -> int:
    noise = torch.empty(_some_latents(base), device="meta")
    beside = base.concat_cond(noise=noise, latent_image=noise, device=noise.device)
    return 0 if beside is None else int(beside.shape[1])


def _outside(model: Any, lists: tuple[str, ...]) -> list[str]:
    def is_apart(name: str) -> bool:
        return not any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in lists)

    return [name for name, _ in model.named_modules() if name and is_apart(name)]


def _normaliser(form: Any, dims: int) -> Any:
    def normalise(samples: Tensor) -> Tensor:
        """[C, F, H, W] -> the same, as the sampler hands it to the model; packed streams likewise."""
        made: Tensor = form.process_in(samples[None].reshape(1, len(samples), *samples.shape[4 - dims :]))[0]
        return made.view(len(made), *[1] * (3 - dims), *made.shape[1:])

    return normalise


# ---- tensors that ComfyUI's loader makes of a file's


def follow(config: Any, records: Mapping[str, TensorRecord]) -> dict[str, TensorRecord | None]:
    """The records under the names that the loader of this config gives them; None for what it makes in another way.
    It makes some of rows of one of the file's. Nothing says which, so it is asked with a random number for each row."""
    given = {name: torch.empty(record.shape, device="meta") for name, record in records.items()}
    by_id = {id(tensor): records[name] for name, tensor in given.items()}
    made = config.process_unet_state_dict(dict(given))
    found = {name: by_id.get(id(tensor)) for name, tensor in made.items()}
    if None not in found.values():
        return found
    kept = {id(tensor) for tensor in made.values()}
    generator = torch.Generator().manual_seed(1)
    numbered: dict[str, Tensor] = {}  # tensors of as many rows, each one number
    origin: dict[int, _Row] = {}  # the row that each number stands for
    for name, tensor in given.items():
        if tensor.ndim and id(tensor) not in kept:
            numbers = torch.randint(2**62, (len(tensor),), generator=generator)
            numbered[name] = numbers.view(-1, *[1] * (tensor.ndim - 1))
            origin |= {number: (name, row) for row, number in enumerate(numbers.tolist())}
    try:
        again = config.process_unet_state_dict({**given, **numbered})
    except (RuntimeError, TypeError):  # it computes with them
        return found
    for name in [name for name, record in found.items() if record is None]:
        rows = again.get(name)
        listed = [] if rows is None or rows.is_meta else rows.flatten().tolist()
        found[name] = _cut(records, tuple(made[name].shape), [origin.get(number) for number in listed])
    return found


def _cut(
    records: Mapping[str, TensorRecord], shape: tuple[int, ...], rows: Sequence[_Row | None]
) -> TensorRecord | None:
    """The record of these rows; None if they are not rows of one tensor in 16 bits or more."""
    known = [row for row in rows if row is not None]
    if len(known) != len(rows) or len({name for name, _ in known}) != 1:
        return None
    record = records[known[0][0]]
    if record.is_quantized or shape != (len(rows), *record.shape[1:]):
        return None
    runs: list[tuple[int, int]] = []
    for _, row in known:
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return record.cut(*runs[0]) if len(runs) == 1 else replace(record, shape=shape, pieces=tuple(runs))


def _expert_of(base: Any, beside: int, path: Path) -> tuple[float, bool]:
    """The time in 0..1, before the model's own shift, where a pair changes from one expert to the other; 0.0 without.
    And whether the file is one of two: by its name, or as only Wan 2.2 takes an image without CLIP vision."""
    if type(base).__name__ not in _PAIRS:
        return 0.0, False
    boundary = time_at(base.model_sampling, _FROM_IMAGES if beside else _FROM_TEXT)
    takes_image = bool(beside) and getattr(base.diffusion_model, "img_emb", None) is None
    return boundary, takes_image or any(each.search(path.name) for each in (WAN_22, OF_PAIR))


def _unused(*args: Any) -> Any:
    raise RuntimeError("one of ComfyUI's own models was treated as one of diffusers'")
