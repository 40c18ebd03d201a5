"""A plan as people read it: a table with reasons, plain values for --json, a picture; and forecast against measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..system.pace import describe_duration
from .block_times import ASSUMED_FLOPS_PER_S, ASSUMED_LINK_BYTES_PER_S
from .forecast import DeviceForecast

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image as PilImage

    from .plan_training import TrainingPlan

# Per device, decimal GB: forecast peak, the same as reserved by the allocator, and what was measured of both.
Comparison = Mapping[str, Mapping[str, "float | None"]]

# What the bars and the table's columns are made of, with colours that are told apart in grey and by the colour-blind.
_PARTS = (
    ("weights", "#0072b2"),
    ("lora", "#009e73"),
    ("gradients", "#f0e442"),
    ("optimizer", "#e69f00"),
    ("checkpoints", "#56b4e9"),
    ("kept", "#cc79a7"),
    ("moving", "#d55e00"),
    ("other", "#999999"),
)
_LABELS = {
    "lora": "LoRA",
    "checkpoints": "block inputs",
    "kept": "kept activations",
    "moving": "one block at work",
    "other": "workspace, allocator, driver",
}
_STEPS = 1000  # of a run, where nobody says how many
_BAR_HEIGHT, _BAR_WIDTH, _MARGIN = 34, 640, 16  # pixels


def parts_of(device: DeviceForecast) -> dict[str, int]:
    """Bytes by what they are for; they add up to what is needed."""
    parts = {name: getattr(device, name) for name, _ in _PARTS if name != "other"}
    return parts | {"other": device.workspace + device.overhead + device.context}


def describe_verdict(plan: TrainingPlan, steps: int = _STEPS) -> list[str]:
    """What cards were assumed, whether it fits, and how long a step and so many take: all that a node has room for."""
    return [*_assumed(plan), _verdict(plan), _times(plan, steps)]


def _assumed(plan: TrainingPlan) -> Iterator[str]:
    """Which generation of cards, where only their memory was said."""
    kinds = dict.fromkeys(card.kind.name for card in plan.cards if card.is_assumed and card.kind)
    needs = " or newer, as fp8-compute needs RTX 40" if plan.setting.scheme == "fp8-compute" else ""
    if kinds:
        yield f"assumed: cards like the {' and '.join(kinds)}{needs}; name them to be sure, such as 2x3090"
    elif needs and not all(card.has_context or card.kind for card in plan.cards):  # nobody could ask
        yield "assumed: RTX 40 cards or newer, as fp8-compute needs; for older ones plan with int8-compute"


def _verdict(plan: TrainingPlan) -> str:
    if plan.warning:
        return f"may not fit: {plan.warning}"
    streams = [f"{sum(plan.offloaded)} blocks"] * any(plan.offloaded) + ["block inputs"] * plan.setting.offloads
    if not streams:
        return "fits"
    slower = plan.without_streaming
    also = "" if slower is None else f"; all on the cards it fits too, and takes {slower:.2f} times as long"
    return f"fits with streaming: {' and '.join(streams)} wait in host memory{also}"


def _times(plan: TrainingPlan, steps: int) -> str:
    seconds, source = step_seconds(plan)
    if seconds is None:
        return "seconds of a step are unknown: no card of this kind is in the table of speeds"
    whole = describe_duration(seconds * steps)
    return f"a step takes about {_seconds(seconds)}, {steps} steps about {whole} ({source})"


def step_seconds(plan: TrainingPlan) -> tuple[float | None, str]:
    """Of a step at this size, None if a card's speed is unknown; and what the estimate goes by."""
    if not all(card.flops_per_s for card in plan.cards):
        return None, ""
    slowest = max(card.speed * ASSUMED_FLOPS_PER_S / card.flops_per_s for card in plan.cards)
    is_measured = any(card.measured_flops_per_s for card in plan.cards)
    source = "a matrix product measured on the cards" if is_measured else "published speeds of cards"
    link = f", at {ASSUMED_LINK_BYTES_PER_S / 1e9:.0f} GB/s between them" if plan.setting.divides_blocks else ""
    return plan.step_s * slowest, f"estimated from {source}{link}"


def describe_plan(plan: TrainingPlan, steps: int = _STEPS) -> str:
    """The verdict, the choice, a line per card in decimal GB, the reasons."""
    height, width = plan.bucket
    space = plan.space
    length = f", {plan.frames} frames" if plan.frames > 1 else ""
    lines = [
        *describe_verdict(plan, steps),
        f"{plan.variant}: {plan.setting.describe()}; {plan.placement.describe()}; {width}x{height} {plan.unit}"
        f"{length}, batch {space.batch_size}, accumulation {space.accumulation}, LoRA rank {space.lora.rank}",
        "",
        *_table(plan),
        "",
        _host_line(plan),
        _relative_time(plan),
        *plan.reasons,
    ]
    if plan.hint:
        lines.append(plan.hint)
    return "\n".join(lines)


def _relative_time(plan: TrainingPlan) -> str:
    without = ", no pipeline and nothing streamed" if any(plan.offloaded) else " and no pipeline"
    relative = f"{plan.relative_time:.2f} of the time that the same takes with every block recomputed{without}"
    return f"a step takes {relative} (estimated)"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _table(plan: TrainingPlan) -> list[str]:
    names = [name for name, _ in _PARTS if any(parts_of(device)[name] for device in plan.devices)]
    head = ["card", "blocks", *(_LABELS.get(name, name) for name in names), "needed", "free", "peak at"]
    rows = [head]
    for card, device in zip(plan.cards, plan.devices, strict=True):
        sizes = [_gb(parts_of(device)[name]) for name in names]
        rows.append([card.name, _blocks(device), *sizes, _gb(device.needed), _gb(card.usable_bytes), device.moment])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _blocks(device: DeviceForecast) -> str:
    """ "23 (1 kept, 5 offloaded)"."""
    parts = ((device.num_uncheckpointed, "kept"), (device.num_offloaded, "offloaded"))
    special = ", ".join(f"{count} {what}" for count, what in parts if count)
    return str(device.num_blocks) + (f" ({special})" if special else "")


