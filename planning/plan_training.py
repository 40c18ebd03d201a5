"""Makes a job's plan: what the planner found to be fastest, why, and what would help where nothing fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..parallel.placement import Placement
from .advice import describe_refusal
from .cards import Card
from .cuts import HEADROOM, Found
from .forecast import DeviceForecast
from .question import Question
from .search import HOST_GAIN, Looked, find_fastest, fit
from .space import SearchSpace, Setting, is_open, strategies_on, why_not_shared

_SEVERAL = 4  # micro-batches that a hint speaks of


@dataclass(frozen=True)
class Alternative:
    """A setting that was looked at; times_longer than the chosen one, None if it does not fit."""

    setting: Setting
    times_longer: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """What was chosen and why.

    Args:
        space: what it was chosen from.
        devices: in execution order.
        host_bytes, offloaded_inputs: host memory at most, and the share of block inputs.
        bucket, frames, unit: (height, width) and video frames that were planned for, and what sides are counted in.
        variant: name of the model.
        relative_time: of a step, over the same with every block recomputed, one micro-batch after the other and, for
            data and tensor parallel, on the first card alone.
        step_s: of a step at this size, seconds of cards of speed 1.
        without_streaming: time of the same with all blocks on the cards, over this one; None if that does not fit.
        warning: why it may not fit after all, where the user has vouched for it; "" otherwise.
    """

    space: SearchSpace
    cards: tuple[Card, ...]
    placement: Placement
    setting: Setting
    devices: tuple[DeviceForecast, ...]
    host_bytes: int
    offloaded_inputs: int
    relative_time: float
    step_s: float
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    hint: str
    warning: str
    bucket: tuple[int, int]
    frames: int
    variant: str
    without_streaming: float | None = None
    unit: str = "pixels"

    @property
    def uncheckpointed(self) -> tuple[int, ...]:
        """Per device, blocks without activation checkpointing."""
        return tuple(device.num_uncheckpointed for device in self.devices)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Per device, blocks that stream from host memory."""
        return tuple(device.num_offloaded for device in self.devices)


def plan_training(question: Question) -> TrainingPlan:
    """The fastest way to run a job on its cards that fits.

    Raises: ValueError if none does; it says what each card lacks and which changes would do.
    """
    found, looked_at = find_fastest(question)
    if found is None:
        raise ValueError(describe_refusal(question))
    stages = tuple(stage.forecast for stage in found.stages)
    resident = _time_on_cards(looked_at, offloads=found.setting.offloads) if found.is_streaming else None
    return TrainingPlan(
        space=question.space,
        cards=question.cards,
        placement=_place(question, found),
        setting=found.setting,
        devices=stages,
        host_bytes=found.host_bytes,
        offloaded_inputs=found.offloaded_inputs,
        relative_time=found.time / _plain_time(question, found),
        step_s=found.time,
        reasons=tuple(_reasons(question, found, looked_at)),
        alternatives=tuple(
            Alternative(setting, None if other is None else other.time / found.time) for setting, other in looked_at
        ),
        hint=_hint_of_pipeline(question, found),
        warning=_warning(question, found),
        bucket=question.bucket,
        unit=question.unit,
        frames=question.frames,
        variant=question.model.variant.name,
        without_streaming=None if resident is None else resident / found.time,
    )


def _place(question: Question, found: Found) -> Placement:
    names, home = question.model.names, question.cards[0].device
    if found.setting.holds_copies:
        copies = tuple(card.device for card in question.cards)
        return Placement(names, (home,) * len(names), home, replicas=copies)
    if found.setting.divides_blocks:
        cards = tuple(card.device for card in question.cards)
        shares = question.given_shares
        return Placement(names, (home,) * len(names), home, shards=cards, shares=shares if len({*shares}) > 1 else ())
    devices = [card.device for card, stage in zip(question.cards, found.stages, strict=True) for _ in stage.blocks]
    return Placement(names, tuple(devices), home)


