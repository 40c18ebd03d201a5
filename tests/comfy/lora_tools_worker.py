"""ComfyUI's own loader reads every result of `devicebridge lora`, and adds to each weight what was asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.sd
import folder_paths  # noqa: F401 - by which a process is known to have ComfyUI in it
import torch
from devicebridge.checkpoints.lora_convert import describe_loaders, find_models
from devicebridge.checkpoints.lora_tools import open_lora
from devicebridge.cli.main import main
from devicebridge.tests.comfy.cases import FOLDER, case_of
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint, small_sizes
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = ("flux1", "flux2", "wan", "sdxl", "qwen_image")
KINDS = ("LoKr", "LoHa", "DoRA", "DoKr", "OFT")
OURS = ("flux1", "flux2", "wan")  # whose names are known in every layout
RANK, ALPHA = 3, 1.5
PREFIX = "diffusion_model."


@case_of(*NAMES)
def lora_tools(name: str) -> None:
    family, folder = FAMILIES[name], FOLDER / name
    folder.mkdir(parents=True)
    with small_sizes(family):
        path = save_checkpoint(family, folder / "base.safetensors")
        stock = comfy.sd.load_diffusion_model(str(path)).model
    weights = {
        key.removesuffix(".weight"): each.float()
        for key, each in stock.state_dict().items()
        if key.startswith(tuple(PREFIX + each for each in family.block_lists))
        and key.endswith("weight")
        and each.ndim > 1
    }
    changes = [_write(folder / f"{each}.safetensors", weights, seed) for seed, each in enumerate("ab", 1)]
    base = load_file(path)
    tuned = {n: each + changes[0].get(f"{PREFIX}{n}", torch.zeros(1)) for n, each in base.items()}
    save_file(tuned, folder / "tuned.safetensors")
    one, two = changes
    whole = {key: 0.5 * one[key] - 2 * two[key] for key in one}
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    kinds: dict[str, tuple[list[Any], Mapping[str, Tensor]]] = {
        "scale": (["scale", a, "--by", "-0.7"], {key: -0.7 * each for key, each in one.items()}),
        "merge": (["merge", f"{a}:0.5", f"{b}:-2"], whole),
        "merge to a rank": (["merge", f"{a}:0.5", f"{b}:-2", "--rank", "2"], _best(whole, 2)),
        "resize": (["resize", a, "--rank", "2"], _best(one, 2)),
        "extract": (["extract", folder / "tuned.safetensors", path, "--rank", RANK, "--dtype", "float32"], one),
        **{each: (["convert", a, "--to", each], one) for each in ("kohya", "original")},
    }
    if name in OURS:
        layouts = ("both", "diffusers")
        kinds |= {each: (["convert", a, "--to", each, "--family", name], one) for each in layouts}
        kinds |= {
            f"{each} and back": (["convert", folder / f"{each}.safetensors", "--to", "original", "--family", name], one)
            for each in layouts
        }
    for kind, (arguments, expected) in kinds.items():
        out = folder / f"{kind}.safetensors"
        assert main(["lora", *map(str, arguments), "-o", str(out)]) == 0
        prefix = {"kohya": "lora_unet_", "diffusers": "transformer.", "original": PREFIX}.get(kind, "")
        assert all(key.startswith(prefix) for key in load_file(out)), out
        most = {"extract": 1e-3, "resize": 1e-4, "merge to a rank": 1e-4}.get(kind, 1e-5)
        if (name, kind) != ("wan", "diffusers"):  # which ComfyUI does not read
            _adds(stock, out, expected, most)
    linears = dict([each for each in weights.items() if each[1].ndim == 2][:6])
    zero, few = _write(folder / "few.safetensors", linears, 2), folder / "few.safetensors"
    for kind in KINDS:
        source = _write_kind(folder / f"{kind}.safetensors", linears, kind)
        alone = _added(stock, source, linears)[0]
        both = {key: 0.5 * alone[key] - 2 * each for key, each in zero.items()}
        more = [] if kind in ("LoKr", "LoHa") else ["--base", path]
        tools: dict[str, tuple[list[Any], Mapping[str, Tensor]]] = {
            "convert": (["convert", source, "--to", "kohya"], alone),
            "resize": (["resize", source, "--rank", 999, *more], alone),
            "merge": (["merge", f"{source}:0.5", f"{few}:-2", "--rank", 999, *more], both),
        }
        if not more:
            tools["scale"] = (["scale", source, "--by", 0.3], {key: 0.3 * each for key, each in alone.items()})
        for tool, (arguments, expected) in tools.items():
            out = folder / f"{kind} {tool}.safetensors"
            assert main(["lora", *map(str, arguments), "-o", str(out)]) == 0
            _adds(stock, out, expected, 1e-5, linears)
    odd = load_file(a) | {f"{PREFIX}nowhere.lora_{each}.weight": torch.ones(2, 2) for each in "AB"}
    save_file(odd, folder / "odd.safetensors")
    with small_sizes(family), redirect_stdout(io.StringIO()) as said:
        assert main(["lora", "inspect", str(folder / "odd.safetensors"), "--json", "--model", str(path)]) == 0
    unread = [f"{PREFIX}nowhere.lora_{each}.weight" for each in "AB"]
    assert json.loads(said.getvalue())["unread"] == unread
    if name in OURS:
        _says_how_many_layers_are_found(name, stock, folder)


def _write(path: Path, weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A LoRA of every weight of the blocks, and what it adds to each."""
    generator, tensors, changes = torch.Generator().manual_seed(seed), {}, {}
    for layer, weight in weights.items():
        rows, columns = weight.flatten(1).shape
        down, up = (torch.randn(shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
        tensors[f"{layer}.lora_A.weight"] = down.reshape(RANK, *weight.shape[1:])
        tensors[f"{layer}.lora_B.weight"] = up.reshape(rows, RANK, *(1,) * (weight.ndim - 2))
        tensors[f"{layer}.alpha"] = torch.tensor(ALPHA * seed)
        changes[f"{layer}.weight"] = (ALPHA * seed / RANK * up @ down).reshape(weight.shape)
    save_file(tensors, path)
    return changes


def _write_kind(path: Path, weights: Mapping[str, Tensor], kind: str) -> Path:
    """A LoRA of this kind of every weight."""
    generator, tensors = torch.Generator().manual_seed(7), {}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    for layer, weight in weights.items():
        rows, columns = weight.shape
        if kind == "OFT":
            parts = {"oft_blocks": draw(rows // 4, 4, 4)}
        elif kind == "LoHa":
            parts = {f"hada_w{n}_{s}": draw(*((rows, 2) if s == "a" else (2, columns))) for n in (1, 2) for s in "ab"}
        elif kind in ("LoKr", "DoKr"):
            parts = {"lokr_w1": draw(2, 2), "lokr_w2_a": draw(rows // 2, 2), "lokr_w2_b": draw(2, columns // 2)}
        else:
            parts = {"lora_A.weight": draw(2, columns), "lora_B.weight": draw(rows, 2)}
        parts |= {"alpha": torch.tensor(3.0)} if kind != "OFT" else {}
        parts |= {"dora_scale": weight.norm(dim=1, keepdim=True) * (1 + draw(rows, 1))} if kind[:2] == "Do" else {}
        tensors |= {f"{layer}.{key}": each for key, each in parts.items()}
    save_file(tensors, path)
    return path


def _best(changes: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    found = {}
    for key, each in changes.items():
        left, values, right = torch.linalg.svd(each.flatten(1), full_matrices=False)
        found[key] = (left[:, :rank] * values[:rank] @ right[:rank]).reshape(each.shape)
    return found


def _added(stock: Any, file: Path, weights: Mapping[str, Tensor] = {}) -> tuple[dict[str, Tensor], list[str]]:
    """What ComfyUI's own arithmetic adds to each weight, of those that are given; tensors that it does not map."""
    named = comfy.lora_convert.convert_lora(load_file(file))
    mapped = comfy.lora.load_lora(named, comfy.lora.model_lora_keys_unet(stock, {}), log_missing=False)
    patches: dict[str, list[Any]] = {}
    for place, adapter in mapped.items():
        key, offset, function = (place, None, None) if isinstance(place, str) else (*place, None, None)[:3]
        patches.setdefault(key, []).append((1.0, adapter, 1.0, offset, function or (lambda each: each)))
    shapes = {key: each.shape for key, each in stock.state_dict().items()}
    added = {}
    for key, own in patches.items():
        weight = weights.get(key.removesuffix(".weight"), torch.zeros(shapes[key])).float()
        added[key] = comfy.lora.calculate_weight(own, weight.clone(), key) - weight
    return added, sorted(set(named) - {key for adapter in mapped.values() for key in adapter.loaded_keys})


def _adds(
    stock: Any, file: Path, expected: Mapping[str, Tensor], most: float, weights: Mapping[str, Tensor] = {}
) -> None:
    """To each weight as much, as ComfyUI's own arithmetic makes it, which maps every tensor."""
    added, unread = _added(stock, file, weights)
    assert added.keys() == expected.keys() and not unread, file
    assert max(float((added[key] - each).norm() / each.norm()) for key, each in expected.items()) < most, file


def _says_how_many_layers_are_found(name: str, stock: Any, folder: Path) -> None:
    """Of files in many spellings what we say of ComfyUI's loader is how many layers it maps."""
    files = {each: load_file(folder / f"{each}.safetensors") for each in ("a", "kohya", "both")}
    arguments = [folder / "a.safetensors", "--to", "diffusers", "--family", name, "-o", folder / "names.safetensors"]
    assert main(["lora", "convert", *map(str, arguments)]) == 0
    plain = files["transformer."] = load_file(folder / "names.safetensors")
    for prefix in ("", "diffusion_model.", "base_model.model.", "unet."):
        files[f"{prefix}<diffusers>"] = {f"{prefix}{n.removeprefix('transformer.')}": each for n, each in plain.items()}
    for prefix in ("lycoris_", "lora_transformer_"):
        spelled = {}
        for key, each in plain.items():
            layer, _, end = key.removeprefix("transformer.").partition(".lora_")
            spelled[f"{prefix}{layer.replace('.', '_')}.lora_{'down' if end[0] == 'A' else 'up'}.weight"] = each
        files[prefix] = spelled
    places, counts = comfy.lora.model_lora_keys_unet(stock, {}), set()
    for spelling, tensors in files.items():
        path = folder / "spelled.safetensors"
        save_file({key: each.clone() for key, each in tensors.items()}, path)
        with open_lora(path) as file:
            said = [describe_loaders(file, model)["ComfyUI"] for model in find_models(file, name)]
            counted = f"loads {sum(layer in places for layer in file.names)} of {len(file.names)} layers"
        assert said[0].split(", not")[0] == counted, spelling
        counts.add(counted)
    assert len(counts) > 1