def _host_line(plan: TrainingPlan) -> str:
    pinned = plan.offloaded_inputs / 1e9
    size = f"host memory: {plan.host_bytes / 1e9:.1f} GB"
    inputs = f", {pinned:.1f} GB pinned for block inputs while training" if pinned else ""
    if any(plan.offloaded):
        return f"{size}, all but one block of it for as long as the training runs{inputs}"
    return f"{size} at most{inputs}" if pinned else f"{size} while loading, beside the system's cache of the files"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def plan_values(plan: TrainingPlan) -> dict[str, Any]:
    """Plain values, sizes in bytes, for --json."""
    return {
        "model": plan.variant,
        "setting": {
            "quantize": plan.setting.scheme,
            "optimizer": plan.setting.optimizer,
            "strategy": plan.setting.strategy,
            "microbatches_ahead": plan.setting.ahead,
            "offload_activations": plan.setting.offloads,
            "split_at": _cuts(plan),
            "replicas": [str(device) for device in plan.placement.replicas],
            "shards": [str(device) for device in plan.placement.shards],
            "shares": list(plan.placement.shares),
            "blocks_without_checkpointing": list(plan.uncheckpointed),
            "offloaded_blocks": list(plan.offloaded),
        },
        "pixels": {"height": plan.bucket[0], "width": plan.bucket[1]},  # of audio: see unit
        "unit": plan.unit,
        "frames": plan.frames,
        "devices": [
            {
                "device": device.device,
                "num_blocks": device.num_blocks,
                "num_kept": device.num_uncheckpointed,
                "num_offloaded": device.num_offloaded,
                "micro_batches_held": device.held,
                "bytes": parts_of(device),
                "allocated": device.allocated,
                "reserved": device.reserved,
                "needed": device.needed,
                "usable": card.usable_bytes,
                "peak_at": device.moment,
            }
            for card, device in zip(plan.cards, plan.devices, strict=True)
        ],
        "host_bytes": plan.host_bytes,
        "offloaded_bytes": plan.offloaded_inputs,
        "relative_time": plan.relative_time,
        "verdict": _verdict(plan),
        "assumed": list(_assumed(plan)),
        "estimated_step_s": step_seconds(plan)[0],
        "reasons": list(plan.reasons),
        "alternatives": [
            {"setting": other.setting.describe(), "times_longer": other.times_longer} for other in plan.alternatives
        ],
        "hints": [plan.hint] if plan.hint else [],
        "warning": plan.warning,
    }


def _cuts(plan: TrainingPlan) -> list[int]:
    devices = plan.placement.devices
    return [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]]


# ---- forecast against measured


def compare(devices: Sequence[DeviceForecast], measured: Mapping[str, Mapping[str, float]] | None = None) -> Comparison:
    """For the event "forecast"; measured is what memory_in_use returned after the run."""
    return {
        device.device: {
            "forecast": device.allocated / 1e9,
            "forecast_reserved": device.reserved / 1e9,
            "measured": (measured or {}).get(device.device, {}).get("peak"),
            "measured_reserved": (measured or {}).get(device.device, {}).get("reserved"),
        }
        for device in devices
    }


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
    height, width = plan.bucket
    return (
        f"step: forecast {_seconds(forecast)} at {width}x{height}, measured {_seconds(measured)} "
        f"({_error(forecast, measured)})"
    )


# ---- the picture


def picture_of(plan: TrainingPlan) -> torch.Tensor:
    """draw_plan as ComfyUI hands images on: float32 in 0..1. [1, height, width, 3]"""
    import torch

    picture = draw_plan(plan)
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return (values.float() / 255).view(1, picture.height, picture.width, 3)


def draw_plan(plan: TrainingPlan) -> PilImage:
    """A bar per card, its parts side by side, the card's free memory as the frame. RGB"""
    from PIL import Image, ImageDraw, ImageFont

    font, row = ImageFont.load_default(14), _BAR_HEIGHT + 30
    devices = list(zip(plan.cards, plan.devices, strict=True))
    largest = max(max(card.usable_bytes, device.needed) for card, device in devices)
    height = 2 * _MARGIN + len(devices) * row + 22 * len(_PARTS)
    sheet = Image.new("RGB", (_BAR_WIDTH + 2 * _MARGIN, height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (card, device) in enumerate(devices):
        top = _MARGIN + number * row
        label = f"{card.name}: {_blocks(device)} blocks, {_gb(device.needed)} of {_gb(card.usable_bytes)} GB"
        draw.text((_MARGIN, top), label, fill="black", font=font)
        top += 20
        left = float(_MARGIN)
        for (_, colour), size in zip(_PARTS, parts_of(device).values(), strict=True):
            right = left + _BAR_WIDTH * size / largest
            if round(right) > round(left):
                draw.rectangle((round(left), top, round(right) - 1, top + _BAR_HEIGHT), fill=colour)
            left = right
        frame = _MARGIN + _BAR_WIDTH * card.usable_bytes / largest
        draw.rectangle((_MARGIN, top, round(frame), top + _BAR_HEIGHT), outline="black", width=2)
    for number, (name, colour) in enumerate(_PARTS):
        at = _MARGIN + len(devices) * row + 22 * number
        draw.rectangle((_MARGIN, at, _MARGIN + 14, at + 14), fill=colour)
        draw.text((_MARGIN + 22, at - 2), _LABELS.get(name, name), fill="black", font=font)
    return sheet
