"""Files and weight types: loaded split from the file, half precision, fp8 with and without scales, packs' patchers."""

import json
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.sd
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from devicebridge.nodes.allocation import read_allocation
from devicebridge.nodes.host.split.model import load_split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, block_devices, peaks_of
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, make_weights, small_sizes
from safetensors.torch import save_file

NAME = "flux1"
BOTH = SplitRequest(devices=(HOME, OTHER))


def _load_split(host: Host, name: str, weight_dtype: str = "default", path: Path | None = None) -> Any:
    with small_sizes(FAMILIES[name]):
        return load_split_model(path or host.checkpoint(name), weight_dtype, BOTH)


@case
def loaded_split(case: Case, host: Host) -> None:
    """Load Diffusion Model Across GPUs: a MODEL that never existed whole, nowhere but in host memory."""
    for name in ("flux1", "wan_vace", "qwen_image", "sdxl"):
        reference = host.reference(name)
        divided = _load_split(host, name)
        whole = sum(parameter.nbytes for parameter in divided.model.diffusion_model.parameters())
        with peaks_of(host.machine) as peaks:
            case.equal(name, host.sample(divided, name), reference)
        places = {place for found in block_devices(divided, FAMILIES[name]).values() for place in found}
        case.check(f"{name}: on both cards", places == {str(HOME), str(OTHER)}, places)
        case.check(f"{name}: the whole was on no card", max(peaks.values()) < 0.85 * whole, (peaks, whole))
        host.unload_all()
        case.equal(f"{name}: after unloading", host.sample(divided, name), reference)
        host.unload_all()


@case
def half_precision(case: Case, host: Host) -> None:
    """A bf16 file: computed in float32 where the machine says so, or kept and cast at every use."""
    path = host.checkpoint(NAME, torch.bfloat16)
    for options in ({}, {"dtype": torch.bfloat16}):
        unsplit = comfy.sd.load_diffusion_model(str(path), model_options={"load_device": CPU, **options})
        reference = host.sample(unsplit, NAME)
        divided = split(comfy.sd.load_diffusion_model(str(path), model_options=options))
        case.check("the type of the weights", divided.model_dtype() == unsplit.model_dtype(), divided.model_dtype())
        case.equal(f"{options}: as unsplit", host.sample(divided, NAME), reference)
        with_lora = host.sample(host.lora(unsplit, NAME, 1), NAME)
        case.equal(f"{options}: with a LoRA", host.sample(host.lora(divided, NAME, 1), NAME), with_lora)
    unsplit = comfy.sd.load_diffusion_model(str(path), model_options={"load_device": CPU})
    case.equal("loaded split", host.sample(_load_split(host, NAME, path=path), NAME), host.sample(unsplit, NAME))


@case
def fp8_weights(case: Case, host: Host) -> None:
    """weight_dtype of the loader: weights are stored in fp8 and cast where they are used."""
    reference = host.sample(host.load(NAME, load_device=CPU, dtype=torch.float8_e4m3fn), NAME)
    case.differs("it does something", reference, host.reference(NAME))
    divided = split(host.load(NAME, dtype=torch.float8_e4m3fn))
    case.equal("as unsplit", host.sample(divided, NAME), reference)
    case.equal("loaded split", host.sample(_load_split(host, NAME, "fp8_e4m3fn"), NAME), reference)
    types = {str(parameter.dtype) for parameter in divided.model.diffusion_model.single_blocks.parameters()}
    case.check("the blocks are fp8", "torch.float8_e4m3fn" in types, types)
    unsplit = host.load(NAME, load_device=CPU, dtype=torch.float8_e4m3fn)
    with_lora = host.sample(host.lora(unsplit, NAME, 1), NAME)
    case.equal("with a LoRA, rounded at random", host.sample(host.lora(divided, NAME, 1), NAME), with_lora)


def scaled_checkpoint(host: Host, name: str = NAME) -> Path:
    """A file as the fp8_scaled ones: matrices of the blocks in fp8, a scale beside each, and the mark."""
    path = host.folder / f"{name}-scaled.safetensors"
    if path.exists():
        return path
    family, weights = FAMILIES[name], {}
    for key, tensor in make_weights(family).items():
        if tensor.ndim == 2 and key.startswith(family.block_lists):
            scale = tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            weights[key] = (tensor / scale).to(torch.float8_e4m3fn)
            weights[key.removesuffix("weight") + "scale_weight"] = scale
        else:
            weights[key] = tensor
    weights["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(weights, path)
    return path


def quantised_checkpoint(host: Host, quant_format: str, name: str = NAME, **how: Any) -> Path:
    """A file as ComfyUI writes quantised ones: beside each matrix its scales and a description."""
    path = host.folder / f"{'-'.join([name, quant_format, *how])}.safetensors"
    family, weights = FAMILIES[name], {}
    for key, tensor in make_weights(family).items():
        if tensor.ndim == 2 and key.startswith(family.block_lists):
            layout = QUANT_ALGOS[quant_format]["comfy_tensor_layout"]
            weights |= QuantizedTensor.from_float(tensor, layout, **how).state_dict(key)
            described = list(json.dumps({"format": quant_format}).encode())
            weights[key.removesuffix("weight") + "comfy_quant"] = torch.tensor(described, dtype=torch.uint8)
        else:
            weights[key] = tensor
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, path)
    return path


