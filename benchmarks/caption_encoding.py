"""Captions per second of FLUX.2-dev's text encoder: streamed through a card limited to a few GB, on the CPU, resident.

    python benchmarks/caption_encoding.py --folder /dev/shm [--window-gb 6] [--captions 128] [--out results.json]

Writes an encoder of Mistral-Small-3's size with random weights (the 30 layers that FLUX.2-dev reads: 35 GB; where
--folder lacks the room, fewer, and the report says so) and encodes the same captions three ways in one process:

- streamed: torch may take --window-gb of the card and no more (torch.cuda.set_per_process_memory_fraction, so one byte
  above raises), the pack's own plan for that window. The first pass may read the disk and is timed
  apart; captions per second are of the passes after it.
- on the CPU, all cores, one caption at a time; the first is not counted.
- resident on the card, without a limit; the first is not counted.

Ratios come first. Bar: streamed at least 10 times the CPU, and states equal to the resident ones within bfloat16's
rounding; what is found is how many are equal bit for bit, and the signal-to-noise ratio of all. --tiny is the same with
a toy encoder on emulated cards, where times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import runpy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from card_limit import limited  # noqa: E402
from devicebridge.encoding.text_encoder import TextEncoder, load_text_encoder, make_empty_encoder  # noqa: E402
from devicebridge.encoding.text_place import (  # noqa: E402
    EncoderSize,
    forecast_size,
    plan_text_place,
)
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.families.spec import TextEncoderSpec  # noqa: E402
from devicebridge.parallel.devices import CPU, release_cached_memory, synchronize  # noqa: E402
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes  # noqa: E402
from devicebridge.tests.toy_encoders import save_tiny_text_encoder  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_checkpoint import write_tensors  # noqa: E402

SPEC = FAMILIES["flux2"].variant("flux2-dev").text_encoders[0]
# mistralai/Mistral-Small-3.2-24B-Instruct-2506, config.json
SIZES = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
}
TINY_SPEC = replace(SPEC, max_length=64, layers=(2, 4, 6), system_prompt="Look.")
MARGIN_BYTES = 300 * 10**6  # of the limit: cuBLAS' workspace, and what torch's allocator cannot use
BARS = {"streamed_over_cpu": 10.0, "snr_db": 30.0}
WORDS = ("a", "the", "cat", "ship", "lantern", "river", "at dusk", "under", "old", "quiet", "in oil", "on wood", "gold")


def main() -> None:
    options = _parse_options()
    folder = Path(tempfile.mkdtemp(prefix="caption-encoding-", dir=options.folder))
    report: dict[str, Any] = {"what": __doc__.splitlines()[0]}
    try:
        with emulated_cards(1) if options.tiny else contextlib.nullcontext():
            _measure(options, folder, report)
    finally:
        shutil.rmtree(folder)
    print_or_write(report, options.out)


def _measure(options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    spec = _write_tiny(folder) if options.tiny else _write_encoder(folder)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    card = CARDS[0] if options.tiny else torch.device("cuda", 0)
    size = forecast_size(spec, folder, dtype)
    captions = _make_captions(options.captions)
    window = size.streamed_bytes(4) if options.tiny else int(options.window_gb * 1e9)
    report |= {"layers": max(spec.layers), "encoder_gb": size.whole / 1e9, "window_gb": window / 1e9}
    report |= {"captions": len(captions), "tokens": spec.max_length, "cpu_threads": torch.get_num_threads()}
    report |= describe_run("transformers", "safetensors")
    states: dict[str, torch.Tensor] = {}
    report["streamed"] = _streamed(options, spec, folder, dtype, card, window, captions, states)
    write_json(report, options.out)
    few = captions[: 1 + options.cpu_captions]
    report["resident"] = _one_by_one(spec, folder, dtype, card, captions[: options.resident_captions], states)
    write_json(report, options.out)
    report["cpu"] = _one_by_one(spec, folder, dtype, CPU, few, states)
    _conclude(report, size)


def _conclude(report: dict[str, Any], size: EncoderSize) -> None:
    """Ratios go to the front."""
    per_second = {way: report[way]["captions_per_s"] for way in ("streamed", "cpu", "resident")}
    ratios = {
        "streamed_over_cpu": per_second["streamed"] / per_second["cpu"],
        "streamed_over_resident": per_second["streamed"] / per_second["resident"],
        "peak_over_whole_encoder": report["streamed"]["peak_gb"] * 1e9 / size.resident_bytes,
    }
    resident = report["resident"]["against_streamed"]
    held = {
        "streamed_over_cpu": ratios["streamed_over_cpu"] >= BARS["streamed_over_cpu"],
        "states": resident["snr_db"] >= BARS["snr_db"],
        "window": report["streamed"]["peak_gb"] <= report["window_gb"],
    }
    rest = dict(report)
    report.clear()
    report |= {"ratios": ratios, "bars": BARS, "bars_held": held, "seconds": elapsed_s(), **rest}


# --- ways ------------------------------------------------------------------------------------------------------------


def _streamed(
    options: argparse.Namespace,
    spec: TextEncoderSpec,
    folder: Path,
    dtype: torch.dtype,
    card: torch.device,
    window: int,
    captions: Sequence[str],
    states: dict[str, torch.Tensor],
) -> dict[str, Any]:
    plan_bytes = window if options.tiny else window - MARGIN_BYTES
    place = plan_text_place(f"stream:{card}", spec, folder, dtype, "none", plan_bytes)
    assert place.captions_per_pass, "the window holds the whole encoder; give --window-gb less"
    say(f"streamed: the encoder {place}")
    with limited(card, window), _peak_bytes(card) as peak:
        encoder = load_text_encoder(spec, folder, card, dtype, captions_per_pass=place.captions_per_pass)
        assert encoder.stream is not None
        batches = encoder.plan_batches(captions)
        times = _time(encoder, batches, states)
        copies = encoder.stream.slots.num_copies
        found = {
            "captions_per_s": _rate(batches[1:], times[1:]),
            "first_pass_s": times[0],
            "pass_s": times[1:],
            "captions_per_pass": place.captions_per_pass,
            "passes": len(batches),
            "layer_copies_per_pass": copies / len(batches),
            "host_gb": encoder.stream.buffer.num_bytes / 1e9,
        }
        encoder.close()
        del encoder
    say(f"streamed: {found['captions_per_s']:.2f} captions/s")
    return found | {"peak_gb": peak() / 1e9}


def _one_by_one(
    spec: TextEncoderSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    captions: Sequence[str],
    states: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """The first caption is not timed."""
    own: dict[str, torch.Tensor] = {}
    with _peak_bytes(device) as peak:
        loading_s = time.perf_counter()
        encoder = load_text_encoder(spec, folder, device, dtype)
        _time(encoder, [captions[:1]], own)
        loading_s = time.perf_counter() - loading_s
        say(f"{device}: loaded, first caption done")
        batches = [[caption] for caption in captions[1:]]
        times = _time(encoder, batches, own)
        encoder.close()
        del encoder
    say(f"{device}: {_rate(batches, times):.3f} captions/s")
    return {
        "captions_per_s": _rate(batches, times),
        "timed": len(times),
        "loading_and_first_s": loading_s,
        "peak_gb": peak() / 1e9,
        "against_streamed": _compare(own, states),
    }


def _time(encoder: TextEncoder, batches: Sequence[Sequence[str]], states: dict[str, torch.Tensor]) -> list[float]:
    """Seconds of each batch; what it gives is added to the states."""
    times = []
    for batch in batches:
        start = time.perf_counter()
        found = encoder.encode_batch(batch)
        states.update((caption, one.to(CPU)) for caption, one in zip(batch, found, strict=True))
        synchronize([encoder.device])
        times.append(time.perf_counter() - start)
    return times


def _rate(batches: Sequence[Sequence[str]], times: Sequence[float]) -> float:
    return sum(map(len, batches)) / sum(times)


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the captions that both ways encoded."""
    common = [caption for caption in found if caption in expected]
    noise = sum(float((found[c].double() - expected[c].double()).square().sum()) for c in common)
    signal = sum(float(found[c].double().square().sum()) for c in common)
    return {
        "captions": len(common),
        "equal_bit_for_bit": sum(torch.equal(found[caption], expected[caption]) for caption in common),
        "snr_db": 10 * math.log10(signal / noise) if noise else 999.0,
        "largest_difference": max(float((found[c].float() - expected[c].float()).abs().max()) for c in common),
        "largest_state": max(float(found[c].float().abs().max()) for c in common),
    }


