"""Training that goes on from a LoRA file: the model computes what it computed with that LoRA, whoever wrote it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.lora_file import lycoris_for_comfyui, make_lora_tensors
from devicebridge.checkpoints.lora_start import read_start, refuse_start
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.lora import resolve_targets
from devicebridge.tests.toy import TINY
from devicebridge.tests.weight_files import write_raw
from devicebridge.training.adapter import LoraHandle, apply_lora
from safetensors.torch import save_file
from torch import Tensor, nn

NAMES = sorted(FAMILIES)
RANK, ALPHA = 2, 3.0


def _trained(name: str, **settings: Any) -> tuple[nn.Module, LoraHandle]:
    model = TINY[name].make_model()
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=RANK, alpha=ALPHA, **settings), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in handle.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model, handle


def _output(name: str, model: nn.Module) -> Tensor:
    return model(**TINY[name].make_inputs(), return_dict=False)[0].detach()  # type: ignore[no-any-return]


def _file(name: str, handle: LoraHandle, layout: Any) -> dict[str, Tensor]:
    return make_lora_tensors(FAMILIES[name], layout, handle.tensors(), handle.tensors_for_comfyui(), ALPHA, RANK)


def linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def _read(path: Path, name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    save_file(tensors, path)
    return read_start(path, FAMILIES[name], linears(TINY[name].make_model()))


def _started(name: str, layers: dict[str, dict[str, Tensor]], **settings: Any) -> nn.Module:
    model = TINY[name].make_model()
    wanted = LoraSettings(**{"rank": 2 * RANK, "alpha": 7.0, **settings})
    handle = apply_lora(model, FAMILIES[name], wanted, seed=1)
    refuse_start(Path("a.safetensors"), layers, handle.targets, wanted)
    handle.start_from(layers, wanted.alpha / wanted.rank)
    return model


def _kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as kohya's scripts write them."""
    renamed = {}
    for key, tensor in tensors.items():
        module, _, kind = key.removeprefix("diffusion_model.").partition(".lora_" if ".lora_" in key else ".alpha")
        end = {"A.weight": ".lora_down.weight", "B.weight": ".lora_up.weight", "": ".alpha"}[kind]
        renamed[f"lora_unet_{module.replace('.', '_')}{end}"] = tensor
    return renamed


