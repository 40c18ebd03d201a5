"""Interleaved forwards: the results and errors of sequential ones, in pipelined order, and no thread left behind."""

import contextlib
import contextvars
import signal
import threading
import time
import weakref

import pytest
import torch
from devicebridge.parallel.local.interleave import Interleave
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import arrivals_noted, forward_of
from devicebridge.tests.streams import Clock, SimulatedMachine
from devicebridge.tests.unit.parallel.test_bridge import NUM_CONSTANTS, WIDTH, _make
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

pytestmark = pytest.mark.usefixtures("no_thread_left")
HOME, NEXT, THIRD = CARDS[:3]


def _job(model, bridge, seed):
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(HOME)

    def job():
        with forward_of(bridge):
            return model(x)

    return job


def _jobs(model, bridge, count):
    return [_job(model, bridge, seed) for seed in range(count)]


HALVES = [HOME, HOME, NEXT, NEXT]
THIRDS = [HOME, HOME, NEXT, NEXT, THIRD, THIRD]
PLANS = pytest.mark.parametrize(
    "devices", [HALVES, THIRDS, [HOME, NEXT, HOME, NEXT], [NEXT, NEXT, THIRD], [HOME] * 2], ids=lambda d: str(len(d))
)
TRANSPORTS = pytest.mark.parametrize("transport", ["stream", "relay"])


@pytest.mark.parametrize("count", [1, 2, 5])
@TRANSPORTS
@PLANS
def test_results_are_those_of_one_forward_after_the_other(devices, transport, count):
    with emulated_cards(4), torch.inference_mode():
        model, bridge = _make(devices, transport=transport)
        expected = [on_cpu(job()) for job in _jobs(model, bridge, count)]
        interleave = Interleave(bridge)
        for _ in range(2):
            results = interleave.run(_jobs(model, bridge, count))
            assert all(torch.equal(on_cpu(a), b) for a, b in zip(results, expected, strict=True))
            assert len(results) == count and bridge.traffic is None and not bridge.is_running


def test_order_of_issue_is_the_pipeline():
    """While job k is on the second card, job k + 1 is on the first; block by block in turn."""
    with emulated_cards(), torch.inference_mode():
        model, bridge = _make(HALVES)
        trace = []
        with arrivals_noted(trace):
            Interleave(bridge).run(_jobs(model, bridge, 3))
    # per job: blocks 0 and 1 at home, 2 and 3 on the second card, the output home, the tail
    assert trace == [
        *[(0, HOME), (0, HOME)],
        *[(0, NEXT), (1, HOME), (0, NEXT), (1, HOME)],
        *[(1, NEXT), (2, HOME), (1, NEXT), (2, HOME)],
        *[(0, HOME), (2, NEXT), (0, HOME)],  # job 0 asked for home while job 2 held it
        *[(1, HOME), (2, NEXT), (1, HOME)],
        *[(2, HOME), (2, HOME)],
    ]


class _Interrupt(BaseException):
    """As ComfyUI's InterruptProcessingException."""


def _failing(error, model, bridge, seed, block):
    inner = _job(model, bridge, seed)

    def job():
        if block is None:
            raise error
        if block == -1:
            inner()
            raise error
        me = threading.current_thread()

        def fail(module, args):
            if threading.current_thread() is me:
                raise error

        handle = model.blocks[block].register_forward_pre_hook(fail)
        try:
            return inner()
        finally:
            handle.remove()

    return job


# Every two of error, job, block and number of cards.
@pytest.mark.parametrize("block", [None, 0, 1, 2, 3, -1])
@pytest.mark.parametrize("kind", [KeyError, _Interrupt, SystemExit])
def test_an_error_of_one_job_ends_the_run(kind, block):
    number = (KeyError, _Interrupt, SystemExit).index(kind) + (5 if block is None else block + 1)
    failing, devices = (0, 1, 3)[number % 3], (HALVES, THIRDS)[number % 2]
    with emulated_cards(4), torch.inference_mode():
        model, bridge = _make(devices)
        jobs, error = _jobs(model, bridge, 4), kind("in a job")
        expected = [on_cpu(job()) for job in jobs]
        broken = list(jobs)
        broken[failing] = _failing(error, model, bridge, failing, block)
        interleave = Interleave(bridge)
        with pytest.raises(kind) as caught:
            interleave.run(broken)
        assert caught.value is error and bridge.traffic is None
        assert all(torch.equal(on_cpu(a), b) for a, b in zip(interleave.run(jobs), expected, strict=True))