def _plain_time(question: Question, found: Found) -> float:
    """Of a step with every block recomputed, one micro-batch after the other, on the found cut or the first card."""
    is_whole = found.setting.holds_copies or found.setting.divides_blocks
    one_model = found.stages[:1] if is_whole else found.stages
    times = (
        question.recomputed_s(stage.blocks, question.cards[stage.plan.stage], found.setting.scheme)
        for stage in one_model
    )
    return question.space.accumulation * sum(times)


# ---- why


def _reasons(question: Question, found: Found, looked_at: Looked) -> Iterator[str]:
    """A line per choice that was ours."""
    yield from _cut_reason(question, found)
    yield _activation_reason(question, found)
    if found.is_streaming:
        yield _streaming_reason(question, found, looked_at)
    yield from _without_effect(question, found)
    if found.setting.offloads:
        why = "nothing as good fits without" if is_open(question.space.offloads) else "given"
        yield f"block inputs: they wait in {found.offloaded_inputs / 1e9:.1f} GB of pinned host memory: {why}"
    yield from _rivals(found, looked_at)


def _cut_reason(question: Question, found: Found) -> Iterator[str]:
    stages = found.stages
    if found.setting.holds_copies:
        each = ", ".join(
            f"{stage.share:.0%} of {card.name}" for stage, card in zip(stages, question.cards, strict=True)
        )
        yield f"data parallel: each card holds the whole model and needs no other's activations; it needs {each}"
        return
    if found.setting.divides_blocks:
        needed = " and ".join(f"{stage.share:.0%}" for stage in stages)
        yield f"tensor parallel: the cards compute each block together; it needs {needed} of what they have free"
        return
    if question.bounds:
        why = "given"
    elif len(stages) == 1:
        return
    elif found.setting.has_stages or question.space.is_cut_by_time:
        why = "shortest time in its slowest stage"
    elif found.is_streaming:
        why = "shortest time, then least from host memory"
    else:
        are_alike = len({card.speed for card in question.cards}) == 1
        why = "even use of memory" if are_alike else "shortest time, then even use of memory"
    cut, shares = _joined(len(stage.blocks) for stage in stages), " and ".join(f"{stage.share:.0%}" for stage in stages)
    yield f"cut {cut} blocks: {why}; it needs {shares} of what the cards have free"


def _activation_reason(question: Question, found: Found) -> str:
    space = question.space
    counts = [stage.forecast.num_uncheckpointed for stage in found.stages]
    if not space.is_checkpointing:
        return "activations: all are kept, as gradient_checkpointing is off"
    if space.uncheckpointed or any(counts):
        why = ": given" if space.uncheckpointed else ", which saves computing those blocks again"
        return f"activations: the last {_joined(counts)} blocks keep them{why}"
    if found.is_streaming or space.memory_limit_gb:
        return "activations: every block is recomputed"
    return f"activations: every block is recomputed; keeping one would leave less than {HEADROOM:.0%} of a card free"


def _time_on_cards(looked_at: Looked, *, offloads: bool) -> float | None:
    """Of the fastest that fits with all blocks on the cards. offloads: block inputs wait in host memory."""
    fitting = [other for _, other in looked_at if other is not None and other.setting.offloads == offloads]
    without = [each.time for each in fitting if not each.is_streaming]
    without += [each.resident_time for each in fitting if each.resident_time is not None]
    return min(without, default=None)


def _streaming_reason(question: Question, found: Found, looked_at: Looked) -> str:
    stages = found.stages
    offloads = found.setting.offloads
    alike, other = (_time_on_cards(looked_at, offloads=each) for each in (offloads, not offloads))
    if question.space.offloaded:
        why = "given"
    elif alike is not None:
        why = f"what fits without would take {alike / found.time:.2f} times as long"
    elif other is not None:
        why = f"with block inputs there instead it would take {other / found.time:.2f} times as long"
    elif question.space.memory_limit_gb:
        why = "what memory_limit_gb allows cannot hold them"
    else:
        why = "the cards cannot hold them"
    waiting = [card.name for card, stage in zip(question.cards, stages, strict=True) if stage.is_waiting]
    slow = f"{' and '.join(waiting)} will wait for copies" if waiting else "copies take less time than computing"
    count = _joined(stage.plan.num_offloaded for stage in stages)
    return f"host memory: {count} blocks stream from there, {found.streamed / 1e9:.1f} GB: {why}; {slow}"


