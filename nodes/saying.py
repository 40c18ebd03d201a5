"""What a node says to its user: warnings on the node itself, and errors in the words of its sockets."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.job import job_keys
from ..system.import_faults import import_fault
from ..system.stopping import Stopped
from ..system.telling import printable, quiet_imports
from . import host
from .host import io
from .sockets import SHOWN, make_inputs

# What nodes and sockets are called and say, which ComfyUI's page reads, too.
_ENGLISH = Path(__file__).resolve().parent.parent / "locales" / "en" / "nodeDefs.json"
_TEXTS: Any = json.loads(_ENGLISH.read_text(encoding="utf-8"))
PACK = __name__.removesuffix(".nodes.saying")
_NO_SOCKET = "a setting without a socket"
_OTHERS = {
    "--cards": "cards of Plan Training",
    "data.folders": "Training Dataset (one node for each folder, chained by previous)",
    "output.folder": "name",
    "model.path": "model of Load Model for Training Across GPUs",
    **{f"cache.stock_{each}": f"stock_{each} of Cache Captions and Latents" for each in ("clip", "vae", "vision")},
    "--frames": "frames of Training Dataset",
    "find what does not belong there with devicebridge cache --verify, or choose": "choose",
    "take --continue in place of --resume": "turn on continue with these settings",
    "--nproc": "processes of Train LoRA Across GPUs",
}
_BESIDE = {
    "cache.text_encoders": ", or connect core's Load CLIP to stock_clip",
    "cache.vae": ", or connect core's Load VAE to stock_vae",
}


def schema(node_id: str, inputs: Any, outputs: Any, *, is_named: bool = False, **of: Any) -> Any:
    """The define_schema of a node that says something on itself. Its English texts are those of locales/en.
    inputs: entries of make_inputs; a function makes them anew each time, for lists that show what is there now.
    is_named: whether messages send users to its sockets."""

    def define_schema(cls: type[io.ComfyNode]) -> io.Schema:
        texts = _TEXTS[node_id]
        title = texts["display_name"]
        made = make_inputs(inputs() if callable(inputs) else inputs, title if is_named else "")
        said = [(each, texts["inputs"].get(each.id, {})) for each in made]
        for socket, text in (*said, *zip(outputs, texts["outputs"].values(), strict=True)):
            socket.tooltip = socket.tooltip or text.get("tooltip")
            if text.get("name", socket.id) != socket.id:
                socket.display_name = text["name"]
        shown = {"display_name": title, "description": texts["description"], "hidden": [io.Hidden.unique_id]}
        return io.Schema(**{"node_id": node_id, "inputs": made, "outputs": outputs, **shown, **of})

    return classmethod(define_schema)


training_schema = functools.partial(schema, category="DeviceBridge/training")


class _Keeper(logging.Handler):
    """Keeps the pack's warnings, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = in_sockets(record.getMessage())
        if record.name.startswith(PACK) and text not in self.texts:
            self.texts.append(text)
            host.NodeView.footer = "\n".join(f"Warning: {each}" for each in self.texts)


def said_on_node(execute: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    """An execute whose warnings appear on its node, whose errors speak of sockets. Stopped ends it as Cancel does."""

    @functools.wraps(execute)
    def inner(cls: type[io.ComfyNode], *args: Any, **sockets: Any) -> io.NodeOutput:
        keeper = _Keeper()
        logging.getLogger().addHandler(keeper)
        host.NodeView.footer = ""
        quiet_imports()
        try:
            output = execute(cls, *args, **sockets)
        except Stopped:
            host.cancel()
        except Exception as error:
            if fault := import_fault(error):
                raise RuntimeError(fault) from error
            if isinstance(error, (ValueError, RuntimeError)) and [*map(type, error.args)] == [str]:
                error.args = (in_sockets(error.args[0]),)
            raise
        else:
            if keeper.texts:  # also in the node's output, which a reload of the page brings back
                shown = (output.ui or {}).get("text", ())
                output.ui = {**(output.ui or {}), "text": (*shown, *(f"Warning: {each}" for each in keeper.texts))}
                host.NodeView(cls.hidden.unique_id).show_again()
            return output
        finally:
            host.NodeView.footer = ""
            logging.getLogger().removeHandler(keeper)

    return inner


# ---- words


def in_sockets(message: str) -> str:
    """The message with sockets in place of a job file's keys and of flags, fit for a terminal."""
    return _keys().sub(lambda found: _name(found[0]), printable(message))


@functools.cache
def _keys() -> re.Pattern[str]:
    longest_first = sorted({*job_keys(), *_OTHERS}, key=len, reverse=True)
    return re.compile(r"(?<![\w./])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w/]|\.\w)")


def _name(path: str) -> str:
    socket = _OTHERS.get(path) or SHOWN.get(path)
    return f"{socket}{_BESIDE.get(path, '')}" if socket else f"{path.rpartition('.')[2]} ({_NO_SOCKET})"
