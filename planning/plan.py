"""The plan of a job: what was found to be fastest, as a table, plain values and a picture; and what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..config.model import has_stages, holds_copies, shares_rows
from ..parallel.placement import Placement
from ..system.progress import describe_duration
from ..system.telling import aligned
from .cards import Card
from .memory import DeviceForecast
from .question import Question, is_open, why_not_shared
from .search import Found, Looked, describe_refusal, find_fastest
from .times import ASSUMED_FLOPS_PER_S, KERNEL_S

_STEPS = 1000  # of a run, where nobody says how many
_MOST_ALTERNATIVES = 8  # rows of the table
# What a card's memory is for: attribute of a DeviceForecast, its name in the table, and the colour of its bar. The
# colours are told apart in grey and by the colour-blind.
_PARTS = (
    ("weights", "weights", "#0072b2"),
    ("lora", "LoRA", "#009e73"),
    ("gradients", "gradients", "#f0e442"),
    ("optimizer", "optimizer", "#e69f00"),
    ("checkpoints", "block inputs", "#56b4e9"),
    ("kept", "kept activations", "#cc79a7"),
    ("moving", "one block at work", "#d55e00"),
    ("other", "workspace, allocator, driver", "#999999"),
)
_SHOWN = ("device", "num_blocks", "num_offloaded", "allocated", "reserved", "needed")  # values of each card
_BAR_HEIGHT, _BAR_WIDTH, _MARGIN = 34, 640, 16  # pixels

# Per device, decimal GB: the peak that was forecast, and the one that was measured.
Comparison = Mapping[str, Mapping[str, "float | None"]]


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Found):
    """How a job is best run. looked_at: every setting that was compared. warning: why it may not fit after all, where
    the user has vouched for it; "" otherwise."""

    question: Question
    looked_at: Looked
    placement: Placement
    notes: tuple[str, ...]
    warning: str

    @property
    def uncheckpointed(self) -> tuple[int, ...]:
        """Per device, blocks without activation checkpointing."""
        return tuple(device.num_uncheckpointed for device in self.devices)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Per device, blocks that stream from host memory."""
        return tuple(device.num_offloaded for device in self.devices)


def plan_training(question: Question) -> TrainingPlan:
    """The fastest way to run a job on its cards that fits. Raises: ValueError if none does; it says which would."""
    found, looked_at = find_fastest(question)
    if found is None:
        raise ValueError(describe_refusal(question))
    names, cards = question.model.names, tuple(card.device for card in question.cards)
    if holds_copies(found.setting.strategy):
        whole, shares = (cards[0],) * len(names), found.setting.row_shares
        placement = Placement(names, whole, cards[0], replicas=cards, row_shares=shares)
    else:
        owners = (card for card, stage in zip(cards, found.devices, strict=True) for _ in range(stage.num_blocks))
        placement = Placement(names, tuple(owners), cards[0])
    over = ", ".join(_fill(stage) for stage in found.devices if stage.needed > stage.usable)
    warning = f"the forecast exceeds what is free ({over}), and memory_limit_gb says to try" * bool(over)
    notes = tuple(_notes(question, found, looked_at))
    return TrainingPlan(
        **vars(found), question=question, looked_at=looked_at, placement=placement, notes=notes, warning=warning
    )


def _notes(question: Question, found: Found, looked_at: Looked) -> Iterator[str]:
    job, chosen, devices = question.job, found.setting.strategy, [card.device for card in question.cards]
    if shares_rows(chosen) and is_open(question.open.strategies):
        others = [each for _, each in looked_at if each is not None and not shares_rows(each.setting.strategy)]
        best = min(others, key=lambda each: each.step_s, default=None)
        why = ", since nothing else fits them" if best is None else f": {_compared(question, found, best)}"
        yield f"the cards share out the tokens of each micro-batch{why}"
    wanted, ahead = job.parallel.requested, job.parallel.microbatches_ahead
    if wanted not in (None, "none", chosen):
        why = why_not_shared(wanted, question.accumulation, devices)
        yield f'parallel.strategy = "{wanted}": without effect, {why}'
    if ahead > 1 and not has_stages(chosen):
        yield f"parallel.microbatches_ahead = {ahead}: without effect, only a pipeline runs ahead"


