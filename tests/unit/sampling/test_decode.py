"""Where a VAE decodes, by what the forecast leaves; and what decoding takes, against what emulated cards hold."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.planning.dry_run import Kernels
from devicebridge.sampling import draw as decode
from devicebridge.sampling.draw import Decoder, decoding_bytes
from devicebridge.tests.emulated import CARDS, EmulatedTensor, emulated_cards, factories_on_cards, live_bytes
from devicebridge.tests.toy import TINY

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def _decoder(folder: Path, name: str = "flux1", **limits: int) -> Decoder:
    TINY[name].make_vae().save_pretrained(folder / "vae")
    family = FAMILIES[name]
    cards = {torch.device(card.replace("_", ":")): limit for card, limit in limits.items()}
    return Decoder(family, family.variants[0], folder / "vae", torch.float32, cards)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_decoding_takes_is_what_an_emulated_card_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, family = TINY[name].make_vae().requires_grad_(False), FAMILIES[name]
    channels, frames, *_ = TINY[name].latent_shape
    shape = (1, channels, frames, 32, 32)
    counted = decoding_bytes(family, vae, shape, is_tiled=False, kernels=Kernels(has_fused=False, rounding=1))
    gc.collect()
    with emulated_cards(1), factories_on_cards(), torch.no_grad():
        before = live_bytes(CARDS[0])
        vae.to(CARDS[0])
        latents, peak = torch.randn(shape).to(CARDS[0]), [0]

        def made(tensor: EmulatedTensor, data: torch.Tensor, device: torch.device) -> None:
            if data.untyped_storage().nbytes() >= 2**15:
                peak[0] = max(peak[0], live_bytes(CARDS[0]))

        with monkeypatch.context() as patch:
            patch.setattr(EmulatedTensor, "__init__", made)
            family.decode_latents(vae, latents)
    assert counted == pytest.approx(peak[0] - before, rel=0.01)


def test_tiles_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_TILE", 64)
    vae, shape = TINY["flux1"].make_vae(), (1, 4, 1, 128, 128)
    whole, tiled = (decoding_bytes(FAMILIES["flux1"], vae, shape, is_tiled=each) for each in (False, True))
    assert tiled < 0.6 * whole


MANY, WHOLE, TILED = 10**9, 500, 100


@pytest.mark.parametrize(
    ("limits", "free", "reserved", "place"),
    [
        ({"cuda_0": 1500, "cuda_1": 2500}, {0: MANY, 1: MANY}, {0: 1000, 1: 1000}, ("cuda:0", False)),
        ({"cuda_0": 1499, "cuda_1": 2500}, {0: MANY, 1: MANY}, {0: 1000, 1: 1000}, ("cuda:1", False)),
        ({"cuda_0": 1499, "cuda_1": 2500}, {0: MANY, 1: 499}, {0: 1000, 1: 1000}, ("cuda:0", True)),
        ({"cuda_0": 1099, "cuda_1": 1100}, {0: MANY, 1: MANY}, {0: 1000, 1: 1000}, ("cuda:1", True)),
        ({"cuda_0": 1099, "cuda_1": 900}, {0: MANY, 1: MANY}, {0: 1000, 1: 1000}, ("cpu", False)),
        ({}, {}, {}, ("cpu", False)),
    ],
)
def test_a_vae_goes_where_the_forecast_leaves_room(tmp_path, monkeypatch, limits, free, reserved, place):
    """Whole on the first card that has room, else in tiles, else on the CPU; never beyond what was forecast."""
    module = SimpleNamespace(memory_reserved=lambda device: reserved[device.index])
    monkeypatch.setattr(decode, "device_module", lambda device: module)
    monkeypatch.setattr(decode, "free_bytes", lambda device: free[device.index])
    monkeypatch.setattr(decode, "_WORKSPACE_BYTES", 0)
    monkeypatch.setattr(decode, "_LOSSES", 1.0)
    monkeypatch.setattr(decode, "decoding_bytes", lambda *arguments, is_tiled: TILED if is_tiled else WHOLE)
    found, is_tiled = _decoder(tmp_path, **limits)._find_place(None, (1, 4, 1, 4, 4))
    assert (str(found), is_tiled) == place


def test_pixels_that_are_not_finite_are_no_picture(tmp_path: Path) -> None:
    decoder = _decoder(tmp_path)
    with pytest.raises(RuntimeError, match="not finite"):
        list(decoder.decode([torch.full((1, 4, 1, 4, 4), float("inf"))]))
