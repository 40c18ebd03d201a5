"""Compiled blocks must give the gradients of uncompiled ones, or the run goes on uncompiled."""

import logging
import re
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from devicebridge import assembly
from devicebridge.jobs import job as job_module
from devicebridge.jobs.job import run_job
from devicebridge.parallel.devices import random_states
from devicebridge.parallel.ranks.group import Ranks
from devicebridge.patches.compile_blocks import CompiledBlocks
from devicebridge.patches.lora_linear import apply_fused
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import encoded_before, make_tiny_job, run_steps
from devicebridge.training import compile_check, loop
from devicebridge.training.compile_check import _sample, _with_short_streams, compare_forwards
from diffusers.models.transformers.transformer_flux2 import Flux2TransformerBlock
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")
SCHEDULES = ("none", "pipeline", "data")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One model, dataset and cache for all jobs here."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def job_of(shared, tmp_path):
    """A job over them, its run in the test's own folder."""

    def make(folder, schedule, *, compile="auto", dropout=0.0):
        return make_tiny_job(
            shared, "flux2", split={"devices": ["lazy:0", "lazy:1"]},
            cache={"folder": encoded_before(tmp_path), "vae_device": "cpu"}, lora={"dropout": dropout},
            train={"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 3, "seed": 3, "compile": compile},
            parallel={"strategy": schedule}, output={"folder": str(tmp_path / folder), "save_every_steps": 0},
        )  # fmt: skip

    return make


_plain_runs = {}  # by schedule


@pytest.fixture
def plain(job_of):
    def run(schedule):
        if schedule not in _plain_runs:
            _plain_runs[schedule] = _run(job_of("plain", schedule, compile="off"))
        return _plain_runs[schedule]

    return run


def _run(job, **arguments):
    with emulated_cards():
        return run_job(job, **arguments)


def _instead_of_torch(monkeypatch, wrap, only=lambda index: True):
    """Blocks with wrap(their forward), in place of compiled ones; returns the handles."""
    handles = []

    def compile_blocks(model, family, devices, num_shapes):
        blocks = [block for each in family.block_lists for block in model.get_submodule(each.name)]
        blocks = [block for index, block in enumerate(blocks) if only(index)]
        handles.append(CompiledBlocks(ExitStack()))
        for block in blocks:
            handles[-1].compile(block, wrap)
        return handles[-1]

    monkeypatch.setattr(assembly, "compile_if_possible", compile_blocks)
    return handles


def _then(change):
    """A wrapper that changes a forward's output."""
    return lambda forward: lambda *arguments, **named: change(forward(*arguments, **named))


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


@pytest.mark.parametrize(
    "schedule", ["pipeline", *(pytest.param(each, marks=pytest.mark.long) for each in SCHEDULES if each != "pipeline")]
)
def test_right_ones_stay_and_the_comparison_leaves_no_trace(job_of, plain, monkeypatch, caplog, schedule):
    """Losses, files and the order of the data are those of a run that compares nothing."""
    expected = plain(schedule)
    calls = []
    handles = _instead_of_torch(monkeypatch, _then(lambda output: calls.append(output) or output))
    caplog.set_level(logging.INFO, "devicebridge")
    found = _run(job_of("compared", schedule))
    assert calls and len(handles) == (2 if schedule == "data" else 1)
    assert "off by 0, rounding explains" in caplog.text
    _check_same(found, expected)


@_then
def _failing(output):
    raise AssertionError("a compiler's own mistake\nand where it happened")


@pytest.mark.parametrize(
    ("schedule", "wrap", "only", "words"),
    [
        ("pipeline", _without_gradient, [0, 1, 2, 3], "as torch .* rounding explains"),
        ("none", _without_gradient, [1], "as torch .* rounding explains"),
        ("pipeline", _failing, [0, 1, 2, 3], "fails: a compiler's own mistake"),
        pytest.param("none", _without_gradient, [0, 1, 2, 3], "as torch", marks=pytest.mark.long),
        pytest.param("data", _without_gradient, [0, 1, 2, 3], "as torch", marks=pytest.mark.long),
    ],
    ids=["pipeline", "one block", "fails", "none", "data"],
)
def test_wrong_ones_are_given_up(job_of, plain, monkeypatch, caplog, schedule, wrap, only, words):
    """The run is the one without compiling, bit for bit; a gradient that one block loses is enough."""
    expected = plain(schedule)
    _instead_of_torch(monkeypatch, wrap, lambda index: index in only)
    _check_same(_run(job_of("given up", schedule)), expected)
    assert re.search(f"blocks are no longer compiled: .*{words}", caplog.text)
    assert "where it happened" not in caplog.text


def test_dropout_and_too_little_memory_are_said(job_of, monkeypatch, caplog):
    handles = _instead_of_torch(monkeypatch, _then(lambda output: output))
    _run(job_of("dropout", "none", dropout=0.3))
    assert "not compared with uncompiled ones: dropout" in caplog.text

    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    monkeypatch.setattr(compile_check, "compare_forwards", full)
    _run(job_of("full", "none"))
    assert "not all compiled blocks are compared with uncompiled ones: comparing needs more memory" in caplog.text
    assert "no longer compiled" not in caplog.text and len(handles) == 2


def test_data_that_cannot_be_read_is_not_the_compilers_fault(job_of, monkeypatch, caplog):
    """Also that of the second copy's first micro-batch."""
    _instead_of_torch(monkeypatch, _then(lambda output: output))
    load, loaded = loop.CachedSamples.load, []

    def fail(samples, *arguments):
        loaded.append(arguments)
        if len(loaded) == 2:
            raise OSError("the entry is gone")
        return load(samples, *arguments)

    job = job_of("run", "data")
    monkeypatch.setattr(loop.CachedSamples, "load", fail)
    with pytest.raises(RuntimeError, match="the entry is gone"):
        _run(job)
    assert "no longer compiled" not in caplog.text


def test_a_full_card_ends_the_run_where_it_is_compiled(job_of, monkeypatch):
    def fail(output):
        raise torch.cuda.OutOfMemoryError("as if the card were full")

    _instead_of_torch(monkeypatch, _then(fail))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _run(job_of("full", "none"))


def test_a_fault_on_the_second_card_alone_is_found(job_of, monkeypatch, caplog):
    """Whose gradients would be a part of the sum only."""
    handles = _instead_of_torch(monkeypatch, _without_gradient, only=lambda index: len(handles) == 1)
    _run(job_of("given up", "data"))
    assert len(handles) == 2 and "blocks are no longer compiled" in caplog.text


def test_gradients_lost_inside_of_a_block_are_found_by_a_resumed_run(job_of, monkeypatch, caplog):
    """As torch 2.11 loses them in base layers: what goes around the layers still has a gradient."""
    blocks = []

    def losing(forward):
        layers = [m.base_layer for m in forward.__self__.modules() if hasattr(m, "base_layer")]
        blocks.append(layers)
        layers = layers[-1:] if len(blocks) == 2 else []  # not of the first block, whose inputs need no gradient

        def run(*arguments, **named):
            hooks = [each.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),)) for each in layers]
            try:
                return forward(*arguments, **named)
            finally:
                for hook in hooks:
                    hook.remove()

        return run

    run_steps(job := job_of("run", "none"), cards=2)
    _instead_of_torch(monkeypatch, losing)
    _run(job, resume=True)
    assert all(blocks)
    assert "blocks are no longer compiled" in caplog.text


