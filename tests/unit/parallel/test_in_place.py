"""Blocks that write in place: their gradients are the loss's own slopes, or an error, and nothing outside changes."""

from __future__ import annotations

import pytest
import torch
from devicebridge.parallel.offload.block_call import checkpoint_calls
from devicebridge.parallel.offload.in_place import InPlaceGuard, put_back, taken_out
from devicebridge.parallel.offload.recompute import recompute
from torch import nn

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


class Pure(nn.Module):
    """What the blocks below compute, with nothing written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        return (x + self.second(y * scale)) * (y + 1)


class IntoItself(Pure):
    """Writes into what its own operations were given."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))  # whose backward reads y
        scaled = y * scale  # likewise
        y += 1
        return (x + self.second(scaled)) * y


class IntoArguments(Pure):
    """Writes into what it is called with as well, as FLUX's and LTX-Video's blocks do."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        added = self.second(y * scale)
        y.add_(1)
        x += added  # which the first linear was given
        return x.mul_(y)


WRITING = (IntoItself, IntoArguments)


def _made(cls):
    torch.manual_seed(5)
    return cls().double()


def _inputs():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(6, dtype=torch.float64, generator=generator)


def _loss(block, x, scale, run=lambda block, *args: block(*args)):
    """With something before the block that needs a gradient, as blocks have each other."""
    return run(block, x * 1.5, scale * 1).sin().sum()


def _gradients(block, run=lambda block, *args: block(*args)):
    x, scale = (tensor.requires_grad_() for tensor in _inputs())
    block.zero_grad()
    _loss(block, x, scale, run).backward()
    return [tensor.grad for tensor in (x, scale, *block.parameters())]


@torch.no_grad()
def _slopes(block):
    """Central differences, of every number of inputs and parameters."""
    x, scale = _inputs()
    found = []
    for tensor in (x, scale, *block.parameters()):
        slope = torch.empty_like(tensor)
        for index in range(tensor.numel()):
            numbers, ends = tensor.view(-1), []
            for step in (1e-6, -2e-6):
                numbers[index] += step
                ends.append(_loss(block, x, scale))
            numbers[index] += 1e-6
            slope.view(-1)[index] = (ends[0] - ends[1]) / 2e-6
        found.append(slope)
    return found


def _guarded(cls, passed_by=()):
    block = _made(cls)
    block.forward = InPlaceGuard(block, passed_by)
    return block


def _recomputed(block, *args):
    return recompute(block, args, CPU)


def _intercepted(block, *args):
    checkpoint_calls([block], lambda call, *values: recompute(call, values, CPU), ())
    return block(args[0], scale=args[1])


WAYS = {"plain": lambda block, *args: block(*args), "recomputed": _recomputed, "intercepted": _intercepted}


@pytest.mark.parametrize("cls", WRITING)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_central_differences(cls, way):
    expected = _slopes(_made(Pure))
    block = _guarded(cls)
    for _ in range(2):  # the first call of a kind is watched, the next ones know
        for found, slope in zip(_gradients(block, WAYS[way]), expected, strict=True):
            torch.testing.assert_close(found, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("cls", WRITING)
@pytest.mark.parametrize("way", WAYS)
def test_without_the_guard_there_is_an_error_and_no_gradient(cls, way):
    with pytest.raises(RuntimeError, match="in place|inplace"):
        _gradients(_made(cls), WAYS[way])


@pytest.mark.parametrize("cls", WRITING)
def test_the_callers_tensors_are_left_alone(cls):
    x, scale = _inputs()
    before = x.clone(), scale.clone()
    with torch.no_grad():
        output = _guarded(cls)(x, scale)
    assert torch.equal(x, before[0]) and torch.equal(scale, before[1])
    torch.testing.assert_close(output, _made(Pure)(*before))


def test_only_what_is_written_to_is_copied():
    block = _guarded(IntoArguments)
    _gradients(block)
    (writes,) = block.forward.known.values()
    assert writes.arguments == {0}
    written = [index for index, (_, is_written) in enumerate(writes.saved) if is_written]
    assert 0 < writes.num_copied == len(written) < len(writes.saved)
    pure = _guarded(Pure)
    _gradients(pure)
    (writes,) = pure.forward.known.values()
    assert not writes.arguments and not writes.num_copied


def test_every_way_of_being_called_is_watched_on_its_own():
    block = _guarded(IntoArguments)
    x, scale = _inputs()
    block(x.clone().requires_grad_() * 1, scale)
    block(x, scale)
    block(x, scale=scale)
    block(x[None], scale)
    assert len(block.forward.known) == 4


class Fickle(Pure):
    """Writes into its argument only when told so by something nobody sees."""

    writes = False

    def forward(self, x, scale):
        return super().forward(x.add_(1) if self.writes else x + 1, scale)


def test_a_write_that_was_not_there_before_is_an_error():
    block = _guarded(Fickle)
    _gradients(block)
    block.writes = True
    with pytest.raises(RuntimeError, match="Fickle changed an argument in place that it did not change before"):
        _gradients(block)


class Keeping(Pure):
    """Hands out what its backward needs."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        y += 0
        self.kept = scaled = y * scale
        return torch.exp(scaled) * self.second(scaled)


