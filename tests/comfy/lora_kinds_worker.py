"""LoRA kinds on ComfyUI's own classes: stock loaders read all in full, and training goes on from any file."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.lora
import comfy.supported_models
import torch
from devicebridge.checkpoints.load import load_transformer
from devicebridge.checkpoints.lora_start import read_start
from devicebridge.config.job import LoraSettings
from devicebridge.encoding.comfy_data import read_pairs
from devicebridge.families.comfy.inputs import COND, read_latents, streams_of
from devicebridge.jobs.lora_output import lora_file_tensors
from devicebridge.nodes.host.native.model import native_training
from devicebridge.tests.comfy.cases import FOLDER, case_of, expect_refusal
from devicebridge.tests.comfy.native_steps import CARDS, TWO, Bench, _sample, distance
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED
from devicebridge.training.adapter import apply_lora, find_targets
from safetensors.torch import save_file

BUILDS = FAMILIES | {"qwen_image_21": TRAINED["Qwen-Image 2.1 edit"]}
KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"kind": "lokr", "rank": 2, "alpha": 2.0},
    "loha": {"kind": "loha", "rank": 2, "alpha": 4.0},
    "dora": {"dora": True, "rank": 2, "alpha": 2.0},
    "dokr": {"kind": "lokr", "dora": True, "rank": 2, "alpha": 2.0},
    "oft": {"kind": "oft", "rank": 4},
}
PLAIN = {"train": {"gradient_checkpointing": False}}
# Other kinds in every way are in tests/unit/jobs/test_lora_kinds_job.py.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(KINDS, {"plain": PLAIN}),
    "dora": {
        "plain": PLAIN,
        "accumulated": {"train": TWO},
        "pipeline": {"split": CARDS, "train": TWO, "parallel": {"strategy": "pipeline"}},
    },
}


@case_of(*BUILDS)
def lora_kinds(name: str) -> None:
    family = BUILDS[name]
    if not hasattr(comfy.supported_models, family.config_class):
        return  # of later versions
    bench = Bench(name, FOLDER / name, family=family)
    with small_sizes(family), native_training():
        model = bench.info.family.host.make(is_empty=True)
        some, every = (
            find_targets(model, bench.info.family, LoraSettings(layers=each)) for each in ("attention", "all")
        )
        assert 0 < len(some) < len(every)
        for kind in KINDS:
            _is_trained_and_read(bench, kind)
        for spelling, tensors in _spellings(bench.info).items():
            _begins_as_the_stock_model(bench, bench.folder / f"{spelling}.safetensors", tensors)
        _is_refused_for_what_it_is(bench)


def _is_refused_for_what_it_is(bench: Bench) -> None:
    whole = _spellings(bench.info)
    names = {name.rpartition(".lora_")[0] for name in whole["comfyui"]}
    layer, rows = min(names), len(whole["comfyui"][f"{min(names)}.lora_B.weight"])
    products = {f"{layer}.{kind}": torch.ones(2, 2) for kind in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
    tucker = {f"{layer}.hada_{each}": torch.ones(2, 2, 1, 1) for each in ("t1", "t2")}
    blocks = {f"{layer}.oft_blocks": torch.ones(2, 2, 2)}
    files: tuple[tuple[Mapping[str, torch.Tensor], tuple[str, ...]], ...] = (
        ({**blocks, f"{layer}.alpha": torch.tensor(2.0)}, ("constraint", layer)),
        ({**blocks, f"{layer}.rescale": torch.ones(4, 1)}, ("kind oft", layer)),
        ({name: each * ("lora_A" in name) for name, each in whole["comfyui"].items()}, ("changes nothing",)),
        ({**whole["comfyui"], f"{layer}.diff_b": torch.ones(rows)}, ("kind diff", layer)),
        ({**whole["comfyui"], **whole["kohya"]}, ("there twice",)), ({**products, **tucker}, ("kind loha", layer)),
    )  # fmt: skip
    path = bench.folder / "refused.safetensors"
    for tensors, words in files:
        save_file({name: each.clone() for name, each in tensors.items()}, path)
        expect_refusal(lambda: read_start(path, bench.info.family, {}), *words)


def _is_trained_and_read(bench: Bench, kind: str) -> None:
    """In every way of training; the stock loader reads all of its file, and computes what was trained."""
    results, family, info = {}, bench.family, bench.info
    for way, sections in WAYS[kind].items():
        train = {"steps": 3, **sections.get("train", {})}
        results[way] = bench.run(f"{kind} {way}", {"lora": KINDS[kind], **sections, "train": train})
    if "pipeline" in results:
        in_stages, accumulated = results["pipeline"].losses, results["accumulated"].losses
        assert all(abs(a / b - 1) < 1e-5 for a, b in zip(in_stages, accumulated, strict=True))
        assert len(set(results["plain"].losses)) == len(set(in_stages)) == 3
    trained, stock = results["plain"], bench.stock().model
    assert trained.lora_path is not None
    mapped = comfy.lora.load_lora(dict(trained.lora), comfy.lora.model_lora_keys_unet(stock, {}))
    modules = {key.partition(".lora_")[0].removesuffix(".dora_scale").removesuffix(".alpha") for key in trained.lora}
    modules = {key.partition(".lokr_")[0].partition(".hada_")[0].removesuffix(".oft_blocks") for key in modules}
    assert len(mapped) == len(modules) > 0
    assert _written(bench.job(kind, {"lora": KINDS[kind]}), family, info, stock) < 1e-5
    _same_as_stock(bench, _started(info, trained.lora_path, **KINDS[kind]), _patched(info, stock, mapped))


def _same_as_stock(bench: Bench, started: torch.nn.Module, patched: torch.nn.Module) -> None:
    found, stock, before = (_prediction(bench.family, bench.info, m) for m in (started, patched, _loaded(bench.info)))
    assert distance(found, stock) < 1e-5 and distance(found, before) > 1e-3


def _written(job: Any, family: Any, info: Any, stock: Any) -> float:
    model = _loaded(info)
    handle = apply_lora(model, info.family, job.lora, seed=1)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, each in handle.parameters().items():
            noise = torch.randn(each.shape, generator=generator)
            each.copy_(each * (1 + 0.1 * noise) if "magnitude" in name or "dora" in name else 0.3 * noise)
    tensors = lora_file_tensors(SimpleNamespace(job=job, family=info.family), handle)  # type: ignore[arg-type]
    mapped = comfy.lora.load_lora(dict(tensors), comfy.lora.model_lora_keys_unet(stock, {}))
    return distance(_prediction(family, info, model), _prediction(family, info, _patched(info, stock, mapped)))


def _begins_as_the_stock_model(bench: Bench, file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """With the same file. Of "metadata" the strength is in its metadata alone, where the stock loader does not look."""
    is_bare = file.stem == "metadata"
    written = {name: each for name, each in tensors.items() if not (is_bare and name.endswith(".alpha"))}
    said = {"lora_adapter_metadata": json.dumps({"r": 3, "lora_alpha": 1.5})}
    save_file(written, file, said if is_bare else None)
    stock = bench.stock().model
    mapped = comfy.lora.load_lora(dict(tensors), comfy.lora.model_lora_keys_unet(stock, {}))
    started = _started(bench.info, file, rank=16, alpha=8.0)
    _same_as_stock(bench, started, _patched(bench.info, stock, mapped))


def _loaded(info: Any) -> torch.nn.Module:
    return load_transformer(info, lambda name: torch.device("cpu"), torch.float32)


def _started(info: Any, file: Path, **settings: Any) -> torch.nn.Module:
    model = _loaded(info)
    linears = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    wanted = LoraSettings(**{"rank": 2, "alpha": 2.0, **settings})
    handle = apply_lora(model, info.family, wanted, seed=1)
    handle.start_from(read_start(file, info.family, linears), wanted.alpha / wanted.rank)
    return model


def _patched(info: Any, stock: Any, mapped: Mapping[Any, Any]) -> torch.nn.Module:
    """A fresh model with the weights that ComfyUI's own code makes of its adapters."""
    model, weights = _loaded(info), stock.state_dict()
    patches: dict[str, list[Any]] = {}
    for place, adapter in mapped.items():
        key, offset, function = (place, None, lambda t: t) if isinstance(place, str) else (*place, None, None)[:3]
        patches.setdefault(key, []).append((1.0, adapter, 1.0, offset, function or (lambda t: t)))
    with torch.no_grad():
        for key, own in patches.items():
            changed = comfy.lora.calculate_weight(own, weights[key].float().clone(), key)
            model.get_parameter(key.removeprefix("diffusion_model.")).copy_(changed)
    return model


