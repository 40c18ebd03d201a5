"""Before the first step: whether compiled blocks compute what uncompiled ones do, in outputs and gradients, as far as
rounding does not explain it. The method, its reasons and figures: docs/decisions/0012-compiled-gradients.md."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..events import first_line
from ..parallel.devices import release_cached_memory, reset_peaks
from ..parallel.ranks.group import RankLost
from ..patches.attention import sound_attention
from ..patches.compile_blocks import Arguments, Forward, remove_compiled
from ..patches.hooks import map_tensors, tensors_reached
from ..system.stopping import alive
from .loop import Trainer

_log = logging.getLogger(__name__)

# A compiled block may be off by so much, and by so many times what a block is whose inputs are rounded otherwise.
# Measured on H200: up to 0.007 (tests/gpu/test_compiled_on_gpus.py).
_LEAST, _TIMES = 0.02, 4.0
_MOST_VALUES = 2**18  # of a tensor that are compared: 1 MiB
_RMS = 1 / 16  # of inputs that pass a block by; far above what a norm adds to its divisor
_SMALL = 0.01  # of what a LoRA learns
_NUM_TRIES = 3  # with other random numbers, before a block is wrong


def check_compiled(trainer: Trainer) -> list[BlockDifference]:
    """Go on uncompiled, on all ranks, where compiled blocks compute something else in the next microbatch of every copy
    of the model, or the compiler fails. With dropout nothing is compared; peaks of memory start anew. Returns: a
    comparison of every block and call that could be told apart from rounding. Raises: RuntimeError where ranks share
    the weights and blocks cannot be compiled: the others wait inside a forward."""
    count = trainer.runner.num_replicas
    with trainer.trial():
        for microbatch in trainer.microbatches(count):
            microbatch.prepare()  # what is wrong with the data is not the compiler's fault
    check = BlockCheck(*(trainer.runner.replica_for(index)[0] for index in range(count)))
    faults = trainer.ranks.gather(_fault(trainer, check))
    fault = next((f"rank {rank}: {text}" if len(faults) > 1 else text for rank, text in enumerate(faults) if text), "")
    if fault:
        _log.warning("blocks are no longer compiled: %s", fault)
        remove_compiled(trainer.compiled)
        trainer.compiled = ()
    elif check.found and not check.is_full:
        _log.info("compiled blocks compute what uncompiled ones do; %s", worst_of(check.found))
    release_cached_memory()
    reset_peaks(trainer.devices)
    return check.found


def _fault(trainer: Trainer, check: BlockCheck) -> str:
    """What is wrong with compiled blocks; "" for nothing."""
    by = f"torch {torch.__version__}"
    try:
        with trainer.trial(), sound_attention(), ExitStack() as stack:
            if trainer.job.lora.dropout:
                _log.warning("compiled blocks are not compared with uncompiled ones: dropout draws other numbers")
            else:
                for each in trainer.compiled:
                    stack.enter_context(each.watched(check))
            trainer.rehearse()
    except (torch.cuda.OutOfMemoryError, RankLost):
        raise
    except Exception as error:  # whatever a compiler raises; what is not its own comes again without it
        reason = first_line(getattr(error, "inner_exception", error))  # which torch puts on a line of its own
        if trainer.runner.in_lockstep:
            raise RuntimeError(f'a step compiled by {by} fails: {reason}; set train.compile to "off"') from error
        _log.debug("compiled blocks failed", exc_info=True)
        return f"a step compiled by {by} fails: {reason}"
    if check.is_full:
        _log.warning("not all compiled blocks are compared with uncompiled ones: comparing needs more memory")
    worst = worst_of(check.found)
    return f"as {by} compiles them they are wrong: {worst}" if worst is not None and worst.excess > 1 else ""


class BlockDifference(NamedTuple):
    """Of a block's tensor that is the furthest off for what rounding explains: |compiled - plain| / |plain|, infinite
    where only one has values, or one is not finite; and what it may be."""

    name: str
    difference: float
    explained: float

    @property
    def excess(self) -> float:
        """How many times as far off as rounding explains; above 1 something is wrong."""
        return self.difference / self.explained

    def __str__(self) -> str:
        return f"{self.name} is off by {self.difference:.3g}, rounding explains {self.explained:.2g}"


class BlockCheck:
    """Compares every block that is called (CompiledBlocks.watched), from any thread, while memory suffices."""

    def __init__(self, *models: nn.Module) -> None:
        self.found: list[BlockDifference] = []
        self.is_full = False
        self._names = {module: name for model in models for name, module in model.named_modules()}

    def __call__(self, block: nn.Module, compiled: Forward, plain: Forward, arguments: Arguments) -> None:
        alive()
        if self.is_full:
            return
        trained = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
        try:
            # torch's checkpointing of the block keeps its own tensors
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                comparison = compare_forwards(compiled, plain, arguments, trained)
        except torch.cuda.OutOfMemoryError:
            self.is_full = True
            return
        if comparison is not None:
            self.found.append(comparison._replace(name=f"{self._names[block]}, {comparison.name}"))


def worst_of(comparisons: Sequence[BlockDifference]) -> BlockDifference | None:
    """Which rounding explains least; None of none."""
    return max(comparisons, key=lambda each: each.excess, default=None)


def compare_forwards(
    compiled: Forward, plain: Forward, arguments: Arguments, trained: Mapping[str, nn.Parameter]
) -> BlockDifference | None:
    """Run a block's two forwards, and backwards where gradients are on; None where nothing can be told. Arguments,
    gradients and graph are left alone. trained: the block's parameters that train."""
    with torch.no_grad():
        sizes = [output.shape for output in tensors_reached(plain(*arguments[0], **arguments[1]))]
    with _without_zeros(list(trained.values())):
        tries = (_compare_once(compiled, plain, arguments, trained, sizes) for _ in range(_NUM_TRIES))
        comparison = next(tries)
        for again in tries if comparison is not None and comparison.excess > 1 else ():
            if again is None or again.excess <= 1:
                return again
        return comparison


