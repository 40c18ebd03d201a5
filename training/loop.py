"""The training loop: what one step does, when the state is saved, and how a run ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.job import JobConfig, job_to_dict
from ..data.samples import DROPPED, Batch, BatchOrder
from ..events import EventLog, first_line
from ..parallel.devices import memory_in_use, own_random_states, random_states, restore_random_states
from ..parallel.ranks.group import ALONE, AcrossRanks, RankLost, Ranks, fingerprint
from ..parallel.runner import MicroBatch, Runner
from ..patches.attention import sound_attention
from ..patches.compile_blocks import CompiledBlocks
from ..system.stopping import Requests
from .adapter import LoraHandle
from .batches import CachedSamples
from .objective import LOWER_RATE, NoisyBatch, Objective, describe_growth, draw_quantiles, make_generator
from .optimizer import (
    AVERAGE,
    LoraAverage,
    LossScale,
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
    pack_optimizer,
    set_learning_rate,
    unpack_optimizer,
)
from .state import TrainingState, list_checkpoints, save_checkpoint

_log = logging.getLogger(__name__)
_MEMORY_EVERY_STEPS = 50


def checkpoint_folder(job: JobConfig) -> Path:
    """Where a job keeps its checkpoints."""
    return Path(job.output.folder) / "checkpoints"


@dataclass
class Trainer:
    """One run: a model with a LoRA, its data, and where it stands."""

    job: JobConfig
    objective: Objective
    runner: Runner  # computes the microbatches, and knows the model and its copies
    lora: LoraHandle
    train_data: CachedSamples
    eval_data: CachedSamples | None  # None evaluates nothing
    order: BatchOrder
    identity: dict[str, Any]  # plain facts of model, data and placement, so that no other run continues a checkpoint
    devices: tuple[torch.device, ...]  # of the model, the main one first
    events: EventLog
    save_lora: Callable[[Path], Path]  # into a folder; returns the file
    compiled: tuple[CompiledBlocks, ...] = ()  # torch compiles at the first batch of each shape
    samples: Any = None  # what draws pictures, of sampling/sampler.py
    ranks: Ranks = ALONE  # the first one writes
    step: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    step_times_s: list[float] = field(default_factory=list)  # of this run alone

    def __post_init__(self) -> None:
        self._parameters = list(self.lora.parameters().values())
        self._by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            self._by_device.setdefault(parameter.device, []).append(parameter)
        self._optimizer = make_optimizer(self._parameters, self.job.optimizer, self.lora.num_of_text)
        decay = self.job.train.ema_decay
        self._average = LoraAverage(self.lora.parameters(), decay) if decay else None
        self._dtype = self.objective.dtype
        self._scale = LossScale() if self._dtype is torch.float16 else None
        self._num_runs = 0  # of the runner
        self._first_run: dict[Any, int] = {}  # in which a shape was computed first
        self._chosen: list[Batch] = []  # of the step in hand
        self._begun: tuple[dict[str, int], dict[str, torch.Tensor]] | None = None  # where it began
        self._largest_weights: list[torch.Tensor] = []  # after the last step, of every device
        self._saved_at = 0
        self._is_sound = True  # weights and counts belong together, and may be saved
        self._has_warned = False

    def run(
        self, should_stop: Callable[[], bool], preflight: Callable[[Trainer], object] = lambda trainer: None
    ) -> bool:
        """Train until the last step or until should_stop() is true between two steps; True if all steps are done. The
        state is saved either way, and where something breaks. preflight: called before the first step through compiled
        blocks. Raises: RuntimeError with what broke and what is saved."""
        self._saved_at = self.step  # a resumed run stands on disk already; at step 0 there is nothing to lose
        last, every = self.job.train.steps, self.job.output.save_every_steps
        requests = Requests(Path(self.job.output.folder))
        try:
            if self.compiled and self.step < last and not should_stop():
                preflight(self)
            if not should_stop():
                self._evaluate_if_due(is_end=self.step >= last)
            self._draw_if_due(should_stop, is_start=True)
            while self.step < last and not should_stop():
                with self.ranks.doing():
                    self._timed_step()
                self._evaluate_if_due(is_end=self.step == last)
                is_due = self.step == last or bool(every) and self.step % every == 0
                if self.ranks.from_first(lambda: requests.take("save")) or is_due:
                    self._save_on_all_ranks()
                self._draw_if_due(should_stop)
            if self._saved_at != self.step:
                self._save_on_all_ranks()
        except Exception as error:
            kept = self._save_before_the_end()
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, (ValueError, RuntimeError, OSError)):
                _log.warning("%s", kept)
                raise
            raise (RankLost if isinstance(error, RankLost) else RuntimeError)(f"{error}\n{kept}") from error
        return self.step >= last

    def _save_on_all_ranks(self) -> None:
        """Save, if every rank would save the same. Raises: RuntimeError, without saving, if they would not."""
        if self.ranks.is_launched and len(set(self.ranks.gather(fingerprint(self._parameters)))) > 1:
            self._is_sound = False
            found = f"after step {self.step} the processes of this job do not have the same LoRA, and it is not saved"
            why = f"{self.job.optimizer.name} makes other steps from the same gradients"
            raise RuntimeError(f"{found}: {why}; use another optimizer")
        with self.ranks.doing():
            self.save()

    def _save_before_the_end(self) -> str:
        """Save what is done after something broke, if that has not been tried; what to say of it."""
        if self._is_sound and self._saved_at != self.step:
            if self._begun is not None:  # inside a step, which a resumed run begins again
                position, states = self._begun
                self.order.load_state_dict(position)
                restore_random_states(states)
            try:
                self.save()
            except Exception as error:  # what broke may keep the device or the disk from it, too
                _log.warning("what was done since step %d could not be saved: %s", self._saved_at, first_line(error))
        newest = next(reversed(list_checkpoints(checkpoint_folder(self.job))), None)
        if newest is None:
            return "No step is saved; start the job again" if self.step else "No step was done yet"
        lost = "" if self._saved_at == self.step else f"; steps {self._saved_at + 1} to {self.step} are not"
        return f"The steps done are saved in {newest}{lost}. The same job goes on from there with resume"

    def _timed_step(self) -> None:
        start, total = time.perf_counter(), self.job.train.steps
        rate = self.job.optimizer.learning_rate * learning_rate_factor(self.job.schedule, self.step, total)
        self._begun = self.order.state_dict(), random_states(self.devices)
        loss = self.train_step(rate)
        self.step += 1
        if self._average is not None:
            self._average.update(self.step)
        self.losses.append(loss)
        self._begun, self._is_sound = None, True
        elapsed = time.perf_counter() - start
        self.step_times_s.append(elapsed)
        own = {"rank_losses": self.runner.rank_losses} if isinstance(self.runner, AcrossRanks) else {}
        self.events.emit("step", self.step, total, loss=loss, learning_rate=rate, elapsed_s=elapsed, **own)
        if not self._has_warned and (growth := describe_growth(self.losses)):
            self._has_warned = True
            _log.warning("%s", growth)
        if len(self.step_times_s) == 1 or self.step % _MEMORY_EVERY_STEPS == 0:
            memory: dict[str, Any] = memory_in_use(self.devices)
            if self.ranks.is_launched:
                every = enumerate(self.ranks.gather(memory))
                memory = {f"rank {rank} {device}": each for rank, found in every for device, each in found.items()}
            self.events.emit("memory", self.step, total, **memory)

    def train_step(self, learning_rate: float) -> float:
        """One optimizer step; returns the mean loss. Raises: RuntimeError if loss or gradients are not finite, before
        the weights are touched, or the weights of the step before."""
        settings = self.job.train
        self._chosen.clear()
        with sound_attention():
            losses = self.accumulate(settings.gradient_accumulation_steps)
        self.train_data.read_ahead(self.order.ahead(self.ranks.place.rank))  # while the devices are still computing
        total = sum(loss.item() for loss in losses)
        if self._scale is not None:
            self._scale.unscale(self._parameters)
        norm = clip_gradients(self._parameters, settings.clip_norm or math.inf)
        self._refuse_spoilt_weights()  # the host has just waited for the devices
        if self._scale is not None and math.isfinite(total) and not self._scale.allows(math.isfinite(norm)):
            _log.info("step %d is left out: its gradients exceed float16's range", self.step + 1)
            self._optimizer.zero_grad(set_to_none=True)
            return total
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise RuntimeError(self._why_not_finite(total, norm))
        set_learning_rate(self._optimizer, learning_rate)
        self._is_sound = False  # until the step is counted
        self._optimizer.step()
        self._largest_weights = [nn.utils.get_total_norm(group, math.inf) for group in self._by_device.values()]
        self._optimizer.zero_grad(set_to_none=True)
        self.runner.sync()
        return total

    def _why_not_finite(self, loss: float, norm: float) -> str:
        what = f"step {self.step + 1} gave a loss of {loss} and a gradient of length {norm}"
        what += "; training stopped before it could spoil the LoRA. "
        name = str(self._dtype).removeprefix("torch.")
        samples = [pair for each in self._chosen for pair in zip(each.indices, each.captions, strict=True)]
        broken = [text for pair in samples if (text := self.train_data.not_finite(*pair, self._dtype))]
        said = f"Not finite as {name}: {'; '.join(dict.fromkeys(broken))}. " if broken else ""
        names = ", ".join(dict.fromkeys(self.train_data.name_of(index) for index, _ in samples))
        if self._scale is not None:
            where = "in its forward, which no scale of the loss mends" if not math.isfinite(loss) else "at every scale"
            helps = 'Go on by --continue with model.dtype = "float32", or by --resume on cards that have bfloat16'
            return f"{what}{said}The model leaves float16's range {where}: {names}. {helps}"
        if broken:
            help_with = "Delete that file, so that it is computed again, or take the sample out of the dataset"
            return f"{what}{said}{help_with} and start anew"
        return f"{what}Its samples are finite: {names}. Start {LOWER_RATE}"

    def _refuse_spoilt_weights(self) -> None:
        """Raises: RuntimeError if the last step has left weights that are not finite; nothing of it is saved then."""
        if all(math.isfinite(largest.item()) for largest in self._largest_weights):
            return
        self._is_sound = False
        rate, found = float(self._optimizer.param_groups[0]["lr"]), f"not finite as {self.job.lora.dtype}"
        found = f"after step {self.step} the LoRA's weights are {found}, and they are not saved"
        raise RuntimeError(f"{found}. Its learning rate was {rate:g}: start {LOWER_RATE}")

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Afterwards the run stands where it stood: next batch, random states, no gradients."""
        position = self.order.state_dict()
        try:
            with own_random_states(self.devices):
                yield
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            self.order.load_state_dict(position)

    def accumulate(self, num_batches: int) -> list[torch.Tensor]:
        """Forward and backward of so many batches; their losses, each divided by their number."""
        self._num_runs += 1
        return self.runner.run(self.microbatches(num_batches))

    def rehearse(self) -> None:
        """Forward and backward of the next microbatch of every copy of the model; of several ranks, each its own."""
        self._num_runs += 1
        compute = self.runner.run_share if isinstance(self.runner, AcrossRanks) else self.runner.run
        compute(self.microbatches(self.runner.num_replicas))

    def microbatches(self, count: int) -> list[MicroBatch[NoisyBatch]]:
        """The next so many batches of this step."""
        return [self._microbatch(index, count) for index in range(count)]

    def _microbatch(self, index: int, count: int) -> MicroBatch[NoisyBatch]:
        chosen, step, (model, device) = self.order.next(), self.step, self.runner.replica_for(index)
        self._chosen.append(chosen)

        def prepare() -> NoisyBatch:
            batch = self.train_data.load(chosen.indices, chosen.captions)
            generator = make_generator(self.job.train.seed, "train", step, index)
            quantiles = draw_quantiles(len(chosen.indices), generator)
            return self.objective.weighted(self.objective.noisy(batch, quantiles, generator))

        def forward(batch: NoisyBatch) -> torch.Tensor:
            loss = self.objective.loss(batch, model, device) / count
            if self._scale is not None:
                loss.register_hook(self._scale.scaled)
            return loss

        sample, run = self.train_data.samples[chosen.indices[0]], self._num_runs
        size = (len(chosen.indices), DROPPED in chosen.captions, sample.bucket, sample.num_frames, *sample.alike)

        def is_alone(batch: NoisyBatch) -> bool:
            shapes = (device, batch.noisy.shape, *sorted((name, states.shape) for name, states in batch.text.items()))
            return self._is_first(run, shapes)

        return MicroBatch(prepare, forward, is_alone, f"{step} {index}", partial(self._is_first, run, size))

    def _is_first(self, run: int, shapes: tuple[Any, ...]) -> bool:
        """Whether no batch of this shape went through this copy before this run; compiled blocks care."""
        return bool(self.compiled) and self._first_run.setdefault(shapes, run) == run

    @torch.no_grad()
    @sound_attention()
    def evaluate(self) -> float:
        """Mean loss over the held-out samples at fixed quantiles with fixed noise: comparable between runs."""
        data, settings = self.eval_data, self.job.evaluation
        assert data is not None
        model, device = self.runner.replica_for(0)

        def losses_of(index: int) -> list[float]:
            """Of one held-out sample at every quantile."""
            batch, losses = data.load([index], [0]), []
            for quantile in settings.quantiles:
                generator = make_generator(settings.seed, "eval", index, quantile)
                noisy = self.objective.noisy(batch, torch.tensor([quantile], dtype=torch.float64), generator)
                losses.append(self.objective.loss(replace(noisy, outside=None), model, device).item())
            return losses

        model.eval()
        kind = {"in_lockstep": self.runner.in_lockstep, "is_long": bool(self.compiled)}
        found = self.ranks.distributed(len(data.samples), losses_of, **kind)
        model.train()
        losses = [loss for each in found for loss in each]
        return math.fsum(losses) / len(losses)

    def _evaluate_if_due(self, *, is_end: bool) -> None:
        every = self.job.evaluation.every_steps
        is_due = not self.evaluations or is_end or (every and self.step % every == 0)
        if self.eval_data is None or not is_due or self.step in self.evaluations:
            return
        self.evaluations[self.step] = self.evaluate()
        self.events.emit("eval", self.step, self.job.train.steps, loss=self.evaluations[self.step])

    def _draw_if_due(self, should_stop: Callable[[], bool], *, is_start: bool = False) -> None:
        if self.samples is not None and not should_stop() and self.samples.is_due(is_start=is_start):
            with self._averaged(self.job.samples.use_ema):
                self.samples.draw(should_stop)

    @contextmanager
    def _averaged(self, is_wanted: bool) -> Iterator[None]:
        """Inside, the LoRA is its average, in all copies of the model, if that is wanted and there is one."""
        if self._average is None or not is_wanted:
            yield
            return
        try:
            with self._average.in_place():
                self.runner.sync()
                yield
        finally:
            self.runner.sync()

    def as_written(self) -> AbstractContextManager[None]:
        """Inside, the LoRA is what its file holds: the average if there is one and the job wants that."""
        return self._averaged(self.job.output.use_ema)

    def save(self) -> Path:
        """Write a checkpoint, and a LoRA file beside it. Raises: RuntimeError for weights that are not finite, before
        anything is written; OSError naming the file and what helps."""
        self._refuse_spoilt_weights()
        if not self.ranks.is_first:
            self._saved_at = self.step
            return checkpoint_folder(self.job)
        facts = {
            "config": job_to_dict(self.job),
            "order": self.order.state_dict(),
            **({} if self._scale is None else {"loss_scale": [self._scale.factor, self._scale.num_good]}),
            "losses": self.losses,
            "evaluations": {str(step): loss for step, loss in self.evaluations.items()},
            **self.identity,
        }
        state = TrainingState(
            step=self.step,
            adapter=self.lora.tensors() | ({} if self._average is None else self._average.tensors()),
            optimizer=pack_optimizer(self._optimizer),
            random=random_states(self.devices),
            facts=facts,
        )
        self._is_sound = False  # what fails once is not tried again
        path = save_checkpoint(checkpoint_folder(self.job), state, self.job.output.keep_last)
        self._saved_at, self._is_sound = self.step, True
        with self.as_written():
            self.save_lora(path)
        self.events.emit("saved", self.step, self.job.train.steps, path=str(path))
        return path

    def restore(self, state: TrainingState) -> None:
        """Stand where the saved run stood, bit for bit, but for settings that were changed since. Without such, a LoRA
        file that a kill has prevented is written. Raises: ValueError naming the file of another run."""

        def load_adapter() -> None:
            trained = {name: each for name, each in state.adapter.items() if not name.startswith(AVERAGE)}
            if "kahan.0" in state.optimizer[0]:  # of an earlier version, whose weights were sums of two numbers
                for index, name in enumerate(self.lora.tensors()):
                    trained[name] = trained[name].float() + state.optimizer[0][f"kahan.{index}"]
            self.lora.load_tensors(trained)
            if self._average is not None:
                self._average.load_tensors(state.adapter, may_begin=is_changed)

        is_changed, keeps_state = "keeps_optimizer" in state.facts, state.facts.get("keeps_optimizer", True)
        optimizer = partial(unpack_optimizer, self._optimizer, state.optimizer, keeps_rates=is_changed)
        self.step = state.step
        self.losses = list(state.facts["losses"])
        self.evaluations = {int(step): loss for step, loss in state.facts["evaluations"].items()}
        if (self._scale is None) != ("loss_scale" not in state.facts):
            _log.warning("the run goes on in %s, since these cards are others than its first ones", self._dtype)
        elif self._scale is not None:
            self._scale = LossScale(*state.facts["loss_scale"])
        own = {"cpu", *map(str, self.devices)}  # ranks draw from streams of their own, whichever were saved
        random = {name: each for name, each in state.random.items() if name in own}
        parts: dict[str, Callable[[], object]] = {
            "adapter.safetensors": load_adapter,
            "optimizer.safetensors": lambda: keeps_state and optimizer(),
            "state.json": lambda: self.order.load_state_dict(state.facts["order"]),
            "random.safetensors": lambda: restore_random_states(random),
        }
        for name, load in parts.items():
            try:
                load()
            except (ValueError, RuntimeError, TypeError, KeyError) as error:
                raise ValueError(f"{state.path}/{name} is not of this run: {first_line(error)}") from error
        self.runner.sync()
        if state.path is not None and self.ranks.is_first and not is_changed:
            with self.as_written():
                self.save_lora(state.path)
