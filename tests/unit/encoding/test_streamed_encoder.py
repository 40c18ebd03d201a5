"""Streamed text encoders: the same bits as resident ones, each layer copied once per pass, two of them on the card."""

import contextlib
import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.encoding import text_weights
from devicebridge.encoding.store import CacheStore
from devicebridge.encoding.text_encoder import TextEncoder, load_text_encoder
from devicebridge.encoding.text_place import forecast_size
from devicebridge.encoding.text_weights import layer_list
from devicebridge.parallel.offload import copies
from devicebridge.parallel.offload.copies import NUM_SLOTS, CopyStreams
from devicebridge.patches.hooks import HookSet
from devicebridge.system.stopping import Stopped
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.encoding import encode_captions
from devicebridge.tests.toy_encoders import copy_parts, save_each
from devicebridge.tests.unit.encoding.test_text_encoder_quantized import SPECS
from safetensors.torch import save_file

CPU = torch.device("cpu")
NUM_LAYERS = 8  # of which chat encoders need three, see SPECS
CAPTIONS = ["a cat", "An old ship at sea, painted in oil.", "", "x" * 200, "b c d", "y" * 300, "a dog"]
PADDED = [caption for caption in CAPTIONS if len(caption) < 60]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_each(tmp_path_factory.mktemp("encoders"), SPECS, layers=NUM_LAYERS, max_length=64)


def _stream(folder, kind, captions_per_pass, device=CPU, dtype=torch.float32):
    return load_text_encoder(SPECS[kind], folder, device, dtype, captions_per_pass=captions_per_pass)


def _resident_states(folder, kind, dtype=torch.float32):
    encoder = load_text_encoder(SPECS[kind], folder, CPU, dtype)
    return {caption: encoder.encode_batch([caption])[0] for caption in CAPTIONS}


def _copies(encoder: TextEncoder) -> int:
    assert encoder.stream is not None
    return encoder.stream.slots.num_copies


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mistral3", torch.float32), ("qwen3", torch.bfloat16), ("umt5", torch.bfloat16), ("clip", torch.float32),
        ("t5", torch.float16),  # whose class wants some weights in float32
    ],
)  # fmt: skip
def test_states_are_those_of_the_resident_encoder_bit_by_bit(folders, kind, dtype):
    expected = _resident_states(folders[kind], kind, dtype)
    encoder = _stream(folders[kind], kind, 4, dtype=dtype)
    for company in (CAPTIONS, CAPTIONS[::-1], CAPTIONS[:1], CAPTIONS[3:4], PADDED):
        for caption, states in zip(company, encoder.encode_batch(company), strict=True):
            assert torch.equal(states, expected[caption]), caption
    assert torch.equal(encoder.encode_batch(["a cat"])[0], expected["a cat"])
    encoder.close()


def test_captions_go_through_a_layer_one_by_one(folders: dict[str, Path]) -> None:
    """In a batch of several, products round differently; on a CPU of tiny matrices that may not show in the bits."""
    encoder = _stream(folders["qwen3"], "qwen3", 4)
    seen: list[torch.Size] = []
    hooks = HookSet()
    for layer in layer_list(encoder.model)[1]:
        hooks.after(layer.mlp.up_proj, lambda module, args, kwargs, output: seen.append(output.shape))
    encoder.encode_batch(PADDED[:4])
    assert len(seen) == 3 * 4 and {shape[0] for shape in seen} == {1}
    hooks.remove()
    encoder.close()


def test_a_layer_that_would_mix_captions_is_an_error() -> None:
    """An argument whose batch is not where we look for it would make two captions of one."""
    unknown = text_weights._caption((), {"other": torch.ones(3, 2, 4, 8)}, 0, 2)[1]["other"]
    one = torch.zeros(1, 4, 8) * unknown[0]
    with pytest.raises(AssertionError, match="mixed captions"):
        text_weights._joined([one, one])


