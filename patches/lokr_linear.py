"""A frozen linear and its LoKr computed together, without making the weight that LoKr adds.

LoKr (LyCORIS, arXiv 2309.14859) adds s kron(W1, W2) to a weight, where W2 may be a product W2a W2b of rank R. With x
cut into rows X [in1, in2], kron(W1, W2) x is W1 X W2^T: two small products in place of a matrix [out, in], which PEFT
makes anew for every call and keeps for the backward. Both are the same numbers up to rounding.

    y = base(x) + s W1 X W2^T        W1 [out1, in1], W2 [out2, in2], out = out1 out2, in = in1 in2

PEFT keeps its layers, as in lora_linear.py: each gets a subclass of its class, whose forward computes this way where
PEFT would compute exactly that, and calls PEFT's otherwise. float32 weights are rounded to x's type.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..quantization.frozen_linear import is_autocasting


def apply_fused_lokr(model: nn.Module) -> None:
    """Let PEFT's LoKr layers around linears compute as above, in place."""
    from peft.tuners.lokr import Linear as LokrLinear

    for layer in model.modules():
        if type(layer) is LokrLinear:
            layer.__class__ = _fused_class(LokrLinear)


def lokr_product(layer: Any, name: str, x: Tensor) -> Tensor:
    """What the adapter of this name adds to the output. [..., in] -> [..., out]"""
    w1 = _first(layer, name).to(x.dtype)
    rows = x.reshape(*x.shape[:-1], w1.shape[1], -1)
    for factor in _second(layer, name):
        rows = F.linear(rows, factor.to(x.dtype))
    scaling = layer.scaling[name]
    return F.linear(rows.mT, w1 if scaling == 1 else w1 * scaling).mT.flatten(-2)


def _first(layer: Any, name: str) -> Tensor:
    if name in layer.lokr_w1:
        return layer.lokr_w1[name]  # type: ignore[no-any-return]
    return layer.lokr_w1_a[name] @ layer.lokr_w1_b[name]  # type: ignore[no-any-return]


def _second(layer: Any, name: str) -> tuple[Tensor, ...]:
    """The second matrix, or its two factors in the order they are applied in."""
    if name in layer.lokr_w2:
        return (layer.lokr_w2[name],)
    return layer.lokr_w2_b[name], layer.lokr_w2_a[name]


@cache
def _fused_class(lokr_linear: type) -> type:
    class FusedLokrLinear(lokr_linear):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name = None if args or kwargs else _only_adapter(self, x)
            if name is None:
                return super().forward(x, *args, **kwargs)
            return self.base_layer(x) + lokr_product(self, name, x)

    FusedLokrLinear.__name__ = lokr_linear.__name__  # what a printed model shows
    return FusedLokrLinear


def _only_adapter(layer: Any, x: Tensor) -> str | None:
    """The one adapter to compute with; None if PEFT must decide."""
    if layer.disable_adapters or layer.merged or is_autocasting(x):
        return None
    active = [name for name in layer.active_adapters if name in layer.lokr_w1 or name in layer.lokr_w1_a]
    if len(active) != 1 or layer.module_dropout[active[0]] or layer.rank_dropout[active[0]]:
        return None
    return None if active[0] in layer.lokr_t2 else active[0]
