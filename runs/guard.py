"""What a request must be before anything is done for it: of the page that this server gave out, small, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MOST_BODY = 65_536  # bytes
_MOST_TEXT, _MOST_CAPTION = 500, 8000  # characters of a value
_CAPTIONS = ("caption", "was", "default_caption")
_PORTS = {"http": 80, "https": 443}


class Refused(ValueError):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises: Refused for a request that a page of another origin makes a browser send.

    Browsers say it by Sec-Fetch-Site, and by an Origin that is not the Host asked; programs send neither.
    """
    site = headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        raise Refused(403, f"this is for ComfyUI's own page, and the request comes from one that is {site}")
    origin = headers.get("Origin")
    if origin is not None and not _is_same(origin, headers.get("Host", "")):
        raise Refused(403, "this is for ComfyUI's own page; Origin and Host are not the same")


def _is_same(origin: str, host: str) -> bool:
    try:
        asked, own = urlsplit(origin), urlsplit(f"//{host}")
        port = _PORTS.get(asked.scheme)
        ports = asked.port or port, own.port or port
    except ValueError:
        return False
    return port is not None and bool(asked.hostname) and asked.hostname == own.hostname and ports[0] == ports[1]


def read_body(kind: str, body: bytes) -> dict[str, Any]:
    """The JSON object of a POST, whose values are texts, numbers, true, false and null.

    Args:
        kind: its Content-Type. Only JSON's is one that no page can send elsewhere without being asked about first.
    Raises: Refused.
    """
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, as application/json")
    if len(body) > MOST_BODY:
        raise Refused(413, f"more than {MOST_BODY} bytes")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "this is no JSON") from error
    if not isinstance(values, dict):
        raise Refused(400, "this is no JSON object")
    if not all(_is_plain(value, _MOST_CAPTION if name in _CAPTIONS else _MOST_TEXT) for name, value in values.items()):
        raise Refused(400, "a value is neither a short text nor a number, true, false or null")
    return values


def _is_plain(value: object, most: int) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= most)


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Raises: Refused if it is not there, or is no text."""
    value = values.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise Refused(400, f"{name} should be a text")
    return value


def choice_of(values: Mapping[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    """Raises: Refused if it is none of these."""
    value = values.get(name)
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise Refused(400, f"{name} should be one of {', '.join(map(str, choices))}")


def step_of(values: Mapping[str, Any], *, may_be_last: bool = False) -> int | None:
    """The step of a checkpoint; None for what the run left at its end. Raises: Refused."""
    value = values.get("step")
    if value is None and may_be_last and "step" in values:
        return None
    if type(value) is not int or value < 0:
        raise Refused(400, "step should be a whole number")
    return value
