"""Which requests the page's routes look at."""

import json
from typing import Any

import pytest
from devicebridge.runs.guard import MOST_BODY, Refused, check_origin, read_body

OWN = {"Host": "127.0.0.1:8188"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN, {**OWN, "Origin": "http://127.0.0.1:8188", "Sec-Fetch-Site": "same-origin"}, {},
        {**OWN, "Sec-Fetch-Site": "none"}, {"Host": "box:80", "Origin": "http://box"},
        {"Host": "BOX.", "Origin": "http://box."},
        {"Host": "comfy.example:8188", "Origin": "http://comfy.example:8188"},
        *(
            {"Host": f"{name}{port}", "Origin": f"http://{name}{port}"}
            for name in ("localhost", "LocalHost", "app.localhost", "0.0.0.0", "192.168.1.5", "[::1]", "[fe80::1:2]")
            for port in ("", ":8188")
        ),
        {"Host": "localhost.:8188"}, {"Host": "127.0.0.1."}, {"Host": "[::ffff:127.0.0.1]:8188"},
        # by https a certificate proves the name
        {"Host": "proxy.example", "Origin": "https://proxy.example:443"},
        {"Host": "proxy.example", "Referer": "https://proxy.example/a", "Sec-Fetch-Site": "same-origin"},
    ],
)  # fmt: skip
def test_comfyuis_own_page_and_programs_are_answered(headers: dict[str, str]) -> None:
    check_origin(headers, lambda: {"box", "comfy.example"})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example.", "EVIL.example:8188", "localhost.evil.example", "127.0.0.1.evil.example",
        "notlocalhost", "xn--lcalhost-54a", "box.evil.example", "evil.example:80", "2130706433", "0x7f000001", "", " ",
        ".", "::1", "[::1].evil.example", "127.0.0.1@evil.example", "evil.example@127.0.0.1", "127.0.0.1, evil.example",
        "127.0.0.1/evil.example", "localhost\t", "löcalhost", "x" * 300,
    ],
)  # fmt: skip
def test_a_name_that_the_server_does_not_know_is_refused_though_its_page_has_it_too(host: str) -> None:
    """As a page sends it whose name leads to this machine since it was loaded."""
    page = f"http://{host}"
    more = ({}, {"Origin": page}, {"Referer": f"{page}/"}, {"Referer": f"{page}/", "Sec-Fetch-Site": "none"})
    for headers in more:
        with pytest.raises(Refused) as refused:
            check_origin({"Host": host, **headers}, lambda: {"box"})
        assert refused.value.status == 403


def test_a_refused_name_is_told_with_the_setting_that_would_allow_it() -> None:
    with pytest.raises(Refused) as refused:
        check_origin({"Host": "Comfy.Example.:8188"})
    setting = str(refused.value).rpartition("allowed_hosts = ")[2]
    assert json.loads(setting) == ["comfy.example"] and "devicebridge.toml" in str(refused.value)
    check_origin({"Host": "Comfy.Example.:8188"}, lambda: json.loads(setting))


def test_a_referer_counts_only_beside_what_browsers_send_by_https() -> None:
    given = {"Sec-Fetch-Site": "same-origin"}
    for headers in ({}, {**given, "Origin": "http://evil.example"}, {**given, "Referer": "https://other.example/"}):
        with pytest.raises(Refused):
            check_origin({"Host": "evil.example", "Referer": "https://evil.example/", **headers})
    with pytest.raises(Refused):
        check_origin({"Host": "evil.example:8188", "Origin": "https://evil.example"})


def test_two_hosts_are_refused() -> None:
    class Several(dict[str, str]):
        def items(self) -> Any:  # as a web server's headers have them
            return [("Host", "127.0.0.1"), ("host", "127.0.0.1")]

    with pytest.raises(Refused):
        check_origin(Several())


@pytest.mark.parametrize(
    "headers",
    [
        {**OWN, "Origin": "http://evil.example"}, {**OWN, "Origin": "null"}, {**OWN, "Origin": ""},
        {**OWN, "Origin": "http://127.0.0.1:8189"}, {**OWN, "Origin": "http://127.0.0.1:notaport"},
        {**OWN, "Origin": "http://127.0.0.1:8188@evil.example"}, {**OWN, "Origin": "ftp://127.0.0.1:8188"},
        {**OWN, "Sec-Fetch-Site": "same-site"},
        {**OWN, "Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:8188"}, {"Origin": "http://127.0.0.1:8188"},
    ],
)  # fmt: skip
def test_other_origins_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        check_origin(headers)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("text/plain", b"{}", 415), ("", b"{}", 415), ("application/json", b" " * (MOST_BODY + 1), 413),
        ("application/json", b"{", 400), ("application/json", b"[1]", 400), ("application/json", b"[" * 10_000, 400),
        ("application/json", b'{"a": [1]}', 400), ("application/json", b'{"a": "' + b"x" * 501 + b'"}', 400),
        ("application/json", b'{"caption": "' + b"x" * 8001 + b'"}', 400),
    ],
)  # fmt: skip
def test_bodies_that_are_no_small_json_object_are_refused(kind: str, body: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        read_body(kind, body)
    assert refused.value.status == status
    assert read_body("application/json; charset=utf-8", b'{"a": null, "b": "x"}') == {"a": None, "b": "x"}
