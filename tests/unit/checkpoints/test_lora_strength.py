"""A LoRA file changes each weight by what it was trained to, wherever its strength is written; the rest is refused."""

import json
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from devicebridge.checkpoints.lora_start import read_start
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.toy import TINY
from devicebridge.tests.unit.checkpoints.test_lora_start import linears
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

FLUX = "flux1"
LAYER, OTHER = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
KOHYA = f"lora_unet_{LAYER.replace('.', '_')}"
RANK, ALPHA = 4, 16.0
OF = "transformer."  # a component of a pipeline
LINEARS = linears(TINY[FLUX].make_model())
ROWS, COLUMNS = LINEARS[LAYER]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DOWN, UP = _random(RANK, COLUMNS), _random(ROWS, RANK, seed=1)


def _lora(name: str, **more: Tensor) -> dict[str, Tensor]:
    pair = {f"{name}.lora_A.weight": DOWN.clone(), f"{name}.lora_B.weight": UP.clone()}
    return {**pair, **{f"{name}.{kind}": each for kind, each in more.items()}}


def _read(folder, tensors, metadata=None, name="a.safetensors"):
    save_file(tensors, folder / name, metadata)
    return read_start(folder / name, FAMILIES[FLUX], LINEARS)


def _factor(layer: dict[str, Tensor]) -> float:
    """What B A of the file, computed here, is multiplied by."""
    found, plain = layer["lora_B.weight"] @ layer["lora_A.weight"], UP @ DOWN
    factor = float((found * plain).sum() / (plain * plain).sum())
    assert torch.allclose(found, factor * plain, rtol=1e-4, atol=1e-4)
    return factor


def _adapter(component: str = "", more: Any = (), **values: Any) -> dict[str, str]:
    return {
        "lora_adapter_metadata": json.dumps({f"{component}{key}": each for key, each in values.items()} | dict(more))
    }


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"to_k": 2}, "rank_pattern": {"to_k": 8}}]
)
def test_what_diffusers_writes_begins_as_diffusers_trained_it(settings: dict[str, Any], tmp_path: Path) -> None:
    trained: Any = TINY[FLUX].make_model()
    targets = ["attn.to_q", "attn.to_k"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, target_modules=targets, **settings)
    trained.add_adapter(config)
    state = get_peft_model_state_dict(trained)
    metadata = _collate_lora_metadata({"transformer": trained})
    diffusers.FluxPipeline.save_lora_weights(tmp_path, transformer_lora_layers=state, **metadata)
    (file,) = tmp_path.glob("*.safetensors")
    layers = read_start(file, FAMILIES[FLUX], LINEARS)
    assert {name.rpartition(".")[2] for name in layers} == {"to_q", "to_k"}
    for name, layer in layers.items():
        wanted = trained.get_submodule(name).get_delta_weight("default").detach()
        assert torch.allclose(layer["lora_B.weight"] @ layer["lora_A.weight"], wanted, rtol=1e-4, atol=1e-4), name


