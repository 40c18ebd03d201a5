"""Weight files whose header a test writes itself, and models that must be equal bit for bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from devicebridge.tests.quantized import plain_parts
from torch import nn


def cpu(_: str) -> torch.device:
    """Where every tensor goes."""
    return torch.device("cpu")


def write_raw(file: Path, header: object, num_bytes: int = 0, data: bytes = b"") -> Path:
    """A header as JSON, or bytes, and what follows: data, and else zeros that take no room."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text + data)
        stream.truncate(max(stream.tell(), 8 + len(text) + num_bytes))
    return file


def are_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """In names, types, shapes and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype is each.dtype and found[name].shape == each.shape
        and torch.equal(*plain_parts(found[name]), *plain_parts(each)) for name, each in expected.items()
    )  # fmt: skip


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    """Classes, parameters and buffers; frozen, and in eval mode."""
    ours, theirs = dict(found.named_modules()), dict(expected.named_modules())
    assert not found.training and ours.keys() == theirs.keys()
    for name, module in theirs.items():
        assert type(ours[name]) is type(module), name
        assert getattr(ours[name], "compute_dtype", None) is getattr(module, "compute_dtype", None), name
    held, others = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (found, expected))
    assert held.keys() == others.keys()
    for name, other in others.items():
        assert (held[name].dtype, held[name].shape, held[name].requires_grad) == (other.dtype, other.shape, False), name
        assert torch.equal(*plain_parts(held[name]), *plain_parts(other)), name