def test_a_batch_is_one_pass(folders: dict[str, Path]) -> None:
    encoder = _stream(folders["mistral3"], "mistral3", 3)
    batches = encoder.plan_batches(CAPTIONS)
    assert sorted(map(len, batches)) == [2, 2, 3]  # five with padding, two without
    assert sorted(sum(batches, [])) == sorted(CAPTIONS)
    for batch in batches:
        assert len({len(caption) > 60 for caption in batch}) == 1  # padded and full ones apart
    for number, batch in enumerate(batches, start=1):
        encoder.encode_batch(batch)
        assert _copies(encoder) == 3 * number
    encoder.close()
    encoder = _stream(folders["t5"], "t5", len(CAPTIONS))  # which sees no mask
    assert encoder.plan_batches(CAPTIONS) == [CAPTIONS]
    size = forecast_size(SPECS["t5"], folders["t5"], torch.float32)
    assert encoder.stream is not None and encoder.stream.buffer.num_bytes == size.layer  # of host memory
    for _ in range(2):
        encoder.close()
        assert encoder.stream.buffer.num_bytes == 0


@pytest.fixture
def _views_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # emulated tensors cannot be viewed in inference mode


def _watch_inside(encoder: TextEncoder, look: Callable[[], None]) -> HookSet:
    hooks = HookSet()
    for layer in layer_list(encoder.model)[1]:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                hooks.after(module, lambda module, args, kwargs, output: look())
    return hooks


@pytest.mark.usefixtures("_views_allowed")
@pytest.mark.parametrize("kind", ["mistral3", "qwen3", "umt5", "t5"])
def test_a_card_holds_what_was_forecast_all_of_it_or_two_layers_and_each_crosses_once_per_pass(folders, kind):
    size = forecast_size(SPECS[kind], folders[kind], torch.float32)
    held: list[int] = []
    with emulated_cards(1) as cards:
        encoder = load_text_encoder(SPECS[kind], folders[kind], CARDS[0], torch.float32)
        hooks = _watch_inside(encoder, lambda: held.append(live_bytes(CARDS[0])))
        expected = {text: encoder.encode_batch([text])[0].to(CPU) for text in PADDED}  # in emulation's own way
        assert size.whole < max(held) <= size.resident_bytes
        hooks.remove()
        held.clear()
        del encoder, hooks
        gc.collect()
        assert live_bytes(CARDS[0]) == 0
        encoder = _stream(folders[kind], kind, len(PADDED), CARDS[0])
        num_layers = len(layer_list(encoder.model)[1])
        window = size.rest + NUM_SLOTS * size.layer
        assert window <= live_bytes(CARDS[0]) <= window + 4096  # and rotary frequencies
        hooks = _watch_inside(encoder, lambda: held.append(live_bytes(CARDS[0])))
        for number in (1, 2):
            cards.copies.clear()
            found = encoder.encode_batch(PADDED)
            to_card = [copy.num_bytes for copy in cards.copies if copy.target == CARDS[0]]
            layer_copies = [num_bytes for num_bytes in to_card if num_bytes > size.layer // 2]
            assert len(layer_copies) == num_layers and sum(layer_copies) <= num_layers * size.layer
            assert _copies(encoder) == number * num_layers
        hooks.remove()
        assert max(held) <= size.streamed_bytes(len(PADDED))
        assert max(held) - window < size.working + len(PADDED) * size.caption
        for caption, states in zip(PADDED, found, strict=True):
            assert states.device == CPU and torch.equal(states, expected[caption])
        encoder.close()
        layers = layer_list(encoder.model)[1]
        assert all(parameter.is_meta for parameter in layers.parameters())
        assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)
        del encoder, layers, hooks
        gc.collect()
        assert live_bytes(CARDS[0]) == 0


