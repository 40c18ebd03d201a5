"""A frozen linear and its LoRA, LoKr, LoHa or OFT computed together, in the type of x, to which float32 weights are
rounded.

Legend: M rows, K in_features, N out_features, R rank, s scaling (alpha / rank).

LoRA, around a plain linear or a FrozenLinear8; x and a [M, R] are kept for the backward:

    forward    a = s x A^T;  y = base(x);  y += a B^T
    backward   b = s g B;    gx = base's grad_input(g);  gx += b A;   gA = b^T x;   gB = g^T a

LoKr (LyCORIS, arXiv 2309.14859) adds s kron(W1, W2) to a weight, where W2 may be W2a W2b of rank R. With x cut into
rows X [in1, in2], two small products take the place of a matrix [N, K]:

    y = base(x) + s W1 X W2^T        W1 [out1, in1], W2 [out2, in2], N = out1 out2, K = in1 in2

LoHa (LyCORIS) adds s (W1a W1b) * (W2a W2b), value by value, made in x's type.

Both with a trained magnitude m [N] (DoRA, arXiv 2402.09353; of LoKr: DoKr), where D is what they add to a weight W:

    y = m / |W + D| (W + D) x + bias        norms of rows, which count as constants in the backward

OFT (arXiv 2306.07280) rotates a layer's outputs without its bias, in blocks of b rows. ComfyUI and LyCORIS read
"oft_blocks" [N / b, b, b] so; PEFT's OFT rotates inputs, and no file of the one is a file of the other:

    y = base(x) + (base(x) - bias) (R - 1)        R = (1 + Q) (1 - Q)^-1, Q = oft_blocks - oft_blocks^T (Cayley)

Each of PEFT's layers, which have one adapter, gets a subclass whose forward computes this way where PEFT would compute
exactly that (no dropout, no autocast). Why: docs/decisions/0005-eight-bit-linears.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..quantization.eight_bit import grad_input8, linear8
from ..quantization.frozen_linear import FrozenLinear8, is_autocasting
from ..quantization.quantize import full_weight
from .lora import TRAINABLE_DTYPES


def apply_fused(model: nn.Module) -> None:
    """Let PEFT's LoRA layers around plain linears and FrozenLinear8, LoKr and LoHa compute as above, in place; LoRA
    with a variant (DoRA) or dropout as before."""
    from peft.tuners.loha.layer import Linear as LohaLinear
    from peft.tuners.lokr import Linear as LokrLinear
    from peft.tuners.lora import Linear as LoraLinear

    outputs: dict[Any, Any] = {LoraLinear: _lora_output, LokrLinear: _lycoris_output, LohaLinear: _lycoris_output}
    for layer in model.modules():
        own: Any = type(layer)
        if own in outputs:
            layer.__class__ = _fused_class(own, outputs[own])


def fit_loha(layers: Iterable[Any], adapter: str, rank: int) -> None:
    """Draw PEFT's LoHa anew where it went by the shape of a weight whose numbers are packed, as GGUF has them."""
    for layer in layers:
        base = layer.base_layer
        if base.weight.shape[-1] != base.in_features:
            layer.create_adapter_parameters(adapter, rank, (base.out_features, base.in_features))
            layer.reset_adapter_parameters(adapter)
            for kind in layer.adapter_layer_names:  # as PEFT does, which would round them too
                getattr(layer, kind).to(base.weight.device)


@torch.no_grad()
def add_magnitudes(layers: Iterable[Any], adapter: str) -> None:
    """Give PEFT's LoKr and LoHa layers magnitudes that are trained, the norms of the rows of their weights."""
    for layer in layers:
        weight = full_weight(layer.base_layer).float()
        layer.dora_scale = nn.ParameterDict({adapter: nn.Parameter(weight.norm(dim=1))})


@torch.no_grad()
def changed_weight(layer: Any, adapter: str) -> Tensor:
    """W + D of a layer of PEFT's with LoRA, LoKr or LoHa, float32, without a magnitude. [N, K]"""
    if adapter in getattr(layer, "lora_A", ()):
        added = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
    elif hasattr(layer, "hada_w1_a"):
        added = _loha_product(layer, adapter, torch.float32)
    else:
        first, *second = (each.float() for each in _lokr_factors(layer, adapter))
        added = torch.kron(first, second[0] if len(second) == 1 else second[1] @ second[0])
    weight = full_weight(layer.get_base_layer()).to(added.device).float()  # of a block that streams it may be elsewhere
    return weight + layer.scaling[adapter] * added


def oft_block_size(rows: int, most: int) -> int:
    """Rows of a block: their largest divisor that is not above `most`; 1 rotates nothing."""
    return next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)


def oft_change(blocks: Tensor) -> Tensor:
    """R - 1 = 2 Q (1 - Q)^-1 of blocks, float32, exactly zero of zeros. [N / b, b, b]"""
    skew = blocks.float() - blocks.float().mT
    unit = torch.eye(skew.shape[-1], device=skew.device)
    return 2 * torch.linalg.solve_ex(unit - skew, skew)[0]  # 1 - Q is never singular


def apply_oft(model: nn.Module, targets: Sequence[str], size: int, adapter: str) -> None:
    """Put OFT around these linears, in place, with blocks of at most this size, all zero."""
    for name in targets:
        base: Any = model.get_submodule(name)
        model.set_submodule(name, _oft_class()(base, oft_block_size(base.out_features, size), adapter))


