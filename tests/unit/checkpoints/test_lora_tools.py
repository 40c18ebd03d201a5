"""`devicebridge lora`: sums and singular values of LoRA files, against those computed here; in ComfyUI: tests/comfy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints import lora_change
from devicebridge.cli.main import main
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.toy import TINY
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = sorted(FAMILIES)
RANK, ALPHA = 3, 1.5
X = "diffusion_model.blocks.0.ffn.0"


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layer(name: str, seed: int, rank: int = RANK, alpha: float | None = ALPHA, rows: int = 12) -> dict[str, Tensor]:
    tensors = {f"{name}.lora_A.weight": _noise(seed, rank, 20), f"{name}.lora_B.weight": _noise(seed + 1, rows, rank)}
    return tensors if alpha is None else {**tensors, f"{name}.alpha": torch.tensor(alpha)}


def _kernels(name: str, seed: int, alpha: float = 1.0) -> dict[str, Tensor]:
    """Of a convolution 3 by 3, as kohya's scripts write it."""
    down, up = _noise(seed, RANK, 4, 3, 3), _noise(seed + 1, 6, RANK, 1, 1)
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(alpha)}


def _changes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a file adds to each weight [out, in], computed here, float64; without alpha the strength is 1."""
    found = {}
    for name, down in tensors.items():
        for end, other in ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")):
            if name.endswith(end):
                layer = name.removesuffix(end)
                strength = float(tensors.get(f"{layer}.alpha", len(down))) / len(down)
                found[layer] = strength * tensors[layer + other].flatten(1).double() @ down.flatten(1).double()
    return found


def _file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata)
    return path


def _run(*arguments: Any) -> None:
    assert main(["lora", *map(str, arguments)]) == 0


def _facts(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    _run("inspect", file, "--json")
    return json.loads(capsys.readouterr().out)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for layer, each in expected.items():
        assert (found[layer] - each).norm() <= tolerance * each.norm(), layer


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one model, of other ranks, alphas and number types; some layers are in one alone."""
    one = {**_layer(X, 1), **_layer("diffusion_model.only_one", 3, alpha=None), **_kernels("lora_unet_conv", 5)}
    two = {**_layer(X, 11, rank=5, alpha=20.0), **_layer("lora_te_text", 13), **_kernels("lora_unet_conv", 15, 9.0)}
    first = _file(tmp_path / "one.safetensors", one, {"ss_network_dim": "3", "a": "b"})
    return first, _file(tmp_path / "two.safetensors", two)


