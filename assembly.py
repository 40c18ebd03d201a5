"""The one order in which strategies and patches are applied to a model. Each step says what breaks if it moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from .checkpoints.checkpoint import CheckpointInfo
from .checkpoints.load import load_through_cache
from .config.model import Strategy, has_stages, holds_copies, shares_rows
from .families.spec import ModelFamily
from .parallel.devices import CPU
from .parallel.local.bridge import BlockSplit, Recompute
from .parallel.local.data_parallel import copy_model
from .parallel.local.token_training import TokenModel
from .parallel.local.tokens import TokenParallel
from .parallel.offload.recompute import recompute
from .parallel.offload.weights import WeightOffload
from .parallel.placement import Placement, place_offloaded
from .patches.compile_blocks import CompiledBlocks, compile_if_possible, remove_compiled
from .quantization.quantize import QuantizeSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .training.adapter import LoraHandle

AttachAdapter = Callable[[nn.Module], "LoraHandle"]  # in place


@dataclass(frozen=True)
class ExecutionPlan:
    """How a model is loaded, placed and trained. There is no "auto" in it; devices are found, and None means no.
    dtype: of what is not quantized, and of activations. quantized_cache: folder that keeps quantized weights.
    ahead: how many microbatches a pipeline runs ahead.
    kept_blocks, offloaded_blocks: with gradient_checkpointing, per device, how many of its last blocks keep their
    activations, and how many stream from host memory; () none. offloads: whether inputs wait there.
    compiled_shapes: shapes of batches that blocks are compiled for, 0 if their number is unknown."""

    placement: Placement
    dtype: torch.dtype
    quantize: QuantizeSettings | None = None
    quantized_cache: Path | None = None
    strategy: Strategy = "none"
    ahead: int | None = None
    gradient_checkpointing: bool = True
    kept_blocks: tuple[int, ...] = ()
    offloaded_blocks: tuple[int, ...] = ()
    offloads: bool = False
    compiled_shapes: int | None = None

    def __post_init__(self) -> None:
        replicas, shares, leave = self.placement.replicas, shares_rows(self.strategy), any(self.offloaded_blocks)
        assert self.gradient_checkpointing or not (leave or self.offloads), (
            "only what is computed again leaves a device"
        )
        assert not (replicas and leave) or self.placement.row_shares, "these blocks are all on their cards"
        assert not replicas or holds_copies(self.strategy), "only data and tokens train replicas"
        assert bool(self.placement.row_shares) == shares, "only tokens shares out rows"
        alike = len({*self.kept_blocks}) < 2 > len({*self.offloaded_blocks})
        assert alike or not shares, "devices meet in blocks that are alike"
        assert (self.ahead is None) != has_stages(self.strategy), "only a pipeline runs ahead"


@dataclass(frozen=True)
class Assembled:
    """A model ready to train. split.remove() takes the bridge off; weight_offload.remove() lets go of pinned memory,
    before the model is dropped. replicas: the same on further devices; model calls all where they share out rows."""

    model: nn.Module
    split: BlockSplit
    adapter: LoraHandle
    compiled: CompiledBlocks | None = None
    weight_offload: WeightOffload | None = None
    replicas: tuple[Assembled, ...] = ()

    @property
    def parts(self) -> tuple[Assembled, ...]:
        """What has a split of its own: this and its replicas."""
        return self, *self.replicas

    @property
    def all_compiled(self) -> tuple[CompiledBlocks, ...]:
        return tuple(each.compiled for each in self.parts if each.compiled is not None)


def assemble_for_training(info: CheckpointInfo, plan: ExecutionPlan, attach_adapter: AttachAdapter) -> Assembled:
    """Load a transformer onto its devices, ready to train. Compiling that torch cannot do is logged and left out."""
    placement = plan.placement
    # 1. Every tensor goes from the file to its device, for none could hold the whole model. A layer is quantized before
    #    the next is read, for the same reason, and before LoRA exists, which it must not catch. What will be in host
    #    memory leaves its card layer by layer, too, or never sees it if nothing is rounded.
    placements = [placement.on(device) for device in placement.replicas] or [placement]
    plans = [_of_one(plan, index, each) for index, each in enumerate(placements)]
    offload = None
    if any(plan.offloaded_blocks):
        places = place_offloaded(placements[0], plans[0].kept_blocks, plans[0].offloaded_blocks)
        offload = WeightOffload(places)
    device_of = placement.device_of if plan.quantize else _first_places(info, placement, offload, plan.dtype)
    model = load_through_cache(plan.quantized_cache, info, device_of, plan.dtype, plan.quantize, offload)
    #    Replicas are copied from card to card, 8-bit weights as they are; later, hooks and LoRA would be copied too.
    #    What is in host memory they have in common.
    models, offloads = [model], [offload]
    for device in placement.replicas[1:]:
        models.append(copy_model(model, device) if offload is None else copy_model(model, device, offload.holds))
        offloads.append(None if offload is None else offload.of_copy(models[-1], device))
    #    Of a recomputed block the rows are cut and gathered again, so these hooks come before checkpointing.
    whole = None
    if placement.row_shares:
        native, tokens, devices = info.family.native, info.family.token_plan, placement.replicas
        assert native is not None and tokens is not None, "others are refused"
        rows = TokenParallel(models, devices, tokens, placement.row_shares)
        rows.attach()
        whole = TokenModel(rows, is_derived=bool(native.derived_rows))

    finished: list[Assembled] = []
    try:
        for each, own, streamed in zip(models, plans, offloads, strict=True):
            finished.append(_finish(each, info.family, own, placement.used_devices, streamed, attach_adapter))
    except BaseException:
        remove_compiled([each.compiled for each in finished if each.compiled is not None])
        for streamed in filter(None, reversed(offloads)):  # the first one's, which is last, holds pinned memory
            streamed.remove()
        raise
    return replace(finished[0], model=whole or model, replicas=tuple(finished[1:]))


def assemble_sharded(
    info: CheckpointInfo, plan: ExecutionPlan, attach_adapter: AttachAdapter, mesh: DeviceMesh
) -> Assembled:
    """As above, for a model whose weights several processes share (FSDP2). The LoRA is attached afterwards, so FSDP
    knows nothing of it, and is whole on each of them."""
    from .parallel.ranks.sharded import (  # brings DTensor, which nobody else needs
        checkpointed,
        load_sharded,
        whole_shapes,
    )

    device = plan.placement.main_device
    model = load_sharded(info, mesh, device, plan.dtype, plan.quantize)

    def attach(model: nn.Module) -> LoraHandle:
        with whole_shapes(model):
            return attach_adapter(model)

    # torch's own way to compute blocks again: FSDP then gathers one for its recomputation and its backward at once.
    return _finish(model, info.family, plan, [device], None, attach, recompute=checkpointed)


def _of_one(plan: ExecutionPlan, index: int, placement: Placement) -> ExecutionPlan:
    """The plan for one replica, or for the one model there is."""
    mine = slice(index, index + 1) if plan.placement.replicas else slice(None)
    strategy: Strategy = "none" if shares_rows(plan.strategy) else plan.strategy
    kept, streamed = plan.kept_blocks[mine], plan.offloaded_blocks[mine]
    return replace(plan, placement=placement, kept_blocks=kept, offloaded_blocks=streamed, strategy=strategy)


def _finish(
    model: nn.Module,
    family: ModelFamily,
    plan: ExecutionPlan,
    all_devices: Sequence[torch.device],
    offload: WeightOffload | None,
    attach_adapter: AttachAdapter,
    recompute: Recompute = recompute,
) -> Assembled:
    """What every replica goes through once its weights are in place; all_devices: of all of them."""
    # 2. The bridge comes before everything that may call the model or look at devices.
    split = BlockSplit(model, family, plan.placement)
    split.recompute = recompute
    # 3. LoRA goes onto the final base layers: PEFT picks its layer class, device and dtype from what it finds there.
    adapter = attach_adapter(model)
    # 4. Checkpointing wraps whole blocks, LoRA included, and needs the split to save the right random states.
    model.train()
    if plan.gradient_checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)  # type: ignore[operator]
        if plan.kept_blocks:
            split.keep_activations(plan.kept_blocks)
        if plan.offloads:
            split.offload_inputs()
    # 5. The hooks that bring weights come behind the bridge's, whose turn on the stage they need. LoRA is there now,
    #    and moves to the card that its offloaded layers compute on.
    if offload is not None:
        offload.attach()
    # 6. Only a block's own forward is compiled, with the LoRA in it: hooks and recomputation around it stay Python.
    #    Replicas share their blocks' code and with it torch's limit of graphs.
    compiled = None
    if plan.compiled_shapes is not None:
        compiled = compile_if_possible(model, family, all_devices, plan.compiled_shapes)
    return Assembled(model, split, adapter, compiled=compiled, weight_offload=offload)


def _first_places(
    info: CheckpointInfo, placement: Placement, offload: WeightOffload | None, dtype: torch.dtype
) -> Callable[[str], torch.device]:
    """Where each tensor goes from the file: its device, or the host at once if it is to stay there. What the file has
    in 8 bits is dequantized on its card, as without weight offload, for the same bits."""

    def place(name: str) -> torch.device:
        record = info.tensors.get(name)
        if offload is None or record is None or record.is_quantized:
            return placement.device_of(name)
        return CPU if offload.takes(name, prod(record.shape) * dtype.itemsize) else placement.device_of(name)

    return place
