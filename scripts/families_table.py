"""Writes docs/families.md: which model can be split, divided, trained and so on, and why not. Of the classes that
ComfyUI builds, training is what tests/comfy/test_native_training.py has seen (tests/assets/native_training.json), and
in several processes test_native_ranks.py (native_ranks.json); the rest is what families/ says. With --check it writes
nothing; exit code 1 if the page is out of date.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
SEEN = ROOT / "tests" / "assets" / "native_training.json"
SEEN_IN_RANKS = ROOT / "tests" / "assets" / "native_ranks.json"
_TRAINED = ("loss", "gradients", "recompute", "5 steps", "resume", "stock LoRA")
# Column -> the steps that must have gone well.
_COLUMNS = {
    "train": _TRAINED,
    "split": ("split",),
    "pipeline": ("pipeline",),
    "data": ("data",),
    "tokens": ("tokens",),
    "fsdp": ("fsdp",),
    "8-bit": ("8 bits",),
    "compile": ("compiled",),
    "offload": ("weight offload", "activation offload"),
    "forecast": ("forecast",),
}
_NOT_COMPARED = "nobody has compared what training of it would compute"
_NO_PLAN = "nobody has described how its blocks are divided"
_INTRO = """\
# Which model can do what

Made by `scripts/families_table.py`; do not edit. A number points to the reason below the table.

- **train**: a LoRA. ComfyUI's own trainer has the same loss; where it fails, its sampling has. Central differences have
  the same gradients, five steps lower the loss, a resumed run is the same bit for bit. The stock LoRA loader maps every
  key and draws the same.
- **split**: one model over several cards. **pipeline**: microbatches follow each other through it. **data**: copies.
- **tensor**: every block is divided among the cards in sampling.
- **tokens**: every card has the model and trains its share of the tokens of each sample.
- **fsdp**: processes share the weights, in 8 bits and compiled as well.
- **8-bit**: the frozen weights; the LoRA stays in full precision.
- **compile**: blocks by torch.compile.
- **offload**: weights, and what is kept for the backward, in host memory.
- **forecast**: memory and time are said before weights are loaded; of the others time, where their forward runs without
  numbers.
- **newer**: the model came after ComfyUI 0.33.0. No released version that has it was run. What ran was 0.33.0 with the
  model's public source put in by hand and altered: no fused kernels, no prefix cache, no Fun control, stand-ins for
  latent formats and detection. Tests run where ComfyUI has the class. README's number of models leaves these rows out.

Splits and divided blocks for sampling have a guide of their own: [split models](guides/split_models.md). A class in no
table is split by blocks. A LoRA of it is trained once `devicebridge examine` has proved its gradients on your machine,
as a pipeline where the forward allows one. *derived*: where its tokens are is found and proved there, or refused, as
[for models that no list has](guides/split_models.md#models-that-no-list-has).
"""


class _Reasons:
    """Numbered in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, fault: str) -> str:
        return f"no [{self._numbers.setdefault(fault, len(self._numbers) + 1)}]" if fault else "yes"

    def lines(self) -> Iterator[str]:
        for text, number in self._numbers.items():
            yield f"{number}. {text}"


def page() -> str:
    """The page as it should be."""
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    seen, shared = (json.loads(file.read_text(encoding="utf-8")) for file in (SEEN, SEEN_IN_RANKS))
    for name, model in seen.items():
        model["faults"]["fsdp"] = next(filter(None, shared[name].values()), "")
    rows = importlib.import_module("devicebridge.families.comfy.registry").NATIVE_MODELS
    families = importlib.import_module("devicebridge.families.registry").FAMILIES
    parts = [_INTRO, *_own(families.values()), *_native(rows, seen), *_others(rows, seen)]
    return "\n".join(parts) + "\n"


def _own(families: Iterable[Any]) -> Iterator[str]:
    yield "## Trained as diffusers' class, from any folder or file\n"
    yield from _heading("model", _COLUMNS)
    reasons = _Reasons()
    for family in families:
        faults = dict.fromkeys(_COLUMNS, "")
        faults["tokens"] = "nobody has described where its tokens are"
        yield _row(family.title, [reasons.cell(fault) for fault in faults.values()])
    yield from (*reasons.lines(), "")


def _native(rows: Iterable[Any], seen: dict[str, Any]) -> Iterator[str]:
    yield "## Trained as ComfyUI's class, from a stock MODEL\n"
    yield from _heading("model", ["class", *_COLUMNS, "tensor in sampling"])
    reasons, by_class = _Reasons(), {row.class_name: row for row in rows}
    for name, model in seen.items():
        faults = [_first_fault(model["faults"], steps) for steps in _COLUMNS.values()]
        faults = [_of_any_class(fault, model["class"]) for fault in faults]
        cells = [reasons.cell(fault) for fault in (*faults, _undivided(by_class[model["class"]]))]
        newer = " (newer)" if model.get("newer") else ""
        yield _row(name, [f"`{model['class']}`{newer}", *cells])
    yield from ("", *reasons.lines(), "")


def _of_any_class(fault: str, name: str) -> str:
    fault = fault.replace(f"ComfyUI's {name}", "this class").replace(name, "this class")
    return fault.removeprefix("this class cannot be shared out by tokens: ")


def _undivided(row: Any) -> str:
    """Why its blocks are not divided in sampling; "" if they are."""
    return row.refusal or ("" if row.tensor else _NO_PLAN)


def _first_fault(faults: dict[str, str], steps: Iterable[str]) -> str:
    """Of an error's line what is the reason: neither its class, nor what was asked, nor what would help."""
    fault = next((faults[step] for step in steps if faults[step]), "")
    fault = re.sub(r" \(\w+Error: .*?\)", "", fault)  # which error was behind it
    fault = fault.replace("Unsupported: ", "Unsupported: torch's compiler does not know ")
    return (fault.partition(": ")[2] or fault).rpartition(", but ")[2].partition(";")[0]


def _others(rows: Iterable[Any], seen: dict[str, Any]) -> Iterator[str]:
    trained = {model["class"] for model in seen.values()}
    yield "## Split for sampling, and not trained\n"
    yield from _heading("class", ["module", "split", "tensor", "tokens", "train"])
    reasons = _Reasons()
    for row in rows:
        if row.class_name not in trained:
            why_not = row.refusal or row.untrained or _NOT_COMPARED
            no_tokens = row.no_tokens or row.refusal
            cells = [reasons.cell(each) for each in (row.refusal, _undivided(row), no_tokens, why_not)]
            if not (no_tokens or row.tokens.blocks):
                cells[2] = "derived"
            yield _row(f"`{row.class_name}`", [f"`{row.path.rpartition('.')[0]}`", *cells])
    yield from ("", *reasons.lines())


def _heading(first: str, others: Iterable[str]) -> Iterator[str]:
    names = [first, *others]
    yield _row(names[0], names[1:])
    yield "|" + "---|" * len(names)


def _row(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def main() -> int:
    text = page()
    is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not is_current:
        print("docs/families.md is out of date: python scripts/families_table.py")
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
