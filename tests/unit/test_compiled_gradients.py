"""Compiled blocks must give the gradients of uncompiled ones, or the run goes on uncompiled."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager

import pytest
import torch
from devicebridge import assembly
from devicebridge.parallel.devices import random_states
from devicebridge.patches.compile_blocks import CompiledBlocks
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training import loop
from devicebridge.training.gradient_check import compare_gradients
from devicebridge.training.job import run_job
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")
SCHEDULES = ("none", "1f1b", "replicas")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One model, dataset and cache for all jobs here."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def job_of(shared, tmp_path):
    """A job over them, its run in the test's own folder."""

    def make(folder, schedule, *, compile="auto", dropout=0.0):
        return make_tiny_job(
            shared,
            "flux2",
            split={"devices": ["lazy:0", "lazy:1"]},
            cache={"vae_device": "cpu"},
            lora={"dropout": dropout},
            train={"steps": 2, "batch_size": 1, "accumulation": 3, "seed": 3, "compile": compile},
            pipeline={"schedule": schedule},
            output={"folder": str(tmp_path / folder), "save_every_steps": 0},
        )

    return make


@pytest.fixture(scope="module")
def plain_runs():
    """Runs that compile nothing, by schedule."""
    return {}


@pytest.fixture
def plain(job_of, plain_runs):
    def run(schedule):
        if schedule not in plain_runs:
            plain_runs[schedule] = _run(job_of("plain", schedule, compile="off"))
        return plain_runs[schedule]

    return run


def _run(job, **arguments):
    with emulated_cards():
        return run_job(job, **arguments)


def _run_one_step(job):
    seen = []
    stopped = _run(job, on_event=seen.append, should_stop=lambda: any(event.kind == "step" for event in seen))
    assert stopped.step == 1


def _instead_of_torch(monkeypatch, wrap, only=lambda index: True):
    """Blocks with wrap(their forward), in place of compiled ones; returns the handles."""
    handles = []

    def compile_blocks(model, family, devices, num_shapes):
        blocks = [block for each in family.block_lists for block in model.get_submodule(each.name)]
        blocks = [block for index, block in enumerate(blocks) if only(index)]
        for block in blocks:
            block.forward = wrap(block.forward)
        handles.append(CompiledBlocks(blocks, ExitStack()))
        return handles[-1]

    monkeypatch.setattr(assembly, "compile_if_possible", compile_blocks)
    return handles


def _then(change):
    """A wrapper that changes a forward's output."""
    return lambda forward: lambda *arguments, **named: change(forward(*arguments, **named))


def _as_it_is(forward):
    return lambda *arguments, **named: forward(*arguments, **named)


def _check_same(found, expected):
    """Up to what files say of the settings they were made with."""
    assert found.losses == expected.losses and found.eval_after == expected.eval_after
    file, other = map(load_file, (found.lora_path, expected.lora_path))
    assert list(file) == list(other) and all(torch.equal(file[name], other[name]) for name in other)


@_then
def _without_gradient(output):
    if isinstance(output, tuple):
        return tuple(each.detach() + 0 * each for each in output)
    return output.detach() + 0 * output


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_right_ones_stay_and_the_comparison_leaves_no_trace(job_of, plain, monkeypatch, caplog, schedule):
    """Losses, files and the order of the data are those of a run that compares nothing."""
    expected = plain(schedule)
    calls = []
    handles = _instead_of_torch(monkeypatch, _then(lambda output: calls.append(output) or output))
    caplog.set_level(logging.INFO, "devicebridge")
    found = _run(job_of("compared", schedule))
    assert calls and len(handles) == (2 if schedule == "replicas" else 1)
    assert "gradients of compiled blocks differ by 0.0 % at most" in caplog.text
    _check_same(found, expected)


@pytest.mark.parametrize(
    ("schedule", "only"),
    [*((schedule, lambda index: True) for schedule in SCHEDULES), ("none", lambda index: index == 1)],
    ids=[*SCHEDULES, "one block"],
)
def test_wrong_ones_are_given_up(job_of, plain, monkeypatch, caplog, schedule, only):
    """The run is the one without compiling, bit for bit; a gradient that one block loses is enough."""
    expected = plain(schedule)
    _instead_of_torch(monkeypatch, _without_gradient, only)
    found = _run(job_of("given up", schedule))
    assert "blocks are no longer compiled" in caplog.text and "wrong gradients" in caplog.text
    _check_same(found, expected)


def test_a_resumed_run_compares_again(job_of, monkeypatch, caplog):
    _instead_of_torch(monkeypatch, _as_it_is)
    job = job_of("run", "1f1b")
    _run_one_step(job)
    _instead_of_torch(monkeypatch, _without_gradient)
    assert _run(job, resume=True).step == 2
    assert "blocks are no longer compiled" in caplog.text


def test_dropout_and_too_little_memory_are_said(job_of, monkeypatch, caplog):
    handles = _instead_of_torch(monkeypatch, _as_it_is)
    _run(job_of("dropout", "none", dropout=0.3))
    assert "not compared: dropout" in caplog.text

    def full(handle):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    monkeypatch.setattr(CompiledBlocks, "paused", full)
    _run(job_of("full", "none"))
    assert "not compared: uncompiled ones need more memory" in caplog.text
    assert "no longer compiled" not in caplog.text and len(handles) == 2


