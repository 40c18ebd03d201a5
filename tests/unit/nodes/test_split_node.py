"""What the split nodes' sockets become; what a split does is tested in the real host (tests/comfy)."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from devicebridge.tests import comfy_stub
from devicebridge.tests.emulated import CARDS, emulated_cards

SOCKETS: dict[str, Any] = {
    "devices": "auto", "balance": "memory", "split_at": "", "memory_limit_gb": "", "transport": "auto", "overlap": True,
    "offload": True, "verify": False,
}  # fmt: skip


@pytest.fixture
def split(host: comfy_stub.FakeHost) -> ModuleType:
    return importlib.import_module("devicebridge.nodes.split")


def test_auto_takes_every_gpu_the_hosts_own_first(split: ModuleType, host: comfy_stub.FakeHost) -> None:
    host.gpus = (torch.device("cuda", 1), torch.device("cuda", 0))
    request = split._read_request(SOCKETS)
    assert request.devices == (torch.device("cuda", 1), torch.device("cuda", 0))
    assert (request.balance, request.transport, request.overlap, request.offload) == ("memory", None, True, True)
    assert (request.split_at, request.memory_limit_gb) == ((), ())


@pytest.mark.parametrize("gpus", [(), (torch.device("cuda", 0),)])
def test_with_one_device_the_model_passes_whole_and_the_node_says_so(split, host, gpus):
    host.gpus = gpus
    model = object()
    assert split.SplitModel.execute(model, **SOCKETS).args == (model,)
    assert "stays whole" in host.texts[-1]


def test_settings_reach_the_request(split: ModuleType) -> None:
    given = SOCKETS | {
        "devices": "lazy:1, lazy:0", "balance": "manual", "split_at": "3", "memory_limit_gb": "20, 14.5",
        "transport": "relay", "overlap": False, "offload": False, "verify": True,
    }  # fmt: skip
    with emulated_cards(2):
        request = split._read_request(given)
    assert request.devices == (CARDS[1], CARDS[0])
    assert (request.balance, request.split_at, request.memory_limit_gb) == ("manual", (3,), (20.0, 14.5))
    assert (request.transport, request.overlap, request.offload, request.verify) == ("relay", False, False, True)


@pytest.mark.parametrize("text", ["3:5.5", "3, 5.5", " 3 : 5.5 "])
@pytest.mark.parametrize("balance", ["memory", "manual"])
def test_shares_of_way_tokens_are_a_ratio_or_a_list(split: ModuleType, text: str, balance: str) -> None:
    given = SOCKETS | {"devices": "lazy:0,lazy:1", "balance": balance, "way": "tokens", "shares": text}
    with emulated_cards(2):
        assert split._read_request(given).shares == (3.0, 5.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_limit_gb": "20"}, r"20.0\]: give one above 0 for each of lazy:0, lazy:1"),
        ({"devices": "lazy:1"}, "two or more different devices; asked for lazy:1"),
        ({"devices": "lazy:0,cpu"}, "leave out cpu"), ({"memory_limit_gb": "20, 0"}, "above 0"),
        ({"balance": "manual"}, "manual with way auto needs split_at"), ({"memory_limit_gb": "much, more"}, "'much'"),
        ({"shares": "3:5"}, "shares .* way is auto"), ({"shares": "3:5", "way": "blocks"}, "shares .* way is blocks"),
        ({"shares": "3:5:1", "way": "tokens"}, "shares 3:5:1: give one above 0 for each of lazy:0, lazy:1"),
        ({"shares": "3:0", "way": "tokens"}, "shares 3:0: give one above 0"),
        ({"shares": "nan:1", "way": "tokens"}, "shares nan:1"),
        ({"shares": "3:fast", "way": "tokens"}, "shares: 'fast'"),
        ({"balance": "manual", "way": "tokens"}, "needs shares"),
        ({"balance": "manual", "way": "tokens", "shares": "1:1", "split_at": "3"}, "split_at .* way tokens"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(split: ModuleType, changes: dict[str, Any], message: str) -> None:
    with emulated_cards(2), pytest.raises(ValueError, match=message):
        split._read_request(SOCKETS | {"devices": "lazy:0,lazy:1"} | changes)


def test_a_missing_file_is_refused_with_what_is_there(split: ModuleType, host: comfy_stub.FakeHost) -> None:
    (host.root / "models/diffusion_models/wan.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"'flux.safetensors'.* found there: wan.safetensors$"):
        split.LoadDiffusionModelSplit.execute("flux.safetensors", "default", **SOCKETS)


def test_cuts_that_are_not_used_are_said_to_be_ignored(split: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with emulated_cards(2):
        request = split._read_request(SOCKETS | {"devices": "lazy:0,lazy:1", "split_at": "7"})
    assert request.split_at == ()
    assert "split_at 7 is ignored with balance memory" in caplog.text
