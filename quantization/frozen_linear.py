"""A frozen linear in few bits that passes gradients on; the arithmetic is in eight_bit.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .eight_bit import grad_input8, grad_input8_op, linear8, linear8_op, num_inputs, quantize_weight, rotation_for
from .stored import ROWS, restore

RoundingScheme = Literal["fp8", "int8", "fp8-compute", "int8-compute"]
ROUNDED: Mapping[RoundingScheme, torch.dtype] = {
    "fp8-compute": torch.float8_e4m3fn,
    "int8-compute": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_FULL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Linear8(torch.autograd.Function):
    """linear8 with grad_input8 as its backward; keeps no activation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rotation: Tensor | None, packing: str
    ) -> Tensor:
        ctx.frozen = weight, scale, rotation, packing
        ctx.version = None if torch.compiler.is_compiling() or weight.is_inference() else weight._version
        multiply = linear8_op if torch.compiler.is_compiling() else linear8
        return multiply(x, weight, scale, bias, rotation, packing)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = None
        if ctx.version is not None and ctx.version != ctx.frozen[0]._version:  # as autograd does for what it saved
            raise RuntimeError("a frozen 8-bit weight was changed between a forward and its backward")
        if ctx.needs_input_grad[0]:
            grad_x = (grad_input8_op if torch.compiler.is_compiling() else grad_input8)(grad, *ctx.frozen)
        return grad_x, None, None, None, None, None


class FrozenLinear8(nn.Linear):
    """A frozen linear that multiplies in 8 bits, or in x's type what it makes plain for every product (packing).

    An nn.Linear by class, because PEFT, family patterns and hosts find linears that way. PEFT then attaches its plain
    LoRA layer, which takes device and dtype from weight.device and compute_dtype (from PEFT 0.19 on).

    The output is in x's dtype, under autocast in autocast's. `.to(dtype)` changes compute_dtype and bias alone.

    Args:
        weight, scale: as in Stored8.    bias: taken over and frozen. [N]
        compute_dtype: type of what is attached to the layer, a LoRA for one; products follow x.
        rotation: float32 buffer [B, B]; absent without one, so that a rotated state dict fits no other layer.
        packing: how a weight that is multiplied plainly is stored (stored.py); "" for products in 8 bits.
    """

    scale: Tensor
    rotation: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        rotation: Tensor | None,
        packing: str = "",
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate and draw a full weight
        self.out_features, self.in_features = weight.shape[0], num_inputs(weight, packing)
        self.packing = packing
        self.compute_dtype = compute_dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("rotation", rotation)
        if bias is not None:
            bias = (bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)).requires_grad_(False)
        self.register_parameter("bias", bias)  # type: ignore[arg-type]

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, scheme: RoundingScheme, *, rotation: int = 0) -> FrozenLinear8:
        """Round a linear's weight, where it is; the bias stays the same Parameter, frozen. linear is not changed.
        Raises: ValueError for a weight that is not finite, or a rotation that does not fit."""
        dtype, weight = ROUNDED[scheme], linear.weight
        assert weight.dtype in _FULL_DTYPES, weight.dtype
        matrix = rotation_for(linear.in_features, weight.device, dtype, rotation)
        values, scale = quantize_weight(weight, dtype, matrix)
        packing = "" if scheme.endswith("-compute") else ROWS
        return cls(values, scale, linear.bias, weight.dtype, matrix, packing)

    @property
    def W_q(self) -> Tensor:
        """The name by which PEFT knows layers that it must dequantize (for DoRA's norms)."""
        return self.weight

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """The weight the layer computes with, in compute_dtype. [N, K]"""
        device = self.weight.device  # of a block that streams the weight may rest in host memory, and not the scale
        rotation = None if self.rotation is None else self.rotation.to(device)
        return restore(self.weight, self.scale.to(device), rotation, self.packing or ROWS, self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name for it, which callers may use
        """[..., K] -> [..., N]. Raises: RuntimeError if somebody asks for a gradient of weight or bias."""
        if self.weight.requires_grad or self.bias is not None and self.bias.requires_grad:
            raise RuntimeError(
                "weight or bias of a frozen linear in few bits was set to require a gradient and has none; call "
                "requires_grad_(False) on the model and train a LoRA on top"
            )
        if is_autocasting(input):
            kind = input.device.type
            with torch.autocast(kind, enabled=False):  # our own sums are float32 and stay so
                return self._multiply(input.to(torch.get_autocast_dtype(kind)))
        return self._multiply(input)

    def _multiply(self, x: Tensor) -> Tensor:
        if x.dtype not in _FULL_DTYPES:  # by some model's own code, to the type that the weight has
            raise RuntimeError(f"a frozen linear was given {x.dtype}; cast its input to what the model computes in")
        rows = x.reshape(-1, self.in_features)
        out = _Linear8.apply(rows, self.weight, self.scale, self.bias, self.rotation, self.packing)
        return out.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear8:
        """Let `.to`, `.half` and the like move everything, and change the type only of what may change it."""
        kept = [self.weight, self.scale, self.rotation]

        def change(tensor: Tensor) -> Tensor:
            if not any(tensor is other for other in kept):
                return fn(tensor)
            after = fn(tensor.new_empty(0))
            return fn(tensor) if after.dtype is tensor.dtype else tensor.to(after.device)

        after = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device))
        if after.dtype in _FULL_DTYPES:
            self.compute_dtype = after.dtype
        return super()._apply(change, recurse)


def is_autocasting(x: Tensor) -> bool:
    """Whether autocast would change a linear's input; also where the compiler traces."""
    kind = x.device.type
    return kind in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(kind) and x.dtype != torch.float64