def test_a_compiler_that_fails_is_given_up(job_of, plain, monkeypatch, caplog):
    def fail(output):
        raise AssertionError("a compiler's own mistake\nand where it happened")

    expected = plain("1f1b")
    _instead_of_torch(monkeypatch, _then(fail))
    _check_same(_run(job_of("given up", "1f1b")), expected)
    assert "fails: a compiler's own mistake" in caplog.text and "where it happened" not in caplog.text


def test_a_full_card_ends_the_run_where_it_is_compiled(job_of, monkeypatch):
    def fail(output):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    _instead_of_torch(monkeypatch, _then(fail))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _run(job_of("full", "none"))


def test_a_fault_on_the_second_card_alone_is_found(job_of, monkeypatch, caplog):
    """Whose gradients would be a part of the sum only."""
    handles = _instead_of_torch(monkeypatch, _without_gradient, only=lambda index: len(handles) == 1)
    _run(job_of("given up", "replicas"))
    assert len(handles) == 2 and "blocks are no longer compiled" in caplog.text


@pytest.mark.parametrize("is_resumed", [False, True])
def test_gradients_lost_inside_of_blocks_are_found(job_of, monkeypatch, caplog, is_resumed):
    """As torch 2.11 loses them in base layers: what goes around the layers still has a gradient."""

    def losing(forward):
        layers = [m.base_layer for m in forward.__self__.modules() if hasattr(m, "base_layer")]
        assert layers

        def run(*arguments, **named):
            hooks = [each.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),)) for each in layers]
            try:
                return forward(*arguments, **named)
            finally:
                for hook in hooks:
                    hook.remove()

        return run

    job = job_of("run", "none")
    if is_resumed:
        _run_one_step(job)
    _instead_of_torch(monkeypatch, losing)
    _run(job, resume=is_resumed)
    assert "blocks are no longer compiled" in caplog.text


def test_states_are_put_back_and_a_finished_run_compares_nothing(job_of, monkeypatch):
    """Also where somebody interrupts."""
    seen = []
    plain = loop.Trainer.compare_compiled

    def watched(trainer):
        before = trainer.order.state_dict(), random_states(trainer.devices)
        try:
            return plain(trainer)
        finally:
            after = trainer.order.state_dict(), random_states(trainer.devices)
            assert after[0] == before[0] and all(
                torch.equal(after[1][name], value) for name, value in before[1].items()
            )
            assert all(parameter.grad is None for parameter in trainer.lora.parameters().values())
            seen.append([block for each in trainer.compiled for block in each._blocks if "forward" in vars(block)])

    def draw(output):
        torch.rand(1)
        return output

    monkeypatch.setattr(loop.Trainer, "compare_compiled", watched)
    _instead_of_torch(monkeypatch, _then(draw))
    job = job_of("run", "none")
    assert _run(job).step == 2 and len(seen) == 1 and seen[0]
    assert _run(job, resume=True).step == 2 and len(seen) == 1

    pause = CompiledBlocks.paused

    @contextmanager
    def interrupted(handle):
        with pause(handle):
            yield
            raise KeyboardInterrupt

    monkeypatch.setattr(CompiledBlocks, "paused", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run(job_of("interrupted", "none"))
    assert len(seen) == 2 and seen[1]


@pytest.mark.parametrize(
    ("found", "expected", "difference", "is_fault"),
    [
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0]], 0.0, False),
        ([[0.0, 0.0], [3.0]], [[3.0, 4.0], [3.0]], float("inf"), True),
        ([[3.0, 4.0], [0.0]], [[3.0, 4.0], [0.0]], 0.0, False),  # a tensor without a gradient
        ([[3.0, 4.0], [1.0]], [[3.0, 4.0], [0.0]], float("inf"), True),
        ([[3.0, float("nan")], [1.0]], [[3.0, 4.0], [1.0]], float("inf"), True),
        ([None, [1.0]], [[3.0, 4.0], [1.0]], float("inf"), True),
        ([None, [1.0]], [None, [1.0]], 0.0, False),
    ],
)
def test_what_is_missing_is_a_fault(found, expected, difference, is_fault):
    tensors = [[None if values is None else torch.tensor(values) for values in side] for side in (found, expected)]
    comparison = compare_gradients(["a", "b"], *tensors)
    assert comparison.difference == difference and bool(comparison.fault) == is_fault


@pytest.mark.parametrize("expected", [[0.0, 0.0], [1.0, float("nan")], [float("inf"), 0.0]])
def test_nothing_to_compare_with_is_no_answer(expected):
    assert compare_gradients(["a"], [torch.tensor([0.0, 0.0])], [torch.tensor(expected)]) is None


def test_rounding_is_no_fault_and_another_direction_or_length_of_many_is():
    """A cosine of 0.7 to 0.8, as deep models of random weights in 8 bits have it."""
    expected = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    names = [str(index) for index in range(8)]
    for found, is_odd in (
        (expected + 0.9 * noise, False),
        (expected + 3 * noise, True),
        (noise, True),
        (-expected, True),
        (0.4 * expected, True),
        (0.6 * expected, False),
        (2.5 * expected, True),
    ):
        for count, is_fault in ((2, False), (3, is_odd)):
            mixed = [found] * count + [expected] * (8 - count)
            comparison = compare_gradients(names, mixed, [expected] * 8)
            assert comparison.num_odd == count * is_odd and bool(comparison.fault) == is_fault
