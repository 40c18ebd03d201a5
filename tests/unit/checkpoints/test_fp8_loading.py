"""8 bits while loading: each layer is quantized as it arrives. The result: test_quantized_files.py."""

import gc
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.load import load_transformer, make_empty_transformer
from devicebridge.parallel.placement import block_names, parameter_bytes, plan_placement
from devicebridge.quantization import eight_bit
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.toy import TINY
from torch.utils._python_dispatch import TorchDispatchMode


class _Scale(TorchDispatchMode):
    """Looks after every operation, so that what rounding needs for a moment counts too."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.before = {card: live_bytes(card) for card in CARDS[:2]}  # what other tests have left
        self.peaks = dict.fromkeys(CARDS[:2], 0)

    def now(self) -> dict[torch.device, int]:
        return {card: live_bytes(card) - before for card, before in self.before.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peaks = {card: max(self.peaks[card], held) for card, held in self.now().items()}
        return result


def _load(info, settings):
    """The model, most bytes on each card, and bytes at the end."""
    blocks = block_names(empty := make_empty_transformer(info), info.family)
    sizes, main_device = parameter_bytes(empty, blocks, 2)
    placement = plan_placement(blocks, CARDS[:2], block_cost=sizes, main_cost=main_device)
    with _Scale() as scale:
        model = load_transformer(info, placement.device_of, torch.bfloat16, settings)
    return model, scale.peaks, scale.now()


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=[pytest.mark.long] * (each not in ("fp8", "int8-compute"))) for each in SCHEMES]
)
def test_no_card_holds_more_than_the_result_and_one_layer(scheme, tmp_path, monkeypatch):
    """With pieces as small beside these layers as the real ones are beside FLUX.2's."""
    piece = 512
    monkeypatch.setattr(eight_bit, "_PIECE", piece)
    model = TINY["flux2"].make_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="300KB")  # several files: a layer may lie in two
    info = read_checkpoint(tmp_path)
    with emulated_cards(2):
        plain, _, whole = _load(info, None)
        largest = max(p.nbytes for p in plain.parameters())
        del plain
        # no rotation: of layers this small its matrix would be the larger part
        model, peaks, final = _load(info, QuantizeSettings(scheme, rotation=0))
        for card in peaks:
            assert 0 < final[card] <= peaks[card] <= final[card] + largest + 32 * piece
            assert peaks[card] < whole[card]  # what loading first and quantizing later would need
        del model
