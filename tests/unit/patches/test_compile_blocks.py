"""Compiled blocks: the numbers of uncompiled ones, one graph per kind, and no trace after removal."""

import dataclasses

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.families.registry import FAMILIES
from devicebridge.families.tensor_plan import BlockList
from devicebridge.parallel.offload.recompute import InPlaceGuard
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.patches import compile_blocks
from devicebridge.patches.compile_blocks import apply_compile, compile_fault, compile_if_possible
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.emulated import CARDS
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from devicebridge.training.compile_check import BlockCheck, worst_of
from torch import nn
from torch.distributed.fsdp import FSDPModule

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def _make(name, scheme=None):
    model, family = TINY[name].make_model(seed=0), FAMILIES[name]
    if scheme is not None:
        apply_quantization(model, family, QuantizeSettings(scheme))
    lora = apply_lora(model, family, LoraSettings(rank=2, alpha=3), seed=1)
    for parameter in lora.parameters().values():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model.train(), lora


def _step(model, lora, name, seed=0):
    for parameter in lora.parameters().values():
        parameter.grad = None
    output = model(**TINY[name].make_inputs(seed=seed), return_dict=False)[0]
    output.square().mean().backward()
    return output.detach(), {n: p.grad.clone() for n, p in lora.parameters().items()}


class _Counted:
    """torch.compile's "eager" backend that counts the graphs of each kind of block."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("flux2", "int8-compute"),
        *(pytest.param(name, None, marks=pytest.mark.long) for name in ("flux1", "flux2", "wan")),
        pytest.param("flux2", "fp8-compute", marks=pytest.mark.long),
    ],
)
def test_output_and_gradients_are_those_without(name, scheme):
    model, lora = _make(name, scheme)
    expected = _step(model, lora, name)
    torch._dynamo.reset()
    handle = apply_compile(model, FAMILIES[name], backend="aot_eager")
    found = _step(model, lora, name)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4 * expected[0].abs().max().item())
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())
    _check_blocks(model, lora, name, handle, found)
    handle.remove()
    again = _step(model, lora, name)
    assert torch.equal(again[0], expected[0]) and all(torch.equal(again[1][n], g) for n, g in expected[1].items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def _check_blocks(model, lora, name, handle, expected):
    """Every block is right by itself, too, and to look at it costs no graph and changes nothing."""
    check, num_graphs = BlockCheck(model), handle.num_graphs
    with handle.watched(check):
        output, gradients = _step(model, lora, name)
    blocks = [block for each in FAMILIES[name].block_lists for block in model.get_submodule(each.name)]
    assert len(check.found) == len(blocks) and worst_of(check.found).excess < 0.1, check.found
    assert handle.num_graphs == num_graphs and torch.equal(output, expected[0])
    assert all(torch.equal(gradients[parameter], gradient) for parameter, gradient in expected[1].items())


def _of_size(name, *, rows=0, tokens=0):
    """The tiny family with larger latents and longer captions."""
    tiny = TINY[name]
    channels, frames, height, width = tiny.latent_shape
    text = {key: (s[0] + tokens, *s[1:]) if len(s) > 1 else s for key, s in tiny.text_shapes.items()}
    return dataclasses.replace(tiny, latent_shape=(channels, frames, height + rows, width), text_shapes=text)


@pytest.mark.parametrize("name", ["flux2", *(pytest.param(name, marks=pytest.mark.long) for name in ("flux1", "wan"))])
def test_graphs_for_any_number_of_tokens_serve_every_bucket_and_caption(name):
    """Numbers as without, and after the second size (the first may have equal ones) no graph anew."""
    model, lora = _make(name)
    torch._dynamo.reset()
    backend, counts = _Counted(), []
    for size in (_of_size(name), _of_size(name, rows=2, tokens=1), _of_size(name, rows=4, tokens=4)):
        expected = model(**size.make_inputs(), return_dict=False)[0].detach()
        handle = apply_compile(model, FAMILIES[name], is_dynamic=True, backend=backend)
        found = model(**size.make_inputs(), return_dict=False)[0]
        found.square().mean().backward()
        handle.remove()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        counts.append(backend.num_graphs)
    assert counts[1] == counts[2] <= 2 * counts[0]


def test_a_job_of_several_shapes_is_compiled_for_any(monkeypatch):
    model, _ = _make("flux2")
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    for num_shapes in (1, 2, 0):
        handle = compile_if_possible(model, FAMILIES["flux2"], [CPU, CPU], num_shapes)
        assert handle is not None
        handle.remove()
    assert {options["dynamic"] for options in seen} == {False, True}
    assert [options["dynamic"] for options in seen[:: len(seen) // 3]] == [False, True, True]
    if "recompile_limit" in seen[0]:
        assert [options["recompile_limit"] for options in seen[:: len(seen) // 3]] == [16, 64, 64]


def test_what_cannot_compile_says_why_and_is_left_alone(caplog):
    assert "nothing is known" in compile_fault(CARDS[:1])
    model, _ = _make("flux2")
    assert compile_if_possible(model, FAMILIES["flux2"], CARDS[:1], 1) is None
    cpu = [torch.device("cpu")]
    assert compile_if_possible(model, FAMILIES["flux2"], 9 * cpu, 0) is None
    assert caplog.text.count("not compiled") == 2 and "torch keeps 256" in caplog.text
    assert not any("forward" in module.__dict__ for module in model.modules())


class _Unet(nn.Module):
    """Blocks whose parts are called one by one, as in UNets of ComfyUI; torch's own is one of them."""

    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([_Part(width), nn.Linear(width, 2)]) for width in widths)
        for part in (part for block in self.blocks for part in block):
            part.forward = InPlaceGuard(part)

    def forward(self, x):
        for part, narrow in self.blocks:
            x = narrow(part(x))
        return x.sum()


