"""Requests that the page's routes must refuse: each as method, path with query, headers, body."""

import json
from collections.abc import Iterator
from typing import Any

Hostile = tuple[str, str, dict[str, str], bytes]
_JSON = {"Content-Type": "application/json"}
_CAPTION = {"folder": "dogs", "file": "a.png", "caption": "x", "was": "a dog"}


def _get(path: str, **headers: str) -> Hostile:
    return "GET", f"/devicebridge/{path}", {name.replace("_", "-"): value for name, value in headers.items()}, b""


def _post(path: str, values: Any, **headers: str) -> Hostile:
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    return "POST", f"/devicebridge/{path}", _JSON | {n.replace("_", "-"): each for n, each in headers.items()}, body


def _places(outside: str) -> Iterator[str]:
    """Names that lead elsewhere."""
    asked: dict[str, tuple[str, ...]] = {
        "run?run={}": (
            "..", "../..", "%2e%2e%2f%2e%2e", "/", "/etc", "a/..", ".", "a/../a", "a%00", "%00", "a%5c..", "linked",
            "", "%ff", ".jobs", outside,
        ),
        "sample?run=a&file={}": (
            "../run.json", "..%2f..%2f..%2fsecret%2f1_1.png", outside, "000009_0.png", "%00", "", "run.json",
        ),
        "lora?run=a&step={}": ("..", "-1", "1e3", "%D9%A1", "9" * 40, "", "1/../2"),
        "{}": (
            "run", "run?run=a&run=b", "run?" + "&".join(f"x{number}=1" for number in range(50)),
            "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "state/../run", "%00",
        ),
        "dataset?folder={}": (
            "..", "dogs/..", "%2e%2e", "/etc", "linked_images", "", "%00", "../output", outside,
            "dogs&resolutions=99999999", "dogs&resolutions=__import__('os')",
        ),
        "picture?folder=dogs&file={}": (
            "..%2f..%2fsecret%2f1_1.png", "linked.png", outside, "a.txt", "", "%00", "a.png%00", "..", ".",
        ),
        "picture?folder={}&file=a.png": ("..", "dogs/..", "/etc", "linked_images", "", "%00", "../output"),
    }  # fmt: skip
    for path, names in asked.items():
        yield from map(path.format, names)


def _changes(outside: str) -> Iterator[tuple[str, Any]]:
    """Bodies, among them too large and malformed ones, of what changes something."""
    captions: tuple[dict[str, Any], ...] = (
        {"folder": "../../secret"}, {"folder": "linked_images"}, {"file": "linked.png"}, {"was": "another"},
        {"file": "../../../secret/1_1.png"}, {"file": outside}, {"caption": ["x"]}, {"caption": "x" * 9000},
        {"file": "b.png", "was": None},  # whose caption is a link
        {"was": {}}, {"resolutions": 512}, {"trigger_word": None}, {"max_aspect_ratio": True},
    )  # fmt: skip
    large = b"x" * 10_000_000
    asked: dict[str, tuple[Any, ...]] = {
        "caption": (*(_CAPTION | values for values in captions), large),
        "use": (
            {"run": "../..", "step": 1}, {"run": "linked", "step": None}, {"run": "a", "step": "../1"},
            {"run": "a", "step": True},
        ),
        "delete": (
            {"run": "a", "step": 1}, {"run": "a", "step": 1, "confirm": "true"},
            {"run": "../a", "step": 1, "confirm": True}, {"run": "a", "step": [1], "confirm": True},
        ),
        "ask": (
            {"run": "a", "what": "../../x"}, {"run": "a", "what": "__import__('os').system('id')"},
            {"run": ["a"], "what": "stop"}, {"run": "a\0", "what": "stop"}, large,
            b'{"run": "' + b"a" * 10_000_000 + b'", "what": "stop"}', b"[" * 15_000, [1], b"", b"\xff\xfe",
        ),
        "resume": ({"run": "linked"}, {"run": "/" + "a" * 400}),
        "queue": ({"job": "../x", "what": "remove"}, {"job": {"$ne": 1}, "what": "remove"}),
        "eval": ({"code": "1"},), "state": ({},),
    }  # fmt: skip
    for path, bodies in asked.items():
        yield from ((path, body) for body in bodies)


def hostile_requests(outside: str, port: int) -> list[Hostile]:
    """About 130 of them.

    Args:
        outside: absolute path of a file that nobody may read, outside ComfyUI's folders; the run `linked`, the sample
            000009_0.png of the run `a`, the dataset `linked_images`, and linked.png and b.txt of the dataset `dogs` are
            links to what is beside it.
    """
    step = {"run": "a", "step": 1}
    found = [*map(_get, _places(outside)), *(_post(*each) for each in _changes(outside))]
    found += [
        _post("caption", _CAPTION, Origin="http://evil.example"),
        _post("ask", {"run": "a", "what": "stop"}, Content_Type="text/plain"),
        _post("free", {}, Content_Type="multipart/form-data; boundary=x"),
        # other origins, of which tests/unit/runs/test_guard.py has each kind
        _get("state", Sec_Fetch_Site="cross-site"), _get("state", Host=""),
        _post("free", {}, Origin="http://evil.example"), _post("free", {}, Origin=f"http://127.0.0.1:{port + 1}"),
        _post("free", {}, Host="evil.example", Origin=f"http://127.0.0.1:{port}"),
        # methods
        ("PUT", "/devicebridge/free", _JSON, b"{}"), _get("free"),
        ("DELETE", "/devicebridge/delete", _JSON, json.dumps(step | {"confirm": True}).encode()),
    ]  # fmt: skip
    # A name that its owner leads to this machine.
    shown = ("state", "run?run=a", "lora?run=a&step=1", "datasets", "picture?folder=dogs&file=a.png")
    found += [_get(name, Host=f"evil.example:{port}") for name in shown]
    changing = {"delete": step | {"confirm": True}, "caption": _CAPTION, "use": step, "free": {}}
    hosts = (f"evil.example:{port}", f"localhost.evil.example.:{port}", f"127.0.0.1.evil.example:{port}")
    found += [
        _post(name, body, Host=host, Origin=f"http://{host}") for name, body in changing.items() for host in hosts
    ]
    return found