@torch.no_grad()
def _prediction(family: Any, info: Any, model: torch.nn.Module) -> torch.Tensor:
    samples = {"samples": _sample(family, torch.Generator().manual_seed(9))}
    sample, text = next(iter(read_pairs([samples], [family.condition(1)])))
    latent = read_latents(info.family.comfy, sample).unsqueeze(0)
    given = {name: each.unsqueeze(0) for name, each in text.items()} | streams_of([sample])
    assert COND in given
    model.eval()
    return info.family.host.predict(model, latent, torch.tensor([0.5]), given, info.variant.training_guidance)


def _spellings(info: Any) -> dict[str, dict[str, torch.Tensor]]:
    """A LoRA of every linear of the blocks, as several trainers write it."""
    model = info.family.host.make(is_empty=True)
    generator, found = torch.Generator().manual_seed(4), {}
    for name in find_targets(model, info.family, LoraSettings(layers="all")):
        linear = model.get_submodule(name)
        found[name] = (
            torch.randn(3, linear.in_features, generator=generator) / linear.in_features**0.5,
            0.3 * torch.randn(linear.out_features, 3, generator=generator),
        )
    alpha = torch.tensor(1.5)
    comfyui, kohya = {}, {}
    for name, (down, up) in found.items():
        comfyui |= {f"diffusion_model.{name}.lora_A.weight": down, f"diffusion_model.{name}.lora_B.weight": up}
        module = f"lora_unet_{name.replace('.', '_')}"
        kohya |= {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up, f"{module}.alpha": alpha.clone()}
    alphas = {f"diffusion_model.{name}.alpha": alpha.clone() for name in found}
    spellings = {"comfyui": comfyui, "kohya": kohya, "metadata": comfyui | alphas}
    if info.family.transformer_class == "Flux":
        spellings["diffusers"] = _diffusers_flux(found)
    if info.family.transformer_class.startswith("QwenImage"):
        spellings["SimpleTuner"] = {n.replace("diffusion_model.", "transformer."): t for n, t in comfyui.items()}
        lycoris = {n.replace("lora_unet_", "lycoris_"): each for n, each in kohya.items()}
        spellings["SimpleTuner, LyCORIS"] = lycoris
    if info.family.transformer_class == "MiniMaxH3Model":
        spellings["SimpleTuner"] = _joined_qkv(found, comfyui)
    return spellings