def _compared(question: Question, found: Found, other: Found) -> str:
    """ "about 3 s per step, and fp8-compute, one card at a time takes 5 s"."""
    now, then = (_real_seconds(question.cards, each.step_s) for each in (found, other))
    said = f"{other.step_s / found.step_s:.1f} times as long" if now is None or then is None else _seconds(then)
    about, way = "" if now is None else f"about {_seconds(now)} per step, and ", other.setting
    return f"{about}{way.describe()}{', one card at a time' * (way.strategy == 'none')} takes {said}"


def describe_plan(plan: TrainingPlan, steps: int = _STEPS) -> str:
    """The verdict, a line per card in decimal GB, and a line per setting that was looked at."""
    names = [(name, label) for name, label, _ in _PARTS if any(parts_of(device)[name] for device in plan.devices)]
    cards = [["card", "blocks", *(label for _, label in names), "needed", "free", "peak at"]]
    for device in plan.devices:
        sizes = [*(parts_of(device)[name] for name, _ in names), device.needed, device.usable]
        cards.append([device.device, _blocks(device), *(f"{size / 1e9:.2f}" for size in sizes), device.moment])
    tables = [list(map(list, _facts(plan, steps))), cards]
    if len(plan.looked_at) > 1:
        # The chosen one, then the others by their time. One that is faster and was not taken has 8-bit optimizer state,
        # or more in host memory, and copies are an estimate.
        rows = sorted(plan.looked_at, key=lambda row: (row[0] != plan.setting, row[1].step_s if row[1] else math.inf))
        seconds, _ = step_seconds(plan)
        tables.append([["setting", "per step"]])
        for setting, other in rows[:_MOST_ALTERNATIVES]:
            if other is None:
                tables[-1].append([setting.describe(), "does not fit"])
                continue
            times = other.step_s / plan.step_s
            said = f"x {times:.2f}" if seconds is None else _seconds(seconds * times)
            tables[-1].append([setting.describe() + ", blocks stream" * other.is_streaming, said])
    return "\n\n".join(map(aligned, tables))


def _facts(plan: TrainingPlan, steps: int) -> list[tuple[str, str]]:
    """Names and values of the plan as a whole."""
    question, job, inputs = plan.question, plan.question.job, plan.offloaded_inputs / 1e9
    frames = f", {question.frames} frames" if question.frames > 1 else ""
    pinned = f", {inputs:.1f} GB of it for block inputs" if inputs else ""
    size = f"{question.model.variant.name}, {question.bucket[1]}x{question.bucket[0]} {question.unit}{frames}"
    count = f"batch {job.train.batch_size}, accumulation {question.accumulation}, LoRA rank {job.lora.rank}"
    return [
        ("verdict", _verdict(plan)),
        ("step", describe_time(plan, steps) or "unknown: no card of this kind is in the table of speeds"),
        ("peak", ", ".join(map(_fill, plan.devices))),
        ("plan", f"{plan.setting.describe()}; {plan.placement.describe()}"),
        ("job", f"{size}, {count}"),
        ("host memory", f"{plan.host_bytes / 1e9:.1f} GB{pinned}"),
        *(("assumed", each) for each in _assumed(plan)),
        *(("note", each) for each in plan.notes),
    ]


def _fill(device: DeviceForecast) -> str:
    return f"{device.device} {device.needed / 1e9:.2f} of {device.usable / 1e9:.2f} GB"


def describe_verdict(plan: TrainingPlan, steps: int = _STEPS) -> list[str]:
    """Whether it fits, how long a step and so many take, and what was assumed: all that a node has room for."""
    (_, verdict), (_, step), *others = _facts(plan, steps)
    return [verdict, f"step: {step}", *(f"{name}: {said}" for name, said in others if name == "assumed")]


def _verdict(plan: TrainingPlan) -> str:
    if plan.warning:
        return f"may not fit: {plan.warning}"
    streams = [f"{sum(plan.offloaded)} blocks"] * any(plan.offloaded) + ["block inputs"] * plan.setting.offloads
    return f"fits with streaming: {' and '.join(streams)} wait in host memory" if streams else "fits"


