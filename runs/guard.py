"""What a request must be before anything is done for it: of the page that this server gave out, small, and JSON. That a
page's origin is the Host it asks proves nothing by itself. Whoever has a name may lead it to this machine once the page
is loaded (DNS rebinding), and both are that name. So names that the server does not know are refused."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MOST_BODY = 65_536  # bytes
_MOST_TEXT, _MOST_CAPTION = 500, 8000  # characters of a value
_CAPTIONS = ("caption", "was", "default_caption")
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]{1,253})(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Answer:
    """What a request is answered with: JSON values, a file, or bytes that were made for it. kind: Content-Type of the
    latter two. is_saved: the browser saves the file under its name."""

    status: int = 200
    values: Any = None
    file: Path | None = None
    body: bytes = b""
    kind: str = ""
    is_saved: bool = False


class Refused(ValueError):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_origin(headers: Mapping[str, str], names: Callable[[], Collection[str]] = tuple) -> None:
    """Refuse a request that a page of another origin makes a browser send, by whatever name it asks this server.
    Browsers say it by Sec-Fetch-Site, and by an Origin that is not the Host requested; programs send neither. Names, in
    small letters, are those under which the server is meant to be reached, besides localhost and all addresses."""
    site = headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        raise Refused(403, f"this is for ComfyUI's own page, and the request comes from one that is {site}")
    origin = headers.get("Origin")
    if origin is not None and not _is_same(origin, headers.get("Host", "")):
        raise Refused(403, "this is for ComfyUI's own page; Origin and Host are not the same")
    hosts = [value for name, value in headers.items() if name.lower() == "host"]
    if not hosts:
        return  # every browser sends one
    found = _HOST.fullmatch(hosts[0])
    if found is None or len(hosts) > 1:
        raise Refused(403, "the Host of this request is no name or address")
    # A name may be anybody's. An address cannot be led elsewhere, and a page that came by https has a certificate of
    # the name. Its Referer counts beside Sec-Fetch-Site only, which browsers send by https and to this machine itself.
    name = found[1].strip("[]").removesuffix(".").lower()
    page = headers.get("Origin", headers.get("Referer", "") if "Sec-Fetch-Site" in headers else "")
    if name == "localhost" or name.endswith(".localhost"):
        return
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return
    if page.startswith("https:") and _is_same(page, hosts[0]):
        return
    if name not in names():
        raise Refused(
            403,
            f"ComfyUI was reached under the name {name}, which it does not know. If that name is yours, allow it in "
            f'devicebridge.toml in ComfyUI\'s user folder: allowed_hosts = ["{name}"]',
        )


def _is_same(origin: str, host: str) -> bool:
    try:
        sender, own = urlsplit(origin), urlsplit(f"//{host}")
        port = _PORTS.get(sender.scheme)
        ports = sender.port or port, own.port or port
    except ValueError:
        return False
    return port is not None and bool(sender.hostname) and sender.hostname == own.hostname and ports[0] == ports[1]


def read_body(kind: str, body: bytes) -> dict[str, Any]:
    """The JSON object of a POST, whose values are texts, numbers, true, false and null.
    Raises: Refused, also for a kind (Content-Type) other than JSON's, which alone no page sends elsewhere unasked."""
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
    for name, value in values.items():
        is_short = isinstance(value, str) and len(value) <= (_MOST_CAPTION if name in _CAPTIONS else _MOST_TEXT)
        if value is not None and not isinstance(value, (bool, int, float)) and not is_short:
            raise Refused(400, "a value is neither a short text nor a number, true, false or null")
    return values


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Raises: Refused if it is not there, or is no text."""
    value = values.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise Refused(400, f"{name} should be a text")
    return value


def choice_of(values: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> Any:
    """Raises: Refused if it is none of these."""
    if values.get(name) not in choices:
        raise Refused(400, f"{name} should be one of {', '.join(choices)}")
    return values[name]


def step_of(values: Mapping[str, Any], *, may_be_last: bool = False) -> int | None:
    """The step of a checkpoint; None for what the run left at its end. Raises: Refused."""
    value = values.get("step")
    if value is None and may_be_last and "step" in values:
        return None
    if type(value) is not int or value < 0:
        raise Refused(400, "step should be a whole number")
    return value