WRITTEN: dict[str, tuple[dict[str, Tensor], dict[str, str] | None, float]] = {
    "no alpha": (_lora(f"transformer.{LAYER}"), None, 1),
    "an alpha": (_lora(f"transformer.{LAYER}", alpha=torch.tensor(ALPHA)), None, ALPHA / RANK),
    "a whole alpha": (_lora(f"transformer.{LAYER}", alpha=torch.tensor(16)), None, ALPHA / RANK),
    "a negative alpha": (_lora(f"transformer.{LAYER}", alpha=torch.tensor([-ALPHA])), None, -ALPHA / RANK),
    "of the component": (_lora(f"transformer.{LAYER}"), _adapter(OF, {"text_encoder.r": 8}, r=4, lora_alpha=16), 4),
    "of no component": (_lora(f"diffusion_model.{LAYER}"), _adapter(r=4, lora_alpha=16), 4),
    "in both, alike": (_lora(f"diffusion_model.{LAYER}", alpha=torch.tensor(ALPHA)), _adapter(r=4, lora_alpha=16), 4),
    "1 of all, under names of another": (_lora(f"diffusion_model.{LAYER}"), _adapter(OF, r=4, lora_alpha=4), 1),
    "the first pattern": (
        _lora(f"transformer.{LAYER}"),
        _adapter(
            OF, r=64, lora_alpha=1, rank_pattern={"^attn.to_q": 9, "to_q": RANK, "attn.to_q": 7},
            alpha_pattern={f"^{LAYER}": 2.0, "to_q": 3},
        ),
        2 / RANK,
    ),
    "kohya's beside alpha": (
        {
            key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): each
            for key, each in _lora(KOHYA, alpha=torch.tensor(2.0)).items()
        },
        {"ss_network_alpha": "16", "ss_network_dim": "4"}, 2 / RANK,
    ),
    "kohya's multiplied in": (_lora(f"diffusion_model.{LAYER}"), {"ss_network_alpha": "16", "ss_network_dim": "4"}, 1),
}  # fmt: skip


@pytest.mark.parametrize("where", WRITTEN)
def test_strength_is_read_where_it_is_written(where: str, tmp_path: Path) -> None:
    tensors, metadata, factor = WRITTEN[where]
    assert _factor(_read(tmp_path, tensors, metadata)[LAYER]) == pytest.approx(factor, rel=1e-4)


def test_peft_writes_it_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "use_rslora": True}))
    layers = _read(tmp_path, _lora(f"base_model.model.{LAYER}"), name="adapter_model.safetensors")
    assert _factor(layers[LAYER]) == pytest.approx(ALPHA / math.sqrt(RANK), rel=1e-4)


def test_a_stacked_layer_keeps_a_magnitude_whose_rows_are_else_unchanged(tmp_path: Path) -> None:
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    up = torch.cat([_random(ROWS, RANK), torch.zeros(2 * ROWS, RANK)])
    file = {f"{name}.lora_A.weight": _random(RANK, COLUMNS), f"{name}.lora_B.weight": up}
    scale = torch.arange(1.0, 3 * ROWS + 1).reshape(-1, 1)
    layers = _read(tmp_path, {**file, f"{name}.dora_scale": scale})
    found = [layers[f"transformer_blocks.0.attn.to_{each}"]["dora_scale"] for each in "qkv"]
    assert torch.equal(torch.cat(found), scale.flatten())


