"""Tiny models in quantized files, which train as the files have them; cases of test_native_stored.py. The reference of
each is the same model with plain weights, in a file of float32."""

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import comfy.lora
import comfy.quant_ops
import comfy.sd
import torch
from devicebridge.config.job import JobConfig, LoraSettings
from devicebridge.nodes.host.native.model import native_training
from devicebridge.patches.lora import is_lora_name
from devicebridge.planning.costs import ModelCosts
from devicebridge.planning.dry_run import Kernels, Work
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.quantization.stored import PACKINGS, restore
from devicebridge.tests.comfy.cases import FOLDER, case_of
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import (
    STEPS,
    Bench,
    Figures,
    difference,
    expect,
    prove,
    said_by_sampling,
    without_lora,
)
from devicebridge.tests.comfy.quantized_layers import FORMATS
from devicebridge.tests.comfy.tiny_checkpoints import make_weights, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED
from devicebridge.tests.gguf_files import random_blocks, write_gguf
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
# ComfyUI multiplies int8 with activations that it rounds to 8 bits; all else it makes plain.
STOCK_ERROR, STOCK_ERROR_INT8 = 1e-5, 0.02


# Trainers and the keys that they write: prefix, names of both factors, whether there is an alpha.
LAYOUTS = {
    "diffusion-pipe, ai-toolkit, ComfyUI": ("diffusion_model.", "lora_A", "lora_B", False),
    "kohya, musubi": ("lora_unet_", "lora_down", "lora_up", True),
    "PEFT, diffusers, ai-toolkit": ("transformer.", "lora_A", "lora_B", False),
    "OneTrainer": ("lora_transformer_", "lora_down", "lora_up", True),
}


class Form(NamedTuple):
    """model: of TRAINED. kinds: of GGUF or of quantized_layers.FORMATS, for the matrices of the blocks in turn; "plain"
    leaves one in bfloat16. held: what must be there, a number per weight in 8 bits, rotated or not, or GGUF blocks."""

    model: str
    kinds: tuple[str, ...]
    held: set[str]


_FP8, _E5M2, _INT8 = (f"rows torch.{kind}" for kind in ("float8_e4m3fn 0", "float8_e5m2 0", "int8 0"))
FORMS = {
    "GGUF Q8_0": Form("FLUX.1", ("Q8_0",), {"Q8_0 torch.uint8 0"}),
    "GGUF mixed": Form(
        "FLUX.1", ("Q4_K", "Q6_K", "Q5_K", "plain", "Q4_0", "Q5_1"),
        {f"{kind} torch.uint8 0" for kind in ("Q4_0", "Q4_K", "Q5_1")},
    ),
    "GGUF of Z-Image": Form("Z-Image", ("Q8_0", "Q5_0"), {"Q8_0 torch.uint8 0", "Q5_0 torch.uint8 0"}),
    "int8 convrot": Form("FLUX.1", ("int8_convrot_16",), {"rows torch.int8 16"}),
    "scaled fp8": Form("FLUX.1", ("fp8",), {_FP8}),
    "mixed": Form(
        "FLUX.1", ("fp8", "plain", "int8_rows", "e5m2", "int8_convrot_16"), {_FP8, _E5M2, _INT8, "rows torch.int8 16"}
    ),
}  # fmt: skip


def _save(path: Path, weights: Mapping[str, torch.Tensor], kinds: tuple[str, ...], lists: tuple[str, ...]) -> Tensors:
    """As GGUF or by ComfyUI's own code, as the name says; and what every tensor means. lists: which alone ComfyUI's
    formats are for."""
    is_gguf = path.suffix == ".gguf"
    written: dict[str, Any] = {}
    meant: Tensors = {}
    number = 0
    for name, weight in weights.items():
        written[name] = meant[name] = weight.contiguous()
        if weight.ndim != 2 or not name.endswith(".weight") or not (is_gguf or name.startswith(lists)):
            continue
        fitting = [each for each in kinds if each not in PACKINGS or weight.shape[1] % PACKINGS[each].values == 0]
        kind, number = fitting[number % len(fitting)] if fitting else "plain", number + 1
        if kind == "plain":
            written[name] = weight.bfloat16()
            meant[name] = written[name].float()
        elif is_gguf:
            written[name], meant[name] = _packed(weight, kind, number)
        else:
            parts, meant[name] = _quantized(name, weight, kind)
            written |= parts
    write_gguf(path, written) if is_gguf else save_file(written, path)
    return meant


def _packed(weight: torch.Tensor, kind: str, seed: int) -> tuple[Any, torch.Tensor]:
    """Random blocks, about as large as the weight; and what they mean."""
    data, shape = random_blocks(kind, tuple(weight.shape), seed), tuple(weight.shape)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1)
    plain = restore(values, None, None, kind, torch.float32)  # its bits: unit/checkpoints/test_gguf.py
    data = _scaled(data, kind, 2.0 ** round(float(torch.log2(weight.std() / plain.std()))))  # exact in float16
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1)
    return (kind, shape, data), restore(values, None, None, kind, torch.float32)


