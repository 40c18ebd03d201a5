"""Files in 8 bits that training of ComfyUI's own models keeps as they are, and what it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import comfy.sd
import torch
from devicebridge.checkpoints.load import load_transformer
from devicebridge.checkpoints.lora_file import A, B
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import path_of_model, read_native
from devicebridge.nodes.load import recognised
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.comfy.cases import FOLDER, case, expect_refusal, run_cases
from devicebridge.tests.comfy.native_steps import Bench
from devicebridge.tests.comfy.other_families import OTHERS
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights, make_weights, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
# Format -> scheme that multiplies with its weights.
SCHEMES: dict[str, Any] = {"plain cast": "fp8-compute", "scaled fp8": "fp8-compute", "old scaled fp8": "fp8-compute"}
SCHEMES |= {"int8 rows": "int8-compute"}


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


@case
def a_file_in_8_bits_is_kept_as_it_is_or_dequantized_exactly() -> None:
    for form, scheme in SCHEMES.items():
        path = FOLDER / f"{form.replace(' ', '_')}.safetensors"
        meant, info = _save(form, path), read_native(path, "float32")
        found = load_transformer(info, lambda name: CPU, torch.float32).state_dict()
        wrong = [name for name, tensor in meant.items() if not torch.equal(found[name], tensor)]
        model = load_transformer(info, lambda name: CPU, torch.float32, QuantizeSettings(scheme, rotation=0))
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        with safe_open(path, "pt") as file:
            for name in (name for name in meant if info.tensors[name].is_quantized):
                is_same = torch.equal(held[name].view(torch.int8), file.get_tensor(name).view(torch.int8))
                wrong += [] if is_same else [name]
        assert not wrong, form


@case
def an_incomplete_file_is_refused_by_what_is_missing() -> None:
    weights, layer = make_weights(FAMILIES["flux2"]), "double_blocks.1.img_attn.proj.weight"
    detected = "double_blocks.0.img_attn.norm.key_norm.weight"
    blocks = {name: each for name, each in weights.items() if name.startswith("double_blocks")}
    files: tuple[tuple[dict[str, torch.Tensor], tuple[str, ...]], ...] = (
        ({name: each for name, each in weights.items() if name != layer}, ("1 missing", layer)),
        ({name: each for name, each in weights.items() if name != detected}, ("tensors",)),
        (dict(list(weights.items())[: len(weights) // 2]), ("missing",)), (blocks, ("24 tensors",)),
        ({**weights, layer: weights[layer][:, :-1]}, ("1 mismatched", layer, "[128, 127]", "[128, 128]")),
        ({**weights, layer: weights[layer].flatten()}, ("1 mismatched", layer)),
        ({**weights, "img_in.weight": weights["img_in.weight"][0]}, ()),
        ({**weights, "double_blocks.4000.x": torch.zeros(1)}, ("double_blocks.4000.x",)),
    )  # fmt: skip
    path = FOLDER / "part.safetensors"
    for tensors, words in files:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
        expect_refusal(lambda: read_native(path, "float32"), path.name, *words)


@case
def what_training_cannot_hold_is_refused_with_the_reason() -> None:
    weights = make_weights(FAMILIES["flux2"])
    for form in ("nvfp4", "mxfp8"):
        path = FOLDER / f"{form}.safetensors"
        save_file({**weights, "double_blocks.0.img_attn.qkv.comfy_quant": _note(form)}, path)
        expect_refusal(lambda path=path: read_native(path, "float32"), f"holds quantized weights in {form}")  # type: ignore[misc]
    (gguf := FOLDER / "model.gguf").write_bytes(b"GGUF")
    expect_refusal(lambda: read_native(gguf, "float32"), "is no whole GGUF file")
    save_file(weights, plain := FOLDER / "plain.safetensors")
    stock = comfy.sd.load_diffusion_model(str(plain))
    assert path_of_model(stock) == plain
    with_lora, _ = comfy.sd.load_lora_for_models(stock, None, dict(lora_weights("flux2", 1)), 1.0, 0.0)
    expect_refusal(lambda: path_of_model(with_lora), "has patches (a LoRA's, say), which training would leave out")
    stock.cached_patcher_init = None
    expect_refusal(lambda: path_of_model(stock), "does not come from Load Diffusion Model or Load Checkpoint")


@case
def what_has_a_second_time_is_refused_unless_its_model_turns_it_off() -> None:
    """A tiny build of HunyuanVideo's class with MeanFlow's."""
    build = TRAINED["HunyuanVideo 1.5"]
    config = {**build.unet_config, "meanflow": True}
    for config_class in ("HunyuanVideo15", "HunyuanImage21Refiner"):
        family = dataclasses.replace(build, config_class=config_class, unet_config=config)
        path = save_trained("", FOLDER / f"{config_class}.safetensors", family)
        with small_sizes(family):
            if config_class == "HunyuanVideo15":
                words = "distilled to jump to the sampler's next noise level (time_r_in)"
                expect_refusal(lambda: read_native(path, "float32"), words)  # noqa: B023
            else:
                read_native(path, "float32")


@case
def a_batch_is_refused_by_what_reads_one_sample() -> None:
    bench = Bench("HiDream-O1", FOLDER / "o1", family=OTHERS["HiDream-O1 with a reference"])
    words = "reference_latents is read of the first sample of a batch alone; set train.batch_size to 1"
    with bench.trainer("two", {"train": {"batch_size": 2}}) as trainer:
        expect_refusal(lambda: list(trainer.accumulate(1)), words)
    bench = Bench("MiniMax H3", FOLDER / "h3")
    words = "train.batch_size is 2, but ComfyUI's MiniMaxH3Model computes one sample at a time"
    expect_refusal(lambda: bench.run("two", {"train": {"batch_size": 2}}), words)


@case
def a_lora_of_diffusers_is_a_beginning_for_minimax_h3() -> None:
    """As published files have it: three layers of queries, keys and values, value before gate."""
    bench, generator = Bench("MiniMax H3", FOLDER / "published"), torch.Generator().manual_seed(1)
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
    assert found.keys() == wanted.keys() and len(wanted) == 24
    assert max(float((found[name] - each).abs().max()) for name, each in wanted.items()) < 1e-5
    other = {f"transformer.norm_out.linear.lora_{each}.weight": torch.ones(2, 2) for each in "AB"}
    expect_refusal(lambda: host.read_lora(other), "norm_out.linear")


@case
def clips_without_sound_train_a_model_that_needs_one() -> None:
    """In bfloat16, where the pruned one blends rows of a float32 buffer by float32 numbers."""
    pruned = {**TRAINED["MiniMax H3"].unet_config, "adaln_curve_grid": 9}
    family = dataclasses.replace(TRAINED["MiniMax H3"], sound=(), unet_config=pruned)
    bench = Bench("MiniMax H3", FOLDER / "silent", family=family, dtype="bfloat16")
    losses = bench.run("silent", {"model": {"dtype": "bfloat16"}, "train": {"steps": 2}}).losses
    assert len(losses) == 2 and all(0 < each < 100 for each in losses)
    assert bench.info.family.comfy is not None and bench.info.family.comfy.silence is not None
    assert bench.info.family.comfy.silence(family.latent[1])[-1] == 8  # of five frames at 24 per second, at 40


@case
def the_load_node_has_comfyui_build_what_is_of_no_own_family() -> None:
    """ "checkpoint" has a VAE beside the model, as a whole checkpoint."""
    for name, class_name in {
        "Chroma": "Chroma", "SD 3.5": "OpenAISignatureMMDITWrapper", "Z-Image": "NextDiT",
        "Qwen-Image": "QwenImageTransformer2DModel", "SDXL": "UNetModel", "SDXL checkpoint": "UNetModel",
        "HiDream-O1 with a reference": "HiDreamO1Transformer",
    }.items():  # fmt: skip
        build = (TRAINED | OTHERS)[name.removesuffix(" checkpoint")]
        path = FOLDER / "of_node.safetensors"
        with small_sizes(build):
            save_trained("", path, build)
            if name.endswith("checkpoint"):
                weights = {f"model.diffusion_model.{each}": tensor for each, tensor in load_file(path).items()}
                save_file({**weights, "first_stage_model.encoder.conv_in.weight": torch.zeros(4, 4)}, path)
            config, info = recognised(path, {"dtype": "float32"})
        assert (config.family, info.family.transformer_class) == ("comfyui", class_name)


if __name__ == "__main__":
    with native_training():
        run_cases()