def test_a_saved_tensor_that_somebody_else_changes_is_an_error():
    block = _guarded(Keeping)
    _gradients(block)
    x, scale = (tensor.requires_grad_() for tensor in _inputs())
    loss = _loss(block, x, scale)
    with torch.no_grad():
        block.kept.add_(1)
    with pytest.raises(RuntimeError, match="which did not happen before"):
        loss.backward()


class Dropping(Pure):
    def forward(self, x, scale):
        return nn.functional.dropout(super().forward(x, scale), 0.5)


def test_watching_draws_no_random_numbers():
    found = []
    for block in (_made(Dropping), _guarded(Dropping)):
        torch.manual_seed(7)
        found.append((*_gradients(block), torch.rand(3)))
    for plain, guarded in zip(*found, strict=True):
        assert torch.equal(plain, guarded)


class Sharing(Pure):
    """Reads and changes an object that is the same for all blocks."""

    def forward(self, x, scale, options):
        options["calls"] += 1
        return super().forward(x, scale)


def test_objects_that_are_passed_by_are_the_callers():
    block, options = _guarded(Sharing, ("options",)), {"calls": 0}
    x, scale = _inputs()
    block(x, scale, options=options)
    before = options["calls"]
    block(x, scale, options=options)
    assert options["calls"] == before + 1


def test_tensors_are_taken_out_and_put_back():
    a, b = torch.ones(1), torch.zeros(2)
    value = ({"x": [a, 3]}, (None, b))
    tensors, frame = taken_out(value)
    assert tensors[0] is a and tensors[1] is b
    (first, second) = put_back(frame, [b, a])
    assert first["x"][0] is b and first["x"][1] == 3 and second[0] is None and second[1] is a


class AtSomeBlocks(nn.Module):
    """Serves all blocks and adds to the stream behind some of them, as the audio injector of Wan S2V does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, block):
        if block == 1:
            x[:, :3] = x[:, :3] + torch.tanh(self.layer(torch.tanh(x)))[:, :3]
        return x


def test_a_module_that_serves_all_blocks_is_watched_at_each():
    """The first call writes nothing, and the second does; the gradients are those of the same without writing."""
    module = _made(AtSomeBlocks)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    stream = torch.tanh(x)
    added = torch.cat([torch.tanh(module.layer(torch.tanh(stream)))[:, :3], torch.zeros(3, 3)], dim=1)
    (wanted,) = torch.autograd.grad(torch.sin(stream + added).sum(), x)
    guard = InPlaceGuard(module)
    before = torch.tanh(x)
    after = guard(guard(before, 0), 1)
    (found,) = torch.autograd.grad(torch.sin(after).sum(), x)
    assert torch.allclose(found, wanted) and not torch.equal(after, before)
