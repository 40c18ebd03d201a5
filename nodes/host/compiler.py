"""How this pack's forwards stay outside of ComfyUI's compiler. Since 0.35 it records what a forward allocates and
captures blocks as CUDA graphs, for one thread, stream and card (docs/internals/upstream_facts.md)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...events import first_line

_log = logging.getLogger(__name__)

_ALLOCATIONS, _CAPTURES = "disable_comfy_compiler", "disable_cuda_graphs"  # of comfy.cli_args.args
# What errors of the one and the other say; comfy_aimdo.malloc_graph 0.5.0 to 0.6.0, CUDA and torch.
_ERRORS = {"aimdo memory compile error": _ALLOCATIONS}
_ERRORS |= dict.fromkeys(("stream is capturing", "during capture", "while capturing"), _CAPTURES)
_SPLIT = "this model on several cards"
_LOCK = threading.RLock()  # Python's collector may have a patcher detach, and so leave, at any place
_inside: list[dict[str, bool]] = []  # switches as whoever is inside found them


@contextmanager
def _switched() -> Iterator[None]:
    """Inside, ComfyUI's switches are set; the last to leave puts back what the first one found."""
    args = _arguments()
    with _LOCK:
        found = {name: getattr(args, name) for name in (_ALLOCATIONS, _CAPTURES) if hasattr(args, name)}
        _inside.append(_inside[0] if _inside else found)
        vars(args).update(dict.fromkeys(found, True))
    try:
        yield
    finally:
        with _LOCK:
            before = _inside.pop()
            # What is off by now somebody else has put back meanwhile.
            vars(args).update({name: value for name, value in before.items() if not _inside and getattr(args, name)})


@contextmanager
def outside(devices: Iterable[torch.device] = (), about: str = _SPLIT) -> Iterator[None]:
    """Inside, ComfyUI records no allocation graph and captures no block, in any thread; one that is active in this
    thread is ended first. devices: where the forward runs. about: what runs, for messages.
    Raises: RuntimeError that names the launch flag if the compiler fails inside, or cannot be switched off."""
    with _switched():
        try:
            _prepare(devices, about)
            yield
        except RuntimeError as error:
            switch = next((switch for words, switch in _ERRORS.items() if words in str(error)), "")
            if not switch or _flag(switch) in str(error):  # explained further in
                raise
            raise _failure(about, f"it fails with {first_line(error)!r}", switch) from error


def _prepare(devices: Iterable[torch.device], about: str) -> None:
    """End a graph that is active in this thread. Raises: RuntimeError if ComfyUI has no way to, or would record yet."""
    prefetch = sys.modules.get("comfy.model_prefetch")  # None: nothing can have begun a graph
    is_enabled = getattr(prefetch, "malloc_graph_enabled", lambda device: not hasattr(_arguments(), _ALLOCATIONS))
    still = [str(each) for each in devices if is_enabled(each)] if hasattr(prefetch, "malloc_graph_begin") else []
    if still:
        found = f"this ComfyUI records allocation graphs on {', '.join(still)} although switched off"
        raise RuntimeError(f"{found}; start it with --disable-comfy-compiler, or update the pack")
    thread = threading.get_ident()
    marked = getattr(prefetch, "MALLOC_GRAPHS", {}).get(thread)  # 0.35 lists active graphs, later versions mark them
    if thread not in getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", {}) and not getattr(marked, "_comfy_active", False):
        return
    cleanup: Any = getattr(prefetch, "cleanup_malloc_graph", None)
    if cleanup is None:
        raise _failure(about, "an allocation graph is active around it", _ALLOCATIONS)
    _log.info("an allocation graph of ComfyUI's was active around %s; it is ended here", about)
    cleanup()


def _failure(about: str, what: str, switch: str) -> RuntimeError:
    said = f"ComfyUI's own compiler does not go with {about}: {what}"
    return RuntimeError(f"{said}. Start ComfyUI with {_flag(switch)}, and please report it")


def _flag(switch: str) -> str:
    return f"--{switch.replace('_', '-')}"


def _arguments() -> Any:
    from comfy.cli_args import args

    return args