def test_blocks_are_uncompiled_where_another_rank_cannot_compile(job_of, monkeypatch, caplog):
    _instead_of_torch(monkeypatch, _then(lambda output: output))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, "torch fails"] if value == "" else [value])
    _run(job_of("run", "none"))
    assert "blocks are no longer compiled: rank 1: torch fails" in caplog.text


def test_states_are_put_back_and_a_finished_run_compares_nothing(job_of, monkeypatch):
    """Also where somebody interrupts."""
    seen = []
    plain = job_module.check_compiled

    def watched(trainer):
        before = trainer.order.state_dict(), random_states(trainer.devices)
        compiled = [vars(block)["forward"] for each in trainer.compiled for block in each._own]
        assert compiled
        try:
            return plain(trainer)
        finally:
            after = trainer.order.state_dict(), random_states(trainer.devices)
            assert after[0] == before[0] and all(torch.equal(after[1][name], each) for name, each in before[1].items())
            assert all(parameter.grad is None for parameter in trainer.lora.parameters().values())
            forwards = [vars(block)["forward"] for each in trainer.compiled for block in each._own]
            seen.append(all(now is then for now, then in zip(forwards, compiled, strict=True)))

    def draw(output):
        torch.rand(1)
        return output

    monkeypatch.setattr(job_module, "check_compiled", watched)
    _instead_of_torch(monkeypatch, _then(draw))
    job = job_of("run", "none")
    assert _run(job).step == 2 and len(seen) == 1 and seen[0]
    assert _run(job, resume=True).step == 2 and len(seen) == 1

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_check, "compare_forwards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run(job_of("interrupted", "none"))
    assert len(seen) == 2 and seen[1]