def _assumed(plan: TrainingPlan) -> Iterator[str]:
    """Which generation of cards, where only their memory was given."""
    cards = plan.question.cards
    kinds = dict.fromkeys(card.kind.name for card in cards if card.is_assumed and card.kind)
    needs = " or newer, as fp8-compute needs RTX 40" if plan.setting.scheme == "fp8-compute" else ""
    if kinds:
        yield f"cards like the {' and '.join(kinds)}{needs}; name them to be sure, such as 2x3090"
    elif needs and not all(card.has_context or card.kind for card in cards):  # no card was there to ask
        yield "RTX 40 cards or newer, as fp8-compute needs; for older ones plan with int8-compute"


def describe_time(plan: TrainingPlan, steps: int) -> str:
    """ "20 s, 1500 steps about 8 h 20 min (estimated from ...)"; "" if a card's speed is unknown."""
    seconds, source = step_seconds(plan)
    if seconds is None:
        return ""
    return f"{_seconds(seconds)}, {steps} steps about {describe_duration(seconds * steps)} ({source})"


def step_seconds(plan: TrainingPlan) -> tuple[float | None, str]:
    """Of a step at this size, None if a card's speed is unknown; and what the estimate goes by."""
    cards = plan.question.cards
    seconds = _real_seconds(cards, plan.step_s)
    is_measured = any(card.measured_flops_per_s for card in cards)
    source = "a matrix product measured on the cards" if is_measured else "published speeds of cards"
    slowest = min(card.link_bytes_per_s for card in cards) / 1e9
    link = f", at {slowest:.0f} GB/s between them" if shares_rows(plan.setting.strategy) else ""
    return (None, "") if seconds is None else (seconds, f"estimated from {source}{link}")


def describe_work(cards: Sequence[Card], forward: tuple[float, int], num_forwards: int, steps: int) -> str:
    """ "a step takes about 2.7 s, 1500 steps about 1 h 8 min (...)" of cards that compute one after the other; "" if a
    card's speed is unknown. forward: operations and kernels of a micro-batch's, of which a step takes num_forwards."""
    flops, num_kernels = forward
    if not all(card.flops_per_s for card in cards):
        return ""
    seconds = num_forwards * max(flops / min(each.flops_per_s for each in cards), num_kernels * KERNEL_S)
    source = f"estimated from operations and kernels of {num_forwards} forwards"
    run = f"{steps} steps about {describe_duration(seconds * steps)}"
    return f"a step takes about {_seconds(seconds)}, {run} ({source})"


def _real_seconds(cards: Sequence[Card], seconds: float) -> float | None:
    """Of seconds of cards of speed 1; None if a card's speed is unknown."""
    if not all(card.flops_per_s for card in cards):
        return None
    return seconds * max(card.speed * ASSUMED_FLOPS_PER_S / card.flops_per_s for card in cards)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _blocks(device: DeviceForecast) -> str:
    """ "23 (1 kept, 5 offloaded)"."""
    parts = ((device.num_uncheckpointed, "kept"), (device.num_offloaded, "offloaded"))
    special = ", ".join(f"{count} {what}" for count, what in parts if count)
    return str(device.num_blocks) + (f" ({special})" if special else "")


def parts_of(device: DeviceForecast) -> dict[str, int]:
    """Bytes by what they are for; they add up to what is needed."""
    parts = {name: getattr(device, name) for name, _, _ in _PARTS if name != "other"}
    return parts | {"other": device.workspace + device.overhead + device.context}