def _joined_qkv(
    found: Mapping[str, tuple[torch.Tensor, torch.Tensor]], comfyui: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """As SimpleTuner writes MiniMax H3's: q, k and v were apart, and are one layer of three times the rank."""
    tensors = {}
    for name, (down, up) in found.items():
        layer = f"diffusion_model.{name}"
        tensors |= {each: tensor for each, tensor in comfyui.items() if each.startswith(f"{layer}.")}
        if name.endswith("qkv_proj"):
            tensors[f"{layer}.lora_A.weight"] = torch.cat([down, 2 * down, -down])
            tensors[f"{layer}.lora_B.weight"] = torch.block_diag(*up.chunk(3))
        tensors[f"{layer}.alpha"] = torch.tensor(float(len(tensors[f"{layer}.lora_A.weight"])))
    return tensors


def _diffusers_flux(found: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """q, k and v of the first double block, each with a LoRA of its own."""
    down, up = found["double_blocks.0.img_attn.qkv"]
    width, tensors = up.shape[0] // 3, {}
    for index, name in enumerate(("to_q", "to_k", "to_v")):
        module = f"transformer.transformer_blocks.0.attn.{name}"
        tensors[f"{module}.lora_A.weight"] = (down * (1 + index)).contiguous()
        tensors[f"{module}.lora_B.weight"] = up[index * width : (index + 1) * width].contiguous()
    return tensors
