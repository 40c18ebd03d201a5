"""Requests that the page's routes must refuse: each as method, path with query, headers, body."""

import json
from typing import Any

Hostile = tuple[str, str, dict[str, str], bytes]
_JSON = {"Content-Type": "application/json"}
_CAPTION = {"folder": "dogs", "file": "a.png", "caption": "x", "was": "a dog"}


def _get(path: str, **headers: str) -> Hostile:
    return "GET", path, {name.replace("_", "-"): value for name, value in headers.items()}, b""


def _post(path: str, values: Any, **headers: str) -> Hostile:
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    return "POST", path, _JSON | {name.replace("_", "-"): value for name, value in headers.items()}, body


def hostile_requests(outside: str, port: int) -> list[Hostile]:
    """About 90 of them.

    Args:
        outside: absolute path of a file that nobody may read, outside ComfyUI's folders; the run `linked`, the sample
            000009_0.png of the run `a`, the dataset `linked_images`, and linked.png and b.txt of the dataset `dogs` are
            links to what is beside it.
    """
    host = f"127.0.0.1:{port}"
    found = [
        # names that lead elsewhere
        *(
            _get(f"/devicebridge/run?run={name}")
            for name in ("..", "../..", "%2e%2e%2f%2e%2e", "/", "/etc", "a/..", ".")
        ),
        *(
            _get(f"/devicebridge/run?run={name}")
            for name in ("a/../a", "a%00", "%00", "a%5c..", "linked", "", "%ff", ".jobs")
        ),
        _get(f"/devicebridge/run?run={outside}"),
        _get("/devicebridge/run"),
        _get("/devicebridge/run?run=a&run=b"),
        _get("/devicebridge/run?" + "&".join(f"x{number}=1" for number in range(50))),
        *(
            _get(f"/devicebridge/sample?run=a&file={name}")
            for name in (
                "../run.json",
                "..%2f..%2f..%2fsecret%2f1_1.png",
                outside,
                "000009_0.png",
                "%00",
                "",
                "run.json",
            )
        ),
        *(
            _get(f"/devicebridge/lora?run=a&step={step}")
            for step in ("..", "-1", "1e3", "%D9%A1", "9" * 40, "", "1/../2")
        ),
        _get("/devicebridge/../../../../etc/passwd"),
        _get("/devicebridge/..%2f..%2fetc%2fpasswd"),
        _get("/devicebridge/state/../run"),
        _get("/devicebridge/%00"),
        # folders of images
        *(
            _get(f"/devicebridge/dataset?folder={name}")
            for name in ("..", "dogs/..", "%2e%2e", "/etc", "linked_images", "", "%00", "../output", outside)
        ),
        _get("/devicebridge/dataset?folder=dogs&resolutions=99999999"),
        _get("/devicebridge/dataset?folder=dogs&resolutions=__import__('os')"),
        *(
            _get(f"/devicebridge/picture?folder=dogs&file={name}")
            for name in ("..%2f..%2fsecret%2f1_1.png", "linked.png", outside, "a.txt", "", "%00", "a.png%00", "..", ".")
        ),
        *(
            _get(f"/devicebridge/picture?folder={name}&file=a.png")
            for name in ("..", "dogs/..", "/etc", "linked_images", "", "%00", "../output")
        ),
        *(
            _post("/devicebridge/caption", _CAPTION | values)
            for values in (
                {"folder": "../../secret"},
                {"folder": "linked_images"},
                {"file": "linked.png"},
                {"file": "../../../secret/1_1.png"},
                {"file": outside},
                {"file": "b.png", "was": None},  # whose caption is a link
                {"caption": ["x"]},
                {"caption": "x" * 9000},
                {"was": "another"},
                {"was": {}},
                {"resolutions": 512},
                {"trigger_word": None},
                {"max_aspect_ratio": True},
            )
        ),
        _post("/devicebridge/caption", b"x" * 10_000_000),
        _post("/devicebridge/caption", _CAPTION, Origin="http://evil.example"),
        # what changes something
        _post("/devicebridge/use", {"run": "../..", "step": 1}),
        _post("/devicebridge/use", {"run": "linked", "step": None}),
        _post("/devicebridge/use", {"run": "a", "step": "../1"}),
        _post("/devicebridge/use", {"run": "a", "step": True}),
        _post("/devicebridge/delete", {"run": "a", "step": 1}),
        _post("/devicebridge/delete", {"run": "a", "step": 1, "confirm": "true"}),
        _post("/devicebridge/delete", {"run": "../a", "step": 1, "confirm": True}),
        _post("/devicebridge/delete", {"run": "a", "step": [1], "confirm": True}),
        _post("/devicebridge/ask", {"run": "a", "what": "../../x"}),
        _post("/devicebridge/ask", {"run": "a", "what": "__import__('os').system('id')"}),
        _post("/devicebridge/ask", {"run": ["a"], "what": "stop"}),
        _post("/devicebridge/ask", {"run": "a\0", "what": "stop"}),
        _post("/devicebridge/resume", {"run": "linked"}),
        _post("/devicebridge/resume", {"run": "/" + "a" * 400}),
        _post("/devicebridge/queue", {"job": "../x", "what": "remove"}),
        _post("/devicebridge/queue", {"job": {"$ne": 1}, "what": "remove"}),
        _post("/devicebridge/eval", {"code": "1"}),
        # bodies
        _post("/devicebridge/ask", b"x" * 10_000_000),
        _post("/devicebridge/ask", b'{"run": "' + b"a" * 10_000_000 + b'", "what": "stop"}'),
        _post("/devicebridge/ask", b"[" * 15_000),
        _post("/devicebridge/ask", [1]),
        _post("/devicebridge/ask", b""),
        _post("/devicebridge/ask", b"\xff\xfe"),
        _post("/devicebridge/ask", {"run": "a", "what": "stop"}, Content_Type="text/plain"),
        _post("/devicebridge/free", {}, Content_Type="multipart/form-data; boundary=x"),
        # other origins, of which tests/unit/runs/test_guard.py has each kind
        _get("/devicebridge/state", Sec_Fetch_Site="cross-site"),
        _post("/devicebridge/free", {}, Origin="http://evil.example"),
        _post("/devicebridge/free", {}, Origin=f"http://127.0.0.1:{port + 1}"),
        _post("/devicebridge/free", {}, Host="evil.example", Origin=f"http://{host}"),
        # a name that its owner leads to this machine
        *(
            _get(f"/devicebridge/{name}", Host=f"evil.example:{port}")
            for name in ("state", "run?run=a", "lora?run=a&step=1", "datasets", "picture?folder=dogs&file=a.png")
        ),
        *(
            _post(f"/devicebridge/{name}", values, Host=given, Origin=f"http://{given}")
            for name, values in (
                ("delete", {"run": "a", "step": 1, "confirm": True}),
                ("caption", _CAPTION),
                ("use", {"run": "a", "step": 1}),
                ("free", {}),
            )
            for given in (f"evil.example:{port}", f"localhost.evil.example.:{port}", f"127.0.0.1.evil.example:{port}")
        ),
        _get("/devicebridge/state", Host=""),
        # methods
        ("PUT", "/devicebridge/free", _JSON, b"{}"),
        ("DELETE", "/devicebridge/delete", _JSON, b'{"run": "a", "step": 1, "confirm": true}'),
        _get("/devicebridge/free"),
        _post("/devicebridge/state", {}),
    ]
    assert len(found) >= 40
    return found
