"""When a run draws its sample pictures, between two steps by the model that trains, and how they reach the disk.

It is eager meanwhile, without gradients, dropout or gradient checkpointing. Whatever goes wrong is a warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..events import first_line
from ..families.comfy.inputs import is_tokens, negative_prompt
from ..parallel.devices import own_random_states, release_cached_memory
from ..patches.attention import sound_attention
from ..system.files import write_atomically
from ..system.stopping import Requests, Stopped, never
from ..training.loop import Trainer
from .draw import Decoder, Drawing, as_file

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
        model, _ = self.trainer.runner.replica_for(0)
        release_cached_memory()  # of the step before, in sizes that pictures do not have
        try:
            with torch.no_grad(), sound_attention(), own_random_states(self.trainer.devices), ExitStack() as stack:
                for each in self.trainer.compiled:
                    stack.enter_context(each.paused())
                model.eval()
                yield
        finally:
            model.train()
            release_cached_memory()

    def _drawn(self, should_stop: Callable[[], bool]) -> dict[int, torch.Tensor]:
        """Latents of each prompt, by its index; those that are not finite left out."""
        drawn: dict[int, torch.Tensor] = {}
        for index, prompt in enumerate(self.trainer.job.samples.prompts):
            latents, after = self._latents(index, should_stop), self.trainer.step
            if torch.isfinite(latents).all():
                drawn[index] = latents
            else:
                _log.warning("the sample picture of %r after step %d is not finite; none is written", prompt, after)
        return drawn

    def _latents(self, index: int, should_stop: Callable[[], bool]) -> torch.Tensor:
        """Normalised latents of a prompt's picture, float32 on the CPU. [1, C, F, H, W]
        Raises: Stopped, between two steps."""
        data, settings, emit = self.trainer.train_data, self.trainer.job.samples, self.trainer.events.emit
        family, variant = self.trainer.objective.family, self.trainer.objective.variant
        conditions: Mapping[str, torch.Tensor] = {}
        shape = self.shape
        if variant.condition != "none":  # those of a training sample, and its shape
            batch = data.load([index % len(data.samples)], [True])
            conditions, shape = batch.conditions, tuple(batch.latents.shape[1:])
        text, empty = ({**data.text(each), **conditions} for each in (settings.prompts[index], ""))
        if family.host is not None:
            empty |= negative_prompt()
        steps = self.drawing.begin(int(math.prod(shape[1:]) * family.latent_of(variant).num_tokens_per_cell))
        noise = torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(settings.seed))
        latents, scale = steps.start(noise), self.drawing.cfg_scale
        what = f"picture {index + 1} of {len(settings.prompts)}, step"
        for number, level in enumerate(steps.levels):
            if should_stop():
                raise Stopped("stopped while a sample picture was drawn")
            said = self._predict(latents, level.view(1), text)
            plain = self._predict(latents, level.view(1), empty) if scale > 1 else None
            latents = steps.step(number, latents, said, plain, scale)
            emit("progress", number + 1, len(steps.levels), what=what)
        latents, first = steps.end(latents), text.get("first_latents")
        return latents if first is None else torch.cat([first.to(latents), latents[:, :, 1:]], dim=2)

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

    def _predict(self, latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the model that trains says of latents, [1, C, F, H, W], at a noise level, [1], with the text and the
        conditions of one sample; likewise shaped. All is float32 on the CPU."""
        objective = self.trainer.objective
        given = {name: t if is_tokens(name) else objective.in_type(t) for name, t in text.items()}
        said = objective.predict(
            objective.in_type(latents), sigma, given, *self.trainer.runner.replica_for(0), self.drawing.guidance
        )
        return said.float().cpu()


def _stem(step: int, index: int) -> str:
    return f"{step:06d}_{index}"
