"""ComfyUI's compiler, and how this pack's forwards stay outside of it.

Since 0.35 ComfyUI records what a forward allocates (an allocation graph, comfy/model_prefetch.py) and hands out the
same addresses at the next one. It also captures single blocks as CUDA graphs. Both belong to one thread, one stream and
one card (docs/internals/upstream_facts.md). The host has two switches, which it reads whenever a forward begins.
`outside` sets those that are there and puts back what they were. They are the process's: while one of ours computes,
nobody else's forward is recorded.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_ALLOCATIONS, _CAPTURES = "disable_comfy_compiler", "disable_cuda_graphs"  # of comfy.cli_args.args
_ERROR = "aimdo memory compile error"  # comfy_aimdo.malloc_graph 0.5.0 to 0.6.0
_SPLIT = "this model on several cards"
_CAPTURE_ERRORS = ("stream is capturing", "during capture", "while capturing")  # CUDA's and torch's


class _Failure(RuntimeError):
    """Says already what to switch off."""


class _Switches:
    """The host's switches, set while anybody is inside; the last to leave puts back what was there before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # Python's collector may have a patcher detach, and so leave, at any place
        self._num_inside = 0
        self._before: dict[str, bool] = {}

    def enter(self) -> None:
        args = _arguments()
        with self._lock:
            if self._num_inside == 0:
                self._before = {name: getattr(args, name) for name in (_ALLOCATIONS, _CAPTURES) if hasattr(args, name)}
            self._num_inside += 1
            for name in self._before:
                setattr(args, name, True)

    def leave(self) -> None:
        args = _arguments()
        with self._lock:
            self._num_inside -= 1
            for name, value in self._before.items() if self._num_inside == 0 else ():
                if getattr(args, name):  # else somebody else has put it back meanwhile
                    setattr(args, name, value)


_SWITCHES = _Switches()


@contextmanager
def outside(devices: Iterable[torch.device] = (), about: str = _SPLIT) -> Iterator[None]:
    """Inside, ComfyUI records no allocation graph and captures no block, in any thread; one that is active in this
    thread already is ended first, by ComfyUI's own way of doing so.

    Args:
        devices: where the forward runs; each is asked about.
        about: what runs, for messages.
    Raises: RuntimeError that names the launch flag if the compiler fails inside, or cannot be switched off.
    """
    _SWITCHES.enter()
    try:
        _prepare(devices, about)
        yield
    except RuntimeError as error:
        is_known, text = isinstance(error, _Failure), str(error)
        if text.startswith(_ERROR) and not is_known:
            raise _failure(about, f"it says {text!r}", _ALLOCATIONS) from error
        if any(words in text for words in _CAPTURE_ERRORS) and not is_known:
            first_line = text.partition("\n")[0]
            raise _failure(about, f"the capture of a block failed with {first_line!r}", _CAPTURES) from error
        raise
    finally:
        _SWITCHES.leave()


def _prepare(devices: Iterable[torch.device], about: str) -> None:
    """End a graph that is active in this thread.

    Raises: RuntimeError if the host would record although its switches are set, for it changed in an unknown way, or
        has no way to end a graph.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")  # None: nothing has imported it, nothing can have begun a graph
    is_enabled = getattr(prefetch, "malloc_graph_enabled", lambda device: not hasattr(_arguments(), _ALLOCATIONS))
    still = [str(each) for each in devices if is_enabled(each)] if hasattr(prefetch, "malloc_graph_begin") else []
    if still:
        raise RuntimeError(
            f"this ComfyUI records allocation graphs on {', '.join(still)} in a way that this version of the pack "
            "cannot switch off; update the pack, start ComfyUI with --disable-comfy-compiler, or use the MODEL without "
            "the split"
        )
    thread = threading.get_ident()
    marked = getattr(prefetch, "MALLOC_GRAPHS", {}).get(thread)  # 0.35 lists active graphs, later versions mark them
    if thread not in getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", {}) and not getattr(marked, "_comfy_active", False):
        return
    cleanup: Any = getattr(prefetch, "cleanup_malloc_graph", None)
    if cleanup is None:
        raise _failure(about, "an allocation graph is active around it", _ALLOCATIONS)
    _log.info("an allocation graph of ComfyUI's was active around %s; it is ended here", about)
    cleanup()


def _failure(about: str, what: str, switch: str) -> _Failure:
    return _Failure(
        f"ComfyUI's own compiler does not go with {about}: {what}. Start ComfyUI with "
        f"--{switch.replace('_', '-')}, and please report it"
    )


def _arguments() -> Any:
    from comfy.cli_args import args

    return args
