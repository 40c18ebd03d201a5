"""Loading a model over its file: weights stay in the mapped file until a card takes them.

Under DynamicVRAM ComfyUI does this itself. Without it, ComfyUI copies every weight from the mapped file into the model,
so host memory holds the model once more than any card needs. Here ComfyUI's loader gets tensors that it does not copy
into a Parameter of the same shape and type: the Parameter takes the mapped tensor instead. Whatever else the loader
does with them (recognising the model, splitting, converting) sees and makes ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .model_copy import Origin


class FileTensor(torch.Tensor):
    """A tensor of a mapped file that becomes a Parameter's data instead of being copied into it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and _can_take(*args[:2]):
            args[0].data = _plain(args[1])
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return _plain(func(*args, **(kwargs or {})))


def _can_take(target: Any, source: Any) -> bool:
    plain = _plain(source)
    return (
        isinstance(target, nn.Parameter)
        and type(plain) is torch.Tensor
        and (target.shape, target.dtype, target.device) == (plain.shape, plain.dtype, plain.device)
    )


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if type(value) is FileTensor else value


def load_over_file(path: Path, options: dict[str, Any]) -> tuple[Any, Origin]:
    """A classic patcher of the file's diffusion model, and where its weights lie unpatched.

    Raises: RuntimeError if ComfyUI does not know what the file holds.
    """
    import comfy.sd
    import comfy.utils
    from comfy.quant_ops import QuantizedTensor

    weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    mapped = {
        name: tensor.as_subclass(FileTensor) if type(tensor) is torch.Tensor else tensor
        for name, tensor in weights.items()
    }
    model = comfy.sd.load_diffusion_model_state_dict(mapped, model_options=options, metadata=metadata)
    if model is None:
        raise RuntimeError(f"{path} holds no diffusion model that ComfyUI knows; it has {len(weights)} tensors")
    model.cached_patcher_init = (comfy.sd.load_diffusion_model, (str(path), options))
    addresses = {tensor.data_ptr() for tensor in weights.values() if isinstance(tensor, torch.Tensor)}
    in_file = {
        name: parameter.detach()
        for name, parameter in model.model.named_parameters()
        if type(parameter.data) in (torch.Tensor, QuantizedTensor)
        and parameter.device.type == "cpu"
        and parameter.data_ptr() in addresses
    }
    return model, in_file.get
