"""Which requests the page's routes look at."""

from __future__ import annotations

import pytest
from devicebridge.runs.guard import MOST_BODY, Refused, check_origin, read_body

OWN = {"Host": "127.0.0.1:8188"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        {**OWN, "Origin": "http://127.0.0.1:8188", "Sec-Fetch-Site": "same-origin"},
        {**OWN, "Sec-Fetch-Site": "none"},
        {"Host": "box.example", "Origin": "https://box.example:443"},
        {"Host": "box:80", "Origin": "http://box"},
    ],
)
def test_comfyuis_own_page_and_programs_are_answered(headers: dict[str, str]) -> None:
    check_origin(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {**OWN, "Origin": "http://evil.example"},
        {**OWN, "Origin": "null"},
        {**OWN, "Origin": ""},
        {**OWN, "Origin": "http://127.0.0.1:8189"},
        {**OWN, "Origin": "http://127.0.0.1:notaport"},
        {**OWN, "Origin": "http://127.0.0.1:8188@evil.example"},
        {**OWN, "Origin": "ftp://127.0.0.1:8188"},
        {**OWN, "Sec-Fetch-Site": "same-site"},
        {**OWN, "Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:8188"},
        {"Origin": "http://127.0.0.1:8188"},
    ],
)
def test_other_origins_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        check_origin(headers)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("text/plain", b"{}", 415),
        ("", b"{}", 415),
        ("application/json", b" " * (MOST_BODY + 1), 413),
        ("application/json", b"{", 400),
        ("application/json", b"[1]", 400),
        ("application/json", b"[" * 10_000, 400),
        ("application/json", b'{"a": [1]}', 400),
        ("application/json", b'{"a": "' + b"x" * 501 + b'"}', 400),
        ("application/json", b'{"caption": "' + b"x" * 8001 + b'"}', 400),
    ],
)
def test_bodies_that_are_no_small_json_object_are_refused(kind: str, body: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        read_body(kind, body)
    assert refused.value.status == status
    assert read_body("application/json; charset=utf-8", b'{"a": null, "b": "x"}') == {"a": None, "b": "x"}
