"""`devicebridge doctor --bench`: the row of what ComfyUI's Python measured, and where that fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from devicebridge.cli.main import main
from devicebridge.headless import run as server
from devicebridge.system import processes

BLOCKS = [
    {"model": "FLUX.2", "seconds": {"one card": 0.02, "tokens": 0.0123, "tensor": 0.013}, "difference": {}, "why": {}},
    {"model": "Wan 14B", "seconds": {"one card": 0.1}, "difference": {}, "why": {"tokens": "out of memory"}},
]
MEASURED = {"torch": "2.13.0", "flops_per_s": 7.1e13, "bytes_per_s": 1.2e10, "blocks": BLOCKS}
MEASURED["cards"] = ["NVIDIA GeForce RTX 3090"] * 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What ComfyUI's Python prints, to be changed; and the commands that were run."""
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    answers: list[Any] = [f"ComfyUI says something\n{json.dumps(MEASURED)}\n"]

    def run(command: list[str], *, timeout_s: float) -> str | None:
        answers.append([str(each) for each in command])
        return answers[0]

    monkeypatch.setattr(processes, "run", run)
    return answers


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
    assert "note: Wan 14B, tokens: out of memory\n" in shown and facts["blocks"] == BLOCKS
    assert json.loads(shown.splitlines()[-1]) == facts
    assert told[1][-2:] == ["doctor", "--blocks"]
    assert main(["doctor", "--bench", "--json", str(tmp_path / "no folder" / "bench.json")]) == 2
    assert _row(capsys.readouterr().out)[0] == "2 x RTX 3090"  # which is not lost


def test_without_a_link_or_a_gpu(told, capsys) -> None:
    told[0] = json.dumps({**MEASURED, "cards": MEASURED["cards"][:1], "bytes_per_s": None})
    assert main(["doctor", "--bench"]) == 0
    assert _row(capsys.readouterr().out)[:3:2] == ["RTX 3090", "-"]
    told[0] = json.dumps({**MEASURED, "cards": [], "blocks": []})
    assert main(["doctor", "--bench"]) == 0
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [None, "", "no JSON"])
def test_a_comfyui_that_ends_early_is_named(answer, told, capsys) -> None:
    told[0] = answer
    assert main(["doctor", "--bench"]) == 2
    assert sys.executable in capsys.readouterr().err


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
    told[0] = json.dumps({**MEASURED, "blocks": [{**BLOCKS[1], "why": {"tokens": said}}]})
    assert main(["doctor", "--bench"]) == 0
    printed = capsys.readouterr().out
    assert f"note: Wan 14B, tokens: {shown}\n" in printed
    assert json.loads(printed.splitlines()[-1])["blocks"][0]["why"] == {"tokens": shown}
