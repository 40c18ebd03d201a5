"""Float8 while loading: each layer is quantized as it arrives, and the result is that of quantizing afterwards."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.loading.checkpoint import load_transformer, make_empty_transformer, read_checkpoint
from devicebridge.parallel.placement import block_names, parameter_bytes, plan_placement
from devicebridge.patches.fp8 import Fp8Quantizer, _num_bytes, apply_fp8, stored_bytes
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.toy import TINY
from torch import nn
from torchao.quantization import Float8Tensor


def _checkpoint(folder: Path, name: str) -> Any:
    model = TINY[name].make_model().to(torch.bfloat16)
    model.save_pretrained(folder / "transformer", max_shard_size="300KB")  # several files: a layer may lie in two
    index = {"_class_name": "Any", "transformer": ["diffusers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return read_checkpoint(folder)


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    return [parameter.qdata.view(torch.uint8), parameter.scale] if isinstance(parameter, Float8Tensor) else [parameter]


@pytest.mark.parametrize("name", TINY)
def test_it_is_the_model_quantized_afterwards(name: str, tmp_path: Path) -> None:
    info = _checkpoint(tmp_path, name)
    family = FAMILIES[name]
    afterwards = load_transformer(info, lambda _: torch.device("cpu"), torch.bfloat16)
    expected = apply_fp8(afterwards, family).report
    quantizer = Fp8Quantizer(family)
    streamed = load_transformer(info, lambda _: torch.device("cpu"), torch.bfloat16, quantizer.finish)
    assert quantizer.close(streamed).report == expected
    assert expected.num_quantized > 0
    found = dict(streamed.named_parameters())
    for key, parameter in afterwards.named_parameters():
        assert all(torch.equal(a, b) for a, b in zip(_parts(parameter), _parts(found[key]), strict=True)), key
        assert not found[key].requires_grad


def _peaks(info: Any, quantizer: Fp8Quantizer | None) -> tuple[dict[torch.device, int], dict[torch.device, int], Any]:
    """Most bytes on each card whenever a layer has just arrived, bytes at the end, and the model."""
    model = make_empty_transformer(info)
    blocks = block_names(model, info.family)
    sizes, home = parameter_bytes(model, blocks, 2)
    placement = plan_placement(blocks, CARDS[:2], block_cost=sizes, home_cost=home)
    peaks = dict.fromkeys(CARDS[:2], 0)
    gc.collect()
    before = {card: live_bytes(card) for card in peaks}  # what other tests have left

    def on_complete(fqn: str, module: nn.Module) -> None:
        for card in peaks:
            peaks[card] = max(peaks[card], live_bytes(card) - before[card])
        if quantizer is not None:
            quantizer.finish(fqn, module)

    loaded = load_transformer(info, placement.device_of, torch.bfloat16, on_complete)
    return peaks, {card: live_bytes(card) - before[card] for card in peaks}, loaded


def test_no_card_holds_more_than_the_result_and_one_layer(tmp_path: Path) -> None:
    info = _checkpoint(tmp_path, "flux2")
    with emulated_cards(2):
        plain_peaks, _, plain = _peaks(info, None)
        largest = max(p.nbytes for p in plain.parameters())
        del plain
        quantizer = Fp8Quantizer(info.family)
        peaks, final, model = _peaks(info, quantizer)
        quantizer.close(model)
        for card in peaks:
            assert 0 < final[card] <= peaks[card] <= final[card] + 2 * largest
            assert peaks[card] < 0.75 * plain_peaks[card]  # what loading first and quantizing later would need


@pytest.mark.parametrize("name", TINY)
def test_planned_bytes_are_those_that_are_stored(name: str, tmp_path: Path) -> None:
    info = _checkpoint(tmp_path, name)
    empty = make_empty_transformer(info)
    blocks = block_names(empty, info.family)
    sizes, home = stored_bytes(empty, info.family, blocks, 2)
    quantizer = Fp8Quantizer(info.family)
    model = load_transformer(info, lambda _: torch.device("cpu"), torch.bfloat16, quantizer.finish)
    found = [_num_bytes(dict(model.get_submodule(block).named_modules())) for block in blocks]
    whole = _num_bytes(dict(model.named_modules()))
    in_float32 = sum(2 * p.numel() for p in model.parameters() if p.dtype == torch.float32)  # kept so by the class
    assert sum(sizes) + home == whole - in_float32
    assert all(abs(planned - real) <= 0.02 * real for planned, real in zip(sizes, found, strict=True))


def test_a_layer_that_never_arrived_is_noticed(tmp_path: Path) -> None:
    info = _checkpoint(tmp_path, "flux2")
    model = load_transformer(info, lambda _: torch.device("cpu"), torch.bfloat16)
    with pytest.raises(RuntimeError, match="layers were never quantized, .* first"):
        Fp8Quantizer(info.family).close(model)