def test_the_next_layer_is_copied_while_one_computes_and_never_over_it(folders, monkeypatch):
    """A layer is copied when the one ahead of it is queued, into the slot whose reader it waits for ("used"), once the
    buffer's last copy has ended ("wait")."""
    steps: list[str] = []
    slots: list[int] = []

    class Recorder(CopyStreams):
        def copy(self, target: torch.Tensor, source: torch.Tensor, *after: Any) -> Any:
            super().copy(target, source)
            slots.append(target.data_ptr())
            steps.append("copy" if after == ("used",) else "copy over what is read")
            return SimpleNamespace(synchronize=lambda: steps.append("wait"))

        def wait(self, event: Any) -> None:
            steps.append("await")

        def now(self) -> Any:
            steps.append("used")
            return "used"

    monkeypatch.setattr(copies, "CopyStreams", Recorder)
    encoder = _stream(folders["t5"], "t5", 2)
    steps.clear()  # when the slots were made
    encoder.encode_batch(["a", "b"])
    encoder.encode_batch(["c"])
    encoder.close()
    one = ["copy", "await", "used"]
    assert steps == one + ["wait", *one] * (2 * NUM_LAYERS - 1)
    assert len(set(slots)) == NUM_SLOTS and slots == slots[:NUM_SLOTS] * NUM_LAYERS


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_forgotten_memory_is_unregistered(monkeypatch, caplog):
    card, forgotten, answers, unregistered = torch.device("cuda", 0), [], [2, 0], []
    driver = SimpleNamespace(cudaHostRegister=lambda *args: answers.pop(0), cudaHostUnregister=unregistered.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(copies, "_forget_last_error", forgotten.append)
    buffer = copies.PinnedBuffer(1000, card)
    assert buffer.tensor.nbytes == 1000 and len(forgotten) == 1 and "could not be pinned" in caplog.text
    buffer.close()
    assert not unregistered and buffer.tensor.nbytes == 0
    buffer = copies.PinnedBuffer(1000, card)
    view = buffer.tensor[:10]
    del buffer  # whoever forgets to close it: memory must not be freed while it is registered
    assert len(unregistered) == 1 and view.nbytes == 10
    assert not copies.PinnedBuffer(1000, card, is_wanted=False).is_pinned


@pytest.mark.parametrize("broken_layer", [0, 1, 4, NUM_LAYERS - 1])
def test_after_an_error_in_a_layer_the_next_batch_is_right(folders, broken_layer):
    expected = _resident_states(folders["t5"], "t5")
    encoder = _stream(folders["t5"], "t5", 4)
    hooks = HookSet()

    def fail(module: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    hooks.before(layer_list(encoder.model)[1][broken_layer].layer[0], fail)
    for texts in (["a cat", "a dog"], ["a cat"]):
        with pytest.raises(RuntimeError, match="out of memory"):
            encoder.encode_batch(texts)
    hooks.remove()
    for caption, states in zip(CAPTIONS, encoder.encode_batch(CAPTIONS), strict=True):
        assert torch.equal(states, expected[caption])
    encoder.close()


def test_a_file_that_changes_between_two_passes_is_named_before_another_encoder_computes(folders, tmp_path) -> None:
    folder, tensors = copy_parts(folders["t5"], tmp_path)
    file = folder / "text_encoder" / "model.safetensors"
    save_file(tensors, file)
    encoder = _stream(folder, "t5", 2)
    encoder.encode_batch(["a cat"])
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)  # of the same names and shapes
    with pytest.raises(ValueError, match=re.escape(str(file))):
        encoder.encode_batch(["a dog"])
    encoder.close()


@pytest.mark.usefixtures("_views_allowed")
def test_caching_through_a_stream_fills_the_same_entries_and_leaves_the_card_empty(folders, tmp_path, caplog):
    spec, folder = SPECS["t5"], folders["t5"]
    size = forecast_size(spec, folder, torch.float32)
    window = size.streamed_bytes(3)
    assert window < size.resident_bytes
    seen: list[int] = []
    with emulated_cards(1), caplog.at_level(logging.INFO):
        torch.lazy.empty_cache = lambda: None  # type: ignore[attr-defined]
        gc.collect()
        store = CacheStore(tmp_path / "streamed")
        options: dict[str, Any] = {
            "window_bytes": window,
            "on_progress": lambda done, total, what: seen.append(live_bytes(CARDS[0])),
        }
        arguments = (CAPTIONS, (spec,), folder, "stream:lazy:0", torch.float32, store)
        with pytest.raises(Stopped, match="stopped after 3 of 7 captions"):
            encode_captions(*arguments, **options, should_stop=lambda: len(seen) > 2)
        gc.collect()
        assert live_bytes(CARDS[0]) == 0
        keys = encode_captions(*arguments, **options)
        gc.collect()
        assert 0 < max(seen) <= window and live_bytes(CARDS[0]) == 0
    assert "is streamed through lazy:0, 3 captions per pass" in caplog.text
    plain = CacheStore(tmp_path / "plain")
    assert encode_captions(CAPTIONS, (spec,), folder, "cpu", torch.float32, plain) == keys  # the place is in no key
    for key in keys.values():
        here, there = store.get(key), plain.get(key)
        assert here is not None and there is not None
        torch.testing.assert_close(here[spec.output], there[spec.output], rtol=1e-5, atol=1e-5)