@cache
def _oft_class() -> type:
    from peft.tuners.tuners_utils import BaseTunerLayer

    class OftLinear(nn.Module, BaseTunerLayer):
        adapter_layer_names = ("oft_blocks",)

        def __init__(self, base: Any, size: int, adapter: str) -> None:
            super().__init__()
            self.base_layer, self._disable_adapters, self.merged_adapters = base, False, []
            self.in_features, self.out_features = base.in_features, base.out_features
            blocks = torch.zeros(base.out_features // size, size, size, device=base.weight.device)
            self.oft_blocks = nn.ParameterDict({adapter: nn.Parameter(blocks)})

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base_layer(x)
            if self._disable_adapters:
                return y
            (blocks,) = self.oft_blocks.values()
            bias = self.base_layer.bias
            rows = (y if bias is None else y - bias.to(y.dtype)).unflatten(-1, blocks.shape[:2])
            change = oft_change(blocks).to(y.dtype)
            return y + torch.einsum("...kn,knm->...km", rows, change).flatten(-2)

    return OftLinear


@cache
def _fused_class(peft_class: type, compute: Callable[[Any, Tensor], Tensor | None]) -> type:
    """A subclass rather than an attribute of each layer, so that a copied model calls its own layers. compute: (layer,
    x) -> output; None if PEFT must compute."""

    class Fused(peft_class):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = None if args or kwargs else compute(self, x)
            return super().forward(x, *args, **kwargs) if output is None else output

    Fused.__name__ = peft_class.__name__  # what a printed model shows
    return Fused


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_known_base(base: nn.Module) -> bool:
    return isinstance(base, FrozenLinear8) or (type(base) is nn.Linear and base.weight.dtype in TRAINABLE_DTYPES)


def _lora_output(layer: Any, x: Tensor) -> Tensor | None:
    base = layer.base_layer
    if layer.disable_adapters or layer.lora_variant or is_autocasting(x) or not _is_known_base(base):
        return None
    (name,) = layer.active_adapters
    parts = (layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name])
    is_dropping = isinstance(parts[2], nn.Dropout) and layer.training
    is_frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    # Nor where somebody hangs on a call that this file would pass by. Asked for every LoRA layer at every call, hence
    # not through nn.Module's __getattr__.
    of_each = (each.__dict__ for each in (base, *parts))
    if is_dropping or not is_frozen or any("forward" in own or any(own[hooks] for hooks in _HOOKS) for own in of_each):
        return None
    if x.dtype not in TRAINABLE_DTYPES:
        return None
    a, b, scaling = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    if torch.compiler.is_compiling():  # its own fusions; the opaque function below would be in their way
        low = F.linear(x, a.to(x.dtype)) * scaling
        return base(x) + F.linear(low, b.to(x.dtype))  # type: ignore[no-any-return]
    out = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), a, b, scaling, base)
    return out.view(*x.shape[:-1], out.shape[-1])


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, a: Tensor, b: Tensor, scaling: float, base: nn.Linear) -> Tensor:
        low = rows @ a.to(rows.dtype).t()
        if scaling != 1:
            low *= scaling
        ctx.save_for_backward(rows, low, a, b)
        ctx.base, ctx.scaling = base, scaling
        if isinstance(base, FrozenLinear8):
            out = linear8(rows, base.weight, base.scale, base.bias, base.rotation, base.packing)
        else:
            out = F.linear(rows, base.weight, base.bias)
        return out.addmm_(low, b.to(rows.dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, a, b = ctx.saved_tensors
        grad_low = g @ b.to(g.dtype)
        if ctx.scaling != 1:
            grad_low *= ctx.scaling
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            base = ctx.base
            if isinstance(base, FrozenLinear8):
                grad_x = grad_input8(g, base.weight, base.scale, base.rotation, base.packing)
            else:
                grad_x = g @ base.weight
            grad_x.addmm_(grad_low, a.to(g.dtype))
        if ctx.needs_input_grad[1]:
            grad_a = (grad_low.t() @ rows).to(a.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = (g.t() @ low).to(b.dtype)
        return grad_x, grad_a, grad_b, None, None


def _lycoris_output(layer: Any, x: Tensor) -> Tensor | None:
    magnitudes = layer._modules.get("dora_scale")
    if layer.disable_adapters or magnitudes is None and is_autocasting(x):  # PEFT would leave magnitudes out
        return None
    (name,) = layer.active_adapters
    y: Tensor = layer.base_layer(x)
    if hasattr(layer, "hada_w1_a"):
        added = F.linear(x, _loha_product(layer, name, x.dtype)) * layer.scaling[name]
    else:
        first, *second = (each.to(x.dtype) for each in _lokr_factors(layer, name))
        rows = x.reshape(*x.shape[:-1], first.shape[1], -1)
        for factor in second:
            rows = F.linear(rows, factor)
        scaling = layer.scaling[name]
        added = F.linear(rows.mT, first if scaling == 1 else first * scaling).mT.flatten(-2)
    if magnitudes is None:
        return y + added
    bias = layer.base_layer.bias
    ratio = magnitudes[name].float() / changed_weight(layer, name).norm(dim=1)
    whole = added + (y if bias is None else y - bias.to(y.dtype))
    return y + added + whole * (ratio - 1).to(y.dtype)


def _loha_product(layer: Any, name: str, dtype: torch.dtype) -> Tensor:
    a1, b1, a2, b2 = (getattr(layer, f"hada_w{n}_{side}")[name].to(dtype) for n in (1, 2) for side in "ab")
    return (a1 @ b1) * (a2 @ b2)  # type: ignore[no-any-return]


def _lokr_factors(layer: Any, name: str) -> tuple[Tensor, ...]:
    """W1, and W2 or what it is the product of, the last one first. PEFT halves W1 where it is asked to alone."""
    second = (layer.lokr_w2[name],) if name in layer.lokr_w2 else (layer.lokr_w2_b[name], layer.lokr_w2_a[name])
    return layer.lokr_w1[name], *second