def test_a_merge_is_the_weighted_sum(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "sum.safetensors"
    _run("merge", f"{pair[0]}:0.5", f"{pair[1]}:-2", "-o", out)
    one, two = (_changes(load_file(each)) for each in pair)
    expected = {layer: 0.5 * one.get(layer, torch.zeros(1)) - 2 * two.get(layer, torch.zeros(1)) for layer in one | two}
    found = load_file(out)
    _assert_close(_changes(found), expected)
    assert found["lora_unet_conv.lora_down.weight"].shape == (2 * RANK, 4, 3, 3)
    with safe_open(out, "pt") as opened:
        said = opened.metadata()
    assert said["a"] == "b" and "ss_network_dim" not in said and "one.safetensors x 0.5" in said["devicebridge_lora"]


def _best(change: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


@pytest.mark.parametrize("tool", ["merge", "resize"])
def test_a_lower_rank_is_the_best_there_is(tool: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out, whole = tmp_path / "cut.safetensors", tmp_path / "sum.safetensors"
    _run("merge", *pair, "-o", whole)
    _run(tool, *(pair if tool == "merge" else (whole,)), "--rank", 2, "-o", out)
    expected = {layer: _best(each, 2) for layer, each in _changes(load_file(whole)).items()}
    found = load_file(out)
    _assert_close(_changes(found), expected)
    assert all(len(each) == 2 for name, each in found.items() if "lora_A" in name or "lora_down" in name)


def test_a_share_of_energy_takes_the_fewest_ranks_with_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "cut.safetensors"
    _run("resize", pair[1], "--energy", 0.8, "-o", out)
    expected, ranks = {}, {}
    for layer, change in _changes(load_file(pair[1])).items():
        energy = torch.linalg.svdvals(change).square()
        ranks[layer] = next(r for r in range(1, 6) if energy[:r].sum() >= 0.8 * energy.sum())
        expected[layer] = _best(change, ranks[layer])
    assert {*ranks.values()} - {1, 5}, "some ranks must be between"
    _assert_close(_changes(load_file(out)), expected)
    found = {name: len(each) for name, each in load_file(out).items() if ".lora_A" in name or ".lora_down" in name}
    assert sorted(found.values()) == sorted(ranks.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scale_changes_alpha_alone_where_there_is_one(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {n: each if n.endswith("alpha") else each.to(dtype) for n, each in _layer(X, 1).items()}
    bare = {n: each.to(dtype) for n, each in _layer("diffusion_model.bare", 3, alpha=None).items()}
    source = _file(tmp_path / "a.safetensors", {**tensors, **bare})
    _run("scale", source, "--by", -0.3, "-o", tmp_path / "b.safetensors")
    found, before = load_file(tmp_path / "b.safetensors"), _changes(load_file(source))
    assert all(torch.equal(found[name], each) for name, each in tensors.items() if not name.endswith("alpha"))
    _assert_close(_changes(found), {layer: -0.3 * each for layer, each in before.items()}, 5e-3)


def test_strength_that_metadata_alone_say_is_multiplied_in(tmp_path: Path) -> None:
    said = {"lora_adapter_metadata": json.dumps({"r": RANK, "lora_alpha": 4 * RANK})}
    source = _file(tmp_path / "a.safetensors", _layer(X, 1, alpha=None), said)
    _run("merge", source, _file(tmp_path / "b.safetensors", _layer(X, 7)), "-o", tmp_path / "c.safetensors")
    one, two = (_changes(load_file(tmp_path / f"{each}.safetensors")) for each in "ab")
    _assert_close(_changes(load_file(tmp_path / "c.safetensors")), {X: 4 * one[X] + two[X]})
    with safe_open(tmp_path / "c.safetensors", "pt") as opened:
        assert "lora_adapter_metadata" not in opened.metadata()


def _models(
    folder: Path, types: tuple[torch.dtype, torch.dtype], rank: int = 4
) -> tuple[Path, Path, dict[str, Tensor]]:
    """A model, what a training of this rank made of it, and the change of each layer."""
    base = {"blocks.0.a.weight": _noise(1, 40, 30), "blocks.0.conv.weight": _noise(2, 8, 5, 3, 3)}
    base |= {"blocks.0.still.weight": _noise(3, 9, 9), "blocks.0.norm.weight": _noise(4, 9)}
    base = {name: each.to(types[1]) for name, each in base.items()}
    tuned = {name: each.clone() for name, each in base.items()}
    for seed, name in enumerate(["blocks.0.a.weight", "blocks.0.conv.weight"], 10):
        rows, columns = tuned[name].flatten(1).shape
        change = _noise(seed, rows, rank) @ _noise(seed + 5, rank, columns)
        tuned[name] = tuned[name].float() + change.view_as(tuned[name])
    tuned = {name: each.to(types[0]) for name, each in tuned.items()}
    tuned["blocks.0.norm.weight"] = tuned["blocks.0.norm.weight"] + 1
    for name, tensors in (("base", base), ("tuned", tuned)):
        _file(folder / f"{name}.safetensors", {f"model.diffusion_model.{key}": each for key, each in tensors.items()})
    changes = {n: (tuned[n].double() - base[n].to(types[0]).double()).flatten(1) for n in base if base[n].ndim > 1}
    return folder / "tuned.safetensors", folder / "base.safetensors", changes


@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("rank", [2, 4])
def test_a_lora_of_two_models_is_the_best_of_its_rank(rank, types, tmp_path, capsys):
    tuned, base, changes = _models(tmp_path, types)
    out = tmp_path / "lora.safetensors"
    _run("extract", tuned, base, "--rank", rank, "--dtype", "float32", "-o", out)
    found = load_file(out)
    expected = {
        f"diffusion_model.{name.removesuffix('.weight')}": _best(each, rank)
        for name, each in changes.items()
        if each.any()
    }
    _assert_close(_changes(found), expected, 1e-3)
    assert len(expected) == 2 and found["diffusion_model.blocks.0.conv.lora_A.weight"].shape == (rank, 5, 3, 3)
    assert "blocks.0.norm.weight" in capsys.readouterr().out


def test_names_of_diffusers_stay_such(tmp_path: Path) -> None:
    base = TINY["flux2"].make_model().state_dict()
    tuned = {
        name: each + 0.1 * _noise(3, *each.shape) if "to_q" in name and each.ndim == 2 else each
        for name, each in base.items()
    }
    files = [
        _file(tmp_path / f"{n}.safetensors", {k: t.clone() for k, t in each.items()})
        for n, each in (("t", tuned), ("b", base))
    ]
    _run("extract", *files, "--rank", 2, "-o", tmp_path / "lora.safetensors")
    found = load_file(tmp_path / "lora.safetensors")
    assert found and all(name.startswith("transformer.") and "to_q" in name for name in found)
    assert not any(name.endswith("alpha") for name in found)  # strength 1 for both loaders


KINDS = ("LoKr", "LoKr, cut", "LoHa", "DoRA", "DoRA of PEFT", "DoKr", "OFT")
PLACES = {  # names of a layer, the tensor of a model with it, and which rows of that
    X: ("blocks.0.ffn.0.weight", 0), "lora_unet_blocks_0_ffn_0": ("blocks.0.ffn.0.weight", 0),
    "transformer.transformer_blocks.0.attn.to_k": ("double_blocks.0.img_attn.qkv.weight", 12),
}  # fmt: skip


def _other(kind: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and what ComfyUI's arithmetic (of the last but one, PEFT's) adds to a weight, float64."""
    parts = {
        f"hada_w{n}_{side}": _noise(n + 5 * (side == "a"), *((12, 2) if side == "a" else (2, 20)))
        for n in (1, 2)
        for side in "ab"
    }
    a1, b1, a2, b2 = (parts[f"hada_w{each}"].double() for each in ("1_a", "1_b", "2_a", "2_b"))
    parts, change = parts | {"alpha": torch.tensor(3.0)}, 3 / 2 * (a1 @ b1) * (a2 @ b2)
    if kind in ("LoKr", "LoKr, cut", "DoKr"):
        parts = {
            "lokr_w1": _noise(2, 3, 4),
            "lokr_w2": _noise(3, 4, 5),
            "alpha": torch.tensor(7.0),
        }  # which is not read
        change = torch.kron(parts["lokr_w1"].double(), parts["lokr_w2"].double())
    if kind == "LoKr, cut":
        parts["lokr_w2_a"], parts["lokr_w2_b"] = _noise(4, 4, 2), _noise(5, 2, 5)
        del parts["lokr_w2"]
        change = 3.5 * torch.kron(parts["lokr_w1"].double(), (parts["lokr_w2_a"] @ parts["lokr_w2_b"]).double())
    if kind.startswith("DoRA"):
        parts = {"lora_A.weight": _noise(6, 3, 20), "lora_B.weight": _noise(7, 12, 3), "alpha": torch.tensor(1.5)}
        change = 0.5 * parts["lora_B.weight"].double() @ parts["lora_A.weight"].double()
    whole = weight.double()
    if kind.startswith("Do"):
        scale, is_peft = _noise(8, 12, 1).abs() + 1, kind.endswith("PEFT")
        parts["lora_magnitude_vector" if is_peft else "dora_scale"] = scale.reshape(-1) if is_peft else scale
        length = (whole + change if is_peft else whole).norm(dim=1, keepdim=True)
        change = scale.double() * (whole + change) / length - whole
    if kind == "OFT":
        parts = {"oft_blocks": 0.3 * _noise(9, 4, 3, 3)}
        skew = (parts["oft_blocks"] - parts["oft_blocks"].mT).double()
        turned = (torch.eye(3) + skew) @ torch.linalg.inv(torch.eye(3) - skew)
        change = torch.einsum("knm,kni->kmi", turned, whole.view(4, 3, 20)).reshape(12, 20) - whole
    return {f"{name}.{end}": each for end, each in parts.items()}, change


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_become_the_best_lora_of_a_rank(kind, name, is_streamed, tmp_path, monkeypatch, capsys) -> None:
    key, first = PLACES[name]
    base = {key: _noise(20, 36, 20) if first else _noise(20, 12, 20), "still": _noise(1, 9)}
    tensors, change = _other(kind, name, base[key][first : first + 12])
    source, plain = _file(tmp_path / "a.safetensors", tensors), _file(tmp_path / "p.safetensors", _layer(name, 1))
    if is_streamed:
        monkeypatch.setattr(lora_change, "_HELD", 0)
        monkeypatch.setattr(lora_change, "_CHUNK", 100)
    more = ["--base", _file(tmp_path / "base.safetensors", base)] if kind == "OFT" or kind.startswith("Do") else []
    _run("resize", source, "--rank", 12, *more, "-o", tmp_path / "whole.safetensors")
    _assert_close(_changes(load_file(tmp_path / "whole.safetensors")), {name: change})
    _run("resize", source, "--rank", 2, *more, "-o", tmp_path / "two.safetensors")
    best = _best(change, 2)  # singular values that are close mix in float32
    _assert_close(_changes(load_file(tmp_path / "two.safetensors")), {name: best}, 1e-4)
    assert f"{(best.norm() / change.norm()) ** 2:.1%} of the squared norm" in capsys.readouterr().out
    _run("merge", f"{source}:0.5", f"{plain}:-2", "--rank", 12, *more, "-o", tmp_path / "sum.safetensors")
    expected = {name: 0.5 * change - 2 * _changes(load_file(plain))[name]}
    _assert_close(_changes(load_file(tmp_path / "sum.safetensors")), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_scaled_as_they_are_and_shown_with_their_norms(kind, tmp_path, capsys) -> None:
    weight = _noise(20, 12, 20)
    source = _file(tmp_path / "a.safetensors", _other(kind, X, weight)[0])
    out, needs_base = tmp_path / "b.safetensors", kind == "OFT" or kind.startswith("Do")
    assert main(["lora", "scale", str(source), "--by", "0.5", "-o", str(out)]) == (2 if needs_base else 0)
    message = capsys.readouterr().err
    assert not needs_base or all(e in message for e in (str(source), X, kind.partition(" ")[0], "--base", "merge"))
    (layer,) = _facts(source, capsys)["layers"]
    assert (layer["kind"], layer["size"]) == (kind.split(" of")[0].split(",")[0], [12, 0 if kind == "OFT" else 20])
    if needs_base:
        return
    for file, factor in ((source, 1), (out, 0.5)):
        (layer,) = _facts(file, capsys)["layers"]
        assert layer["norm"] == pytest.approx(factor * float(_other(kind, X, weight)[1].norm()), rel=1e-5)
    assert load_file(out).keys() == load_file(source).keys()


def _oddities(tmp_path: Path) -> dict[str, tuple[list[Any], tuple[str, ...]]]:
    """Arguments, and what the message must name."""
    good = _file(tmp_path / "good.safetensors", _layer(X, 1))
    kinds = {
        "dora": {**_layer(X, 1), f"{X}.dora_scale": torch.ones(12, 1)},
        "lokr": {f"{X}.lokr_w1": torch.ones(2, 2), f"{X}.lokr_w2": torch.ones(2, 2)},
        "loha": {f"{X}.hada_w1_a": torch.ones(2, 2), **_layer("diffusion_model.z", 3)},
        "tucker": {**_kernels(X, 1), f"{X}.lora_mid.weight": torch.ones(RANK, RANK, 3, 3)},
        "half": {f"{X}.lora_A.weight": torch.ones(2, 2)}, "nan": {**_layer(X, 1), f"{X}.alpha": torch.tensor(math.nan)},
        "other": _layer("diffusion_model.elsewhere", 1), "wide": _layer(X, 1, rows=13),
        "text": _layer("lora_te_text", 1),
        "huge": {name: each * (1e4 if "lora_" in name else 1) for name, each in _layer(X, 1, alpha=1e4).items()},
    }  # fmt: skip
    files = {name: _file(tmp_path / f"{name}.safetensors", tensors) for name, tensors in kinds.items()}
    twice = _layer("transformer.proj_out", 1) | _layer("lora_unet_final_layer_linear", 1)
    texts = [_layer("lora_te_text", 1) | _layer(x, 1) for x in (X, f"lora_unet_{X[16:].replace('.', '_')}")]
    named = [_file(tmp_path / f"named_{index}.safetensors", each) for index, each in enumerate(texts)]
    files["twice"] = _file(tmp_path / "twice.safetensors", twice)
    files["once"] = _file(tmp_path / "once.safetensors", _layer("lora_unet_final_layer_linear", 1))
    tuned, base, _ = _models(tmp_path, (torch.float32, torch.float32))
    eight = {n: each.to(torch.float8_e4m3fn) if each.ndim > 1 else each for n, each in load_file(base).items()}
    eight_bit = _file(tmp_path / "eight.safetensors", eight)
    zeros = _file(tmp_path / "zeros.safetensors", {f"{X}.weight": torch.zeros(12, 20), "b.weight": torch.ones(4, 4)})
    fewer = _file(tmp_path / "fewer.safetensors", dict(list(load_file(base).items())[1:]))
    unet = _file(tmp_path / "sd.safetensors", {"conv_in.weight": torch.ones(8, 4, 3, 3), "b.weight": torch.ones(4, 4)})
    out = ["-o", tmp_path / "out.safetensors"]
    return {
        **{f"merge {k}": (["merge", good, files[k], *out], (str(files[k]), X)) for k in ("dora", "lokr", "wide")},
        **{
            k: (["scale", files[k], "--by", 2, *out], (str(files[k]),))
            for k in ("loha", "tucker", "half", "nan", "dora")
        },
        "other layers": (["merge", good, files["other"], *out], (str(good), str(files["other"]))),
        "text alone in common": (["merge", *named, *out], (*map(str, named), X, "lora_unet_blocks_0_ffn_0")),
        "infinite alpha": (["scale", good, "--by", 1e39, *out], (str(good), f"{X}.alpha")),
        "text alone": (["convert", files["text"], "--to", "both", *out], (str(files["text"]), "lora_te_text")),
        "not finite": (
            ["resize", files["huge"], "--rank", 1, "--dtype", "float16", *out],
            (str(files["huge"]), "float16"),
        ),
        "cut in two ways": (["resize", files["twice"], "--rank", 1, *out], (str(files["twice"]), "both")),
        "named in two ways": (["merge", files["twice"], files["once"], *out], (str(files["twice"]), "both")),
        "by 0": (["scale", good, "--by", 0, *out], (str(good),)),
        "there already": (["scale", good, "--by", 2, "-o", good], (str(good),)),
        "ending": (["scale", good, "--by", 2, "-o", tmp_path / "a.pt"], ("a.pt", ".safetensors")),
        "a base of zeros": (["resize", files["dora"], "--rank", 2, "--base", zeros, *out], (str(zeros), X)),
        "no rank": (["resize", good, *out], (str(good), "--rank")),
        "not known": (["convert", files["other"], "--to", "diffusers", *out], (str(files["other"]), "elsewhere")),
        "no known size": (["convert", good, "--to", "diffusers", *out], (str(good), "Wan", "--family")),
        "8 bits": (["extract", eight_bit, base, "--rank", 2, *out], (str(eight_bit), "F8_E4M3")),
        "a layer less": (["extract", tuned, fewer, "--rank", 2, *out], (str(fewer), str(tuned))),
        "a UNet of diffusers": (["extract", unet, unet, "--rank", 2, *out], (str(unet), "ComfyUI")),
        "alike": (["extract", base, base, "--rank", 2, *out], ("out.safetensors",)),
        "a LoRA": (["extract", good, base, "--rank", 2, *out], (str(good),)),
        "none": (["inspect", tmp_path / "none.safetensors"], ("none.safetensors",)),
    }


def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {}
    for what, (arguments, named) in _oddities(tmp_path).items():
        before = before or {each: each.read_bytes() for each in tmp_path.iterdir()}
        assert main(["lora", *map(str, arguments)]) == 2, what
        message = capsys.readouterr().err
        assert all(each in message for each in named), (what, message)
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before  # nothing is left, nothing written over


def test_new_names_leave_every_kind_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {**_layer(X, 1), f"{X}.dora_scale": 1 + _noise(3, 12, 1), **_layer("lora_te_text", 5)}
    other, factors = "diffusion_model.blocks.1.ffn.0", (_noise(7, 2, 1), _noise(9, 1, 4), _noise(8, 3, 5))
    kinds = ("lokr_w1_a", "lokr_w1_b", "lokr_w2", "alpha")
    lokr = {f"{other}.{kind}": each for kind, each in zip(kinds, (*factors, torch.tensor(0.25)), strict=True)}
    source = _file(tmp_path / "a.safetensors", tensors | lokr)
    _run("convert", source, "--to", "kohya", "-o", tmp_path / "b.safetensors")
    assert "lora_unet_blocks_0_ffn_0.lora_down.weight" in load_file(tmp_path / "b.safetensors")
    _run("convert", tmp_path / "b.safetensors", "--to", "original", "-o", tmp_path / "c.safetensors")
    found = load_file(tmp_path / "c.safetensors")
    assert found.keys() == (tensors | lokr).keys()
    assert all(torch.equal(found[key], each) for key, each in (tensors | lokr).items())
    _run("convert", source, "--to", "kohya", "--dtype", "bfloat16", "-o", tmp_path / "d.safetensors")
    rounded, name = load_file(tmp_path / "d.safetensors"), "lora_unet_blocks_0_ffn_0"
    assert rounded[f"{name}.lora_down.weight"].dtype is torch.bfloat16
    assert torch.equal(rounded[f"{name}.dora_scale"], tensors[f"{X}.dora_scale"])  # one number stands for a row
    layers = {each["name"]: each for each in _facts(source, capsys)["layers"]}
    assert [each["kind"] for _, each in sorted(layers.items())] == ["DoRA", "LoKr", "LoRA"]
    change = 0.25 * torch.kron(factors[0] @ factors[1], factors[2])  # as ComfyUI's loader counts alpha and rank
    assert layers[other]["norm"] == pytest.approx(float(change.norm()), rel=1e-5)
    assert (layers[other]["rank"], layers[other]["strength"]) == (1, 0.25)


def test_a_layer_that_q_k_and_v_share_comes_back_as_it_was(tmp_path: Path) -> None:
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {f"{name}.lora_A.weight": _noise(1, RANK, 64), f"{name}.lora_B.weight": _noise(2, 192, RANK)}
    source = _file(tmp_path / "a.safetensors", {**tensors, f"{name}.alpha": torch.tensor(float(RANK))})
    for before, layout, after in (("a", "both", "b"), ("b", "original", "c")):
        paths = [tmp_path / f"{each}.safetensors" for each in (before, after)]
        _run("convert", paths[0], "--to", layout, "--family", "flux1", "-o", paths[1])
    assert len(load_file(tmp_path / "b.safetensors")) == 6
    found, before = load_file(tmp_path / "c.safetensors"), load_file(source)
    assert found.keys() == before.keys() and all(torch.equal(found[key], each) for key, each in before.items())


def test_the_published_size_tells_the_model_and_its_loaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of names that FLUX.1 and FLUX.2 share."""
    name = "diffusion_model.double_blocks.0.img_mlp.0"
    for family, (rows, columns) in {"FLUX.1": (12288, 3072), "FLUX.2": (36864, 6144)}.items():
        tensors = {f"{name}.lora_A.weight": torch.ones(1, columns), f"{name}.lora_B.weight": torch.ones(rows, 1)}
        source = _file(tmp_path / f"{family}.safetensors", {**tensors, f"{name}.alpha": torch.tensor(0.5)})
        facts = _facts(source, capsys)
        assert list(facts["models"]) == [family]
        (layer,) = facts["layers"]
        assert (layer["rank"], layer["alpha"], layer["strength"], layer["size"]) == (1, 0.5, 0.5, [rows, columns])
        assert layer["norm"] == pytest.approx(0.5 * math.sqrt(rows * columns), rel=1e-5)
        assert facts["loaders"][family]["diffusers"] == "cannot load these names"
    _run("inspect", source, "--layers")
    assert name in capsys.readouterr().out
