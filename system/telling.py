"""What a process says, in one place: what nobody can read, or its reader cannot spell, breaks nothing that is done.
A terminal obeys control characters in names, captions and metadata; `printable` spells them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

LOUD = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")  # loggers that warn while torchao is imported
# Control characters but tab and line feed, marks that turn the direction of a text, line separators, and half pairs:
# bytes of a name that is no UTF-8.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with an escape, such as \u001b, in place of each character that a terminal would obey or not spell."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(line: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a line on standard output, or on stream. A no-op where nobody can read it."""
    with contextlib.suppress(OSError, ValueError):  # a pipe that is closed, a full disk; a closed stream
        print(printable(line), end=end, file=stream or sys.stdout, flush=True)


_ERROR = re.compile(  # of our command, to a line in which somebody begins something else
    r"^devicebridge: (.*(?:\n(?!devicebridge: |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|saved|step|==) |[EWI]\d{4} |"
    r"Timeout \(|Traceback ).*)*)",
    re.MULTILINE,
)


def errors_in(text: str) -> list[str]:
    """What went wrong, as commands of ours said in what they printed."""
    return [each.strip() for each in _ERROR.findall(text)]


@dataclass(eq=False)
class _Harmless:
    """A standard stream that nobody, not even a library, can fail to write to."""

    _stream: TextIO

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def safe_output() -> None:
    """Make standard output and errors take everything: an escape for what they cannot spell, and nothing where there
    are none, as under pythonw. To be called first in a process of ours."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Harmless):
            continue
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # to the end of the process
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Harmless(stream))


class SaidLogs(logging.Handler):
    """Says what is logged on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record).replace("\n", "\n  "), sys.stderr)
        except Exception:  # logging's own rule: a record that cannot be formatted breaks nothing
            self.handleError(record)


class EscapedLogs(logging.Handler):
    """As the first handler of a logger, makes what is logged printable for the handlers of the loggers above it."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = printable(record.getMessage()), ()


@functools.cache
def quiet_imports() -> None:
    """From now on torchao does not warn, while it is imported, of kernels that nobody here asked for."""

    def is_no_import(_: logging.LogRecord) -> bool:
        parts = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torchao"]
        return not any(getattr(getattr(each, "__spec__", None), "_initializing", False) for each in parts)

    for name in LOUD:
        logging.getLogger(name).addFilter(is_no_import)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table: cells of one length in a column, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