class Block(nn.Module):
    """Two layers with a norm between, in the type of the weights, as a block with a LoRA on the first."""

    def __init__(self, dtype=torch.float32, width=64, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(0.1 * torch.randn(width, 4, generator=generator).to(dtype))
        self.first, self.second = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        for layer in (self.first, self.second):
            layer.requires_grad_(False).weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)
            layer.weight.mul_(scale)
            layer.bias.mul_(scale)

    def forward(self, x, rest=()):
        return self.steps(x, lambda layer, value: layer(value))

    def steps(self, x, call):
        down = self.down.to(x.dtype)
        value = call(self.first, x) + x @ down @ down.t()
        return x + call(self.second, F.gelu(F.layer_norm(value, value.shape[-1:])))


def _input():
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def _wide(layer, value):
    return F.linear(value, layer.weight.float(), layer.bias.float())


def _compare(block, compiled, *, dtype=torch.float32):
    x = _input().to(dtype).requires_grad_()
    trained = {name: each for name, each in block.named_parameters() if each.requires_grad}
    comparison = compare_forwards(compiled, block, ((x, (torch.ones(2), None)), {}), trained)
    assert x.grad is None and block.down.grad is None
    return comparison


@pytest.mark.parametrize(("scheme", "most"), [(None, 0.3), ("fp8-compute", 0.5), ("int8-compute", 0.5)])
def test_other_rounding_is_no_fault(scheme, most):
    """bfloat16 as one who rounds after every operation, and as one who computes in float32 and rounds at the end. A
    last bit decides to which side a value of 8 bits is rounded; of another layer it is a fault."""
    block = Block(torch.bfloat16)
    if scheme is not None:
        block.first, block.second = (FrozenLinear8.from_linear(each, scheme) for each in (block.first, block.second))

    def fused(x, rest, by=1.0):
        product = _wide if scheme is None else lambda layer, value: layer(value)
        return block.steps(x.float(), lambda layer, value: product(layer, value) * by).to(x.dtype)

    comparison = _compare(block, fused, dtype=torch.bfloat16)
    assert comparison.difference > 0 and comparison.excess < most
    assert _compare(block, lambda x, rest: fused(x, rest, 1.25), dtype=torch.bfloat16).excess > 1


def _lost(layer, value):
    return layer(value.detach())


def _wrong_sign(layer, value):
    return layer(value.detach()) - (layer(value) - layer(value).detach())


def _off_by_a_tenth(layer, value):
    return layer(value) + 0.1 * (layer(value) - layer(value).detach())


@pytest.mark.parametrize("fault", [_lost, _wrong_sign, _off_by_a_tenth])
@pytest.mark.parametrize("name", ["first", "second"])
def test_what_one_layer_of_a_block_does_to_a_gradient_is_found(fault, name):
    """While every output is right."""
    block = Block()
    compiled = lambda x, rest: block.steps(  # noqa: E731
        x, lambda layer, value: fault(layer, value) if layer is getattr(block, name) else layer(value)
    )
    comparison = _compare(block, compiled)
    assert comparison.excess > 1 and "the gradient of" in str(comparison)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (None, "attn.to_q.base_layer"), (None, "ff.linear_in.base_layer"), (None, "attn.to_q.lora_B.default"),
        ("fp8-compute", "attn.add_k_proj.base_layer"), ("fp8-compute", "attn.to_out.0.base_layer"),
        ("int8-compute", "attn.to_q.base_layer"), ("int8-compute", "ff.linear_in.base_layer"),
    ],
)  # fmt: skip
def test_a_layer_of_a_real_block_that_loses_its_gradient_is_found(name, scheme):
    """However long the hidden states are: the norm that a block begins with makes the gradient from behind it as many
    times shorter than what passes by. Of a fresh LoRA one half is zero, and afterwards it is zero again."""
    block = _real_block(scheme)
    if "lora" in name:
        for each in (each for name, each in block.named_parameters() if "lora_B" in name):
            nn.init.zeros_(each)
    trained = {name: each for name, each in block.named_parameters() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in trained.items()}

    def forward(*arguments, change=lambda inputs: inputs):
        with block.get_submodule(name).register_forward_pre_hook(lambda module, inputs: change(inputs)):
            return block(*arguments)

    for rms in (1, 30, 300) if "lora" not in name else (1,):
        arguments = _real_arguments(rms), {}
        assert compare_forwards(forward, block, arguments, trained).excess < 1
        lost = partial(forward, change=lambda inputs: (inputs[0].detach(),))
        comparison = compare_forwards(lost, block, arguments, trained)
        assert comparison.excess > 1 and "the gradient of" in comparison.name
    assert all(torch.equal(each, before[name]) for name, each in trained.items())