@contextmanager
def _without_zeros(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, the half of a fresh LoRA whose zeros keep gradients from the other half is small numbers."""
    with torch.no_grad():
        zeros = {each: each.detach().clone() for each in parameters if not each.any()}
        for each in zeros:
            each.normal_(0, _SMALL)
    try:
        yield
    finally:
        with torch.no_grad():
            for each, before in zeros.items():
                each.copy_(before)


def _compare_once(
    compiled: Forward,
    plain: Forward,
    arguments: Arguments,
    trained: Mapping[str, nn.Parameter],
    sizes: Sequence[torch.Size],
) -> BlockDifference | None:
    directions: list[Tensor] = []
    expected = _results(plain, _with_short_streams(arguments, sizes), trained, directions)
    others = [_rounded_otherwise(each) for each in directions]
    otherwise = map_tensors(_with_short_streams(arguments, sizes), _rounded_otherwise)
    again = _results(plain, otherwise, trained, others)
    del others, otherwise
    found = _results(compiled, _with_short_streams(arguments, sizes), trained, directions)
    comparisons = [_compare(name, found.get(name), again[name], expected[name]) for name in expected]
    return worst_of([each for each in comparisons if each is not None])


def _with_short_streams(arguments: Arguments, sizes: Sequence[torch.Size]) -> Arguments:
    """With what passes by scaled: of the inputs that have an output's size the first, one for each output."""
    left = Counter(sizes)

    def change(tensor: Tensor) -> Tensor:
        left[tensor.shape] -= 1
        return _scaled(tensor) if left[tensor.shape] >= 0 else tensor

    return map_tensors(arguments, change)


def _results(
    forward: Forward, arguments: Arguments, trained: Mapping[str, nn.Parameter], directions: list[Tensor]
) -> dict[str, Tensor]:
    """Samples of what a forward and its backward give. directions: gradients of the outputs; drawn if empty."""
    own = map_tensors(arguments, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
    inputs, outputs = tensors_reached(own), tensors_reached(forward(*own[0], **own[1]))
    found = {f"output {index}": _added(output, inputs) for index, output in enumerate(outputs)}
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        return found
    if not directions:
        directions += [torch.randn_like(output) for output in outputs]
    leaves = {f"the gradient of input {index}": leaf for index, leaf in enumerate(inputs) if leaf.requires_grad}
    leaves |= {f"the gradient of {name}": parameter for name, parameter in trained.items()}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[name] = _added(torch.zeros_like(leaf) if gradient is None else gradient, directions)
    return found


def _added(tensor: Tensor, passed: list[Tensor]) -> Tensor:
    """A sample of it, less the first of its size among what may have passed by."""
    by = next((each for each in passed if each.shape == tensor.shape and each.is_floating_point()), None)
    return _sample(tensor) if by is None else _sample(tensor) - _sample(by)


def _sample(tensor: Tensor) -> Tensor:
    """At most so many values, in float32, of all rows and columns; a copy."""
    step, width = -(-tensor.numel() // _MOST_VALUES), tensor.shape[-1] if tensor.ndim else 1
    while math.gcd(step, width) > 1:  # it would come to the same columns again
        step += 1
    return tensor.detach().flatten()[::step].to(torch.float32, copy=True)


def _scaled(tensor: Tensor) -> Tensor:
    """Times the power of two that brings it next to _RMS, laid out as it was; as it is if that cannot be."""
    if not tensor.is_floating_point():
        return tensor
    length = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).item()
    if not length or not math.isfinite(length):
        return tensor
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor  # several values in one place
    factor = 2.0 ** round(math.log2(_RMS * math.sqrt(tensor.numel()) / length))
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor.detach()).mul_(factor).requires_grad_(tensor.requires_grad)


def _rounded_otherwise(tensor: Tensor) -> Tensor:
    """Off by up to the distance of two neighbouring values."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand_like(tensor).mul_(2).sub_(1).mul_(torch.finfo(tensor.dtype).eps)
    return noise.add_(1).mul_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _compare(name: str, found: Tensor | None, again: Tensor, expected: Tensor) -> BlockDifference | None:
    """None where nothing can be told: what is expected is not finite, or half of it is rounding."""
    found = torch.zeros_like(expected) if found is None else found
    length, noise, off = expected.norm().item(), (again - expected).norm().item(), (found - expected).norm().item()
    if not math.isfinite(length) or not math.isfinite(noise):
        return None
    if not math.isfinite(off) or (length > noise and not found.any()) or (off and not length and not noise):
        return BlockDifference(name, math.inf, _LEAST)
    if not off:
        return BlockDifference(name, 0.0, _LEAST)
    if noise > length / 2:
        return None
    return BlockDifference(name, off / length, _LEAST + _TIMES * noise / length)