def _refused() -> dict[str, tuple[dict[str, Tensor], dict[str, str] | None, tuple[str, ...]]]:
    """Files by what is wrong with them: tensors, metadata, and what the message must name."""
    down, up, name = DOWN, UP, f"transformer.{LAYER}"
    a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    pair = {a: down, b: up}
    lokr = {f"lycoris_{LAYER.replace('.', '_')}.lokr_w{n}": _random(4, 4) for n in (1, 2)}
    alpha, magnitude, down_key = (f"{name}.{each}" for each in ("alpha", "dora_scale", "lora_down.weight"))
    usual = {"r": 4, "lora_alpha": 16}
    return {
        "zeros of LoKr": ({key: each * key.endswith("1") for key, each in lokr.items()}, None, ("changes nothing",)),
        "a magnitude of OFT": ({f"{name}.oft_blocks": up, magnitude: up[:, :1]}, None, (name, "OFT")),
        "unequal ranks": ({a: down, b: _random(ROWS, 8)}, None, (name, "rank 4", "rank 8")),
        "complex": ({a: down.to(torch.complex64), b: up}, None, (name, "lora_A", "complex64")),
        "PEFT's names": ({f"{key}.default": each for key, each in lokr.items()}, None, ("lokr_w1.default", "LoKr")),
        "NaN": ({a: down, b: up * math.nan}, None, (name, "lora_B", "not finite")),
        "empty": ({a: down[:0], b: up[:, :0]}, None, (name, "lora_A", "empty")),
        "half of LoKr": ({f"{name}.lokr_w1": up, f"{name}.lokr_w2_b": down}, None, (name, "lokr_w2_a")),
        "half of LoHa": ({f"{name}.hada_w1_a": up, f"{name}.hada_w1_b": down}, None, (name, "hada_w2_a")),
        "no second factor": ({f"{name}.lokr_w1": up}, None, (name, "lokr_w2")),
        "alpha alone": ({alpha: torch.tensor(1.0)}, None, (name, "alpha")),
        "LoRA and LoKr": ({**pair, f"{name}.lokr_w1": up, f"{name}.lokr_w2": up}, None, (name, "LoKr")),
        "a vector": ({a: down[0], b: up}, None, (name, "lora_A", f"[{COLUMNS}]")),
        "a convolution": ({a: _random(RANK, COLUMNS, 3, 3), b: up}, None, (name, "convolution")),
        "alpha 0": ({**pair, alpha: torch.tensor(0.0)}, None, (name, "alpha", "0")),
        "two alphas": ({**pair, alpha: torch.ones(2)}, None, (name, "alpha", "[2]")),
        "a magnitude for columns": (
            {**pair, magnitude: torch.ones(1, COLUMNS)}, None, (name, "dora_scale", f"[1, {COLUMNS}]"),
        ),
        "one spelling more": ({**pair, down_key: down.clone()}, None, (a, down_key)),
        "metadata of another rank": (pair, _adapter(OF, r=8, lora_alpha=16), (name, "rank 4", "alpha 16", "rank 8")),
        "metadata of another alpha": (
            {**pair, alpha: torch.tensor(2.0)}, _adapter(OF, **usual), (name, "alpha 2", "alpha 16", "rank 4"),
        ),
        "metadata of another component": (pair, _adapter("unet.", r=4, lora_alpha=16), (name, "unet")),
        "metadata of no alpha": (pair, _adapter(OF, r=4), (LAYER, "alpha")),
        "metadata of rank 0": (pair, _adapter(OF, r=0, lora_alpha=16), (LAYER, "rank 0")),
        "metadata that is no JSON": (pair, {"lora_adapter_metadata": "{"}, ("lora_adapter_metadata",)),
        "a pattern without an end": (pair, _adapter(OF, **usual, rank_pattern={"(a+)+": 4}), ("rank_pattern", "(a+)+")),
        "a changed base": (pair, _adapter(OF, **usual, init_lora_weights="pissa_niter_16"), ("pissa_niter_16",)),
        "an alpha that was lost": (
            {f"{KOHYA}.lora_down.weight": down, f"{KOHYA}.lora_up.weight": up},
            {"ss_network_alpha": "1", "ss_network_dim": "4"}, (KOHYA, "ss_network_alpha 1", "rank 4"),
        ),
    }  # fmt: skip


REFUSED = _refused()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_right_is_refused_for_what_it_is(what: str, tmp_path: Path) -> None:
    tensors, metadata, names = REFUSED[what]
    with pytest.raises(ValueError) as refusal:
        _read(tmp_path, {key: each.clone().contiguous() for key, each in tensors.items()}, metadata)
    assert [name for name in names if name not in str(refusal.value)] == [], str(refusal.value)
    assert "a.safetensors" in str(refusal.value)


def test_one_layer_twice_and_alike_is_read_once(tmp_path: Path) -> None:
    layers = _read(tmp_path, {**_lora(f"transformer.{LAYER}"), **_lora(KOHYA)})
    assert list(layers) == [LAYER]
    assert _factor(layers[LAYER]) == pytest.approx(1)


def test_some_zero_layers_are_no_fault(tmp_path: Path) -> None:
    file = {**_lora(f"transformer.{LAYER}"), **_lora(f"transformer.{OTHER}")}
    layers = _read(tmp_path, {**file, f"transformer.{OTHER}.lora_B.weight": 0 * UP})
    assert _factor(layers[LAYER]) == pytest.approx(1)
