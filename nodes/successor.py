"""What stands in for nodes of ComfyUI-MultiGPU, so that workflows made with that archived pack open and run. Where a
loader chose nothing but a device, ComfyUI's own chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .host import io
from .split import LoadDiffusionModelSplit

_SUFFIXES = ("MultiGPU", "DisTorchMultiGPU", "DisTorch2MultiGPU")
_CLIPS: dict[str, tuple[str, ...]] = {
    "CLIPLoader": ("clip_name", "type"),
    "DualCLIPLoader": ("clip_name1", "clip_name2", "type"),
    "TripleCLIPLoader": ("clip_name1", "clip_name2", "clip_name3"),
    "QuadrupleCLIPLoader": ("clip_name1", "clip_name2", "clip_name3", "clip_name4"),
}
# By a loader of ComfyUI, or of ComfyUI-GGUF where that is installed: the inputs that its MultiGPU forms have as well.
_SAME = {
    "VAELoader": ("vae_name",),
    "CLIPVisionLoader": ("clip_name",),
    "CheckpointLoaderSimple": ("ckpt_name",),
    "ControlNetLoader": ("control_net_name",),
    "DiffControlNetLoader": ("model", "control_net_name"),
    "DiffusersLoader": ("model_path",),
    "UnetLoaderGGUF": ("unet_name",),
    "UnetLoaderGGUFAdvanced": ("unet_name", "dequant_dtype", "patch_dtype", "patch_on_device"),
    **_CLIPS,
    **{f"{name}GGUF": names for name, names in _CLIPS.items()},
}
_UNET = ("unet_name", "weight_dtype")
_DISTORCH = (*_UNET, "compute_device", "virtual_vram_gb", "donor_device", "expert_mode_allocations")


def replacements() -> Iterator[io.NodeReplace]:
    """One for each old node that has a counterpart."""
    ours = LoadDiffusionModelSplit.define_schema()
    given = {each.id: each.default for each in ours.inputs if not each.optional and each.id not in _UNET}
    given |= {"way": "blocks", "overlap": False}  # old pictures keep their bits
    to_balance = {"expert_mode_allocations": "balance"}
    yield _replace("UNETLoaderMultiGPU", ours.node_id, (*_UNET, "device"), given, {"device": "devices"})
    yield _replace("UNETLoaderDisTorchMultiGPU", ours.node_id, _UNET, given)
    yield _replace("UNETLoaderDisTorch2MultiGPU", ours.node_id, _DISTORCH, given, to_balance)
    yield _replace("UNetLoaderLP", "UNETLoader", ("unet_name",), {"weight_dtype": "default"})
    for name in ("CheckpointLoaderAdvancedMultiGPU", "CheckpointLoaderAdvancedDisTorch2MultiGPU"):
        yield _replace(name, "CheckpointLoaderSimple", ("ckpt_name",), {})
    for loader, names in _SAME.items():
        more = {"device": "default"} if loader in ("CLIPLoader", "DualCLIPLoader") else {}
        for suffix in _SUFFIXES:
            yield _replace(f"{loader}{suffix}", loader, names, more)


def _replace(
    old: str, new: str, names: tuple[str, ...], given: Mapping[str, Any], renamed: Mapping[str, str] = {}
) -> io.NodeReplace:
    """names: the old node's inputs in order; what neither the new one nor renamed has is left out.
    given: what the new node's other inputs get."""
    kept = {renamed.get(name, name): name for name in names if name in renamed or name not in _DISTORCH[2:]}
    mapping: list[Any] = [{"new_id": name, "old_id": old_name} for name, old_name in kept.items()]
    mapping += [{"new_id": name, "set_value": value} for name, value in given.items() if name not in kept]
    return io.NodeReplace(
        new_node_id=new,
        old_node_id=old,
        old_widget_ids=[name for name in names if name != "model"],  # which is always a link
        input_mapping=mapping,
        output_mapping=[{"old_idx": index, "new_idx": index} for index in range(3)],  # a checkpoint loader has three
    )