def test_the_others_are_stopped_at_their_next_border_and_unwind_one_at_a_time():
    with emulated_cards(), torch.inference_mode():
        model, bridge = _make(HALVES)
        begun, ended, passed, inside = [], [], [], []

        def cleaning(seed):
            inner = _job(model, bridge, seed)

            def job():
                begun.append(seed)
                try:
                    with contextlib.suppress(Exception):  # a patch that swallows errors must not swallow the stop
                        inner()
                        passed.append(seed)
                    passed.append(seed)
                finally:
                    inside.append(seed)
                    time.sleep(0.002)
                    assert inside == [seed]
                    inside.pop()
                    ended.append(seed)

            return job

        jobs, ran = [cleaning(seed) for seed in range(4)], []
        jobs[1] = _failing(KeyError("first block"), model, bridge, 1, 0)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda module, args, i=index: ran.append(i))  # behind ours
        with pytest.raises(KeyError, match="first block"):
            Interleave(bridge).run(jobs)
    # job 0 entered its third block, job 1 its first and raised, so job 0 did not enter its fourth;
    # jobs 2 and 3 waited for home, which job 1 held: they never began
    assert ran == [0, 1, 2, 0]
    assert begun == [0] and ended == [0] and passed == []


def test_an_error_holds_no_memory_once_it_is_handled(no_collector):
    """An out-of-memory error is answered by a smaller batch: its tensors must be gone, without a garbage collection."""
    with emulated_cards(), torch.inference_mode():
        model, bridge = _make(HALVES)
        held = []
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: setattr(module, "seen", None))

        def job():
            x = torch.ones(2, WIDTH).to(HOME)
            held.append(weakref.ref(x))
            with forward_of(bridge):
                model(x)
                raise MemoryError

        interleave = Interleave(bridge)
        with contextlib.suppress(MemoryError):
            interleave.run([job, job, job])
        assert len(held) == 3 and [ref() for ref in held] == [None] * 3


def test_what_a_job_did_not_end_is_ended(no_collector):
    """Copies of a forward that was begun and left are freed with the run, without a garbage collection."""
    with emulated_cards(), torch.inference_mode():
        _, bridge = _make(HALVES)
        source, held = torch.ones(2).to(HOME), []

        def job():
            bridge.begin()
            held.append(weakref.ref(bridge.move(source, NEXT)))

        Interleave(bridge).run([job, job])
        assert len(held) == 2 and [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("count", [1, 3])
def test_runs_do_not_nest(count):
    with emulated_cards(), torch.inference_mode():
        model, bridge = _make(HALVES)
        interleave = Interleave(bridge)
        with pytest.raises(RuntimeError, match="do not nest"):
            interleave.run([lambda: Interleave(bridge).run(_jobs(model, bridge, 2))] * count)
        assert len(interleave.run(_jobs(model, bridge, 2))) == 2


@pytest.fixture
def interrupts():
    """Counts the interrupts that reached the main thread, each raised there as from the keyboard."""
    seen = []

    def handler(number, frame):
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield seen
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to a thread")
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_of_the_waiting_caller_ends_the_run(interrupts, times):
    """Once, and by an impatient user."""
    with emulated_cards(), torch.inference_mode():
        model, bridge = _make(HALVES)
        main, passed = threading.main_thread().ident, []

        def interrupting():
            for count in range(times):
                signal.pthread_kill(main, signal.SIGINT)
                while len(interrupts) <= count:
                    time.sleep(0.01)
                time.sleep(0.05)
            for _ in range(200):  # the caller needs a moment to pass it on
                inner()
            passed.append(0)

        inner = _job(model, bridge, 0)
        with pytest.raises(KeyboardInterrupt):
            Interleave(bridge).run([interrupting, *_jobs(model, bridge, 3)])
        assert passed == [] and len(interrupts) == times and bridge.traffic is None
        assert len(Interleave(bridge).run(_jobs(model, bridge, 4))) == 4


def _thread_state():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return {
        "grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), _color.get()),
        "modes": [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()],
    }  # fmt: skip


_color = contextvars.ContextVar("color", default="none")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None], ids=str)
def test_jobs_see_what_torch_keeps_per_thread(mode, autocast):
    token = _color.set("red")
    cast = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    try:
        with emulated_cards(), BaseTorchFunctionMode(), BaseTorchDispatchMode(), mode(), cast:
            model, bridge = _make(HALVES)
            before, seen = _thread_state(), []
            block = model.blocks[2]
            handle = block.register_forward_pre_hook(lambda module, args: seen.append(_thread_state()))
            with torch.autocast("cpu", enabled=False):
                jobs = _jobs(model, bridge, 3)
            Interleave(bridge).run(jobs)
            handle.remove()
            assert len(before["modes"]) == 3 and seen == [before] * 3 and _thread_state() == before
    finally:
        _color.reset(token)


