"""One process with ComfyUI's Python: a tiny FLUX.2 in every number format, read for training. Prints one line of JSON:

{"silent": losses and a length,
"missing": {format: minus the linears that do not hold the file's own 8 bits}, "wrong": {format: weights that are not
W = q * s where they are dequantized}, "refused": {what: message}, "node": {file: class that Load Model for Training
makes of it, without a MODEL connected}}.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import comfy.sd
import torch
from devicebridge.checkpoints.load import load_transformer
from devicebridge.checkpoints.lora_file import A, B
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import path_of_model, read_native
from devicebridge.nodes.load import recognised
from devicebridge.quantization.quantize import Quantizer, QuantizeSettings
from devicebridge.tests.comfy.native_steps import Bench
from devicebridge.tests.comfy.other_families import OTHERS
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights, make_weights, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained
from safetensors.torch import load_file, save_file

FOLDER = sys.argv[2]

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
# Format -> scheme that multiplies with its weights.
SCHEMES = {"plain cast": "fp8-compute", "scaled fp8": "fp8-compute", "old scaled fp8": "fp8-compute"}
SCHEMES |= {"int8 rows": "int8-compute"}
NODE = ("Chroma", "SD 3.5", "Z-Image", "Qwen-Image", "SDXL", "SDXL checkpoint", "HiDream-O1 with a reference")


def _note(kind: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def _in(form: str, layer: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors in a format, and what they mean, float32."""
    if form == "plain cast":
        values = weight.to(FP8)
        return {f"{layer}.weight": values}, values.float()
    if form == "int8 rows":
        scale = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        more = {f"{layer}.comfy_quant": _note("int8_tensorwise"), f"{layer}.weight_scale": scale}
    else:
        scale = weight.abs().max() / 448
        values = (weight / scale).to(FP8)
        more = {f"{layer}.comfy_quant": _note("float8_e4m3fn"), f"{layer}.weight_scale": scale}
        if form.startswith("old"):
            more = {f"{layer}.scale_weight": scale}
    return {f"{layer}.weight": values, **more}, values.float() * scale


def _save(form: str, path: Path) -> dict[str, torch.Tensor]:
    """The blocks' matrices in a format, all else as it is; returns what every tensor means."""
    tensors, meant = {}, {}
    for name, weight in make_weights(FAMILIES["flux2"]).items():
        layer = name.removesuffix(".weight")
        if layer != name and weight.ndim == 2 and name.startswith(("double_blocks", "single_blocks")):
            own, meant[name] = _in(form, layer, weight)
            tensors |= own
        else:
            tensors[name] = meant[name] = weight
    if form.startswith("old"):
        tensors["scaled_fp8"] = torch.zeros(0, dtype=FP8)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return meant


def _look(form: str) -> tuple[int, list[str]]:
    path = Path(FOLDER) / f"{form.replace(' ', '_')}.safetensors"
    meant, info = _save(form, path), read_native(path, "float32")
    found = load_transformer(info, lambda name: CPU, torch.float32).state_dict()
    wrong = [name for name, tensor in meant.items() if not torch.equal(found[name], tensor)]
    quantizer = Quantizer(info.family, QuantizeSettings(SCHEMES[form], rotation=0))  # type: ignore[arg-type]
    model = load_transformer(info, lambda name: CPU, torch.float32, quantizer)
    values = {name: info.tensors[name] for name in meant if info.tensors[name].is_quantized}
    held: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        same = [
            name for name in values if torch.equal(held[name].view(torch.int8), file.get_tensor(name).view(torch.int8))
        ]
    return len(same) - len(values), wrong


