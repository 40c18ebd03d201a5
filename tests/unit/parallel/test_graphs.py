"""Blocks of several devices that are replayed, against those that are computed, in float32 on the CPU. There are no
CUDA graphs on a CPU. What stands for the recorder computes on the recording's own inputs at every replay: all that
graphs fix is fixed there, too."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.parallel.local.graphs import RECORDED_AFTER, Graphs
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.placed import forward_of
from devicebridge.tests.stand_in_recorder import StandIn, replaying
from devicebridge.tests.unit.parallel.test_tensor_parallel import PLANS, WIDTH, Fused, Separate, divide, make_model, run
from torch import nn
from torch.overrides import BaseTorchFunctionMode

# Classes below that are divided as their base is.
AS_SEPARATE = (*PLANS, *(replace(PLANS[1], block=name) for name in ("Asking", "Drawing", "Acting", "Pressing")))


def where(layer: nn.Module, device: torch.device) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in layer.parameters())


def inputs(number: int) -> list[torch.Tensor]:
    return [torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    "blocks", [(Separate, Fused, Fused, Separate), (Fused, Separate)], ids=["separate first", "fused first"]
)
def test_replays_give_the_bits_of_what_is_computed(blocks, size, mode) -> None:
    """A fused block writes into what it is given; the first one's is the model's own, without a version."""
    model = make_model(*(block() for block in blocks))
    other = copy.deepcopy(model)
    plain, parallel = divide(other, size), divide(model, size)
    graphs, recorder = replaying(parallel, where)
    for number, x in enumerate(inputs(RECORDED_AFTER + 6)):
        with mode(), forward_of(parallel):
            found = model(x)
        with mode(), forward_of(plain):
            expected = other(x)
        assert torch.equal(found, expected), number
    assert recorder.num_recorded == len(blocks) and graphs.num_replays >= 3 * len(blocks) and not graphs.fault


def ready(*blocks: nn.Module, size: int = 2) -> tuple[Any, TensorParallel, Graphs, StandIn]:
    model = make_model(*blocks)
    parallel = divide(model, size, plans=AS_SEPARATE)
    graphs, recorder = replaying(parallel, where)
    for x in inputs(RECORDED_AFTER + 3):
        run(parallel, model, x)
    assert recorder.num_recorded == len(model.blocks) and not graphs.fault
    graphs.num_replays = 0
    return model, parallel, graphs, recorder


def computed(parallel: TensorParallel, model: nn.Module, x: torch.Tensor, *between: Any) -> torch.Tensor:
    graphs, parallel.graphs = parallel.graphs, None
    try:
        return run(parallel, model, x, *between)
    finally:
        parallel.graphs = graphs


def test_a_call_the_cards_do_not_wait_for_is_never_recorded() -> None:
    model = make_model()
    parallel = divide(model, 2)
    graphs, recorder = replaying(parallel, where)
    for number, x in enumerate(inputs(4 * RECORDED_AFTER)):
        recorder.cards_wait = number % RECORDED_AFTER != 0  # not so often one after the other
        run(parallel, model, x)
    assert recorder.num_recorded == graphs.num_replays == 0


def test_another_shape_is_computed_and_recorded_by_itself() -> None:
    model, parallel, graphs, recorder = ready()
    wide = torch.randn(1, 9, WIDTH)
    assert torch.equal(run(parallel, model, wide), computed(parallel, model, wide)) and not graphs.num_replays
    for _ in range(RECORDED_AFTER + 3):
        run(parallel, model, wide)
    assert recorder.num_recorded == 2 * len(model.blocks)
    graphs.num_replays = 0
    for x in (wide, inputs(1)[0]):
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert graphs.num_replays == 2 * len(model.blocks)


def test_of_many_shapes_the_latest_are_kept() -> None:
    model, parallel, graphs, recorder = ready(Separate(), Fused())
    for length in range(10, 16):
        x = torch.randn(1, length, WIDTH)
        for _ in range(RECORDED_AFTER + 3):
            assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    lengths = {tensor.shape[1] for tensor in graphs._staged.values()}
    assert lengths == {1, 12, 13, 14, 15} and recorder.num_recorded == 7 * 2


def test_what_a_block_returned_keeps_its_numbers_when_later_ones_are_replayed() -> None:
    model, parallel, graphs, _ = ready(Separate(), Separate(), Separate())
    kept: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []

    def keep(_: int, x: torch.Tensor) -> None:
        kept.append(x)
        copied.append(x.clone())

    for x in inputs(2):
        run(parallel, model, x, keep)
    assert graphs.num_replays == 6
    assert all(map(torch.equal, kept, copied))


class Asking(Separate):
    """Looks something up in the options, and something in a copy of them that it has written to."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        extra = transformer_options.copy()
        extra["mine"] = 1.0
        factor = transformer_options.get("factor", 1.0) * extra["mine"]
        return super().forward(x, vec) * factor