class _Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(2, width)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        scaled = y * 2
        y += 1  # which the backward of tanh needs as it was
        return y * scaled


class _Looking(_Part):
    """Computes something else in another place."""

    def forward(self, x, transformer_options=None):
        return super().forward(x) * (2 if transformer_options["block"] == ("input", 1) else 1)


def test_parts_that_are_called_one_by_one_are_compiled_one_by_one(caplog):
    torch.manual_seed(1)
    model, x, backend = _Unet(range(3, 15)), torch.randn(4, 2), _Counted()
    row = next(each for each in NATIVE_MODELS if each.hooks_children)
    family = dataclasses.replace(FAMILIES["flux2"], native=row, block_lists=(BlockList("blocks"),))
    plain = torch.autograd.grad(model(x), list(model.parameters()))
    assert compile_if_possible(model, family, 3 * [CPU], 1) is None  # 8 graphs of 12 sizes on 3 devices
    handle = apply_compile(model, family, backend=backend)
    found = torch.autograd.grad(model(x), list(model.parameters()))
    assert backend.num_graphs == 12
    handle.remove()
    assert all(isinstance(part.forward, InPlaceGuard) for block in model.blocks for part in block)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
    model = _Unet([3] * 9)
    for block in model.blocks:
        block[0] = _Looking(3)
        block[0].forward = InPlaceGuard(block[0])
    assert compile_if_possible(model, family, 4 * [CPU], 1) is None
    for count in (12, 9):  # of parts that look where they are each needs graphs of its own
        assert f"{count} kinds of block of one class may need 288 graphs" in caplog.text


def test_a_step_and_an_evaluation_need_no_more_graphs_per_shape_than_reckoned():
    """Recomputed and kept blocks, training and evaluation, on the limit that a job sets."""
    model, lora = _make("flux2")
    split = apply_block_split(model, FAMILIES["flux2"], plan_manual(block_names(model, FAMILIES["flux2"]), [CPU], []))
    model.enable_gradient_checkpointing(split.checkpoint)
    torch._dynamo.reset()
    backend = _Counted()
    handle = apply_compile(model, FAMILIES["flux2"], max_graphs=8, backend=backend)
    for kept in ([0], [2]):
        split.keep_activations(kept)
        _step(model, lora, "flux2")
        check, before = BlockCheck(model), backend.num_graphs
        with handle.watched(check):
            _step(model, lora, "flux2")
        assert backend.num_graphs == before and worst_of(check.found).excess < 0.1
        assert any("gradient" in each.name for each in check.found)
    model.eval()
    with torch.no_grad():
        model(**TINY["flux2"].make_inputs(seed=0), return_dict=False)
    assert 4 * 2 <= backend.num_graphs <= 8 * 2  # two kinds of block
    handle.remove()


