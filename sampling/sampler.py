"""When a run draws its sample pictures, between two steps by the model that trains, and how they reach the disk.

It is eager meanwhile, without gradients, dropout or gradient checkpointing. Whatever goes wrong is a warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.training import SamplesConfig
from ..events import EventLog, first_line
from ..families.comfy.inputs import is_tokens, negative_prompt
from ..families.spec import ModelFamily, Variant
from ..parallel.devices import random_states, release_cached_memory, restore_random_states
from ..parallel.ranks.group import ALONE, Ranks
from ..patches.attention import sound_attention
from ..patches.compile_blocks import CompiledBlocks
from ..system.files import write_atomically
from ..system.stopping import Requests, Stopped, never
from ..training.batches import CachedSamples
from ..training.objective import predict
from .draw import Decoder, Drawing, Text, as_file, draw_latents

_log = logging.getLogger(__name__)

FOLDER = "samples"


@dataclass(frozen=True)
class Sampler:
    """Draws the pictures of one run.

    Args:
        folder: of the run. last: its last step.
        shape: of the latents, [C, F, H, W]; () takes that of the training sample whose first frame is given.
        data: to train on; it has the states of all prompts.
        replica: the model and the device of its inputs. compiled: blocks of all copies. devices: all that train.
        ranks: which all have a sampler, called at the same points; the first one decides, decodes and writes.
        in_lockstep: whether every forward is computed by all ranks, as each has a share of the weights.
    """

    settings: SamplesConfig
    drawing: Drawing
    family: ModelFamily
    variant: Variant
    dtype: torch.dtype
    folder: Path
    last: int
    shape: tuple[int, ...]
    data: CachedSamples
    replica: Callable[[], tuple[nn.Module, torch.device]]
    compiled: Sequence[CompiledBlocks]
    devices: Sequence[torch.device]
    decoder: Decoder
    events: EventLog
    ranks: Ranks = ALONE
    in_lockstep: bool = False

    def is_due(self, step: int, *, is_start: bool = False) -> bool:
        """Whether pictures are wanted after this step; where the run starts there, those that it has not drawn."""

        def decide() -> bool:
            if Requests(self.folder).take("sample"):
                return True
            if step == 0:
                return self.settings.before_first
            every, made = self.settings.every_steps, self.folder / FOLDER
            if step != self.last and not (every > 0 and step % every == 0):
                return False
            return not is_start or not all(
                any(made.glob(f"{_stem(step, index)}.*")) for index in range(len(self.settings.prompts))
            )

        return self.ranks.from_first(decide)

    def draw(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Draw every prompt, write the pictures and tell of each, while other ranks wait. A stop ends it. What fails is
        warned of; of several processes' only decoding, as one that stopped drawing would leave the others waiting."""
        with self.ranks.doing():
            if self.in_lockstep or self.ranks.is_first:
                is_alone = self.ranks.is_launched and not self.in_lockstep
                self._draw(step, self.ranks.is_stop_asked if is_alone else should_stop)
        self.ranks.wait()

    def _draw(self, step: int, should_stop: Callable[[], bool]) -> None:
        self.events.emit("phase", step, self.last, name="samples")
        made: list[tuple[int, Path]] = []
        is_drawn = False
        try:
            with self._apart():
                drawn = self._drawn(step, should_stop)
                is_drawn = True
                if self.ranks.is_first:
                    made += self._pictures(step, drawn, never if self.in_lockstep else should_stop)
        except Stopped:
            return
        except Exception as error:  # a picture is not worth a training
            if self.in_lockstep and not is_drawn:
                raise
            _log.warning("no sample pictures after step %d, and training goes on: %s", step, first_line(error))
        for index, path in made:
            prompt, name = self.settings.prompts[index], path.relative_to(self.folder).as_posix()
            known = {"index": index, "prompt": prompt, "seed": self.settings.seed, "file": name, "path": str(path)}
            self.events.emit("sample", step, self.last, **known)
        self.events.emit("phase", step, self.last, name="training")

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, the model draws; afterwards everything is as it was."""
        states, (model, _) = random_states(self.devices), self.replica()
        release_cached_memory()  # of the step before, in sizes that pictures do not have
        try:
            with torch.no_grad(), sound_attention(), ExitStack() as stack:
                for each in self.compiled:
                    stack.enter_context(each.paused())
                model.eval()
                yield
        finally:
            model.train()
            restore_random_states(states)
            release_cached_memory()

    def _drawn(self, step: int, should_stop: Callable[[], bool]) -> dict[int, torch.Tensor]:
        """Latents of each prompt, by its index; those that are not finite left out."""
        drawn: dict[int, torch.Tensor] = {}
        for index, prompt in enumerate(self.settings.prompts):
            conditions: Mapping[str, torch.Tensor] = {}
            shape: Any = self.shape
            if self.variant.condition != "none":  # those of a training sample, and its shape
                batch = self.data.load([index % len(self.data.samples)], [True])
                conditions, shape = batch.conditions, tuple(batch.latents.shape[1:])
            tokens = int(torch.Size(shape[1:]).numel() * self.family.latent_of(self.variant).num_tokens_per_cell)
            text, empty = ({**self.data.text(each), **conditions} for each in (prompt, ""))
            if self.family.host is not None:
                empty |= negative_prompt()
            tell = partial(
                self.events.emit, "progress", what=f"picture {index + 1} of {len(self.settings.prompts)}, step"
            )
            latents = draw_latents(self._predict, self.drawing, shape, tokens, text, empty, should_stop, tell)
            if torch.isfinite(latents).all():
                drawn[index] = latents
            else:
                _log.warning("the sample picture of %r after step %d is not finite; none is written", prompt, step)
        return drawn

    def _pictures(
        self, step: int, drawn: Mapping[int, torch.Tensor], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Path]]:
        """Index and file of each picture that was written."""
        if not drawn:
            return
        release_cached_memory()
        decoding = contextlib.closing(self.decoder.decode(list(drawn.values())))
        with self.ranks.doing(is_long=True), decoding as decoded:  # a clip on the CPU takes long
            for index, pixels in zip(drawn, decoded, strict=True):
                self.ranks.alive()
                if should_stop():
                    return
                ending, content = as_file(pixels, self.family.latent_of(self.variant).fps)
                path = self.folder / FOLDER / f"{_stem(step, index)}.{ending}"
                write_atomically(path, content)
                yield index, path

    def _predict(self, latents: torch.Tensor, sigma: torch.Tensor, text: Text) -> torch.Tensor:
        """One forward of the model that trains. See Predict."""
        model, device = self.replica()
        given = {name: t if is_tokens(name) else self._in_type(t).to(device) for name, t in text.items()}
        noisy = self._in_type(latents).to(device)
        return predict(self.family, model, noisy, sigma.to(device), given, self.drawing.guidance).float().cpu()

    def _in_type(self, states: torch.Tensor) -> torch.Tensor:
        """Inputs in the type that the model computes in; ComfyUI's own models round by themselves."""
        is_ours = states.is_floating_point() and self.family.host is None
        return states.to(self.dtype) if is_ours else states


def _stem(step: int, index: int) -> str:
    return f"{step:06d}_{index}"