def _without_effect(question: Question, found: Found) -> Iterator[str]:
    """What the user has asked for and the cards cannot do."""
    space, chosen = question.space, found.setting.strategy
    asked = space.strategies[0]
    if not is_open(space.strategies) and asked not in ("none", chosen):
        why = why_not_shared(asked, space.accumulation, [card.device for card in question.cards])
        yield f'parallel.strategy = "{asked}": without effect, {why}'
    if space.ahead > 1 and not found.setting.has_stages:
        yield f"parallel.microbatches_ahead = {space.ahead}: without effect, only a pipeline runs ahead"


def _rivals(found: Found, looked_at: Looked) -> Iterator[str]:
    """What another scheme, strategy or optimizer would have taken."""
    others = [(setting, other) for setting, other in looked_at if setting != found.setting]
    for name in ("scheme", "strategy", "optimizer"):
        chosen = getattr(found.setting, name)
        for rival in sorted({getattr(setting, name) for setting, _ in others} - {chosen}):
            those = [other for setting, other in others if getattr(setting, name) == rival and other is not None]
            if those:
                verdict = _against(found, min(those, key=lambda other: other.time))
            else:
                verdict = "do not fit" if rival == "data" else "does not fit"
            yield f"{name} {_named(name, chosen)}: {_named(name, rival)} {verdict}"


def _against(found: Found, rival: Found) -> str:
    ratio = rival.time / found.time
    if ratio >= 1:
        return f"would take {ratio:.2f} times as long"
    if rival.setting.offloads or rival.is_streaming:
        return f"might take {ratio:.2f} of the time with more in host memory, but copies are an estimate: not worth it"
    return f"might take {ratio:.2f} of the time with an 8-bit optimizer, which is for what would not fit otherwise"


def _named(setting: str, choice: str) -> str:
    return {"scheme": "full precision", "strategy": "no pipeline"}[setting] if choice == "none" else choice


def _joined(numbers: Iterable[int]) -> str:
    return " + ".join(map(str, numbers))


# ---- what else to say


def _hint_of_pipeline(question: Question, found: Found) -> str:
    """What several micro-batches would gain where a step of one keeps one card busy; "" for next to nothing."""
    space = question.space
    if space.accumulation > 1 or found.setting.divides_blocks or "pipeline" not in space.strategies:
        return ""
    several = replace(space, accumulation=_SEVERAL)
    if "pipeline" not in strategies_on(several, [card.device for card in question.cards]):
        return ""
    other = replace(question, space=several, given_times=question.times)
    filled = fit(other, replace(found.setting, strategy="pipeline", ahead=0))
    if filled is None or HOST_GAIN * filled.time > _SEVERAL * found.time:
        return ""
    return (
        f"a step of one micro-batch keeps one card busy: with train.gradient_accumulation_steps = {_SEVERAL} all work "
        f"at once, and {_SEVERAL} batches would take {filled.time / found.time:.1f} times as long as this step, or less"
    )


def _warning(question: Question, found: Found) -> str:
    over = [
        f"{card.name} {stage.forecast.needed / 1e9:.2f} GB of {card.usable_bytes / 1e9:.2f} GB"
        for card, stage in zip(question.cards, found.stages, strict=True)
        if stage.forecast.needed > card.usable_bytes
    ]
    if not over:
        return ""
    return f"the forecast exceeds what is free ({', '.join(over)}), and memory_limit_gb says to try"