def _refusal(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def _distilled(config_class: str) -> str:
    """Of a tiny build of HunyuanVideo's class with MeanFlow's second time."""
    build = TRAINED["HunyuanVideo 1.5"]
    config = {**build.unet_config, "meanflow": True}
    family = dataclasses.replace(build, config_class=config_class, unet_config=config)
    path = Path(FOLDER) / f"{config_class}.safetensors"
    with small_sizes(family):
        return _refusal(lambda: read_native(save_trained("", path, family), "float32"))


def _first_sample_alone() -> str:
    """Of a batch of two with a reference."""
    bench = Bench("HiDream-O1", Path(FOLDER) / "o1", family=OTHERS["HiDream-O1 with a reference"])
    with bench.trainer("two", {"train": {"batch_size": 2}}) as trainer:
        return _refusal(lambda: list(trainer.accumulate(1)))


def _one_at_a_time() -> str:
    """Of MiniMax H3, which computes one sample."""
    bench = Bench("MiniMax H3", Path(FOLDER) / "h3")
    return _refusal(lambda: bench.run("two", {"train": {"batch_size": 2}}))


def _of_diffusers() -> dict[str, Any]:
    """A LoRA of MiniMax H3 as published files have it: three layers of queries, keys and values, value before gate."""
    bench, generator = Bench("MiniMax H3", Path(FOLDER) / "published"), torch.Generator().manual_seed(1)
    host, wanted, file = bench.info.family.host, {}, {}
    for name, weight in host.make(is_empty=True).named_parameters():
        if weight.ndim != 2 or "blocks." not in name:
            continue
        layer = name.removesuffix(".weight")
        down, up = (torch.randn(*of, generator=generator) for of in ((2, weight.shape[1]), (weight.shape[0], 2)))
        wanted[layer] = up @ down
        theirs = layer.replace("refiner.blocks", "refiner.refiner_blocks").replace("mlp.fc2", "ff.net.2")
        theirs = theirs if "refiner" in layer else f"transformer_{theirs}"
        theirs, half = theirs.replace("out_proj", "to_out.0"), len(up) // 2
        parts = {theirs: up}
        if "fc1" in layer:
            parts = {theirs.replace("mlp.fc1", "ff.net.0.proj"): torch.cat([up[half:], up[:half]])}
        elif "qkv" in layer:
            third = len(up) // 3
            parts = {theirs.replace("qkv_proj", f"to_{each}"): up[i * third :][:third] for i, each in enumerate("qkv")}
        for each, rows in parts.items():
            file |= {f"transformer.{each}.lora_A.weight": down, f"transformer.{each}.lora_B.weight": rows}
    found = {name: each[B] @ each[A] for name, each in host.read_lora(file).items()}
    apart = max(float((found[name] - each).abs().max()) for name, each in wanted.items())
    other = {f"transformer.norm_out.linear.lora_{each}.weight": torch.ones(2, 2) for each in "AB"}
    missing = sorted(found.keys() ^ wanted.keys())
    return {"layers": len(wanted), "missing": missing, "apart": apart, "other": _refusal(lambda: host.read_lora(other))}


def _silent() -> list[float]:
    # In bfloat16 the pruned one blends rows of a float32 buffer by float32 numbers.
    pruned = {**TRAINED["MiniMax H3"].unet_config, "adaln_curve_grid": 9}
    family = dataclasses.replace(TRAINED["MiniMax H3"], sound=(), unet_config=pruned)
    bench = Bench("MiniMax H3", Path(FOLDER) / "silent", family=family, dtype="bfloat16")
    losses = bench.run("silent", {"model": {"dtype": "bfloat16"}, "train": {"steps": 2}}).losses
    assert bench.info.family.comfy is not None and bench.info.family.comfy.silence is not None
    return [*losses, bench.info.family.comfy.silence(family.latent[1])[-1]]


def _incomplete() -> dict[str, str]:
    weights, layer = make_weights(FAMILIES["flux2"]), "double_blocks.1.img_attn.proj.weight"
    detected = "double_blocks.0.img_attn.norm.key_norm.weight"
    blocks = {name: each for name, each in weights.items() if name.startswith("double_blocks")}
    files = {
        "one missing": {name: each for name, each in weights.items() if name != layer},
        "one to detect by missing": {name: each for name, each in weights.items() if name != detected},
        "first half": dict(list(weights.items())[: len(weights) // 2]), "blocks alone": blocks,
        "one narrower": {**weights, layer: weights[layer][:, :-1]},
        "one flat": {**weights, layer: weights[layer].flatten()},
        "one row": {**weights, "img_in.weight": weights["img_in.weight"][0]},
        "endless": {**weights, "double_blocks.4000.x": torch.zeros(1)},
    }  # fmt: skip
    said = {}
    for what, tensors in files.items():
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, path := Path(FOLDER) / "part.safetensors"
        )
        said[what] = _refusal(lambda path=path: read_native(path, "float32"))
    return said


def _refused() -> dict[str, str]:
    weights = make_weights(FAMILIES["flux2"])
    layer = "double_blocks.0.img_attn.qkv"
    said = _incomplete()
    for form in ("nvfp4", "mxfp8"):
        path = Path(FOLDER) / f"{form}.safetensors"
        save_file({**weights, f"{layer}.comfy_quant": _note(form)}, path)
        said[form] = _refusal(lambda path=path: read_native(path, "float32"))
    (gguf := Path(FOLDER) / "model.gguf").write_bytes(b"GGUF")
    said["gguf"] = _refusal(lambda: read_native(gguf, "float32"))
    save_file(weights, plain := Path(FOLDER) / "plain.safetensors")
    stock = comfy.sd.load_diffusion_model(str(plain))
    assert path_of_model(stock) == plain
    with_lora, _ = comfy.sd.load_lora_for_models(stock, None, dict(lora_weights("flux2", 1)), 1.0, 0.0)
    said["lora"] = _refusal(lambda: path_of_model(with_lora))
    said["meanflow"], said["meanflow refiner"] = _distilled("HunyuanVideo15"), _distilled("HunyuanImage21Refiner")
    said["first sample alone"], said["one at a time"] = _first_sample_alone(), _one_at_a_time()
    stock.cached_patcher_init = None
    said["other loader"] = _refusal(lambda: path_of_model(stock))
    return said


def _of_node(name: str) -> str:
    """What the node finds in a file of a tiny build; "checkpoint" has a VAE beside it, as a whole checkpoint."""
    build = (TRAINED | OTHERS)[name.removesuffix(" checkpoint")]
    path = Path(FOLDER) / "of_node.safetensors"
    with small_sizes(build):
        save_trained("", path, build)
        if name.endswith("checkpoint"):
            weights = {f"model.diffusion_model.{each}": tensor for each, tensor in load_file(path).items()}
            save_file({**weights, "first_stage_model.encoder.conv_in.weight": torch.zeros(4, 4)}, path)
        config, info = recognised(path, {"dtype": "float32"})
    return f"{config.family} {info.family.transformer_class}"


if __name__ == "__main__":
    with native_training():
        looked = {form: _look(form) for form in SCHEMES}
        answer = {
            "missing": {form: each[0] for form, each in looked.items()},
            "wrong": {form: each[1] for form, each in looked.items()}, "refused": _refused(), "silent": _silent(),
            "diffusers": _of_diffusers(),
            "node": {name: _of_node(name) for name in NODE},
        }  # fmt: skip
    print(json.dumps(answer), flush=True)
