"""A frozen linear and its LoRA computed together: y = x W^T + (s x A^T) B^T, in the type of x.

Legend: M rows, K in_features, N out_features, R LoRA rank, s scaling (alpha / rank).

    forward    a = s x A^T;  y = base(x);  y += a B^T
    backward   b = s g B;    gx = base's grad_input(g);  gx += b A;   gA = b^T x;   gB = g^T a

The base is a plain linear or a FrozenLinear8, frozen. float32 weights are rounded to x's type for the products, as
autocast would. x and a [M, R] are kept for the backward.

PEFT keeps its layers: names, state dict, adapters and merging are untouched. Each layer gets a subclass of its class.
Its forward computes this way where PEFT would compute exactly that (one active plain LoRA, no dropout, not merged, no
autocast), and calls PEFT's otherwise. Why: docs/decisions/0005-eight-bit-linears.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..quantization.eight_bit import grad_input8, linear8
from ..quantization.frozen_linear import FrozenLinear8, is_autocasting
from .lora import TRAINABLE_DTYPES, is_torchao_tensor


class FusedLora:
    """Handle of apply_fused_lora."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def remove(self) -> None:
        """Give every layer PEFT's own forward back; a second call is a no-op."""
        for layer in self.layers:
            layer.__class__ = type(layer).__mro__[1]
        self.layers = []


def apply_fused_lora(model: nn.Module) -> FusedLora:
    """Let PEFT's LoRA layers around plain linears and FrozenLinear8 compute as above, in place.

    No-op for layers whose base is another (torchao's weight-only tensors), that have a variant (DoRA) or dropout.
    """
    from peft.tuners.lora import Linear as LoraLinear

    layers = [m for m in model.modules() if type(m) is LoraLinear and _is_known_base(m.base_layer)]
    for layer in layers:
        layer.__class__ = _fused_class(LoraLinear)
    return FusedLora(cast(list[nn.Module], layers))


def _is_known_base(base: nn.Module) -> bool:
    if isinstance(base, FrozenLinear8):
        return True
    return type(base) is nn.Linear and not is_torchao_tensor(base.weight) and base.weight.dtype in TRAINABLE_DTYPES


@cache
def _fused_class(lora_linear: type) -> type:
    """A subclass rather than an attribute of each layer, so that a copied model calls its own layers."""

    class FusedLoraLinear(lora_linear):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name = None if args or kwargs else _only_adapter(self, x)
            if name is None:
                return super().forward(x, *args, **kwargs)
            a, b, scaling = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            if torch.compiler.is_compiling():  # its own fusions; the opaque function below would be in their way
                low = F.linear(x, a.to(x.dtype)) * scaling
                return self.base_layer(x) + F.linear(low, b.to(x.dtype))
            rows = x.reshape(-1, x.shape[-1])
            out = _LoraLinear.apply(rows, a, b, scaling, self.base_layer)
            return out.view(*x.shape[:-1], out.shape[-1])

    FusedLoraLinear.__name__ = lora_linear.__name__  # what a printed model shows
    return FusedLoraLinear


def _only_adapter(layer: Any, x: Tensor) -> str | None:
    """The one adapter to compute with; None if PEFT must decide."""
    if layer.disable_adapters or layer.merged or is_autocasting(x) or not _is_known_base(layer.base_layer):
        return None  # the base may have been quantized since
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant or layer.lora_bias.get(active[0], False):
        return None
    is_dropping = isinstance(layer.lora_dropout[active[0]], nn.Dropout) and layer.training
    base, parts = layer.base_layer, (layer.lora_A[active[0]], layer.lora_B[active[0]], layer.lora_dropout[active[0]])
    is_frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    is_own = is_frozen and not is_dropping and not any(map(_is_watched, (base, *parts)))
    return active[0] if is_own and x.dtype in (torch.bfloat16, torch.float32) else None


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody hangs on a call that this file would pass by."""
    own = module.__dict__  # asked for every LoRA layer at every call, hence not through nn.Module's __getattr__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


class _LoraLinear(torch.autograd.Function):
    """The equations at the head of this file."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, a: Tensor, b: Tensor, scaling: float, base: nn.Linear) -> Tensor:
        low = rows @ a.to(rows.dtype).t()
        if scaling != 1:
            low *= scaling
        ctx.save_for_backward(rows, low, a, b)
        ctx.base, ctx.scaling = base, scaling
        return _base_product(rows, base).addmm_(low, b.to(rows.dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, a, b = ctx.saved_tensors
        grad_low = g @ b.to(g.dtype)
        if ctx.scaling != 1:
            grad_low *= ctx.scaling
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _base_grad_input(g, ctx.base).addmm_(grad_low, a.to(g.dtype))
        if ctx.needs_input_grad[1]:
            grad_a = (grad_low.t() @ rows).to(a.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = (g.t() @ low).to(b.dtype)
        return grad_x, grad_a, grad_b, None, None


def _base_product(rows: Tensor, base: nn.Linear) -> Tensor:
    if isinstance(base, FrozenLinear8):
        return linear8(rows, base.weight, base.scale, base.bias, base.rotation)
    return F.linear(rows, base.weight, base.bias)


def _base_grad_input(grad: Tensor, base: nn.Linear) -> Tensor:
    if isinstance(base, FrozenLinear8):
        return grad_input8(grad, base.weight, base.scale, base.rotation)
    return grad @ base.weight
