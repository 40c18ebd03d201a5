"""The training loop: what one step does, when the state is saved, and how a run ends.

The loop knows no devices but the model's home: batches are made on the CPU and moved there, the split does the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..families.spec import ModelFamily, Variant
from ..parallel.devices import memory_in_use, random_states, restore_random_states
from .adapter import LoraHandle
from .batches import CachedSamples, LoadedBatch
from .checkpoint import TrainingState, pack_optimizer, save_checkpoint, unpack_optimizer
from .config import JobConfig, job_to_dict
from .data import BatchOrder
from .events import EventLog
from .objective import NoiseSchedule, add_noise, draw_quantiles, flow_matching_loss, make_generator
from .optimizer import learning_rate_factor, make_optimizer, set_learning_rate


def checkpoint_folder(job: JobConfig) -> Path:
    """Where a job keeps its checkpoints."""
    return Path(job.output.folder) / "checkpoints"


@dataclass
class Trainer:
    """One run: a model with a LoRA, its data, and where it stands.

    Args:
        model: split or not; its inputs may be anywhere, its output is at home.
        train_data, eval_data: cached samples; eval_data None evaluates nothing.
        identity: plain facts about model, data and placement, kept in checkpoints so that no other run continues them.
        devices: every device the model uses, home first.
        save_lora: writes the LoRA file for users into a folder and returns its path.
    """

    job: JobConfig
    family: ModelFamily
    variant: Variant
    model: nn.Module
    lora: LoraHandle
    schedule: NoiseSchedule
    train_data: CachedSamples
    eval_data: CachedSamples | None
    order: BatchOrder
    identity: dict[str, Any]
    devices: tuple[torch.device, ...]
    events: EventLog
    save_lora: Callable[[Path], Path]
    step: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parameters = list(self.lora.parameters().values())
        self._optimizer = make_optimizer(self._parameters, self.job.optimizer)
        self._dtype = getattr(torch, self.job.model.dtype)
        self._home = self.devices[0]

    def run(self, should_stop: Callable[[], bool]) -> bool:
        """Train until the last step or until should_stop() is true between two steps; True if all steps are done.

        Either way the state is saved.
        """
        last = self.job.train.steps
        saved_at = self.step  # a resumed run stands on disk already; at step 0 there is nothing to lose
        if not should_stop():
            self._evaluate_if_due(is_end=self.step >= last)
        while self.step < last and not should_stop():
            self._timed_step()
            self._evaluate_if_due(is_end=self.step == last)
            if self._is_save_due():
                self.save()
                saved_at = self.step
        if saved_at != self.step:
            self.save()
        return self.step >= last

    def _timed_step(self) -> None:
        start = time.perf_counter()
        rate = self.job.optimizer.learning_rate * learning_rate_factor(
            self.job.schedule, self.step, self.job.train.steps
        )
        loss = self.train_step(rate)
        self.step += 1
        self.losses.append(loss)
        elapsed = time.perf_counter() - start
        self.events.emit("step", self.step, self.job.train.steps, loss=loss, learning_rate=rate, elapsed_s=elapsed)
        if len(self.losses) == 1:
            self.events.emit("memory", self.step, self.job.train.steps, **memory_in_use(self.devices))

    def train_step(self, learning_rate: float) -> float:
        """One optimizer step over `accumulation` batches; returns the mean loss.

        Raises: RuntimeError if the loss or a gradient is not finite, before the weights are touched.
        """
        settings = self.job.train
        total = 0.0
        for micro_step in range(settings.accumulation):
            chosen = self.order.next()
            batch = self.train_data.load(chosen.indices, chosen.captions_dropped)
            generator = make_generator(settings.seed, "train", self.step, micro_step)
            quantiles = draw_quantiles(len(chosen.indices), generator)
            loss = self._loss(batch, quantiles, generator) / settings.accumulation
            loss.backward()
            total += loss.item()
        limit = settings.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self._parameters, limit).item()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise RuntimeError(
                f"step {self.step + 1} gave a loss of {total} and a gradient of length {norm}; training stopped before "
                f"it could spoil the LoRA. The checkpoints in {checkpoint_folder(self.job)} are whole. Start anew with "
                "a lower learning rate, in another output folder"
            )
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, batch: LoadedBatch, quantiles: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Loss of one batch at these quantiles, with noise from the generator; a scalar at home, float32."""
        noise = torch.randn(batch.latents.shape, generator=generator)
        sigmas = self.schedule.sigmas(quantiles, batch.num_tokens)
        noisy = add_noise(batch.latents, noise, sigmas)
        given = {**batch.text, **batch.conditions}
        text = {name: states.to(self._home, self._dtype) for name, states in given.items()}
        guidance = self.job.objective.guidance
        inputs = self.family.make_inputs(
            noisy.to(self._home, self._dtype),
            sigmas.to(self._home),
            text,
            self.variant.training_guidance if guidance is None else guidance,
        )
        output = self.model(**inputs, return_dict=False)[0]
        prediction = self.family.read_prediction(output, batch.latents)
        return flow_matching_loss(prediction, batch.latents.to(self._home), noise.to(self._home), batch.mask)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out samples at fixed quantiles with fixed noise: comparable between runs."""
        assert self.eval_data is not None
        settings = self.job.evaluation
        self.model.eval()
        losses = []
        for index in range(len(self.eval_data.samples)):
            batch = self.eval_data.load([index], [False])
            for quantile in settings.quantiles:
                generator = make_generator(settings.seed, "eval", index, quantile)
                losses.append(self._loss(batch, torch.tensor([quantile], dtype=torch.float64), generator).item())
        self.model.train()
        return math.fsum(losses) / len(losses)

    def _evaluate_if_due(self, *, is_end: bool) -> None:
        every = self.job.evaluation.every_steps
        is_due = self.step == 0 or is_end or (every and self.step % every == 0)
        if self.eval_data is None or not is_due or self.step in self.evaluations:
            return
        self.evaluations[self.step] = self.evaluate()
        self.events.emit("eval", self.step, self.job.train.steps, loss=self.evaluations[self.step])

    def _is_save_due(self) -> bool:
        every = self.job.output.save_every_steps
        return bool(every) and self.step % every == 0

    def save(self) -> Path:
        """Write a checkpoint of everything the run needs to continue, and a LoRA file users can load beside it."""
        facts = {
            "config": job_to_dict(self.job),
            "order": self.order.state_dict(),
            "losses": self.losses,
            "evaluations": {str(step): loss for step, loss in self.evaluations.items()},
            **self.identity,
        }
        state = TrainingState(
            step=self.step,
            adapter=self.lora.tensors(),
            optimizer=pack_optimizer(self._optimizer),
            random=random_states(self.devices),
            facts=facts,
        )
        path = save_checkpoint(checkpoint_folder(self.job), state, self.job.output.keep_last)
        self.save_lora(path)
        self.events.emit("saved", self.step, self.job.train.steps, path=str(path))
        return path

    def restore(self, state: TrainingState) -> None:
        """Stand where the saved run stood, bit for bit as if it had not stopped."""
        self.step = state.step
        self.losses = list(state.facts["losses"])
        self.evaluations = {int(step): loss for step, loss in state.facts["evaluations"].items()}
        self.lora.load_tensors(state.adapter)
        unpack_optimizer(self._optimizer, state.optimizer)
        self.order.load_state_dict(state.facts["order"])
        restore_random_states(state.random)
