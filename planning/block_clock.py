"""Times one block of every kind on a card, and what a model computes before its first block and after its last.

A model cut down to two blocks of every kind (short_model.py) runs on the card with random weights, at the size of a
job's batch. Its embedders and tail are there all the time; a block's weights come when it is called and then go. So a
card needs room for the embedders and one block with its activations, which training needs anyway.

A block is timed as training calls it: forward with a graph, then backward. Not in here: torch.compile, what several
threads take from each other in a pipeline, optimizer steps, copies between cards, the backward of embedders with LoRA.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_unfilled_transformer
from ..families.spec import Variant
from ..parallel.devices import memory_in_use, own_random_states, release_cached_memory, reset_peaks
from ..parallel.offload.block_call import BlockCall, module_of
from ..parallel.stopwatch import MakeStopwatch, Stopwatch, make_stopwatch
from ..parallel.transfer import current_device
from ..patches.attention import sound_attention
from ..quantization.rotation import make_rotation
from .short_model import ShortModel, Work, shorten, training_step

_STRICT = ConfigDict(extra="forbid")
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_NUM_WARM_UPS = 3  # kernels are compiled and chosen, and the allocator fills, in the first calls
_FEWEST, _MOST = 3, 10  # calls that are timed
_ENOUGH_S = 0.3  # of one kind


@checked_dataclass(frozen=True, config=_STRICT)
class KindTimes:
    """One kind of block, seconds of a micro-batch; backward_s is without computing the forward again.

    first: fqn of the first block of this kind. blocks: indices of all, in execution order.
    """

    first: str
    blocks: tuple[int, ...]
    forward_s: Seconds
    backward_s: Seconds


@checked_dataclass(frozen=True, config=_STRICT)
class CardTimes:
    """What one card takes for a micro-batch of one job, in one scheme.

    Args:
        front_s: embedders and all else before the first block, forward.
        tail_s: norm_out, proj_out and loss, forward and backward.
        peak_gb: the most the card held meanwhile, decimal; None where torch does not tell.
        elapsed_s: how long measuring took. date: when, YYYY-MM-DD.
    """

    kinds: tuple[KindTimes, ...]
    front_s: Seconds
    tail_s: Seconds
    elapsed_s: float
    date: str
    peak_gb: float | None = None

    def __post_init__(self) -> None:
        found = sorted(index for kind in self.kinds for index in kind.blocks)
        if not found or found != list(range(len(found))):
            raise ValueError("every block belongs to one kind")

    @cached_property
    def of_block(self) -> dict[int, tuple[float, float]]:
        """Forward and backward of each block."""
        return {index: (kind.forward_s, kind.backward_s) for kind in self.kinds for index in kind.blocks}


def time_blocks(
    info: CheckpointInfo, variant: Variant, work: Work, device: torch.device, watch: MakeStopwatch = make_stopwatch
) -> CardTimes:
    """Run every kind of block of a model on a device and time it; memory and random states are then as before.

    Raises: what the device raises where memory or a kernel is missing.
    """
    try:
        return _time_blocks(info, variant, work, device, watch(device))
    finally:
        release_cached_memory()


def _time_blocks(
    info: CheckpointInfo, variant: Variant, work: Work, device: torch.device, watch: Stopwatch
) -> CardTimes:
    start = time.perf_counter()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        sound_attention(),
        own_random_states([device], 0),
        current_device(device),  # kernels that are not torch's own are launched there
    ):
        reset_peaks([device])
        course = _Course(shorten(make_unfilled_transformer(info), info.family, work), device, watch)
        with course.with_home():
            ends = course.run(info, variant, work)
        peak = memory_in_use([device]).get(str(device), {}).get("peak")
    elapsed = time.perf_counter() - start
    return CardTimes(course.kinds(), *ends, elapsed, time.strftime("%Y-%m-%d"), peak)


# ---- the course of one measurement


class _Course:
    """Takes gradient checkpointing's place: what it does at a call depends on how often the model has run."""

    def __init__(self, short: ShortModel, device: torch.device, watch: Stopwatch) -> None:
        self._short, self._device, self._watch = short, device, watch
        self._times: dict[int, tuple[float, float]] = {}  # forward and backward of each kind
        self._calls: list[tuple[nn.Module | BlockCall, Any]] = []  # of the first run, with their outputs
        self._num_calls = 0
        self._marks: list[Any] = []  # at the first call, and after the last
        short.model.train()

    @contextlib.contextmanager
    def with_home(self) -> Iterator[None]:
        """Inside, everything but the blocks is on the card."""
        lists = {name.partition(".")[0] for name in self._short.names}
        home = [module for name, module in self._short.model.named_modules() if name.partition(".")[0] not in lists]
        with filled(home, self._device):
            yield

    def run(self, info: CheckpointInfo, variant: Variant, work: Work) -> tuple[float, float]:
        """Every block, then front and tail -> seconds of these two."""
        model: Any = self._short.model
        with contextlib.ExitStack() as room:
            model.enable_gradient_checkpointing(self._measure_in(room))
            training_step(model, info, variant, work, self._latents(work))
        model.enable_gradient_checkpointing(self._stand_in)
        fronts, tails = [], []
        for _ in range(_NUM_WARM_UPS + _FEWEST):
            self._num_calls, self._marks = 0, []
            start = self._watch.mark()
            training_step(model, info, variant, work, self._latents(work))
            end = self._watch.mark()
            fronts.append(self._watch.between(start, self._marks[0]))
            tails.append(self._watch.between(self._marks[-1], end))
        return statistics.median(fronts[_NUM_WARM_UPS:]), statistics.median(tails[_NUM_WARM_UPS:])

    def _latents(self, work: Work) -> torch.Tensor:
        return torch.randn(work.batch_shape, device=self._device)

    def kinds(self) -> tuple[KindTimes, ...]:
        short = self._short
        return tuple(
            KindTimes(
                first,
                tuple(index for index, kind in enumerate(short.kind_of) if kind == number),
                *self._times[number],
            )
            for number, first in enumerate(short.kinds)
        )

    def _measure_in(self, room: contextlib.ExitStack) -> Any:
        """A block's weights are in the room during its call. The last one of its kind is timed: if there are two, only
        its input carries gradients."""

        def measure(block: nn.Module | BlockCall, *args: Any) -> Any:
            call = len(self._calls)
            room.enter_context(filled(module_of(block).modules(), self._device))
            if self._short.is_last(call):
                self._times[self._short.calls[call]] = self._time(block, args)
            with torch.no_grad():
                outputs = block(*args)
            outputs = tree_map_only(torch.Tensor, _leaf, outputs)
            self._calls.append((block, outputs))
            room.close()
            return outputs

        return measure

    def _stand_in(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """What the block returned in the first run, at no cost."""
        if self._num_calls == 0:
            self._marks.append(self._watch.mark())
        first, made = self._calls[self._num_calls]
        if isinstance(block, BlockCall) and isinstance(first, BlockCall):
            block.take_form(first)
        outputs = tree_map_only(torch.Tensor, _leaf, made)
        self._num_calls += 1
        if self._num_calls == len(self._calls):
            self._marks.append(self._watch.mark())
        return outputs

    def _time(self, block: nn.Module | BlockCall, args: Any) -> tuple[float, float]:
        with torch.no_grad():
            found = tree_leaves(block(*args))
            grads = [torch.randn_like(tensor) if tensor.is_floating_point() else None for tensor in found]
        del found
        for _ in range(_NUM_WARM_UPS):
            marks = self._once(block, args, grads)
        whole = self._watch.between(marks[0], marks[2])
        count = max(_FEWEST, min(_MOST, int(_ENOUGH_S / max(whole, 1e-6))))
        rounds = [self._once(block, args, grads) for _ in range(count)]  # read only afterwards: the card never waits
        between, median = self._watch.between, statistics.median
        forward = median(between(start, middle) for start, middle, _ in rounds)
        return forward, median(between(middle, end) for _, middle, end in rounds)

    def _once(self, block: nn.Module | BlockCall, args: Any, grads: list[torch.Tensor | None]) -> tuple[Any, Any, Any]:
        inputs = tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), args)
        start = self._watch.mark()
        outputs = tree_leaves(block(*inputs))
        middle = self._watch.mark()
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return start, middle, self._watch.mark()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


# ---- weights for a while


@contextlib.contextmanager
def filled(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, the modules' own tensors are on the device, those on meta with random values; outside as before."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    try:
        for module, parameters, buffers in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    made = _made(name, parameter.detach(), device)
                    module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = _made(name, buffer, device)
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _made(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like this on the device: its values where it has some, else such as weights have."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {each: _made(each, getattr(tensor, each), device) for each in names}
        kind: Any = type(tensor)
        return kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    if tensor.device.type != "meta":
        return tensor.to(device)
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if name == "rotation":
        return make_rotation(tensor.shape[0]).to(device, tensor.dtype)
    if name == "scale":  # of 8-bit values, per row
        return empty.fill_(3e-4)
    if tensor.dtype is torch.float8_e4m3fn:
        return torch.randn(tensor.shape, dtype=torch.bfloat16, device=device).mul_(64).to(tensor.dtype)
    if tensor.dtype is torch.int8 and name in ("weight", "qdata"):
        return torch.randint(-127, 128, tensor.shape, dtype=torch.int8, device=device)
    if not tensor.is_floating_point():
        return empty.zero_()
    return empty.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.02)
