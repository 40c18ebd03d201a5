"""What one forward of a MODEL takes if its blocks are divided: operations, and bytes that cards send each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..families.comfy.native import NativeModel
from ..families.spec import BlockList
from ..families.tensor_plan import Shares, TensorPlan
from ..parallel.placement import native_block_flops, tokens_seen
from .ways import Work, WorkBySize

NUM_TEXT_TOKENS = 512
_STEP = 4096  # tokens
_ACTIVATION_BYTES, _SQUARE_BYTES = 2, 4  # of a number in half precision, and of a sum of squares

Blocks = Mapping[str, tuple[TensorPlan, Shares]]  # by name: how it is divided


def work_by_size(model: nn.Module, layout: NativeModel, blocks: Blocks) -> WorkBySize:
    """Of a model whose blocks are whole; reads sizes only."""
    zero, one, two = (divided_work(model, layout, blocks, number * _STEP) for number in range(3))
    return WorkBySize(_STEP, (zero, one, two))


def divided_work(model: nn.Module, layout: NativeModel, blocks: Blocks, num_tokens: int) -> Work:
    """Of so many picture tokens beside the text's."""
    side = BlockList("", layout.text_modules, is_joint=True, sample_modules=layout.sample_modules)
    row_flops = sent = width = num_modules = num_exchanges = 0.0
    for block_name, (plan, shares) in blocks.items():
        for name, module in model.get_submodule(block_name).named_modules():
            tokens = tokens_seen(name, side, num_tokens, NUM_TEXT_TOKENS)
            divided = plan.find(name) if hasattr(module, "in_features") else None
            num_modules += any(parameter is not None for parameter in module._parameters.values())
            if divided is not None and divided.by == "row":
                linear: Any = module
                row_flops += 2.0 * linear.in_features * linear.out_features * tokens
                sent += _ACTIVATION_BYTES * linear.out_features * tokens
                width = max(width, linear.out_features)
            elif divided is not None and divided.by == "gathered":
                sent += _ACTIVATION_BYTES * int(module.out_features) * tokens / shares.num_devices  # type: ignore[arg-type]
            is_norm = plan.is_norm(name) and bool(module._parameters)
            sent += _SQUARE_BYTES * tokens * is_norm
            num_exchanges += is_norm or (divided is not None and divided.by != "column")
    stream = _ACTIVATION_BYTES * width * (num_tokens + NUM_TEXT_TOKENS)
    flops = sum(native_block_flops(model, layout, list(blocks), num_tokens, NUM_TEXT_TOKENS))
    return Work(flops, row_flops, sent, stream, num_modules, num_exchanges)


def is_told_guidance(model: nn.Module) -> bool:
    """Whether a model is given the strength of its guidance as a number, so that nobody runs it twice for CFG."""
    return bool(getattr(getattr(model, "params", None), "guidance_embed", False))


def count_tokens(model: nn.Module, latent_shape: Sequence[int]) -> int | None:
    """Picture tokens of one latent; None if the model does not say how large its patches are."""
    patch = getattr(model, "patch_size", None)
    dims = list(latent_shape[2:])
    sizes = [1] * (len(dims) - 2) + [patch] * 2 if isinstance(patch, int) else patch
    if not isinstance(sizes, (tuple, list)) or len(sizes) != len(dims):
        return None
    return math.prod(math.ceil(dim / size) for dim, size in zip(dims, sizes, strict=True))
