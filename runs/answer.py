"""What a request of the page is answered with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """JSON values, a file, or bytes that were made for it.

    Args:
        kind: Content-Type of the file or the bytes.
        is_saved: the browser saves the file under its name.
    """

    status: int = 200
    values: Any = None
    file: Path | None = None
    body: bytes = b""
    kind: str = ""
    is_saved: bool = False