SPELLINGS = {
    "original": lambda tensors: tensors,
    "diffusers": lambda tensors: tensors,
    "both": lambda tensors: tensors,
    "kohya": _kohya,
    "peft": lambda tensors: {f"base_model.model.{k.removeprefix('transformer.')}": t for k, t in tensors.items()},
    "onetrainer": lambda tensors: {
        k.replace(".", "_", k.removesuffix(".weight").count(".") - 1)
        .replace("transformer_", "lora_transformer_", 1)
        .replace("lora_A", "lora_down")
        .replace("lora_B", "lora_up"): t
        for k, t in tensors.items()
    },
}
WRITTEN_AS = {"kohya": "original", "peft": "diffusers", "onetrainer": "diffusers"}


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
@pytest.mark.parametrize("name", NAMES)
def test_the_model_computes_what_it_did_with_the_file(name: str, spelling: str, tmp_path: Path) -> None:
    model, handle = _trained(name)
    tensors = SPELLINGS[spelling](_file(name, handle, WRITTEN_AS.get(spelling, spelling)))
    layers = _read(tmp_path / "a.safetensors", name, tensors)
    expected = _output(name, model)
    assert not torch.allclose(expected, _output(name, TINY[name].make_model()), rtol=1e-2)
    for settings in ({}, {"rank": RANK, "alpha": ALPHA}):
        assert torch.allclose(_output(name, _started(name, layers, **settings)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flux1", "flux2"])
def test_a_lora_of_a_stacked_layer_is_cut_into_its_members(name: str, tmp_path: Path) -> None:
    """As other trainers write it: one A for q, k and v, with no zeros in B."""
    _, handle = _trained(name)
    tensors = _file(name, handle, "original")
    generator = torch.Generator().manual_seed(2)
    for key in [key for key in tensors if key.endswith("lora_B.weight")]:
        tensors[key] = 0.1 * torch.randn(tensors[key].shape, generator=generator)
    layers = _read(tmp_path / "a.safetensors", name, tensors)
    changed = TINY[name].make_model()
    with torch.no_grad():
        for module, layer in layers.items():
            changed.get_submodule(module).weight.add_(layer["lora_B.weight"] @ layer["lora_A.weight"])
    rank = max(layer["lora_A.weight"].shape[0] for layer in layers.values())
    assert rank > RANK  # shared by the members, and not to be taken apart
    started = _started(name, layers, rank=rank)
    assert torch.allclose(_output(name, started), _output(name, changed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "dora"), [("original", True), ("diffusers", True), ("original", False)])
@pytest.mark.parametrize("name", NAMES)
def test_dora_goes_on_from_both_meanings_of_its_magnitude_and_from_plain_lora(name, layout, dora, tmp_path) -> None:
    model, handle = _trained(name, dora=dora)
    layers = _read(tmp_path / "a.safetensors", name, _file(name, handle, layout))
    started = _started(name, layers, dora=True)
    assert torch.allclose(_output(name, started), _output(name, model), rtol=1e-3, atol=1e-4)


OTHERS: list[dict[str, Any]] = [
    {"kind": "lokr"}, {"kind": "loha"}, {"kind": "oft"}, {"kind": "lokr", "dora": True}, {"kind": "loha", "dora": True},
]  # fmt: skip


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_other_kinds_go_on_from_their_own_files_and_no_other_cut(settings: dict[str, Any], tmp_path: Path) -> None:
    model, handle = _trained("wan", **settings)
    written = lycoris_for_comfyui(FAMILIES["wan"], handle.tensors_for_comfyui(), ALPHA / RANK)
    layers = _read(tmp_path / "a.safetensors", "wan", written)
    started = _started("wan", layers, **settings, rank=RANK, alpha=5.0)
    assert torch.allclose(_output("wan", started), _output("wan", model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(_output("wan", TINY["wan"].make_model()), _output("wan", model), rtol=1e-2)
    with pytest.raises(ValueError, match=r"set lora\.factor and lora\.rank"):
        sides = {"rank": RANK, "factor": 2} if "lokr" in settings.values() else {}
        _started("wan", layers, **settings, alpha=ALPHA, **sides)
    with pytest.raises(ValueError, match=f'is of lora.kind = "{settings["kind"]}"'):
        _started("wan", layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 1}, "has rank 2, and lora.rank = 1 would lose"),
        ({"targets": ("*.to_q",)}, "which is not trained"),
        ({"kind": "lokr"}, 'is of lora.kind = "lora"'),
    ],
)
def test_what_the_job_cannot_hold_in_full_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, handle = _trained("flux2")
    layers = _read(tmp_path / "a.safetensors", "flux2", _file("flux2", handle, "original"))
    wanted = LoraSettings(**{"rank": 4, **settings})
    targets = resolve_targets(TINY["flux2"].make_model(), wanted.targets or FAMILIES["flux2"].lora_targets)
    with pytest.raises(ValueError, match=message):
        refuse_start(tmp_path / "a.safetensors", layers, targets, wanted)


def test_a_file_of_another_kind_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    """As a base model of more than memory; sparse, so that it takes no room."""
    side = 2**18
    header = {"blocks.0.weight": {"dtype": "BF16", "shape": [side, side], "data_offsets": [0, 2 * side**2]}}
    file = write_raw(tmp_path / "model.safetensors", header, 2 * side**2)
    with pytest.raises(ValueError, match="which is no tensor of a LoRA"):
        read_start(file, FAMILIES["flux2"], {})


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (
            "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
            (2, 4),
            "set lora.text_encoder = true.*or give a LoRA of the diffusion model alone",
        ),
        ("diffusion_model.nothing.lora_A.weight", (2, 4), "diffusion_model.nothing lacks lora_B.weight"),
        ("diffusion_model.final_layer.linear.hada_t1", (2, 4), "which is no tensor of a LoRA"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", (2, 5), "is of another model"),
        ("diffusion_model.final_layer.linear.hada_w1_a", (2, 4), "lacks hada_w1_b"),
        ("diffusion_model.final_layer.linear.oft_blocks", (2, 4), "square blocks are read"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(key: str, shape: Any, message: str, tmp_path: Path) -> None:
    _, handle = _trained("flux2")
    tensors = {**_file("flux2", handle, "diffusers"), key: torch.ones(shape)}
    with pytest.raises(ValueError, match=message):
        _read(tmp_path / "a.safetensors", "flux2", tensors)