# --- machine ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """What torch reserved on the device at most; on emulated cards, what is there at the end. 0 for the CPU."""
    gc.collect()
    peak = 0
    if device.type == "cuda":
        release_cached_memory()
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: peak
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        gc.collect()
        release_cached_memory()
    elif device.type != "cpu":
        peak = live_bytes(device)


# --- encoder ---------------------------------------------------------------------------------------------------------


def _write_tiny(folder: Path) -> TextEncoderSpec:
    save_tiny_text_encoder(folder, "mistral3", 64, layers=8, max_length=TINY_SPEC.max_length)
    return TINY_SPEC


def _write_encoder(folder: Path) -> TextEncoderSpec:
    """An encoder folder with the files that are read, and a tokenizer of bytes."""
    from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig

    save_tiny_text_encoder(folder, "mistral3", max_length=SPEC.max_length)  # for its tokenizer
    shutil.rmtree(folder / SPEC.folder)
    text = MistralConfig(**SIZES, sliding_window=None)
    vision = PixtralVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = Mistral3Config(text_config=text, vision_config=vision, architectures=["Mistral3ForConditionalGeneration"])
    config.save_pretrained(folder / SPEC.folder)
    spec = replace(SPEC, layers=_layers_that_fit(folder))
    model = make_empty_encoder(spec, folder)
    prefix = "language_model.model."
    by_file: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        part = f"layer-{name.split('.')[1]}" if name.startswith("layers.") else "rest"
        by_file.setdefault(f"{part}.safetensors", {})[prefix + name] = tuple(tensor.shape)
    written = sum(write_tensors(folder / spec.folder / file, shapes) for file, shapes in by_file.items())
    names = {name: file for file, shapes in by_file.items() for name in shapes}
    (folder / spec.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    say(f"wrote {written / 1e9:.1f} GB with {max(spec.layers)} layers")
    return spec


def _layers_that_fit(folder: Path) -> tuple[int, ...]:
    """The spec's, or as many as the disk and half of the host's memory have room for, in three steps as well."""
    size = forecast_size(SPEC, folder, torch.bfloat16)
    room = min(shutil.disk_usage(folder).free, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    fitting = (int(0.9 * room) - size.rest) // size.layer
    if fitting >= max(SPEC.layers):
        return SPEC.layers
    if fitting < 6:
        raise RuntimeError(
            f"{folder} has room for {fitting} layers of {size.layer / 1e9:.2f} GB; at least 6 are needed"
        )
    step = fitting // 3
    return (step, 2 * step, 3 * step)


def _make_captions(number: int) -> list[str]:
    """Different ones, of 3 to 40 words."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 41, (number,), generator=generator).tolist()
    picks = torch.randint(0, len(WORDS), (number, 40), generator=generator).tolist()
    return [
        f"{index}: " + " ".join(WORDS[i] for i in pick[:n])
        for index, (n, pick) in enumerate(zip(lengths, picks, strict=True))
    ]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for 35 GB of files; the default is the system's temporary folder")
    parser.add_argument("--window-gb", type=float, default=6.0)
    parser.add_argument("--captions", type=int, default=192)
    parser.add_argument("--resident-captions", type=int, default=24)
    parser.add_argument("--cpu-captions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a toy encoder on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.captions, options.resident_captions = 12, 6
        torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]  # emulated tensors cannot be viewed in it
    return options


if __name__ == "__main__":
    main()
