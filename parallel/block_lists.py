"""Where the blocks of a native model are: by its description, or by looking for them in a model nobody described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import nn

from ..families.comfy.native import NativeModel, Transport
from ..families.spec import ModelFamily

# Lists below this share of a model's bytes are embedders and the like: moving them saves nothing and costs two copies.
_MIN_SHARE = 0.05
# A child above this share is where the model is, and is searched in turn if nothing is found beside it.
_MAIN_SHARE = 0.5


def block_fqns(model: nn.Module, block_lists: Sequence[str], optional: Sequence[str] = ()) -> tuple[str, ...]:
    """fqns of all blocks of these lists, list by list. A name that is no ModuleList or ModuleDict is itself a block.
    Raises: ValueError if a list that is not optional is missing, or there is no block at all."""
    names: list[str] = []
    for name in block_lists:
        container = find_module(model, name)
        if container is None and name not in optional:
            children = ", ".join(child for child, _ in model.named_children())
            raise ValueError(
                f"the blocks of {type(model).__name__} should be in {name!r}; this one has {children or 'no children'}"
            )
        names += [each for each, _ in members(model, name)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no block in {', '.join(block_lists)}; there is nothing to split")
    return tuple(names)


def members(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules of a list, or the module itself, with their fqns; [] for what this build lacks."""
    found = find_module(model, name)
    if isinstance(found, (nn.ModuleList, nn.ModuleDict)):
        return [(f"{name}.{key}", each) for key, each in found._modules.items() if each is not None]
    return [] if found is None else [(name, found)]


def placed_blocks(model: nn.Module, native: NativeModel) -> tuple[str, ...]:
    """fqns of the blocks a placement is made for, in execution order."""
    return block_fqns(model, native.main_lists, native.optional)


def followers(model: nn.Module, native: NativeModel) -> dict[str, str]:
    """fqn of each block that takes another block's device -> fqn of that block."""
    leaders: dict[str, str] = {}
    for name, (leader, attribute) in native.follows.items():
        if find_module(model, name) is not None:
            mapping: dict[int, int] = getattr(model, attribute)
            leaders.update({f"{name}.{side}": f"{leader}.{main}" for main, side in mapping.items()})
    return leaders


def execution_order(model: nn.Module, native: NativeModel) -> tuple[str, ...]:
    """fqns of all blocks as one forward runs them: each follower right after the block it follows."""
    behind: dict[str, list[str]] = {}
    for follower, leader in followers(model, native).items():
        behind.setdefault(leader, []).append(follower)
    return tuple(chain.from_iterable((name, *behind.get(name, ())) for name in placed_blocks(model, native)))


def transport_for(model: nn.Module, native: NativeModel) -> Transport:
    """How activations travel. A follower behind the last block would be added on the main device from another card."""
    ends_with_follower = execution_order(model, native)[-1] in followers(model, native)
    return "relay" if ends_with_follower else native.transport


def hooked_modules(block: nn.Module, native: NativeModel) -> tuple[nn.Module, ...]:
    """The modules of one block that the model calls: the block itself, or its children where only those are called."""
    return tuple(block.children()) if native.hooks_children else (block,)


def called_modules(model: nn.Module, family: ModelFamily, name: str) -> tuple[nn.Module, ...]:
    block = model.get_submodule(name)
    return (block,) if family.native is None else hooked_modules(block, family.native)


def tail_modules(model: nn.Module, native: NativeModel) -> tuple[nn.Module, ...]:
    return tuple(module for name in native.tail for _, module in members(model, name))


def tail_parameters(model: nn.Module, native: NativeModel) -> tuple[str, ...]:
    known = dict(model.named_parameters())
    return tuple(name for name in native.tail_parameters if name in known)


def parts_of_tail(model: nn.Module, family: ModelFamily) -> tuple[list[nn.Module], list[nn.Parameter]]:
    own = () if family.native is None else family.native.tail_parameters
    modules = [model.get_submodule(name) for name in family.tail if name not in own]
    return modules, [model.get_parameter(name) for name in family.tail if name in own]


def find_block_lists(model: nn.Module) -> tuple[str, ...]:
    """fqns of the lists of blocks in a model nobody described, in registration order; for relay transport only. A list
    is a ModuleList or ModuleDict child with two entries of one class, or with most of the bytes. If there is none, the
    child that holds most of the bytes is searched. Raises: ValueError that says what is there."""
    name, module, total = "", model, max(_num_bytes(model), 1)
    while True:
        shares, found = dict[str, float](), list[str]()
        for child, part in module.named_children():
            shares[child] = _num_bytes(part) / total
            if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
                are_alike = max(Counter(map(type, part.children())).values(), default=0) >= 2
                if shares[child] > _MAIN_SHARE or (are_alike and shares[child] >= _MIN_SHARE):
                    found.append(f"{name}{child}")
        if found:
            return tuple(found)
        main = max(shares, key=lambda child: shares[child], default="")
        if not main or shares[main] <= _MAIN_SHARE:
            children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
            raise ValueError(
                f"{type(model).__name__} has no ModuleList or ModuleDict with two or more blocks of one class that "
                f"holds at least {_MIN_SHARE:.0%} of its weights, so there is nothing to split; its children are "
                f"{children or 'none'}"
            )
        name, module = f"{name}{main}.", module.get_submodule(main)


def _num_bytes(module: nn.Module) -> int:
    tensors: Iterable[torch.Tensor] = chain(module.parameters(), module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this fqn; None where the model has no such attribute, or None in its place."""
    found: object = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
