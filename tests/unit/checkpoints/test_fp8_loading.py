"""8 bits while loading: each layer is quantized as it arrives. The result: test_quantized_files.py."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.load import load_transformer, make_empty_transformer
from devicebridge.parallel.placement import block_names, parameter_bytes, plan_placement
from devicebridge.quantization import eight_bit
from devicebridge.quantization.quantize import SCHEMES, Quantizer, QuantizeSettings
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.toy import TINY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

FP8 = QuantizeSettings("fp8")


def _checkpoint(folder: Path, name: str) -> Any:
    model = TINY[name].make_model().to(torch.bfloat16)
    model.save_pretrained(folder / "transformer", max_shard_size="300KB")  # several files: a layer may lie in two
    index = {"_class_name": "Any", "transformer": ["diffusers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return read_checkpoint(folder)


def _peaks(info, settings):
    """Most bytes on each card whenever a layer has just arrived, bytes at the end, and the model."""
    model = make_empty_transformer(info)
    blocks = block_names(model, info.family)
    sizes, main_device = parameter_bytes(model, blocks, 2)
    placement = plan_placement(blocks, CARDS[:2], block_cost=sizes, main_cost=main_device)
    peaks = dict.fromkeys(CARDS[:2], 0)
    gc.collect()
    before = {card: live_bytes(card) for card in peaks}  # what other tests have left

    class Scale(TorchDispatchMode):
        """Looks after every operation, so that what rounding needs for a moment counts too."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for card in peaks:
                peaks[card] = max(peaks[card], live_bytes(card) - before[card])
            return result

    class Watched(Quantizer):
        def finish(self, fqn: str, module: nn.Module) -> nn.Module:
            with Scale():
                if settings is not None:
                    return super().finish(fqn, module)
                module.weight.detach()  # type: ignore[union-attr,operator]
                return module

        def store(self, module: nn.Module) -> Any:
            return super().store(module) if settings is not None else None

    quantizer = Watched(info.family, settings or FP8)
    loaded = load_transformer(info, placement.device_of, torch.bfloat16, quantizer)
    if settings is not None:
        quantizer.close(loaded)
    return peaks, {card: live_bytes(card) - before[card] for card in peaks}, loaded


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=[pytest.mark.long] * (each not in ("fp8", "int8-compute"))) for each in SCHEMES]
)
def test_no_card_holds_more_than_the_result_and_one_layer(scheme, tmp_path, monkeypatch):
    """With pieces as small beside these layers as the real ones are beside FLUX.2's."""
    piece = 512
    monkeypatch.setattr(eight_bit, "_PIECE", piece)
    info = _checkpoint(tmp_path, "flux2")
    with emulated_cards(2):
        plain_peaks, _, plain = _peaks(info, None)
        largest = max(p.nbytes for p in plain.parameters())
        del plain
        # no rotation: of layers this small its matrix would be the larger part
        peaks, final, model = _peaks(info, QuantizeSettings(scheme, rotation=0))
        for card in peaks:
            assert 0 < final[card] <= peaks[card] <= final[card] + largest + 32 * piece
            assert peaks[card] < plain_peaks[card]  # what loading first and quantizing later would need
        del model
