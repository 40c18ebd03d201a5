"""The one order in which strategies and patches meet a model. Each step says what breaks if it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import nn

from .families.spec import ModelFamily
from .loading.checkpoint import CheckpointInfo, load_transformer
from .loading.quantized_cache import load_through_cache
from .parallel.block_split import BlockSplit, apply_block_split
from .parallel.devices import CPU
from .parallel.placement import Placement, place_swapped
from .parallel.replicas import copy_model
from .parallel.swap import BlockSwap
from .patches.compile_blocks import CompiledBlocks, compile_if_possible, remove_compiled
from .patches.cuda_graphs import GraphedBlocks, graph_if_possible
from .patches.quantize import Quantizer, QuantizeReport, QuantizeSettings

# Attaches an adapter in place; training passes its own, so that this room needs nothing below it.
AttachAdapter = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Assembled:
    """A model ready to train. split.remove() takes the bridge off; the blocks stay where the loader put them.

    Where blocks are swapped, swap.remove() must be called before the model is dropped: it lets go of pinned memory.

    Args:
        replicas: the same on further devices, as the placement says.
    """

    model: nn.Module
    split: BlockSplit
    adapter: object
    quantized: QuantizeReport | None = None
    compiled: CompiledBlocks | None = None
    swap: BlockSwap | None = None
    graphs: GraphedBlocks | None = None
    replicas: tuple[Assembled, ...] = ()

    @property
    def all_graphs(self) -> tuple[GraphedBlocks, ...]:
        """Of this and its replicas; () if blocks are not replayed."""
        return tuple(each.graphs for each in (self, *self.replicas) if each.graphs is not None)

    @property
    def all_compiled(self) -> tuple[CompiledBlocks, ...]:
        """Of this and its replicas, in the order they were made in; () if blocks are not compiled."""
        return _compiled_of((self, *self.replicas))


def _compiled_of(assembled: Iterable[Assembled]) -> tuple[CompiledBlocks, ...]:
    return tuple(each.compiled for each in assembled if each.compiled is not None)


def assemble_for_training(
    info: CheckpointInfo,
    family: ModelFamily,
    placement: Placement,
    *,
    dtype: torch.dtype,
    quantize: QuantizeSettings | None,
    attach_adapter: AttachAdapter,
    gradient_checkpointing: bool,
    kept_blocks: Sequence[int] = (),
    swapped_blocks: Sequence[int] = (),
    offloads: bool = False,
    compiled_shapes: int | None = None,
    has_graphs: bool = False,
    quantized_cache: Path | None = None,
) -> Assembled:
    """Load a transformer straight onto its devices and make it trainable.

    Args:
        quantize: how the frozen linears are held; None as they are.
        placement: with replicas, a copy of the model is made ready on each of their devices.
        kept_blocks: with gradient_checkpointing, how many blocks of each device keep their activations; () none.
        swapped_blocks: with gradient_checkpointing, how many blocks of each device stream from host memory; () none.
        offloads: with gradient_checkpointing, whether what recomputed blocks keep waits in host memory.
        compiled_shapes: compile the blocks for so many shapes of batches, 0 if their number is unknown; where that
            cannot be done, it is logged. None compiles nothing.
        has_graphs: let blocks that keep their activations be replayed as CUDA graphs; where that cannot be done, it is
            logged.
        quantized_cache: folder that keeps quantized weights for the next time; None for none.
        attach_adapter: adds the LoRA in place and returns its handle.
    """
    # 1. Every tensor goes from the file to its device; loading first and splitting later would need one device, or the
    #    host, to hold the whole model. A layer is quantized before the next is read, else the devices would have to
    #    hold the model in full precision first; and before LoRA exists, so that no LoRA weight can be caught by it.
    #    What will rest in host memory leaves its card layer by layer, too, or never sees it if nothing is rounded.
    quantizer = Quantizer(family, quantize) if quantize is not None else None
    swap = None
    if any(swapped_blocks):
        assert gradient_checkpointing, "swapped blocks must be recomputed; check_job refuses anything else"
        assert not placement.replicas, "a replica's blocks are all on its card; check_job refuses anything else"
        swap = BlockSwap(place_swapped(placement, kept_blocks, swapped_blocks), is_on_host=True)
    if quantizer is None:
        model = load_transformer(info, _first_places(info, placement, swap, dtype), dtype, keeper=swap)
    else:
        model = load_through_cache(quantized_cache, info, placement.device_of, dtype, quantizer, swap)
    quantized = quantizer.close(model).report if quantizer is not None else None
    #    Replicas are copied from card to card, 8-bit weights as they are; later, hooks and LoRA would be copied too.
    models = [model, *(copy_model(model, device) for device in placement.replicas[1:])]
    placements = [placement.on(device) for device in placement.replicas] or [placement]
    kept = [tuple(kept_blocks[i : i + 1]) for i in range(len(models))] if placement.replicas else [tuple(kept_blocks)]

    def finish(index: int) -> Assembled:
        return _finish(
            models[index],
            family,
            placements[index],
            attach_adapter=attach_adapter,
            gradient_checkpointing=gradient_checkpointing,
            kept_blocks=kept[index],
            swap=swap,
            offloads=offloads,
            compiled_shapes=compiled_shapes,
            compiled_on=placement.used_devices,
            has_graphs=has_graphs,
            quantized=quantized,
        )

    finished: list[Assembled] = []
    try:
        for index in range(len(models)):
            finished.append(finish(index))
    except BaseException:
        remove_compiled(_compiled_of(finished))
        raise
    return replace(finished[0], replicas=tuple(finished[1:]))


def _finish(
    model: nn.Module,
    family: ModelFamily,
    placement: Placement,
    *,
    attach_adapter: AttachAdapter,
    gradient_checkpointing: bool,
    kept_blocks: Sequence[int],
    swap: BlockSwap | None,
    offloads: bool,
    compiled_shapes: int | None,
    compiled_on: Sequence[torch.device],
    has_graphs: bool,
    quantized: QuantizeReport | None,
) -> Assembled:
    """What every replica goes through once its weights are in place; compiled_on: the devices of all of them."""
    # 2. The bridge comes before everything that may call the model or look at devices.
    split = apply_block_split(model, family, placement, swap)
    # 3. LoRA goes onto the final base layers: PEFT picks its layer class, device and dtype from what it finds there.
    adapter = attach_adapter(model)
    # 4. Checkpointing wraps whole blocks, LoRA included, and needs the split to save the right random states.
    model.train()
    if gradient_checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)  # type: ignore[operator]
        if kept_blocks:
            split.keep_activations(kept_blocks)
        if offloads:
            split.offload_inputs()
    # 5. The hooks that bring weights come behind the bridge's, whose turn on the stage they need. LoRA is there now,
    #    and moves to the card that its resting layers compute on.
    if swap is not None:
        swap.attach(split)
    # 6. Only a block's own forward is compiled, with the LoRA in it: hooks and recomputation around it stay Python.
    #    Replicas share their blocks' code and with it torch's limit of graphs.
    compiled = None
    if compiled_shapes is not None:
        compiled = compile_if_possible(model, family, compiled_on, compiled_shapes)
    # 7. A graph is of what a block's forward has become by now, and a block that is computed again has none.
    graphs = graph_if_possible(split.kept_blocks) if has_graphs else None
    return Assembled(model, split, adapter, quantized, compiled, swap, graphs)


def _first_places(
    info: CheckpointInfo, placement: Placement, swap: BlockSwap | None, dtype: torch.dtype
) -> Callable[[str], torch.device]:
    """Where each tensor goes from the file: its device, or the host at once if it is to rest there.

    What the file has in 8 bits is dequantized on its card, as without swapping, for the same bits.
    """

    def place(name: str) -> torch.device:
        record = info.tensors.get(name)
        if swap is None or record is None or record.is_quantized:
            return placement.device_of(name)
        return CPU if swap.will_rest(name, prod(record.shape) * dtype.itemsize) else placement.device_of(name)

    return place
