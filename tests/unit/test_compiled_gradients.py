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


def _job(tmp_path, folder, schedule, *, compile="auto", dropout=0.0):
    return make_tiny_job(
        tmp_path,
        "flux2",
        split={"devices": ["lazy:0", "lazy:1"]},
        cache={"vae_device": "cpu"},
        lora={"dropout": dropout},
        train={"steps": 2, "batch_size": 1, "accumulation": 3, "seed": 3, "compile": compile},
        pipeline={"schedule": schedule},
        output={"folder": str(tmp_path / folder), "save_every_steps": 0},
    )


def _run(job, **arguments):
    with emulated_cards():
        return run_job(job, **arguments)


def _instead_of_torch(monkeypatch, change, only=lambda index: True):
    """Blocks whose forward is `change` of their own, in place of compiled ones; returns the handles."""
    handles = []

    def wrap(forward):
        return lambda *arguments, **named: change(forward(*arguments, **named))

    def compile_blocks(model, family, devices, num_shapes):
        blocks = [block for each in family.block_lists for block in model.get_submodule(each.name)]
        blocks = [block for index, block in enumerate(blocks) if only(index)]
        for block in blocks:
            block.forward = wrap(block.forward)
        handles.append(CompiledBlocks(blocks, ExitStack()))
        return handles[-1]

    monkeypatch.setattr(assembly, "compile_if_possible", compile_blocks)
    return handles


def _same_files(*paths):
    """Up to what they say of the settings they were made with."""
    found, plain = map(load_file, paths)
    return list(found) == list(plain) and all(torch.equal(found[name], plain[name]) for name in plain)


def _without_gradient(output):
    if isinstance(output, tuple):
        return tuple(map(_without_gradient, output))
    return output.detach() + 0 * output


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_right_ones_stay_and_the_comparison_leaves_no_trace(tmp_path, monkeypatch, caplog, schedule):
    """Losses, files and the order of the data are those of a run that compares nothing."""
    plain = _run(_job(tmp_path, "plain", schedule, compile="off"))
    calls = []
    handles = _instead_of_torch(monkeypatch, lambda output: calls.append(output) or output)
    caplog.set_level(logging.INFO, "devicebridge")
    found = _run(_job(tmp_path, "compared", schedule))
    assert calls and len(handles) == (2 if schedule == "replicas" else 1)
    assert "gradients of compiled blocks differ by 0.0 % at most" in caplog.text
    assert found.losses == plain.losses and found.eval_after == plain.eval_after
    assert _same_files(found.lora_path, plain.lora_path)


@pytest.mark.parametrize(
    ("schedule", "only"),
    [*((schedule, lambda index: True) for schedule in SCHEDULES), ("none", lambda index: index == 1)],
    ids=[*SCHEDULES, "one block"],
)
def test_wrong_ones_are_given_up(tmp_path, monkeypatch, caplog, schedule, only):
    """The run is the one without compiling, bit for bit; a gradient that one block loses is enough."""
    plain = _run(_job(tmp_path, "plain", schedule, compile="off"))
    _instead_of_torch(monkeypatch, _without_gradient, only)
    found = _run(_job(tmp_path, "given up", schedule))
    assert "blocks are no longer compiled" in caplog.text and "wrong gradients" in caplog.text
    assert found.losses == plain.losses and found.eval_after == plain.eval_after
    assert _same_files(found.lora_path, plain.lora_path)


def test_a_resumed_run_compares_again(tmp_path, monkeypatch, caplog):
    _instead_of_torch(monkeypatch, lambda output: output)
    job, seen = _job(tmp_path, "run", "1f1b"), []
    stopped = _run(job, on_event=seen.append, should_stop=lambda: any(e.kind == "step" for e in seen))
    assert stopped.step == 1
    _instead_of_torch(monkeypatch, _without_gradient)
    assert _run(job, resume=True).step == 2
    assert "blocks are no longer compiled" in caplog.text


def test_dropout_and_too_little_memory_are_said(tmp_path, monkeypatch, caplog):
    handles = _instead_of_torch(monkeypatch, lambda output: output)
    _run(_job(tmp_path, "dropout", "none", dropout=0.3))
    assert "not compared: dropout" in caplog.text

    def full(handle):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    monkeypatch.setattr(CompiledBlocks, "paused", full)
    _run(_job(tmp_path, "full", "none"))
    assert "not compared: uncompiled ones need more memory" in caplog.text
    assert "no longer compiled" not in caplog.text and len(handles) == 2


def test_a_compiler_that_fails_is_given_up(tmp_path, monkeypatch, caplog):
    def fail(output):
        raise AssertionError("a compiler's own mistake\nand where it happened")

    plain = _run(_job(tmp_path, "plain", "1f1b", compile="off"))
    _instead_of_torch(monkeypatch, fail)
    found = _run(_job(tmp_path, "given up", "1f1b"))
    assert found.losses == plain.losses and _same_files(found.lora_path, plain.lora_path)
    assert "fails: a compiler's own mistake" in caplog.text and "where it happened" not in caplog.text


def test_a_full_card_ends_the_run_where_it_is_compiled(tmp_path, monkeypatch):
    def fail(output):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    _instead_of_torch(monkeypatch, fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _run(_job(tmp_path, "full", "none"))


def test_a_fault_on_the_second_card_alone_is_found(tmp_path, monkeypatch, caplog):
    """Whose gradients would be a part of the sum only."""
    handles = _instead_of_torch(monkeypatch, _without_gradient, only=lambda index: len(handles) == 1)
    _run(_job(tmp_path, "given up", "replicas"))
    assert len(handles) == 2 and "blocks are no longer compiled" in caplog.text


@pytest.mark.parametrize("is_resumed", [False, True])
def test_gradients_lost_inside_of_blocks_are_found(tmp_path, monkeypatch, caplog, is_resumed):
    """As torch 2.11 loses them in base layers: what goes around the layers still has a gradient."""
    is_losing = []

    def lose(module, inputs):
        return (inputs[0].detach(),) if is_losing else None

    def compile_blocks(model, family, devices, num_shapes):
        blocks = [block for each in family.block_lists for block in model.get_submodule(each.name)]
        for module in model.modules():
            if hasattr(module, "base_layer"):
                module.base_layer.register_forward_pre_hook(lose)

        def wrap(forward):
            def losing(*arguments, **named):
                is_losing.append(True)
                try:
                    return forward(*arguments, **named)
                finally:
                    is_losing.pop()

            return losing

        for block in blocks:
            block.forward = wrap(block.forward)
        return CompiledBlocks(blocks, ExitStack())

    job = _job(tmp_path, "run", "none")
    if is_resumed:
        seen = []
        _run(job, on_event=seen.append, should_stop=lambda: any(e.kind == "step" for e in seen))
    monkeypatch.setattr(assembly, "compile_if_possible", compile_blocks)
    _run(job, resume=is_resumed)
    assert "blocks are no longer compiled" in caplog.text


def test_states_are_put_back_and_a_finished_run_compares_nothing(tmp_path, monkeypatch):
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
    _instead_of_torch(monkeypatch, draw)
    job = _job(tmp_path, "run", "none")
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
        _run(_job(tmp_path, "interrupted", "none"))
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