@case
def quantised_checkpoints(case: Case, host: Host) -> None:
    """Compared with one card: which kernel multiplies depends on the device."""
    kinds = in_long_runs("float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise")
    files = {"fp8_scaled": scaled_checkpoint(host), **{kind: quantised_checkpoint(host, kind) for kind in kinds}}
    for kind, path in files.items():
        unsplit = comfy.sd.load_diffusion_model(str(path))
        reference = host.sample(unsplit, NAME)
        divided = split(comfy.sd.load_diffusion_model(str(path)))
        case.equal(f"{kind}: as unsplit", host.sample(divided, NAME), reference)
        for device in (HOME, OTHER):
            found = [p for p in divided.model.parameters() if isinstance(p, QuantizedTensor) and p.device == device]
            case.check(f"{kind}: {device} has quantised weights", len(found) > 5, len(found))
        with_lora = host.sample(host.lora(unsplit, NAME, 1), NAME)
        case.equal(f"{kind}: with a LoRA", host.sample(host.lora(divided, NAME, 1), NAME), with_lora)
        case.equal(f"{kind}: clean again", host.sample(divided, NAME), reference)
        case.equal(f"{kind}: loaded split", host.sample(_load_split(host, NAME, path=path), NAME), reference)
        host.unload_all()


class PackPatcher(comfy.model_patcher.ModelPatcher):
    """As of a pack for other file formats: a class of its own that each clone is put back into."""

    loads = 0

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        n = super().clone(*args, **kwargs)
        n.__class__ = PackPatcher
        return n

    def load(self, *args: Any, **kwargs: Any) -> Any:
        PackPatcher.loads += 1
        return super().load(*args, **kwargs)


@case
def a_patcher_class_of_a_pack(case: Case, host: Host) -> None:
    plain = host.load(NAME)
    plain.__class__ = PackPatcher
    PackPatcher.loads = 0
    divided = split(plain)
    case.check("the split one is of that class too", isinstance(divided, PackPatcher), type(divided).__mro__)
    clone = host.lora(divided, NAME, 1)
    case.check("and so is its clone", isinstance(clone, PackPatcher) and type(clone) is type(divided), type(clone))
    reference = host.sample(host.lora(host.load(NAME, load_device=CPU), NAME), NAME)
    case.equal("as unsplit", host.sample(clone, NAME), reference)
    case.check("its own code loaded both parts", PackPatcher.loads >= 2, PackPatcher.loads)


class DiskPatcher(comfy.model_patcher.ModelPatcher):
    """As of ComfyUI after 0.33, which tells a patcher whether its file lies on a fast disk."""

    def __init__(self, *args: Any, fast_disk: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fast_disk = fast_disk

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        n = super().clone(*args, **kwargs)
        n.fast_disk = self.fast_disk
        return n


@case
def cards_stream_as_the_file_lies(case: Case, host: Host) -> None:
    reference = host.reference(NAME)
    for fast_disk in (True, False):
        plain = host.load(NAME)
        plain.__class__, plain.fast_disk = DiskPatcher, fast_disk
        divided = split(plain)
        found = [each.fast_disk for each in (divided, *divided.companions, *divided.clone().companions)]
        case.check(f"every card's patcher knows that it is {fast_disk}", found == [fast_disk] * 3, found)
        case.equal(f"fast disk {fast_disk}", host.sample(divided, NAME), reference)


@case
def balances(case: Case, host: Host) -> None:
    """However the blocks are shared out, the numbers are the same; a cut lies where it was asked for."""
    reference = host.reference(NAME)
    plain = host.load(NAME)
    for options in ({"balance": "time"}, *({"balance": "manual", "split_at": (cut,)} for cut in (1, 2, 5))):
        divided = split(plain, **options)
        case.equal(f"{options}", host.sample(divided, NAME), reference)
        found = sum(places == {str(HOME)} for places in block_devices(divided, FAMILIES[NAME]).values())
        case.check("blocks at home", found == options.get("split_at", (found,))[0], found)
    for text in (f"{HOME},30%;{OTHER},70%", f"{HOME},25%;{OTHER},25%;cpu,50%"):
        divided = split(plain, balance=read_allocation(text, (HOME, OTHER)))
        case.equal(text, host.sample(divided, NAME), reference)
        sizes, limits = tree_of(divided.model).weight_bytes(), tree_of(divided.model).plan.request.limit_bytes
        here, whole = limits.get(HOME, sizes[HOME]), sum(sizes.values())
        case.check("near what was asked", abs(here - float(text[7:9]) / 100 * whole) < 0.1 * whole, (here, whole))
        case.check("limits only where the host holds a part", bool(limits) == ("cpu" in text), limits)
    case.refused("a cut behind the last block", lambda: split(plain, balance="manual", split_at=(9,)), ValueError, "9")
    case.refused("the same card twice", lambda: split(plain, HOME, HOME), ValueError, "different")