def test_streams_that_are_parts_of_wider_tensors_keep_their_layout():
    """As FLUX.1's single blocks get theirs."""
    whole = 30 * torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    part = whole[:, 8:].requires_grad_()
    (found, other, same), _ = _with_short_streams(((part, whole[:, :16], part.detach()), {}), [part.shape] * 2)
    assert found.stride() == part.stride() and found.requires_grad and not found.is_contiguous()
    assert found.float().square().mean().sqrt().item() == pytest.approx(1 / 16, rel=0.5)
    factor = (part.float().norm() / found.float().norm()).log2().round().exp2()
    assert torch.equal(found.float() * factor, part.float())
    assert other.float().norm() < part.float().norm() / 100 and torch.equal(same, part)  # one for each output


def _real_block(scheme):
    torch.manual_seed(0)
    block = Flux2TransformerBlock(dim=128, num_attention_heads=2, attention_head_dim=64, mlp_ratio=2.0, bias=False)
    block = block.bfloat16().requires_grad_(False)
    linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    if scheme is not None:
        for name in linears:
            block.set_submodule(name, FrozenLinear8.from_linear(block.get_submodule(name), scheme))
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=8, target_modules=linears, init_lora_weights=False), block)
    apply_fused(block)
    return block.train()


def _real_arguments(rms):
    generator = torch.Generator().manual_seed(2)
    hidden, text = ((rms * torch.randn(1, n, 128, generator=generator)).bfloat16().requires_grad_() for n in (64, 32))
    modulation = [0.5 * torch.randn(1, 1, 6 * 128, generator=generator).bfloat16() for _ in range(2)]
    return hidden, text, *modulation, (torch.ones(96, 64), torch.zeros(96, 64))


def test_what_passes_a_block_by_hides_nothing():
    """An input and a gradient more than twenty times as long as what the block adds."""
    block = Block(torch.bfloat16, scale=0.02)
    lost = lambda x, rest: block.steps(x, _lost)  # noqa: E731
    other = lambda x, rest: x + 2 * (block(x) - x)  # noqa: E731
    with torch.no_grad():
        assert (block(_input()) - _input()).norm() < 0.05 * _input().norm()
        assert _compare(block, block, dtype=torch.bfloat16).excess == 0
        comparison = _compare(block, other, dtype=torch.bfloat16)
        assert comparison.excess > 1 and comparison.name == "output 0"
    assert _compare(block, lost, dtype=torch.bfloat16).excess > 1
    block = Block(torch.bfloat16, scale=1e-4)  # adds zeros, and a few bits that rounding decides on
    assert _compare(block, lambda x, rest: block.steps(x.float(), _wide).to(x.dtype), dtype=torch.bfloat16).excess < 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite(value):
    """In compiled code alone it is a fault; in both nothing can be told."""
    block = Block()
    assert _compare(block, lambda x, rest: block(x) * value).difference == float("inf")
    lost = _compare(block, lambda x, rest: block(x).detach())
    assert lost.difference == float("inf") and "the gradient of" in lost.name
    with torch.no_grad():
        block.second.weight.fill_(value)
    assert _compare(block, block) is None


@pytest.mark.parametrize(
    ("excess", "expected"), [((2, 0.5, 3), 0.5), ((2, 3, 0.5), 0.5), ((2, 3, 4), 2), ((2, None), None)]
)
def test_what_chance_may_have_done_is_looked_at_again(monkeypatch, excess, expected):
    found = iter(None if each is None else compile_check.BlockDifference("a", each, 1.0) for each in excess)
    monkeypatch.setattr(compile_check, "_compare_once", lambda *arguments: next(found))
    comparison = _compare(Block(), Block())
    assert (comparison and comparison.excess) == expected


@pytest.mark.parametrize("shape", [(2048, 6144), (1600, 6144), (14040, 5120), (3, 5)])
def test_a_part_of_a_large_tensor_has_all_of_its_rows_and_columns(shape):
    rows, columns = torch.arange(shape[0])[:, None].expand(shape), torch.arange(shape[1]).expand(shape)
    assert min(2**17, rows.numel()) <= len(_sample(rows)) <= 2**18
    assert (len(_sample(rows).unique()), len(_sample(columns).unique())) == shape
    assert _sample(rows).untyped_storage().nbytes() <= 2**20 and _sample(columns[:4]).data_ptr() != columns.data_ptr()
