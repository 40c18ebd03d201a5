"""When a run draws its sample pictures, between two steps by the model that trains, and how they reach the disk.

It is eager meanwhile, without gradients, dropout or gradient checkpointing. Whatever goes wrong is a warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..events import first_line
from ..families.comfy.inputs import is_tokens, negative_prompt
from ..parallel.devices import random_states, release_cached_memory, restore_random_states
from ..patches.attention import sound_attention
from ..system.files import write_atomically
from ..system.stopping import Requests, Stopped, never
from ..training.loop import Trainer
from .draw import Decoder, Drawing, Text, as_file, draw_latents

_log = logging.getLogger(__name__)

FOLDER = "samples"


@dataclass(frozen=True)
class Sampler:
    """Draws the pictures of one run, whose ranks all have a sampler, called at the same points: the first one decides,
    decodes and writes. shape: of the latents, [C, F, H, W]; () takes that of the training sample whose first frame is
    given."""

    trainer: Trainer
    drawing: Drawing
    shape: tuple[int, ...]
    decoder: Decoder

    @property
    def _folder(self) -> Path:
        return Path(self.trainer.job.output.folder)

    def is_due(self, *, is_start: bool = False) -> bool:
        """Whether pictures are wanted after the last step; where the run starts there, those that it has not drawn."""
        step, job = self.trainer.step, self.trainer.job

        def decide() -> bool:
            if Requests(self._folder).take("sample"):
                return True
            if step == 0:
                return job.samples.before_first
            every, made = job.samples.every_steps, self._folder / FOLDER
            if step != job.train.steps and not (every > 0 and step % every == 0):
                return False
            return not is_start or not all(
                any(made.glob(f"{_stem(step, index)}.*")) for index in range(len(job.samples.prompts))
            )

        return self.trainer.ranks.from_first(decide)

    def draw(self, should_stop: Callable[[], bool]) -> None:
        """Draw every prompt, write the pictures and tell of each, while other ranks wait. A stop ends it. What fails is
        warned of; of several processes' only decoding, as one that stopped drawing would leave the others waiting."""
        ranks, in_lockstep = self.trainer.ranks, self.trainer.runner.in_lockstep
        with ranks.doing():
            if in_lockstep or ranks.is_first:
                self._draw(ranks.is_stop_asked if ranks.is_launched and not in_lockstep else should_stop)
        ranks.wait()

    def _draw(self, should_stop: Callable[[], bool]) -> None:
        step, settings, in_lockstep = self.trainer.step, self.trainer.job.samples, self.trainer.runner.in_lockstep
        emit = partial(self.trainer.events.emit, step=step, total=self.trainer.job.train.steps)
        emit("phase", name="samples")
        made: list[tuple[int, Path]] = []
        is_drawn = False
        try:
            with self._apart():
                drawn = self._drawn(should_stop)
                is_drawn = True
                if self.trainer.ranks.is_first:
                    made += self._pictures(drawn, never if in_lockstep else should_stop)
        except Stopped:
            return
        except Exception as error:  # a picture is not worth a training
            if in_lockstep and not is_drawn:
                raise
            _log.warning("no sample pictures after step %d, and training goes on: %s", step, first_line(error))
        for index, path in made:
            prompt, name = settings.prompts[index], path.relative_to(self._folder).as_posix()
            emit("sample", index=index, prompt=prompt, seed=settings.seed, file=name, path=str(path))
        emit("phase", name="training")

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, the model draws; afterwards everything is as it was."""
        states, (model, _) = random_states(self.trainer.devices), self.trainer.runner.replica_for(0)
        release_cached_memory()  # of the step before, in sizes that pictures do not have
        try:
            with torch.no_grad(), sound_attention(), ExitStack() as stack:
                for each in self.trainer.compiled:
                    stack.enter_context(each.paused())
                model.eval()
                yield
        finally:
            model.train()
            restore_random_states(states)
            release_cached_memory()

    def _drawn(self, should_stop: Callable[[], bool]) -> dict[int, torch.Tensor]:
        """Latents of each prompt, by its index; those that are not finite left out."""
        drawn: dict[int, torch.Tensor] = {}
        data, objective, prompts = self.trainer.train_data, self.trainer.objective, self.trainer.job.samples.prompts
        latent = objective.family.latent_of(objective.variant)
        for index, prompt in enumerate(prompts):
            conditions: Mapping[str, torch.Tensor] = {}
            shape: Any = self.shape
            if objective.variant.condition != "none":  # those of a training sample, and its shape
                batch = data.load([index % len(data.samples)], [True])
                conditions, shape = batch.conditions, tuple(batch.latents.shape[1:])
            tokens = int(torch.Size(shape[1:]).numel() * latent.num_tokens_per_cell)
            text, empty = ({**data.text(each), **conditions} for each in (prompt, ""))
            if objective.family.host is not None:
                empty |= negative_prompt()
            tell = partial(self.trainer.events.emit, "progress", what=f"picture {index + 1} of {len(prompts)}, step")
            latents = draw_latents(self._predict, self.drawing, shape, tokens, text, empty, should_stop, tell)
            if torch.isfinite(latents).all():
                drawn[index] = latents
            else:
                after = self.trainer.step
                _log.warning("the sample picture of %r after step %d is not finite; none is written", prompt, after)
        return drawn

    def _pictures(
        self, drawn: Mapping[int, torch.Tensor], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Path]]:
        """Index and file of each picture that was written."""
        if not drawn:
            return
        release_cached_memory()
        decoding = contextlib.closing(self.decoder.decode(list(drawn.values())))
        objective, ranks = self.trainer.objective, self.trainer.ranks
        with ranks.doing(is_long=True), decoding as decoded:  # a clip on the CPU takes long
            for index, pixels in zip(drawn, decoded, strict=True):
                ranks.alive()
                if should_stop():
                    return
                ending, content = as_file(pixels, objective.family.latent_of(objective.variant).fps)
                path = self._folder / FOLDER / f"{_stem(self.trainer.step, index)}.{ending}"
                write_atomically(path, content)
                yield index, path

    def _predict(self, latents: torch.Tensor, sigma: torch.Tensor, text: Text) -> torch.Tensor:
        """One forward of the model that trains. See Predict."""
        objective = self.trainer.objective
        given = {name: t if is_tokens(name) else objective.in_type(t) for name, t in text.items()}
        said = objective.predict(
            objective.in_type(latents), sigma, given, *self.trainer.runner.replica_for(0), self.drawing.guidance
        )
        return said.float().cpu()


def _stem(step: int, index: int) -> str:
    return f"{step:06d}_{index}"
