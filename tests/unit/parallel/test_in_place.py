"""Blocks that write in place: their gradients are the loss's own slopes, or an error, and nothing outside changes."""

import pytest
import torch
from devicebridge.parallel.offload.recompute import InPlaceGuard, checkpoint_calls, recompute
from devicebridge.patches.compile_blocks import OutOfPlace
from devicebridge.tests.toy import slopes
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


class ReturningIt(Pure):
    """Returns what it is called with, once it has written into it, as LTX-2's blocks do."""

    def forward(self, pair, scale):
        x, other = pair
        y = torch.tanh(self.first(x))
        x.add_(self.second(y * scale))
        x.mul_(y + 1)
        return x, other


class IntoRows(Pure):
    """Writes into views of what it is called with, and of what it has computed itself."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        added = self.second(y * scale)
        x[:1] += added[:1]
        x[1:] += added[1:]
        y = y + 1
        y[:, :] *= x
        return y


class LookingBack(Pure):
    """Uses what it is called with by another name, after writing into it."""

    def forward(self, x, scale):
        old, row = x, x[:2]
        y = torch.tanh(self.first(x))
        x += self.second(y * scale)
        return old * (y + 1) + 0 * row.sum()


class HandingBack(Pure):
    """Returns a view that it has made before writing."""

    def forward(self, x, scale):
        y, view = torch.tanh(self.first(x)), x[:]
        x += self.second(y * scale)
        x *= y + 1
        return view


class Halving(Pure):
    """Every kind of augmented assignment; twice what it is called with, and then half of it."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        x -= scale
        x /= 0.5
        x += 2 * scale + 2 * self.second(y * scale)
        x *= (y + 1).float()  # of a narrower type
        return x / 2


class IntoOut(Pure):
    """Names what an operation writes into, as HiDream-O1's blocks do."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        total = torch.add(x, self.second(y * scale), out=x)
        return total * (y + 1)


class LookingAtOut(IntoOut):
    """Reads by its own name what such an operation has written into."""

    def forward(self, x, scale):
        y = torch.tanh(self.first(x))
        torch.add(x, self.second(y * scale), out=x)
        return x * (y + 1)


THROUGH_VIEWS = (IntoRows, LookingBack, HandingBack)
NAMING = (IntoOut, LookingAtOut)
WRITING = (IntoItself, IntoArguments, IntoRows, LookingBack, HandingBack, Halving, *NAMING)


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


def _guarded(cls, passed_by=()):
    block = _made(cls)
    block.forward = InPlaceGuard(block, passed_by, has_out=cls in NAMING)
    return block


def _compiled(guard):
    torch._dynamo.reset()
    return guard.compiled(lambda forward: torch.compile(forward, backend=OutOfPlace("aot_eager"), fullgraph=True))


def _recomputed(block, *args):
    return recompute(block, args, CPU)


def _intercepted(block, *args):
    checkpoint_calls([block], lambda call, *values: recompute(call, values, CPU), ())
    return block(args[0], scale=args[1])


class _HandedOn(torch.autograd.Function):
    """FSDP puts one like it before each block: what it returns is views of its arguments."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return grads


WAYS = {
    "plain": lambda block, *args: block(*args), "recomputed": _recomputed, "intercepted": _intercepted,
    "handed on": lambda block, *args: block(*_HandedOn.apply(*args)),
}  # fmt: skip


@pytest.mark.parametrize("cls", WRITING)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_central_differences(cls, way):
    pure, given = _made(Pure), _inputs()
    expected = slopes(lambda: _loss(pure, *given), (*given, *pure.parameters()))
    block, tolerance = _guarded(cls), 1e-6 if cls is Halving else 1e-8
    for _ in range(2):  # the first call of a kind is watched, the next ones know
        for found, slope in zip(_gradients(block, WAYS[way]), expected, strict=True):
            torch.testing.assert_close(found, slope, rtol=1e-6 if cls is Halving else 1e-7, atol=tolerance)


def test_without_the_guard_a_block_that_is_computed_again_is_an_error():
    with pytest.raises(RuntimeError, match="in place"):
        _gradients(_made(IntoArguments), _recomputed)


def _each_once(classes):
    """Each class in one way, and each way with one class; the other pairs in long runs."""
    pairs = [(cls, way, i % len(WAYS) == j) for i, cls in enumerate(classes) for j, way in enumerate(WAYS)]
    return [pytest.param(cls, way, marks=[] if once else pytest.mark.long) for cls, way, once in pairs]


@pytest.mark.parametrize(
    ("cls", "way"), _each_once([each for each in WRITING if each not in (*THROUGH_VIEWS, LookingAtOut)])
)
def test_compiled_blocks_have_the_gradients_of_uncompiled_ones(cls, way):
    block = _guarded(cls)
    expected, guard = _gradients(block, WAYS[way]), block.forward
    block.forward = _compiled(guard)
    found = _gradients(block, WAYS[way])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(found, expected, strict=True))
    x, scale = _inputs()
    before = x.clone()
    with torch.no_grad():
        outputs = block(x, scale), guard(x, scale)
    assert torch.equal(x, before) and torch.allclose(*outputs, rtol=1e-10)


def test_a_compiled_block_may_return_the_tensors_that_it_has_written_into():
    def run(block, x, scale):
        first, other = block((x, scale.clone()), scale)
        return first + 0 * other

    block = _guarded(ReturningIt)
    block.forward = _compiled(block.forward)
    for found, expected in zip(_gradients(block, run), _gradients(_made(Pure)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("cls", "way"), _each_once(THROUGH_VIEWS))
def test_a_block_that_cannot_be_compiled_is_an_error_and_no_gradient(cls, way):
    block = _guarded(cls)
    block.forward = _compiled(block.forward)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(block, WAYS[way])


@pytest.mark.parametrize("cls", WRITING)
def test_the_callers_tensors_are_left_alone(cls):
    x, scale = _inputs()
    before = x.clone(), scale.clone()
    with torch.no_grad():
        output = _guarded(cls)(x, scale)
    assert torch.equal(x, before[0]) and torch.equal(scale, before[1])
    assert type(output) is torch.Tensor
    torch.testing.assert_close(output, _made(Pure)(*before), rtol=1e-6, atol=1e-7)


def _learned(cls):
    block = _guarded(cls)
    _gradients(block)
    (writes,) = block.forward.known.values()
    return writes


def test_only_what_is_written_to_is_copied():
    writes = _learned(IntoItself)
    assert 0 < sum(is_written for _, is_written in writes.saved) < len(writes.saved)
    pure = _learned(Pure)
    assert not pure.arguments and not any(is_written for _, is_written in pure.saved)


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


class Interrupted(Dropping):
    def forward(self, x, scale):
        super().forward(x, scale)
        raise KeyboardInterrupt


def test_watching_that_is_interrupted_leaves_the_random_numbers_as_they_were():
    block, before = _guarded(Interrupted), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        _gradients(block)
    assert torch.equal(torch.get_rng_state(), before)


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
