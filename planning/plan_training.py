"""Makes a job's plan: what the planner found to be fastest, why, and what would help where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..config.job import JobConfig
from ..parallel.placement import Placement
from .advice import describe_refusal
from .block_times import FlopTimes
from .forecast import Forecast
from .planner import (
    HEADROOM,
    HOST_GAIN,
    Alternative,
    Found,
    Planner,
    Setting,
    Stage,
    TrainingPlan,
    asked_schedule,
    why_no_schedule,
)

_SEVERAL = 4  # micro-batches that a hint speaks of


def plan_training(planner: Planner) -> TrainingPlan:
    """The fastest way to run a job on its cards that fits.

    Raises: ValueError if none does; it says what each card lacks and which changes would do.
    """
    found, looked_at = planner.find()
    if found is None:
        raise ValueError(describe_refusal(planner))
    host_bytes = planner.host_needed(found)
    forecast = Forecast(tuple(stage.forecast for stage in found.stages), host_bytes, found.offloaded_bytes)
    is_copied = found.setting.schedule == "replicas"
    one_model = found.stages[:1] if is_copied else found.stages
    plain = planner.job.train.gradient_accumulation_steps * sum(
        _recomputed(planner, found, stage) for stage in one_model
    )
    return TrainingPlan(
        job=_settled(planner.job, found.setting),
        cards=planner.cards,
        placement=_place_replicas(planner) if is_copied else _place(planner, found),
        setting=found.setting,
        kept_blocks=tuple(stage.forecast.num_kept for stage in found.stages),
        swapped_blocks=tuple(stage.plan.num_swapped for stage in found.stages),
        forecast=forecast,
        relative_time=found.time / plain,
        step_s=found.time,
        reasons=tuple(_reasons(planner, found, looked_at)),
        alternatives=tuple(
            Alternative(setting, None if other is None else other.time / found.time) for setting, other in looked_at
        ),
        hints=tuple(filter(None, [_hint_of_pipeline(planner, found)])),
        warning=_warning(planner, found),
        bucket=planner.bucket,
        frames=planner.frames,
        variant=planner.variant.name,
        has_graphs=found.settings.has_graphs and any(stage.forecast.num_kept for stage in found.stages),
    )


def _place_replicas(planner: Planner) -> Placement:
    """All blocks on every card."""
    devices = tuple(card.device for card in planner.cards)
    return Placement(planner.names, (devices[0],) * len(planner.names), devices[0], replicas=devices)


def _place(planner: Planner, found: Found) -> Placement:
    devices = [card.device for card, stage in zip(planner.cards, found.stages, strict=True) for _ in _blocks(stage)]
    return Placement(planner.names, tuple(devices), planner.cards[0].device)


def _blocks(stage: Stage) -> range:
    return range(stage.plan.start, stage.plan.end)


def _settled(job: JobConfig, setting: Setting) -> JobConfig:
    return replace(
        job,
        model=replace(job.model, quantize=setting.scheme),  # type: ignore[arg-type]
        optimizer=replace(job.optimizer, name=setting.optimizer),
    )


def _recomputed(planner: Planner, found: Found, stage: Stage) -> float:
    card = planner.cards[stage.plan.stage]
    blocks = planner.recomputed_s(_blocks(stage), card, found.setting.scheme)
    ends = planner.ends_s(stage.plan, found.setting.scheme, replace(found.settings, schedule="none"))
    return blocks + ends


def _reasons(planner: Planner, found: Found, looked_at: Sequence[tuple[Setting, Found | None]]) -> Iterator[str]:
    """A line per choice that was ours."""
    job, stages = planner.job, found.stages
    cut = " + ".join(str(len(_blocks(stage))) for stage in stages)
    shares = " and ".join(f"{stage.share:.0%}" for stage in stages)
    if found.setting.schedule == "replicas":
        each = ", ".join(f"{stage.share:.0%} of {card.name}" for stage, card in zip(stages, planner.cards, strict=True))
        yield f"replicas: each card holds the whole model and needs no other's activations; it needs {each}"
    elif planner.bounds:
        yield f"cut {cut} blocks: given; it needs {shares} of what the cards have free"
    elif len(stages) > 1:
        yield f"cut {cut} blocks: {_cut_reason(planner, found)}; it needs {shares} of what the cards have free"
    kept = [stage.forecast.num_kept for stage in stages]
    if not job.train.gradient_checkpointing:
        yield "activations: all are kept, as gradient_checkpointing is off"
    elif job.split.blocks_without_checkpointing:
        yield f"activations: the last {_joined(kept)} blocks keep them: given"
    elif any(kept):
        yield f"activations: the last {_joined(kept)} blocks keep them, which saves computing those blocks again"
    elif found.is_swapping or job.split.memory_limit_gb:
        yield "activations: every block is recomputed"
    else:
        yield f"activations: every block is recomputed; keeping one would leave less than {HEADROOM:.0%} of a card free"
    if job.train.cuda_graphs == "auto":
        fault = planner.graphs_fault or ("" if any(kept) else "no block keeps its activations")
        which = f"the last {_joined(kept)}" if job.train.gradient_checkpointing else "all"
        yield f"CUDA graphs: not used, {fault}" if fault else f"CUDA graphs: {which} blocks are replayed"
    if found.is_swapping:
        yield _swap_reason(planner, found, looked_at)
    if job.parallel.strategy not in ("auto", "none") and found.setting.schedule == "none":
        why = why_no_schedule(job, [card.device for card in planner.cards])
        yield f'parallel.strategy = "{job.parallel.strategy}": without effect, {why}'
    if job.parallel.microbatches_ahead > 1 and found.setting.schedule != "1f1b":
        ahead = job.parallel.microbatches_ahead
        yield f"parallel.microbatches_ahead = {ahead}: without effect, only a pipeline runs ahead"
    if found.setting.offloads:
        is_given = job.train.offload_activations == "on"
        why = "given" if is_given else "nothing as good fits without"
        yield f"block inputs: they wait in {found.offloaded_bytes / 1e9:.1f} GB of pinned host memory: {why}"
    others = [(setting, other) for setting, other in looked_at if setting != found.setting]
    for label, of in (("scheme", "scheme"), ("schedule", "schedule"), ("optimizer", "optimizer")):
        rivals = {getattr(setting, of) for setting, _ in others} - {getattr(found.setting, of)}
        for rival in sorted(rivals):
            times = [other.time for setting, other in others if getattr(setting, of) == rival and other is not None]
            chosen = getattr(found.setting, of)
            fails = "do not fit" if rival == "replicas" else "does not fit"
            verdict = f"{min(times) / found.time:.2f} times as long" if times else fails
            yield f"{label} {_named(of, chosen)}: {_named(of, rival)} {'would take ' if times else ''}{verdict}"


def _cut_reason(planner: Planner, found: Found) -> str:
    if found.setting.schedule != "none" or planner.job.split.balance == "time":
        return "shortest time in its slowest stage"
    if found.is_swapping:
        return "shortest time, then least from host memory"
    are_alike = len({card.speed for card in planner.cards}) == 1 and isinstance(planner.times, FlopTimes)
    return "even use of memory" if are_alike else "shortest time, then even use of memory"


def _swap_reason(planner: Planner, found: Found, looked_at: Sequence[tuple[Setting, Found | None]]) -> str:
    stages = found.stages
    count = _joined([stage.plan.num_swapped for stage in stages])
    fitting = [other for _, other in looked_at if other is not None]
    without = [(each, each.time) for each in fitting if not each.is_swapping]
    without += [(each, each.resident_time) for each in fitting if each.resident_time is not None]
    alike = [time for each, time in without if each.setting.offloads == found.setting.offloads]
    others = [time for each, time in without if each.setting.offloads != found.setting.offloads]
    if planner.job.split.offloaded_blocks:
        why = "given"
    elif alike:
        why = f"what fits without would take {min(alike) / found.time:.2f} times as long"
    elif others:
        why = f"with block inputs there instead it would take {min(others) / found.time:.2f} times as long"
    elif planner.job.split.memory_limit_gb:
        why = "what memory_limit_gb allows cannot hold them"
    else:
        why = "the cards cannot hold them"
    waiting = [card.name for card, stage in zip(planner.cards, stages, strict=True) if stage.is_waiting]
    slow = f"{' and '.join(waiting)} will wait for copies" if waiting else "copies take less time than computing"
    return (
        f"host memory: {count} blocks stream from there, {sum(s.streamed for s in stages) / 1e9:.1f} GB: {why}; {slow}"
    )


def _joined(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


def _named(of: str, choice: str) -> str:
    return {"scheme": "full precision", "schedule": "no pipeline"}[of] if choice == "none" else choice


def _hint_of_pipeline(planner: Planner, found: Found) -> str:
    """What several micro-batches would gain where a step of one keeps one card busy; "" for next to nothing."""
    job, devices = planner.job, [card.device for card in planner.cards]
    if job.train.gradient_accumulation_steps > 1 or job.parallel.strategy not in ("auto", "pipeline"):
        return ""
    several = replace(job, train=replace(job.train, gradient_accumulation_steps=_SEVERAL))
    schedule = asked_schedule(several, devices)
    if schedule is None or schedule == "replicas":
        return ""
    other = planner.changed(several, planner.cards, planner.bucket).with_times(planner.times)
    filled = other.fit(replace(found.setting, schedule=schedule, ahead=0))
    if filled is None or HOST_GAIN * filled.time > _SEVERAL * found.time:
        return ""
    return (
        f"a step of one micro-batch keeps one card busy: with train.gradient_accumulation_steps = {_SEVERAL} all work "
        f"at once, and {_SEVERAL} batches would take {filled.time / found.time:.1f} times as long as this step, or less"
    )


def _warning(planner: Planner, found: Found) -> str:
    over = [
        f"{card.name} {stage.forecast.needed / 1e9:.2f} GB of {card.usable_bytes / 1e9:.2f} GB"
        for card, stage in zip(planner.cards, found.stages, strict=True)
        if stage.forecast.needed > card.usable_bytes
    ]
    if not over:
        return ""
    return f"the forecast exceeds what is free ({', '.join(over)}), and memory_limit_gb says to try"
