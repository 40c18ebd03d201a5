"""Allocations of ComfyUI-MultiGPU: what each text says, and which are refused."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from devicebridge.tests import comfy_stub
from devicebridge.tests.emulated import CARDS, emulated_cards

ONE, TWO, THREE = CARDS[:3]
CPU = torch.device("cpu")
GIB = 1 << 30
MODEL = 12 * GIB
TOTALS = {ONE: 24 * GIB, TWO: 16 * GIB, THREE: 8 * GIB}


@pytest.fixture
def allocation(host: comfy_stub.FakeHost) -> ModuleType:
    return importlib.import_module("devicebridge.nodes.allocation")


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("lazy:0,10gb;lazy:1,*", {ONE: 10, TWO: 2}), ("lazy:1,*;lazy:0,10gb", {TWO: 2, ONE: 10}),
        ("lazy:0,10G; lazy:1 , 512 MB ;", {ONE: 10, TWO: 0.5, CPU: 1.5}),
        ("lazy:0,500mb;lazy:1,3.0g;cpu,5gb*", {ONE: 500 / 1024, TWO: 3, CPU: 9 - 500 / 1024}),
        ("lazy:0,20gb;lazy:1,20gb", {ONE: 12, TWO: 0, CPU: 0}), ("lazy:0,4gb;cpu,*", {ONE: 4, CPU: 8}),
        ("lazy:0,25%;lazy:1,75%", {ONE: 3, TWO: 9}), ("lazy:0,8%;lazy:1,8%;cpu,4%", {ONE: 4.8, TWO: 4.8, CPU: 2.4}),
        ("lazy:0,50%;lazy:1,*", {ONE: 6, TWO: 6}), ("3:1", {ONE: 9, TWO: 3}),
        ("lazy:0,0.25;lazy:1,0.5", {ONE: 6, TWO: 6}), ("lazy:0,0.125;cpu,0.5", {ONE: 3, CPU: 9}),
        ("lazy:0,0.25;lazy:1,0.125", {ONE: 10, TWO: 2}),  # nobody's rest is the first device's
        ("lazy:0;4;lazy:1", {ONE: 8, TWO: 4}), ("#lazy:0;4.0;cpu", {ONE: 8, CPU: 4}),
        ("lazy:0,10gb;lazy:1,*#lazy:0;4.0;cpu", {ONE: 10, TWO: 2}), ("lazy:0,10gb;lazy:1,*#lazy:0", {ONE: 10, TWO: 2}),
    ],
)  # fmt: skip
def test_the_forms_of_its_node_and_log(allocation: ModuleType, text: str, gib: dict[Any, float]) -> None:
    with emulated_cards(3):
        found = allocation.read_allocation(text, (ONE, TWO)).weights(MODEL, TOTALS)
    assert sum(found.values()) == MODEL
    for device, size in found.items():
        assert size == pytest.approx(gib.get(device, 0) * GIB, abs=2), device


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("quickly", "quickly"), ("lazy:0", "lazy:0"), ("lazy:0,", "lazy:0,"), ("lazy:0,10", "above 1"),
        ("lazy:0,-1gb;lazy:1,*", "-1gb"), ("lazy:0,1e9gb;lazy:1,*", "1e9gb"), ("lazy:0,nan%;lazy:1,1%", "nan%"),
        ("lazy:0,10gb;;lazy:1,*", "''"), ("lazy:0,10gb;lazy:1,40%", "mixes"), ("lazy:0,10gb;lazy:0,*", "part already"),
        ("lazy:0,*;lazy:1,*", "rest"), ("lazy:0,0%;lazy:1,0%", "no GPU"), ("cpu,*", "no GPU"), ("#", "''"),
        ("lazy:9,10gb;lazy:1,*", "lazy:9"), ("3:1:1", "3 numbers"), ("lazy:0;4;lazy:0", "part already"),
        ("lazy:0;4;lazy:1,cpu", "lazy:1,cpu,4gb"), ("lazy:0;4", "lazy:0"), ("lazy:0,٣gb;lazy:1,*", "٣gb"),
        ("lazy:0,*;lazy:1,4gb;lazy:1;4;cpu", "lazy:1"), ("lazy:0,1gb;../../etc/passwd,*", "passwd"),
        ("lazy:0,1gb\x00;lazy:1,*", r"1gb\x00"), ("lazy:0,1gb;" * 400, "characters"), ("9" * 400 + ":1", "999"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(allocation: ModuleType, text: str, named: str) -> None:
    with emulated_cards(2), pytest.raises(ValueError) as refused:
        allocation.read_allocation(text, (ONE, TWO))
    assert named in str(refused.value) and len(str(refused.value)) < 600


SOCKETS: dict[str, Any] = {"split_at": "", "memory_limit_gb": "", "transport": "auto", "overlap": True, "offload": True}


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({"balance": "lazy:1,1gb;lazy:0,*"}, (TWO, ONE)),
        ({"balance": "lazy:1,1gb;lazy:0,*", "devices": "lazy:0,lazy:1"}, (ONE, TWO)),
        ({"balance": ""}, (ONE, TWO, THREE)),
    ],
)
def test_an_allocation_names_the_devices(host, changes, devices):
    split, host.gpus = importlib.import_module("devicebridge.nodes.split"), (ONE, TWO, THREE)
    with emulated_cards(3):
        assert split._read_request({"devices": "auto"} | SOCKETS | changes).devices == devices


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": "lazy:0,lazy:2"}, {"devices": "lazy:0,lazy:1,lazy:2"}, {"way": "tensor"}, {"way": "tokens"},
        {"memory_limit_gb": "1, 1"},
    ],
)  # fmt: skip
def test_what_contradicts_an_allocation_is_refused(host: comfy_stub.FakeHost, changes: dict[str, Any]) -> None:
    split = importlib.import_module("devicebridge.nodes.split")
    given = {"devices": "auto", "balance": "lazy:0,1gb;lazy:1,*", **SOCKETS, **changes}
    with emulated_cards(3), pytest.raises(ValueError, match="balance 'lazy:0,1gb;lazy:1"):
        split._read_request(given)


def test_one_device_alone_holds_the_whole_model(host: comfy_stub.FakeHost) -> None:
    split, host.gpus = importlib.import_module("devicebridge.nodes.split"), (ONE, TWO)
    with emulated_cards(2):
        for devices, balance, expected in [
            ("lazy:1", "memory", TWO), ("cpu", "memory", CPU), ("auto", "lazy:1,4gb;cpu,*", TWO),
            ("auto", "memory", None), ("auto", "lazy:1,4gb;lazy:0,*", None),
        ]:  # fmt: skip
            place = split.read_place({"devices": devices, "balance": balance} | SOCKETS)
            assert (place if isinstance(place, torch.device) else None) == expected
