"""`devicebridge doctor --bench`: the row of what a process with ComfyUI in it measured, and where there is none."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from devicebridge.cli.main import main
from devicebridge.headless import run as server

BLOCKS = [
    {"model": "FLUX.2", "seconds": {"one card": 0.02, "tokens": 0.0123, "tensor": 0.013}, "difference": {}, "why": {}},
    {"model": "Wan 14B", "seconds": {"one card": 0.1}, "difference": {}, "why": {"tokens": "out of memory"}},
]
MEASURED = {"torch": "2.13.0", "flops_per_s": 7.1e13, "bytes_per_s": 1.2e10, "blocks": BLOCKS}
MEASURED["cards"] = ["NVIDIA GeForce RTX 3090"] * 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is measured in a process that has ComfyUI, to be changed."""
    measured = json.loads(json.dumps(MEASURED))

    def measure() -> dict[str, Any]:
        sys.stdout.write("ComfyUI says something\n")
        return measured

    monkeypatch.setattr("devicebridge.cli.native.is_native_process", lambda: True)
    module = ModuleType("devicebridge.nodes.host.split.bench")

    def __getattr__(name: str) -> Any:  # as what is imported for it does
        sys.stdout.write("ComfyUI says something\n")
        if name == "measure":
            return measure
        raise AttributeError(name)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return measured


def _row(text: str) -> list[str]:
    lines = text.splitlines()
    cells = [each.strip() for each in lines[2].strip("|").split("|")]
    assert len(cells) == lines[0].count("|") - 1
    return cells


def test_two_cards_give_a_row(told, capsys, tmp_path) -> None:
    file = tmp_path / "bench.json"
    assert main(["doctor", "--bench", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    cells, facts = _row(shown), json.loads(file.read_text(encoding="utf-8"))
    assert cells[0] == "2 x RTX 3090" and cells[1].startswith("2.13.0, ")
    assert cells[2:] == ["12", "71", "20, 12.3, 13", "-, -, -", "100, -, -"]
    assert "note: Wan 14B, tokens: out of memory\n" in shown and "something" not in shown and facts["blocks"] == BLOCKS
    assert json.loads(shown.splitlines()[-1]) == facts
    assert main(["doctor", "--bench", "--json", str(tmp_path / "no folder" / "bench.json")]) == 2
    assert _row(capsys.readouterr().out)[0] == "2 x RTX 3090"  # which is not lost


def test_without_a_link_or_a_gpu(told, capsys) -> None:
    told |= {"cards": MEASURED["cards"][:1], "bytes_per_s": None}
    assert main(["doctor", "--bench"]) == 0
    assert _row(capsys.readouterr().out)[:3:2] == ["RTX 3090", "-"]
    told |= {"cards": [], "blocks": []}
    assert main(["doctor", "--bench"]) == 0
    assert "no GPU" in capsys.readouterr().out


def test_a_process_without_comfyui_goes_on_in_one_that_has_it(monkeypatch, tmp_path) -> None:
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr("devicebridge.cli.native.find_comfyui", lambda **_: found)
    monkeypatch.setattr("devicebridge.cli.native.go_on_as", lambda command: [command[0], *command[-2:]])
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--bench"])
    assert ended.value.code == [sys.executable, "doctor", "--bench"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no such file: /data/Jane/ComfyUI/models/a.safetensors, b", "no such file: a.safetensors, b"),
        ("No module 'x' (/srv/me/x.py)", "No module 'x' (x.py)"), (r"C:\Users\Jane\x.py is old", "x.py is old"),
        (f"in {Path.home() / 'Jane Doe' / 'x'}", "in ~/Jane Doe/x"),
        ("1e12/s of a/b at https://example.org/a/b", "1e12/s of a/b at https://example.org/a/b"),
    ],
)  # fmt: skip
def test_what_is_sent_names_no_folder(said, shown, told, capsys) -> None:
    told["blocks"] = [{**BLOCKS[1], "why": {"tokens": said}}]
    assert main(["doctor", "--bench"]) == 0
    printed = capsys.readouterr().out
    assert f"note: Wan 14B, tokens: {shown}\n" in printed
    assert json.loads(printed.splitlines()[-1])["blocks"][0]["why"] == {"tokens": shown}