# Simulated streams --------------------------------------------------------------------------------------------------


def _makespan(machine, devices, count, *, interleave, copy_cost=0.0):
    """Time until all streams are idle, and races seen, of count forwards; and the results."""
    with emulated_cards(4), machine.installed(), torch.inference_mode():
        model, bridge = _make(devices)
        model.front, model.tail = nn.Sigmoid(), nn.Identity()  # only blocks take time
        jobs = _jobs(model, bridge, count)
        with Clock(machine, copy_cost) as clock:
            results = Interleave(bridge).run(jobs) if interleave else [job() for job in jobs]
        end = max(stream.busy_until for stream in machine.default.values())
        return end, clock.races, [on_cpu(result) for result in results], bridge


@pytest.mark.parametrize(("count", "expected"), [(2, 3 / 4), (4, 5 / 8), (8, 9 / 16)])
def test_two_cards_take_the_time_of_a_pipeline(machine, count, expected):
    alone, races, reference, _ = _makespan(SimulatedMachine(4), HALVES, count, interleave=False)
    assert alone == 4 * count and races == 0
    together, races, results, _ = _makespan(machine, HALVES, count, interleave=True)
    assert together == alone * expected and races == 0
    assert all(torch.equal(a, b) for a, b in zip(results, reference, strict=True))


def test_what_the_host_moves_inside_a_block_may_be_used_at_once(machine):
    """ControlNet residuals: from home, by name, while the block's card computes."""
    with emulated_cards(4), machine.installed(), torch.inference_mode():
        model, bridge = _make(HALVES)
        residual, jobs = torch.ones(2, WIDTH).to(HOME), _jobs(model, bridge, 2)

        def add(module, args):
            return args[0] + bridge.move(residual, bridge.current_device), *args[1:]

        for block in model.blocks:
            block.register_forward_pre_hook(add)
        expected = [on_cpu(job()) for job in jobs]
        with Clock(machine, copy_cost=0.5) as clock:
            results = Interleave(bridge).run(jobs)
        assert clock.races == 0
        assert all(torch.equal(on_cpu(a), b) for a, b in zip(results, expected, strict=True))


def test_side_streams_are_made_once_and_tensors_recorded_on_them(machine):
    _, _, _, bridge = _makespan(machine, HALVES, 4, interleave=True)
    assert set(bridge.side_streams.pairs) == {(HOME, NEXT), (NEXT, HOME)} and len(machine.streams_made) == 4
    made = {id(stream): stream for stream in machine.streams_made}
    for tensor, stream in machine.used_on:
        # a source on the side stream of its own card, a copy on the main stream of its own card
        assert stream.device == tensor.device and (id(stream) in made or stream is machine.default[tensor.device])
    # x and the constants out, x home: each source and each copy
    assert len(machine.used_on) == 4 * (NUM_CONSTANTS + 2) * 2
    assert sum(id(stream) in made for _, stream in machine.used_on) == 4 * (NUM_CONSTANTS + 2)


def test_jobs_use_the_callers_streams_and_device(machine):
    with emulated_cards(4), machine.installed(), torch.inference_mode():
        model, bridge = _make(HALVES)
        jobs, seen, mine = _jobs(model, bridge, 2), [], [machine.Stream(HOME), machine.Stream(NEXT)]
        for stream in mine:
            machine.set_stream(stream)
        machine.set_device(3)
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(_current(machine)))
        model.blocks[2].register_forward_pre_hook(lambda module, args: seen.append(_current(machine)))
        Interleave(bridge).run(jobs)
        assert seen[0] == (3, *mine) and (1, *mine) in seen  # on the foreign block its own card is current
        assert sorted(device for device, *_ in seen) == [1, 1, 3, 3] and all(entry[1:] == tuple(mine) for entry in seen)
        assert _current(machine) == (3, *mine)


def _current(machine):
    return machine.current_device(), machine.current_stream(HOME), machine.current_stream(NEXT)
