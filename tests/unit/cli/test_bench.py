"""`devicebridge doctor --bench` in process: on no GPU, on one and on two emulated ones, and where something fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.cli import bench
from devicebridge.cli.main import main
from devicebridge.headless import server
from devicebridge.parallel import devices as devices_module
from devicebridge.parallel import exchange_speed as exchange_module
from devicebridge.system import processes
from devicebridge.tests.emulated import CARDS, emulated_cards

BLOCKS = [
    {"model": "FLUX.2", "seconds": {"one card": 0.02, "tokens": 0.0123, "tensor": 0.013}, "difference": {}, "why": {}},
    {"model": "Wan 14B", "seconds": {"one card": 0.1}, "difference": {}, "why": {"tokens": "out of memory"}},
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What ComfyUI's Python prints, to be changed; and the commands that were run."""
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    answers: list[Any] = [f"ComfyUI says something\n{json.dumps(BLOCKS)}\n"]

    def run(command: list[str], *, timeout_s: float) -> str | None:
        answers.append([str(each) for each in command])
        return answers[0]

    monkeypatch.setattr(processes, "run", run)
    return answers


def _machine(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices_module, "available_devices", lambda: list(CARDS[:count]))
    monkeypatch.setattr(devices_module, "device_title", lambda device: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(exchange_module, "_LARGEST_PRODUCT", 256)


def _row(text: str) -> list[str]:
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| cards |"))
    cells = [each.strip() for each in lines[head + 2].strip("|").split("|")]
    assert len(cells) == lines[head].count("|") - 1
    return cells


def test_two_cards_give_a_row(told, monkeypatch, capsys, tmp_path) -> None:
    _machine(monkeypatch, 2)
    file = tmp_path / "bench.json"
    with emulated_cards(2):
        assert main(["doctor", "--bench", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    cells, facts = _row(shown), json.loads(file.read_text(encoding="utf-8"))
    assert cells[0] == "2 x RTX 3090" and cells[1].startswith(torch.__version__)
    direct, host = map(float, cells[2].split(", "))
    assert direct > 0 and host > 0 and "-" not in cells[3].split(", ")[0]
    assert cells[4:] == ["20, 12.3, 13", "-, -, -", "100, -, -"]
    assert len(facts["cards"]) == 2 and len(facts["links"]) == 1 and facts["blocks"] == BLOCKS
    assert "Wan 14B, tokens: out of memory" in facts["notes"]
    assert json.loads(shown.splitlines()[-1]) == facts
    assert told[1][-2:] == ["doctor", "--blocks"]


def test_one_card_has_no_link(told, monkeypatch, capsys) -> None:
    _machine(monkeypatch, 1)
    with emulated_cards(1):
        assert main(["doctor", "--bench"]) == 0
    shown = capsys.readouterr().out
    assert _row(shown)[2] == "-, -" and "no link" in shown


def test_without_a_gpu_it_says_so_and_starts_nothing(told, monkeypatch, capsys) -> None:
    _machine(monkeypatch, 0)
    assert main(["doctor", "--bench", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cards"] == [] and "no GPU" in facts["notes"][0] and len(told) == 1
    assert main(["doctor", "--bench"]) == 0
    assert capsys.readouterr().out.startswith("note: no GPU")


@pytest.mark.parametrize("answer", [None, "", "no JSON"])
def test_a_comfyui_that_ends_early_leaves_the_rest(answer, told, monkeypatch, capsys) -> None:
    _machine(monkeypatch, 2)
    told[0] = answer
    with emulated_cards(2):
        facts = bench.collect()
    assert facts["blocks"] == [] and any(note.startswith("blocks: ") for note in facts["notes"])
    assert facts["links"][0]["direct"] > 0
    assert sys.executable not in json.dumps(facts) and sys.executable in capsys.readouterr().err


def test_a_comfyui_whose_torch_finds_no_gpu_has_a_note(told, monkeypatch) -> None:
    _machine(monkeypatch, 1)
    told[0] = "[]"
    with emulated_cards(1):
        facts = bench.collect()
    assert facts["blocks"] == [] and any(each.startswith("blocks: ") and "GPU" in each for each in facts["notes"])


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no such file: /data/Jane/ComfyUI/models/a.safetensors, b", "no such file: a.safetensors, b"),
        ("No module 'x' (/srv/me/x.py)", "No module 'x' (x.py)"),
        (r"C:\Users\Jane\x.py is old", "x.py is old"),
        (f"in {Path.home() / 'Jane Doe' / 'x'}", "in ~/Jane Doe/x"),
        ("1e12/s of a/b at https://example.org/a/b", "1e12/s of a/b at https://example.org/a/b"),
    ],
)
def test_what_is_sent_names_no_folder(said, shown, told, monkeypatch, capsys) -> None:
    _machine(monkeypatch, 1)
    told[0] = json.dumps([{**BLOCKS[1], "why": {"tokens": said}}])
    with emulated_cards(1):
        assert main(["doctor", "--bench"]) == 0
    printed = capsys.readouterr().out
    assert f"note: Wan 14B, tokens: {shown}\n" in printed
    assert json.loads(printed.splitlines()[-1])["blocks"][0]["why"] == {"tokens": shown}


def test_a_file_that_cannot_be_written_costs_no_measurement(told, monkeypatch, capsys, tmp_path) -> None:
    _machine(monkeypatch, 1)
    path = tmp_path / "no folder" / "bench.json"
    with emulated_cards(1):
        assert main(["doctor", "--bench", "--json", str(path)]) == 2
    shown = capsys.readouterr()
    assert _row(shown.out)[0] == "RTX 3090" and str(path) in shown.err


def test_without_comfyui_blocks_are_left_out(monkeypatch) -> None:
    _machine(monkeypatch, 1)

    def nowhere(**_: object) -> None:
        raise RuntimeError("no ComfyUI")

    monkeypatch.setattr(server, "find_comfyui", nowhere)
    with emulated_cards(1):
        facts = bench.collect()
    assert any("COMFYUI_PATH" in note for note in facts["notes"]) and facts["cards"]


def test_a_card_without_products_of_a_type_has_a_note(told, monkeypatch) -> None:
    _machine(monkeypatch, 1)
    real = exchange_module.product_speed

    def refusing(device: torch.device, dtype: torch.dtype = torch.float16) -> float:
        if dtype is torch.float8_e4m3fn:
            raise RuntimeError("needs compute capability 8.9\nand more")
        return real(device, dtype=dtype)

    monkeypatch.setattr(exchange_module, "product_speed", refusing)
    with emulated_cards(1):
        facts = bench.collect()
    assert facts["cards"][0]["float8"] is None and facts["cards"][0]["half"] > 0
    assert "float8 products on lazy:0: needs compute capability 8.9" in facts["notes"]


def test_products_of_eight_bits_are_of_as_many_operations() -> None:
    for dtype in (torch.int8, torch.float16):
        times = [0.0, 1.0] * 8
        found = exchange_module.product_speed(torch.device("cpu"), lambda times=times: times.pop(0), dtype)
        assert found == 2.0 * 256**3  # long enough at the first size
