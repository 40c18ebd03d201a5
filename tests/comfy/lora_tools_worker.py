"""One process with ComfyUI's Python: what its own loader makes of files of `devicebridge lora`; run by
test_lora_tools.py.

Takes ComfyUI's folder, a folder for files and names of FAMILIES. Prints one line of JSON per name.
"""

from __future__ import annotations

import io
import json
import sys
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
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint, small_sizes
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER, *NAMES = sys.argv[2:]
OURS = ("flux1", "flux2", "wan")  # whose names are known in every layout
RANK, ALPHA = 3, 1.5
PREFIX = "diffusion_model."


def examine(name: str) -> dict[str, Any]:
    family, folder = FAMILIES[name], Path(FOLDER) / name
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
        layouts = ("both",) if name == "wan" else ("both", "diffusers")
        kinds |= {each: (["convert", a, "--to", each, "--family", name], one) for each in layouts}
        kinds |= {
            f"{each} and back": (["convert", folder / f"{each}.safetensors", "--to", "original", "--family", name], one)
            for each in layouts
        }
    found = {}
    for kind, (arguments, expected) in kinds.items():
        out = folder / f"{kind}.safetensors"
        assert main(["lora", *map(str, arguments), "-o", str(out)]) == 0
        found[kind] = _differences(stock, out, expected)
    odd = load_file(a) | {f"{PREFIX}nowhere.lora_{each}.weight": torch.ones(2, 2) for each in "AB"}
    save_file(odd, folder / "odd.safetensors")
    with small_sizes(family), redirect_stdout(io.StringIO()) as said:
        assert main(["lora", "inspect", str(folder / "odd.safetensors"), "--json", "--model", str(path)]) == 0
    unread = json.loads(said.getvalue())["unread"]
    return {
        "name": name,
        "unread": unread,
        "found": found,
        "loaders": _loaders(name, stock, folder) if name in OURS else [],
    }


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


def _best(changes: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    found = {}
    for key, each in changes.items():
        left, values, right = torch.linalg.svd(each.flatten(1), full_matrices=False)
        found[key] = (left[:, :rank] * values[:rank] @ right[:rank]).reshape(each.shape)
    return found


def _differences(stock: Any, file: Path, expected: Mapping[str, Tensor]) -> list[Any]:
    """The most that a weight differs, as ComfyUI's own arithmetic makes it; tensors that it does not map."""
    named = comfy.lora_convert.convert_lora(load_file(file))
    mapped = comfy.lora.load_lora(named, comfy.lora.model_lora_keys_unet(stock, {}), log_missing=False)
    patches: dict[str, list[Any]] = {}
    for place, adapter in mapped.items():
        key, offset, function = (place, None, None) if isinstance(place, str) else (*place, None, None)[:3]
        patches.setdefault(key, []).append((1.0, adapter, 1.0, offset, function or (lambda each: each)))
    assert patches.keys() == expected.keys(), patches.keys() ^ expected.keys()
    most = 0.0
    for key, own in patches.items():
        added = comfy.lora.calculate_weight(own, torch.zeros(expected[key].shape), key)
        most = max(most, float((added - expected[key]).norm() / expected[key].norm()))
    return [most, sorted(set(named) - {key for adapter in mapped.values() for key in adapter.loaded_keys})]


def _loaders(name: str, stock: Any, folder: Path) -> list[list[Any]]:
    """Of files in many spellings what we say of ComfyUI's loader, and how many layers it maps."""
    files = {each: load_file(folder / f"{each}.safetensors") for each in ("a", "kohya", "both")}
    assert (
        main(
            [
                "lora", "convert", str(folder / "a.safetensors"), "--to", "diffusers", "--family", name, "-o",
                str(folder / "names.safetensors"),
            ]
        )
        == 0
    )  # fmt: skip
    plain = files["transformer."] = load_file(folder / "names.safetensors")
    for prefix in ("", "diffusion_model.", "base_model.model.", "unet."):
        files[f"{prefix}<diffusers>"] = {
            f"{prefix}{key.removeprefix('transformer.')}": each for key, each in plain.items()
        }
    for prefix in ("lycoris_", "lora_transformer_"):
        spelled = {}
        for key, each in plain.items():
            layer, _, end = key.removeprefix("transformer.").partition(".lora_")
            spelled[f"{prefix}{layer.replace('.', '_')}.lora_{'down' if end[0] == 'A' else 'up'}.weight"] = each
        files[prefix] = spelled
    places, found = comfy.lora.model_lora_keys_unet(stock, {}), []
    for spelling, tensors in files.items():
        path = folder / "spelled.safetensors"
        save_file({key: each.clone() for key, each in tensors.items()}, path)
        with open_lora(path) as file:
            said = [describe_loaders(file, model)["ComfyUI"] for model in find_models(file, name)]
            found.append(
                [spelling, said, f"loads {sum(layer in places for layer in file.names)} of {len(file.names)} layers"]
            )
    return found


if __name__ == "__main__":
    for each in NAMES:
        print(json.dumps(examine(each)), flush=True)