def _scaled(data: bytes, kind: str, factor: float) -> bytes:
    packed = PACKINGS[kind]
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, packed.num_bytes)
    for start in packed.halves:
        half = blocks[:, start : start + 2].contiguous().view(torch.float16) * factor
        blocks[:, start : start + 2] = half.view(torch.uint8)
    return blocks.numpy().tobytes()


def _quantized(name: str, weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    layout, form, arguments, more = FORMATS[kind]
    values, params = comfy.quant_ops.get_layout_class(layout).quantize(weight, **arguments)
    note = {"format": form, **({"convrot": True} if "convrot" in arguments else {}), **more}
    layer, said = name.removesuffix(".weight"), torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    parts = {name: values, f"{layer}.weight_scale": params.scale.contiguous(), f"{layer}.comfy_quant": said}
    return parts, comfy.quant_ops.get_layout_class(layout).dequantize(values, params).float().contiguous()


class StoredBench(Bench):
    """Of the quantized file, held as it is; twin: of the plain one."""

    def __init__(self, name: str, folder: Path) -> None:
        form = FORMS[name]
        family, is_gguf = TRAINED[form.model], name.startswith("GGUF")
        folder.mkdir(parents=True)
        file = folder / ("base.gguf" if is_gguf else "base.safetensors")
        meant = _save(file, family.as_published(make_weights(family)), form.kinds, family.block_lists)
        save_file(meant, folder / "plain.safetensors")
        self.is_gguf = is_gguf
        super().__init__(form.model, folder / "stored", file)
        self.is_long = False
        self.twin = Bench(form.model, folder / "twin", folder / "plain.safetensors")

    def job(self, name: str, sections: Mapping[str, Any]) -> JobConfig:
        return super().job(name, {**sections, "model": {"quantize": "stored", **sections.get("model", {})}})

    def stock(self) -> Any:
        """Of the plain file: ComfyUI itself reads no GGUF, and rounds anew what a LoRA was added to."""
        return self.twin.stock()

    @cached_property
    def packings(self) -> list[str]:
        """Of the linears that are held as the file has them, of the first step."""
        found: list[str] = []

        def look(trainer: Any) -> None:
            model, _ = trainer.runner.replica_for(0)
            kept = [each for each in model.modules() if isinstance(each, FrozenLinear8)]
            assert all(each.packing for each in kept)
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            self.held_bytes = sum(each.nbytes for name, each in tensors.items() if not is_lora_name(name))
            rotations = [0 if each.rotation is None else len(each.rotation) for each in kept]
            found.extend(f"{e.packing} {e.weight.dtype} {turn}" for e, turn in zip(kept, rotations, strict=True))
            dtypes = {p.dtype for n, p in model.named_parameters() if is_lora_name(n)}
            assert dtypes == {torch.float32}, dtypes

        self.kept_step = self.first_step("kept", {"train": {"gradient_checkpointing": False}}, look)
        return found


def kept(bench: StoredBench) -> Figures:
    """Loss and gradients are those of the plain weights; the base is held as it is."""
    kinds = sorted(set(bench.packings))
    (loss, found), (wanted_loss, wanted) = bench.kept_step, bench.twin.plain
    return {
        "linears": len(bench.packings), "kinds": kinds,
        "loss": expect(abs(loss / wanted_loss - 1), 1e-5, "the difference of the loss"),
        "gradients": expect(difference(found, wanted), 1e-4, "the difference of the gradients"),
    }  # fmt: skip


def dequantized(bench: StoredBench) -> Figures:
    """With quantize "none" the whole file is made plain while loading: the twin's bits."""
    loss, found = bench.first_step("none", {"model": {"quantize": "none"}, "train": {"gradient_checkpointing": False}})
    wanted_loss, wanted = bench.twin.plain
    assert loss == wanted_loss and found.keys() == wanted.keys()
    return {"gradients": expect(difference(found, wanted), 1e-6, "the difference of the gradients")}


def stock_forward(bench: StoredBench) -> Figures:
    """What training computes before its first step, beside the stock MODEL of the same file; of GGUF nothing."""
    if bench.is_gguf:
        return {}
    with bench.trainer("forward", {"train": {"gradient_checkpointing": False}}) as trainer, torch.no_grad():
        without_lora(trainer)
        _, ours, made = bench.prediction(trainer, 0, 0.4, guidance=None)
    family = bench.family
    sampled = said_by_sampling.__wrapped__  # ComfyUI's quantized tensors want no inference mode
    with torch.no_grad():
        said = sampled(Bench.stock(bench), made, bench.conditions[0], family.latent, family.sound)
    error = float((said.view(ours.shape) - ours).norm() / ours.norm())
    limit = STOCK_ERROR_INT8 if any("int8" in kind for kind in bench.packings) else STOCK_ERROR
    return {"error": expect(error, limit, "the difference from the stock MODEL")}


def counted(bench: StoredBench) -> Figures:
    """The forecast's bytes of weights are those of the model that is loaded."""
    bench.packings  # noqa: B018
    lora = LoraSettings(rank=2, alpha=2.0)
    settings = QuantizeSettings("stored")
    work = Work((16, 1, 8, 8), 1, torch.float32, settings, lora)
    with small_sizes(bench.family), native_training():
        cost = ModelCosts(bench.info, bench.info.variant).dry_run(work, Kernels(rounding=1))
    forecast = cost.outer_weights + sum(block.weights for block in cost.blocks)
    assert forecast == bench.held_bytes, f"{forecast} bytes in the place of {bench.held_bytes}"
    return {"bytes": forecast, "plain": sum(4 * math.prod(each.shape) for each in bench.info.tensors.values())}


def starts(bench: StoredBench) -> Figures:
    """LoRA files by the keys of several trainers: before the first step the model says what the stock MODEL with the
    same file loaded says; two steps are finite, and each file has every key of ComfyUI's in the end."""
    return {name: _started(bench, name, *layout) for name, layout in LAYOUTS.items()}


def _started(bench: StoredBench, name: str, prefix: str, down: str, up: str, has_alpha: bool) -> float | None:
    patcher = bench.stock()
    places = comfy.lora.model_lora_keys_unet(patcher.model, {})
    shapes = {key: each.shape for key, each in patcher.model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    lora: Tensors = {}
    seen: set[str] = set()  # some places have two names
    for key, place in places.items():
        target, rows = (place, None) if isinstance(place, str) else (place[0], place[1])
        is_inside = target.removeprefix("diffusion_model.").startswith(bench.family.block_lists)
        if not key.startswith(prefix) or not is_inside or len(shapes[target]) != 2 or repr(place) in seen:
            continue
        seen.add(repr(place))
        count = shapes[target][0] if rows is None else rows[2]
        sizes = {down: (3, shapes[target][1]), up: (count, 3)}
        lora |= {f"{key}.{n}.weight": torch.randn(*s, generator=generator) / s[1] ** 0.5 / 2 for n, s in sizes.items()}
        if has_alpha:
            lora[f"{key}.alpha"] = torch.tensor(1.5)
    if not lora:
        return None  # ComfyUI knows no such keys of this class
    assert len(lora) > 20, f"{len(lora)} tensors"
    save_file(lora, path := bench.folder / f"{name.split()[0]}.safetensors")
    sections = {"lora": {"rank": 16, "alpha": 16.0, "targets": ["*"], "start_from": str(path)}}
    plain = {**sections, "train": {"gradient_checkpointing": False}}
    with bench.trainer(f"start {name}", plain, is_drawn=False) as trainer, torch.no_grad():
        _, ours, made = bench.prediction(trainer, 0, 0.4, guidance=None)
        without_lora(trainer)
        _, before, _ = bench.prediction(trainer, 0, 0.4, guidance=None)
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, dict(lora), 1.0, 0)
    said = said_by_sampling(patched, made, bench.conditions[0], bench.family.latent)
    assert (ours - before).norm() > 1e-2 * before.norm(), "the LoRA does nothing"
    apart = float((said.view(ours.shape) - ours).norm() / (ours - before).norm())
    result = bench.run(f"steps {name}", {**sections, "train": {"steps": 2}})
    assert all(map(math.isfinite, result.losses))
    found = comfy.lora.load_lora(dict(result.lora), comfy.lora.model_lora_keys_unet(patcher.model, {}))
    assert len(found) == sum(key.endswith("lora_A.weight") for key in result.lora)
    return expect(apart, 2e-3, f"the difference of {name} from the stock loader")


STORED_STEPS: dict[str, Callable[[Any], Figures]] = {
    "kept": kept, "dequantized": dequantized, "stock forward": stock_forward, "stock LoRA": STEPS["stock LoRA"],
    **{name: STEPS[name] for name in ("recompute", "split", "pipeline", "data", "weight offload", "5 steps", "resume")},
    "tokens": STEPS["tokens"], "counted": counted, "starts": starts,
}  # fmt: skip


@case_of(*FORMS)
def a_base_trains_as_its_file_has_it(name: str) -> None:
    with endless_memory():
        steps = prove(name, STORED_STEPS, StoredBench(name, FOLDER / name.replace(" ", "_")))
    assert not any(each["fault"] for each in steps.values())
    assert set(steps["kept"]["kinds"]) == FORMS[name].held and steps["kept"]["linears"] > 10
    assert steps["counted"]["bytes"] < steps["counted"]["plain"]
    started = [layout for layout, error in steps["starts"].items() if isinstance(error, float)]
    assert len(started) >= (2 if "Z-Image" in name else 4)