class Drawing(Separate):
    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        self.times = getattr(self, "times", 0) + 1
        return super().forward(x, vec) + self.times


class Acting(Separate):
    """Does something to what it is called with before it computes."""

    def __init__(self, act: Callable[[torch.Tensor, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        self.act(x, vec, transformer_options)
        return super().forward(x, vec)


def refuse(x: torch.Tensor, vec: torch.Tensor, options: Any) -> None:
    if type(options) is not dict:  # only what a recording is given
        raise RuntimeError("operation not permitted when stream is capturing")


class Pressing(Separate):
    """Memory runs short meanwhile, as often as it is told."""

    times = 0

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        output = super().forward(x, vec)
        if self.times:
            self.times -= 1
            self.__dict__["press"]()
        return output


def test_options_that_a_block_looked_up_must_be_those_of_the_recording(monkeypatch) -> None:
    model, parallel, graphs, _ = ready(Asking(), Asking())
    x = inputs(1)[0]

    def with_options(value: float, other: Any) -> Callable[..., Any]:
        def forward(self: Any, x: torch.Tensor, between: Any = None) -> torch.Tensor:
            x = self.front(x)
            for block in self.blocks:
                x = block(x, vec=x[:, :1] * 0 + 1, transformer_options={"factor": value, "other": other})
            return self.tail(x)

        return forward

    monkeypatch.setattr(type(model), "forward", with_options(2.0, object()))
    for _ in range(RECORDED_AFTER + 3):
        run(parallel, model, x)
    graphs.num_replays = 0
    monkeypatch.setattr(type(model), "forward", with_options(2.0, object()))  # nobody looks at the other one
    assert torch.equal(run(parallel, model, x), computed(parallel, model, x)) and graphs.num_replays == 2
    monkeypatch.setattr(type(model), "forward", with_options(3.0, None))
    assert torch.equal(run(parallel, model, x), computed(parallel, model, x)) and graphs.num_replays == 2


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (lambda x, vec, options: options.__setitem__("told", 1), "changes the transformer_options"),
        (None, "a replay gives something else"),
        (refuse, "operation not permitted when stream is capturing"),
        (lambda x, vec, options: x.add_(1.0), "it returns something else in the shape of what it writes to"),
        (lambda x, vec, options: x.data.add_(1.0), "torch does not see it"),
    ],
)
def test_a_block_that_cannot_be_replayed_ends_recording_and_is_computed(act, fault, caplog) -> None:
    model = make_model(Acting(act) if act else Drawing(), Separate())
    other = copy.deepcopy(model)
    plain, parallel = (divide(each, 2, plans=AS_SEPARATE) for each in (other, model))
    graphs, _ = replaying(parallel, where)
    for x in inputs(RECORDED_AFTER + 4):
        found, expected = run(parallel, model, x), run(plain, other, x)
        assert act is None or torch.equal(found, expected)
    assert fault in graphs.fault and graphs.num_replays == 0
    assert [fault in record.message for record in caplog.records] == [True]


def test_a_weight_that_lies_elsewhere_is_read_there() -> None:
    model, parallel, graphs, recorder = ready()
    layer = model.blocks[0].attn.q
    layer.weight = nn.Parameter(layer.weight.data * 1.5, requires_grad=False)
    x = inputs(1)[0]
    assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert graphs.num_replays == len(model.blocks) - 1
    graphs._addresses = lambda layer, device: None  # of weights that are away, or not used as they are
    assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert graphs.num_replays == len(model.blocks) - 1


@contextlib.contextmanager
def switched() -> Iterator[None]:
    """As a node does for its MODEL, which samples with the same blocks as the MODEL without it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = not before
    yield
    matmul.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize("kept_by", ["others' code", "a mode", "a switch of torch", "gradients"])
def test_what_may_change_what_blocks_do_keeps_them_from_being_replayed(kept_by) -> None:
    model, parallel, graphs, _ = ready()
    x = inputs(1)[0]
    alone = mock.patch.object(parallel, "runs_alone", kept_by != "others' code")
    others = {"a mode": BaseTorchFunctionMode, "a switch of torch": switched}
    mode = torch.enable_grad if kept_by == "gradients" else torch.inference_mode
    with alone, others.get(kept_by, contextlib.nullcontext)(), mode(), forward_of(parallel):
        model(x)
    assert graphs.num_replays == 0
    run(parallel, model, x)
    assert graphs.num_replays == len(model.blocks)


def test_an_error_of_a_replay_ends_its_forward_alone(monkeypatch) -> None:
    model, parallel, graphs, recorder = ready()
    x = inputs(1)[0]
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="injected"):
        patched.setattr(StandIn, "launch", mock.Mock(side_effect=[None, RuntimeError("injected")]))
        run(parallel, model, x)
    graphs.num_replays = 0
    assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert graphs.num_replays == len(model.blocks) and not graphs.fault


def test_released_graphs_are_recorded_anew() -> None:
    model, parallel, graphs, recorder = ready()
    parallel.release()
    assert not graphs._staged and not graphs._graphs
    for x in inputs(RECORDED_AFTER + 3):
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert recorder.num_recorded == 2 * len(model.blocks)


def test_what_a_computed_block_wrote_to_is_given_anew() -> None:
    """A tensor without a version, which one replayed block was given, and another is after somebody wrote into it."""
    model = make_model(Separate(), Acting(lambda x, vec, options: vec.add_(1.0)), Separate())
    parallel = divide(model, 2, plans=AS_SEPARATE)
    graphs, recorder = replaying(parallel, lambda layer, device: None if isinstance(layer, Acting) else ())
    for x in inputs(RECORDED_AFTER + 4):
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert recorder.num_recorded == 2 and graphs.num_replays


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_released_while_a_block_is_recorded_is_not_replayed(times) -> None:
    """In the call that computes, in the one that records, in the one that compares."""
    model = make_model(Pressing(), Separate())
    parallel = divide(model, 2, plans=AS_SEPARATE)
    graphs, recorder = replaying(parallel, where)
    block = model.blocks[0]
    block.__dict__["press"] = parallel.release
    computes = Graphs._record

    def record(self: Graphs, *args: Any) -> Any:
        block.times = times - 1
        return computes(self, *args)

    for x in inputs(RECORDED_AFTER + 2):
        run(parallel, model, x)
    assert recorder.num_recorded == 1 and not graphs._graphs.get(block)  # of the first block no wait is known before
    if times == 1:
        block.times = 1
    with pytest.MonkeyPatch.context() as patched:
        if times > 1:
            patched.setattr(Graphs, "_record", record)
        run(parallel, model, inputs(1)[0])
    kept = graphs._graphs.get(block)
    for x in inputs(3):
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert not block.times and not kept and not graphs.fault


def test_where_memory_is_short_before_a_recording_blocks_are_computed(monkeypatch, caplog) -> None:
    model = make_model()
    parallel = divide(model, 2)
    graphs, recorder = replaying(parallel, where)

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("not enough memory")

    monkeypatch.setattr(Graphs, "_place", no_room)
    for x in inputs(RECORDED_AFTER + 3):
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert not recorder.num_recorded and "not enough memory" in graphs.fault
    assert sum("not enough memory" in record.message for record in caplog.records) == 1


def test_weights_that_move_at_every_forward_are_not_recorded_at_every_forward() -> None:
    model, parallel, graphs, recorder = ready(Separate(), Separate())
    layer = model.blocks[0].attn.q
    both = [layer.weight, nn.Parameter(layer.weight.data.clone(), requires_grad=False)]
    for number, x in enumerate(inputs(3 * RECORDED_AFTER)):
        layer.weight = both[(number + 1) % 2]
        assert torch.equal(run(parallel, model, x), computed(parallel, model, x))
    assert recorder.num_recorded <= 4


def test_a_thread_that_died_in_its_forward_leaves_nothing_held() -> None:
    model, parallel, graphs, _ = ready()

    def die() -> None:
        with torch.inference_mode():
            parallel.begin()
            model(inputs(1)[0])

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    assert graphs._held
    with forward_of(parallel):
        assert not graphs._held