def test_a_compiler_that_refuses_leaves_no_trace(monkeypatch, caplog):
    model, _ = _make("flux2")
    calls = []

    def compile_twice(function, **options):
        calls.append(function)
        if len(calls) > 1:
            raise RuntimeError("torch.compile is not supported on this Python")
        return function

    monkeypatch.setattr(torch, "compile", compile_twice)
    assert compile_if_possible(model, FAMILIES["flux2"], [CPU], 1) is None
    assert "not supported" in caplog.text
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_class_that_fsdp_has_added_to_is_still_its_makers() -> None:
    """FSDP gives each module a class of its own, which says that it is torch's."""

    class Own(nn.Linear):
        pass

    def as_fsdp(cls: type) -> type:
        return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": "torch.distributed.fsdp"})

    found = [compile_blocks._is_of_others(each) for each in (Own, as_fsdp(Own), nn.Linear, as_fsdp(nn.Linear))]
    assert found == [True, True, False, False]


class _Packed(nn.Module):
    """Writes into rows of what a norm gave, as MiniMax H3's blocks do, and into rows of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor, segments: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
        h = self.norm(x)
        for first, last, row in segments:
            h[first:last].mul_(1 + self.gate[row]).add_(self.gate[1 - row])
        other = h.sin()
        for first, last, row in segments:
            x[first:last].addcmul_(other[first:last], self.gate[row])
        x[:, 1:].mul_(h[:, 1:])
        return x * h


def test_rows_that_are_written_into_become_new_tensors() -> None:
    """Autograd refuses the graph as it is: what is written into was saved."""
    torch.manual_seed(2)
    torch._dynamo.reset()
    module, x = _Packed().double(), torch.randn(6, 4, dtype=torch.float64)
    segments = ((0, 2, 1), (2, 6, 0), (1, 3, 1))
    given = [x.clone() for _ in range(2)]
    compiled = torch.compile(module, backend=compile_blocks.OutOfPlace("aot_eager"))
    with torch.no_grad():
        expected = module(given[0], segments)
    y = compiled(given[1], segments)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(given[1], given[0])
    y.square().sum().backward()
    length, losses = module.gate.grad.norm(), []
    with torch.no_grad():
        for sign in (1, -2):  # there, and to the other side
            module.gate.add_(sign * 1e-5 * module.gate.grad / length)
            losses.append(float(module(x.clone(), segments).square().sum()))
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(float(length), rel=1e-6)


WRITES = {  # behind a.mul_(3), where a is h[:3]
    "a row": lambda h, a: a[1:2].add_(1),
    "all rows": lambda h, a: h.add_(1),
    "a view": lambda h, a: a.view(-1).add_(1),
    "other rows": lambda h, a: h[1:4].add_(1),
    "an item": lambda h, a: h.__setitem__(1, 3),
    "out": lambda h, a: torch.add(h.detach(), 1, out=h.detach()),
}


@pytest.mark.parametrize("read", [0, 1], ids=["all", "rows"])
@pytest.mark.parametrize("write", WRITES)
def test_rows_are_not_renewed_where_a_later_write_would_reach_some_of_them(write: str, read: int) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        a = h[:3]
        a.mul_(3)
        WRITES[write](h, a)
        return (h, a)[read] * 2

    torch._dynamo.reset()
    x = torch.randn(4, 3, requires_grad=True)
    compiled = torch.compile(compute, backend=compile_blocks.OutOfPlace("aot_eager"))
    found, expected = compiled(x), compute(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)
