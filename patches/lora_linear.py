"""A frozen linear and its LoRA, LoKr or LoHa computed together, in the type of x, to which float32 weights are
rounded.

Legend: M rows, K in_features, N out_features, R rank, s scaling (alpha / rank).

LoRA, around a plain linear or a FrozenLinear8; x and a [M, R] are kept for the backward:

    forward    a = s x A^T;  y = base(x);  y += a B^T
    backward   b = s g B;    gx = base's grad_input(g);  gx += b A;   gA = b^T x;   gB = g^T a

LoKr (LyCORIS, arXiv 2309.14859) adds s kron(W1, W2) to a weight, where W2 may be W2a W2b of rank R. With x cut into
rows X [in1, in2], kron(W1, W2) x is W1 X W2^T: two small products in place of a matrix [N, K], which PEFT makes anew
for every call and keeps for the backward.

    y = base(x) + s W1 X W2^T        W1 [out1, in1], W2 [out2, in2], N = out1 out2, K = in1 in2

LoHa (LyCORIS) adds s (W1a W1b) * (W2a W2b), value by value. That matrix [N, K] is made in x's type, where PEFT makes
it and the product in float32. Autograd keeps it and both of its factors for the backward, in a recomputed block.

PEFT keeps its layers: names, state dict, adapters and merging are untouched. Each layer gets a subclass of its class.
Its forward computes this way where PEFT would compute exactly that (one active adapter, no dropout, not merged, no
autocast), and calls PEFT's otherwise. Why: docs/decisions/0005-eight-bit-linears.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..quantization.eight_bit import grad_input8, linear8
from ..quantization.frozen_linear import FrozenLinear8, is_autocasting
from .lora import TRAINABLE_DTYPES


def apply_fused_lora(model: nn.Module) -> list[nn.Module]:
    """Let PEFT's LoRA layers around plain linears and FrozenLinear8 compute as above, in place; returns them.

    No-op for layers whose base is another, that have a variant (DoRA) or dropout.
    """
    from peft.tuners.lora import Linear as LoraLinear

    layers = [m for m in model.modules() if type(m) is LoraLinear and _is_known_base(m.base_layer)]
    for layer in layers:
        layer.__class__ = _fused_class(LoraLinear, _lora_output)
    return list(layers)


def apply_fused_lycoris(model: nn.Module) -> None:
    """Let PEFT's LoKr and LoHa layers around linears compute as above, in place."""
    from peft.tuners.loha.layer import Linear as LohaLinear
    from peft.tuners.lokr import Linear as LokrLinear

    kinds: dict[type, Callable[[Any, Tensor], Tensor | None]] = {LokrLinear: _lokr_output, LohaLinear: _loha_output}
    for layer in model.modules():
        if type(layer) in kinds:
            own: Any = type(layer)
            layer.__class__ = _fused_class(own, kinds[own])


@cache
def _fused_class(peft_class: type, compute: Callable[[Any, Tensor], Tensor | None]) -> type:
    """A subclass rather than an attribute of each layer, so that a copied model calls its own layers.

    compute: (layer, x) -> output; None if PEFT must compute.
    """

    class Fused(peft_class):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = None if args or kwargs else compute(self, x)
            return super().forward(x, *args, **kwargs) if output is None else output

    Fused.__name__ = peft_class.__name__  # what a printed model shows
    return Fused


# ---- LoRA


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_known_base(base: nn.Module) -> bool:
    return isinstance(base, FrozenLinear8) or (type(base) is nn.Linear and base.weight.dtype in TRAINABLE_DTYPES)


def _lora_output(layer: Any, x: Tensor) -> Tensor | None:
    """None where PEFT must decide."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged or is_autocasting(x) or not _is_known_base(base):
        return None  # the base may have been quantized since
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant or layer.lora_bias.get(active[0], False):
        return None
    (name,) = active
    is_dropping = isinstance(layer.lora_dropout[name], nn.Dropout) and layer.training
    parts = (layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name])
    is_frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    is_own = is_frozen and not is_dropping
    # Nor where somebody hangs on a call that this file would pass by. Asked for every LoRA layer at every call, hence
    # not through nn.Module's __getattr__.
    of_each = (each.__dict__ for each in (base, *parts))
    if not is_own or any("forward" in own or any(own[hooks] for hooks in _HOOKS) for own in of_each):
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
    """The equations at the head of this file."""

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


# ---- LoKr and LoHa


def _only_adapter(layer: Any, x: Tensor, tucker: Any) -> str | None:
    """The one active adapter, if it is of a linear and drops nothing; else None."""
    active = [name for name in layer.active_adapters if name in layer._available_adapters]
    if layer.disable_adapters or layer.merged or is_autocasting(x) or len(active) != 1 or active[0] in tucker:
        return None
    (name,) = active
    return None if layer.module_dropout[name] or layer.rank_dropout[name] else str(name)


def _loha_output(layer: Any, x: Tensor) -> Tensor | None:
    if (name := _only_adapter(layer, x, layer.hada_t1)) is None:
        return None
    a1, b1, a2, b2 = (getattr(layer, f"hada_w{n}_{side}")[name].to(x.dtype) for n in (1, 2) for side in "ab")
    added = F.linear(x, (a1 @ b1) * (a2 @ b2))
    return layer.base_layer(x) + added * layer.scaling[name]  # type: ignore[no-any-return]


def _lokr_output(layer: Any, x: Tensor) -> Tensor | None:
    if (name := _only_adapter(layer, x, layer.lokr_t2)) is None:
        return None
    first = layer.lokr_w1[name] if name in layer.lokr_w1 else layer.lokr_w1_a[name] @ layer.lokr_w1_b[name]
    second = (layer.lokr_w2[name],) if name in layer.lokr_w2 else (layer.lokr_w2_b[name], layer.lokr_w2_a[name])
    w1 = first.to(x.dtype)
    rows = x.reshape(*x.shape[:-1], w1.shape[1], -1)
    for factor in second:
        rows = F.linear(rows, factor.to(x.dtype))
    scaling = layer.scaling[name]
    added = F.linear(rows.mT, w1 if scaling == 1 else w1 * scaling).mT.flatten(-2)
    return layer.base_layer(x) + added  # type: ignore[no-any-return]