def plan_values(plan: TrainingPlan) -> dict[str, Any]:
    """Plain values, sizes in bytes, for --json."""
    owners = plan.placement.devices
    return {
        "model": plan.question.model.variant.name,
        "setting": {
            "quantize": plan.setting.scheme,
            "optimizer": plan.setting.optimizer,
            "strategy": plan.setting.strategy,
            "microbatches_ahead": plan.setting.ahead,
            "offload_activations": plan.setting.offloads,
            "split_at": [index for index in range(1, len(owners)) if owners[index] != owners[index - 1]],
            "replicas": [str(device) for device in plan.placement.replicas],
            "row_shares": list(plan.placement.row_shares),
            "blocks_without_checkpointing": list(plan.uncheckpointed),
            "offloaded_blocks": list(plan.offloaded),
        },
        "pixels": dict(zip(("height", "width"), plan.question.bucket, strict=True)),  # of audio: see unit
        "unit": plan.question.unit,
        "frames": plan.question.frames,
        "devices": [
            {
                **{name: getattr(device, name) for name in _SHOWN},
                "num_kept": device.num_uncheckpointed,
                "micro_batches_held": device.held,
                "bytes": parts_of(device),
                "usable": device.usable,
                "peak_at": device.moment,
            }
            for device in plan.devices
        ],
        "host_bytes": plan.host_bytes,
        "offloaded_bytes": plan.offloaded_inputs,
        "verdict": _verdict(plan),
        "assumed": list(_assumed(plan)),
        "estimated_step_s": step_seconds(plan)[0],
        "notes": list(plan.notes),
        "alternatives": [
            {"setting": setting.describe(), "times_longer": None if other is None else other.step_s / plan.step_s}
            for setting, other in plan.looked_at
        ],
        "warning": plan.warning,
    }


def compare(devices: Sequence[DeviceForecast], measured: Mapping[str, Mapping[str, float]] | None = None) -> Comparison:
    """For the event "forecast"; measured is what memory_in_use returned after the run."""
    peaks = {name: each["peak"] for name, each in (measured or {}).items()}
    return {each.device: {"forecast": each.allocated / 1e9, "measured": peaks.get(each.device)} for each in devices}


def describe_comparison(compared: Comparison) -> list[str]:
    """ "memory cuda:0: forecast 21.5 GB, measured 21.3 GB (forecast +1.0 %)"; a line per card."""
    lines = []
    for device, values in compared.items():
        forecast, measured = values["forecast"] or 0.0, values["measured"]
        found = f", measured {measured:.2f} GB ({_error(forecast, measured)})" if measured else ""
        lines.append(f"memory {device}: forecast {forecast:.2f} GB{found}")
    return lines


def _error(forecast: float, measured: float) -> str:
    return f"forecast {100 * (forecast / measured - 1):+.1f} %"


def describe_pace(plan: TrainingPlan, step_times_s: Sequence[float]) -> str:
    """ "step: forecast 3.1 s, measured 3.2 s (forecast -3.1 %)", the median of all but the first; "" if unknown."""
    forecast, _ = step_seconds(plan)
    if forecast is None or len(step_times_s) < 2:
        return ""
    measured = statistics.median(step_times_s[1:])  # the first compiles and chooses kernels
    height, width = plan.question.bucket
    said = f"step: forecast {_seconds(forecast)} at {width}x{height}, measured {_seconds(measured)}"
    return f"{said} ({_error(forecast, measured)})"


def draw_plan(plan: TrainingPlan) -> Image.Image:
    """A bar per card, its parts side by side, the card's free memory as the frame. RGB"""
    font, row = ImageFont.load_default(14), _BAR_HEIGHT + 30
    largest = max(max(device.usable, device.needed) for device in plan.devices)
    height = 2 * _MARGIN + len(plan.devices) * row + 22 * len(_PARTS)
    sheet = Image.new("RGB", (_BAR_WIDTH + 2 * _MARGIN, height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, device in enumerate(plan.devices):
        top = _MARGIN + number * row + 20
        draw.text((_MARGIN, top - 20), f"{_fill(device)}, {_blocks(device)} blocks", fill="black", font=font)
        left = float(_MARGIN)
        for (_, _, colour), size in zip(_PARTS, parts_of(device).values(), strict=True):
            right = left + _BAR_WIDTH * size / largest
            if round(right) > round(left):
                draw.rectangle((round(left), top, round(right) - 1, top + _BAR_HEIGHT), fill=colour)
            left = right
        frame = _MARGIN + _BAR_WIDTH * device.usable / largest
        draw.rectangle((_MARGIN, top, round(frame), top + _BAR_HEIGHT), outline="black", width=2)
    for number, (_, label, colour) in enumerate(_PARTS):
        at = _MARGIN + len(plan.devices) * row + 22 * number
        draw.rectangle((_MARGIN, at, _MARGIN + 14, at + 14), fill=colour)
        draw.text((_MARGIN + 22, at - 2), label, fill="black", font=font)
    return sheet
