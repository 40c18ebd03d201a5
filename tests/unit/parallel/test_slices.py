"""Slices of a packed weight: as good as joined ones wherever they are used, without memory until they are copied."""

import pytest
import torch
from devicebridge.parallel.local.shards import JoinedSlices, Slice
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = Slice(0, ((0, 4), (8, 12), (20, 21)))
COLUMNS = Slice(1, ((2, 5), (9, 16)))


def _whole() -> torch.Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


def _expected(whole: torch.Tensor, part: Slice) -> torch.Tensor:
    index = torch.tensor([i for first, last in part.ranges for i in range(first, last)])
    return whole.index_select(part.dim, index)


@pytest.fixture(params=[ROWS, COLUMNS], ids=["rows", "columns"])
def part(request) -> Slice:
    return request.param


class Made(TorchDispatchMode):
    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.bytes, self._known = 0, {whole.untyped_storage().data_ptr()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not isinstance(result, JoinedSlices):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return result


def test_one_range_is_an_ordinary_view() -> None:
    whole = _whole()
    found = Slice(0, ((4, 10),)).of(whole)
    assert type(found) is torch.Tensor and torch.equal(found, whole[4:10])
    assert found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_slice_takes_no_memory(part) -> None:
    whole = _whole()
    with Made(whole) as made:
        found = part.of(whole)
        parameter = nn.Parameter(found, requires_grad=False)
        assert made.bytes == 0
        part.copied(whole)  # what would have been taken
    assert made.bytes == _expected(whole, part).nbytes
    assert all(p.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for p in parameter.data.pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_to_another_type_or_as_a_copy_gives_an_ordinary_tensor(part, dtype) -> None:
    whole = _whole()
    found = part.of(whole).to(dtype=dtype, copy=True)
    assert type(found) is torch.Tensor and torch.equal(found, _expected(whole, part).to(dtype))
    whole.zero_()
    assert found.count_nonzero()


def test_copied_into_a_place_it_makes_no_joined_copy_on_the_way(part) -> None:
    whole = _whole()
    target = torch.zeros(_expected(whole, part).shape, dtype=torch.float16)
    with Made(whole) as made:
        made._known.add(target.untyped_storage().data_ptr())
        found = target.copy_(part.of(whole), non_blocking=True)
    assert found is target and torch.equal(target, _expected(whole, part).half())
    assert made.bytes == 0


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_only_asks_copies_or_makes_room_joins_nothing(part, is_inference, monkeypatch) -> None:
    """In inference mode, as ComfyUI runs nodes, operations come whole."""
    whole = _whole()
    found, shape = part.of(whole), _expected(whole, part).shape
    monkeypatch.setattr(JoinedSlices, "joined", lambda self: pytest.fail("joined"))
    with torch.inference_mode(is_inference):
        assert found.to("cpu") is found and found.to(torch.float32) is found
        assert torch.equal(found.to(torch.float64), _expected(whole, part).double())
        assert found.to("meta").shape == shape and not found.is_pinned() and found.data_ptr() == 0
        room = torch.empty_like(found, dtype=torch.float16)
        assert type(room) is torch.Tensor and room.is_contiguous() and (room.shape, room.dtype) == (shape, torch.half)
        module = nn.Module()
        module.weight = nn.Parameter(found, requires_grad=False)
        assert isinstance(module.to("cpu").weight.data, JoinedSlices)


def test_it_can_be_written_to_nowhere_by_mistake(part) -> None:
    """Whatever is no copy works on a joined copy, so the whole, which may be a mapped file, stays as it is."""
    whole = _whole()
    before = whole.clone()
    part.of(whole).add_(1)
    part.of(whole).copy_(torch.ones(_expected(whole, part).shape))
    assert torch.equal(whole, before)


def test_other_functions_work_on_joined_copies(part) -> None:
    whole = _whole()
    found, expected = part.of(whole), _expected(whole, part)
    assert torch.equal(found + found, expected + expected)
    assert torch.equal(torch.cat([found, expected]), torch.cat([expected, expected]))
    assert torch.equal(found.t(), expected.t()) and torch.equal(found[1:3], expected[1:3])
    assert torch.equal(torch.add(input=found, other=found), expected * 2)


def test_a_parameter_of_it_is_one_still(part) -> None:
    whole = _whole()
    parameter = nn.Parameter(part.of(whole), requires_grad=False)
    assert isinstance(parameter.data, JoinedSlices) and isinstance(parameter.detach(), JoinedSlices)
    assert torch.equal(parameter.data.joined(), _expected(whole, part))
    module = nn.Module()
    module.weight = parameter
    assert torch.equal(module.state_dict()["weight"].joined(), _expected(whole, part))
    module.weight = nn.Parameter(parameter.data.to(torch.float16), requires_grad=False)
    assert torch.equal(module.weight, _expected(whole, part).half())


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_changes_nothing(part, made_inside) -> None:
    whole = _whole()
    found = part.of(whole)
    x = torch.randn(3, _expected(whole, part).shape[1])
    with torch.inference_mode():
        if made_inside:
            found = part.of(whole)
        assert isinstance(found.detach(), JoinedSlices)
        assert torch.equal(F.linear(x, found), F.linear(x, _expected(whole, part)))
        assert torch.equal(found.to(torch.float16), _expected(whole, part).half())
        assert torch.equal(torch.zeros_like(_expected(whole, part)).copy_(found), _expected(whole, part))
