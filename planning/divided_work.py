"""What one forward of a MODEL takes if its blocks are divided: operations, and bytes that cards send each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..families.comfy.native import NativeModel
from ..families.spec import BlockList
from ..families.tensor_plan import Shares, TensorPlan
from ..parallel.local.shards import meetings_in
from ..parallel.placement import native_block_flops, native_list, products_of, tokens_seen
from .ways import Work, WorkBySize

NUM_TEXT_TOKENS = 512
_STEP = 4096  # tokens
_ACTIVATION_BYTES, _SQUARE_BYTES = 2, 4  # of a number in half precision, and of a sum of squares
_CHOICE_BYTES = 2 * (8 + 2)  # of two of several experts, as an index and a number each

Blocks = Mapping[str, tuple[TensorPlan, Shares]]  # by name: how it is divided


def work_by_size(model: nn.Module, layout: NativeModel, blocks: Blocks) -> WorkBySize:
    """Of a model whose blocks are whole; reads sizes only."""
    zero, one, two = (divided_work(model, layout, blocks, number * _STEP) for number in range(3))
    return WorkBySize(_STEP, (zero, one, two))


def divided_work(model: nn.Module, layout: NativeModel, blocks: Blocks, num_tokens: int) -> Work:
    """Of so many picture tokens beside the text's."""
    flops = sum(native_block_flops(model, layout, list(blocks), num_tokens, NUM_TEXT_TOKENS))
    parts = [
        _work_of_block(model.get_submodule(name), native_list(layout), plan, shares, num_tokens)
        for name, (plan, shares) in blocks.items()
    ]
    whole_flops, sent, widths = zip(*parts, strict=True)
    stream = _ACTIVATION_BYTES * max(widths) * (num_tokens + NUM_TEXT_TOKENS * layout.is_joint)
    exchanges = sum(len(meetings_in(model.get_submodule(name), plan)) for name, (plan, _) in blocks.items())
    return Work(
        flops,
        sum(sent),
        stream,
        exchanges,
        whole_flops=sum(whole_flops),
    )


def _work_of_block(
    block: nn.Module, side: BlockList, plan: TensorPlan, shares: Shares, num_tokens: int
) -> tuple[float, float, float]:
    """Operations of the whole layers, bytes sent and width."""
    products = products_of(block, side, num_tokens, NUM_TEXT_TOKENS)
    whole_flops = sent = width = 0.0
    summed = set()
    for name, module in block.named_modules():
        divided = plan.find(name) if name in products else None
        at = plan.summed_in(name) or name
        tokens = tokens_seen(at, side, num_tokens, NUM_TEXT_TOKENS)
        if divided is None:
            whole_flops += products.get(name, 0.0)
        elif divided.by == "row":
            linear: Any = module
            sent += _ACTIVATION_BYTES * linear.out_features * tokens * (at not in summed)
            width = max(width, linear.out_features)
            summed.add(at)
        elif divided.by == "gathered":
            sent += _ACTIVATION_BYTES * int(module.out_features) * tokens / shares.num_devices  # type: ignore[arg-type]
        if plan.is_norm(name) and module._parameters:
            sent += _SQUARE_BYTES * tokens
        if plan.is_decided(name):
            sent += _CHOICE_BYTES * tokens
    return whole_flops, sent, width


def is_told_guidance(model: nn.Module) -> bool:
    """Whether a model is given the strength of its guidance as a number, so that nobody runs it twice for CFG."""
    return bool(getattr(getattr(model, "params", None), "guidance_embed", False))
