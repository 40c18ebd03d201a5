"""A split MODEL inside the real ComfyUI, on emulated cards: one test per case of split_cases_*.py.

The cases run in one process with ComfyUI's own Python (split_worker.py); each makes its claims there, beside the
reference it compares with, and reports what it found.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.split_classes import EVERY
from devicebridge.tests.comfy.workers import fork_host
from devicebridge.tests.comfy_host import can_import, comfy_python, find_gguf_pack

pytestmark = pytest.mark.comfy


def _cases() -> Iterator[tuple[str, bool]]:
    """Every case of split_cases_*.py, and whether it takes long."""
    for form, (names, short) in EVERY.items():
        yield from ((form.format(name), name not in short) for name in names)
    for path in sorted(Path(__file__).parent.glob("split_cases_*.py")):
        found = re.findall(r"^@(long_)?case\ndef (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        yield from ((name, bool(is_long)) for is_long, name in found)


CASES = dict(_cases())


class Worker:
    def __init__(self, checkout: Path, folder: Path) -> None:
        self.log = folder / "worker.log"
        self._host = fork_host(checkout)
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        with self.log.open("w", encoding="utf-8") as log:
            streams = its_input, its_output, log.fileno()
            self._pid = self._host.start("split_worker.py", checkout, folder, streams=streams)
        os.close(its_input)
        os.close(its_output)
        self._questions, self._answers = os.fdopen(to_it, "w", encoding="utf-8"), os.fdopen(from_it, encoding="utf-8")

    def ask(self, case: str) -> dict[str, Any]:
        self._questions.write(json.dumps({"case": case}) + "\n")
        self._questions.flush()
        answer = self._answers.readline()
        assert answer, f"the worker ended:\n{self.log.read_text(encoding='utf-8')[-3000:]}"
        return json.loads(answer)

    def stop(self) -> None:
        self._questions.close()
        self._host.wait(self._pid, timeout=60)
        self._answers.close()


@pytest.fixture(scope="module")
def worker(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(comfyui, tmp_path_factory.mktemp("split"))
    yield worker
    worker.stop()


def _check(answer: dict[str, Any]) -> None:
    assert "error" not in answer, answer["error"]
    assert answer["claims"]
    broken = [f"{claim}: {found}" for claim, holds, found in answer["claims"] if not holds]
    assert not broken, "\n".join(broken)


def test_every_case_is_listed(worker: Worker) -> None:
    assert sorted(CASES) == worker.ask("names")["names"]


@pytest.fixture(scope="module")
def gguf_pack(comfyui: Path) -> None:
    """The real ComfyUI-GGUF and the package it reads files with."""
    if find_gguf_pack(comfyui) is None:
        pytest.skip("needs ComfyUI-GGUF: set COMFYUI_GGUF_PATH to its folder, or put it among ComfyUI's custom nodes")
    python = comfy_python(comfyui)
    if python is None or not can_import(python, "gguf"):
        pytest.skip("needs the gguf package in ComfyUI's environment; a folder of its own may be named in PYTHONPATH")


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.long] * CASES[each]) for each in CASES])
def test_case(request: pytest.FixtureRequest, worker: Worker, case: str) -> None:
    if case.startswith("gguf_"):
        request.getfixturevalue("gguf_pack")
    _check(worker.ask(case))


def test_no_function_of_comfyui_was_replaced(worker: Worker) -> None:
    """After all of the above the functions, classes and methods of ComfyUI's core are those it came with."""
    _check(worker.ask("core"))


# Each guard of split_guards.py, and a case that does not hold without it.
BROKEN = {
    "copies are forgotten behind other people's code": "writers_before_blocks",
    "what blocks write is written back": "writes_by_layers_of_a_pack",
    "what patches write is carried back": "writes_into_what_an_attention_patch_gets",
    "what is attached is seen": "writers_after_blocks_were_recorded",
    "overlap looks at what is attached": "what_keeps_state_turns_overlap_off",
    "replaced methods go by relay": "a_replaced_method",
    "exchanged lists go by relay": "a_block_list_exchanged_by_a_wrapper",
    "what runs unseen is looked for": "writes_by_layers_of_a_pack",
    "an override with tensors runs at home": "attention_that_brings_tensors",
    "other layers are loaded anew": "a_layer_with_weights_of_its_own",
    "object patches lie under injections": "an_injection_over_an_object_patch",
    "adapters go where their layer is": "bypass_lora",
}


@pytest.mark.long
@pytest.mark.parametrize(("guard", "case"), BROKEN.items())
def test_a_case_does_not_hold_without_its_guard(worker: Worker, guard: str, case: str) -> None:
    answer = worker.ask(f"{case} without {guard}")
    assert not all(holds for _, holds, _ in answer.get("claims", [["an error", False, ""]]))


_ALWAYS = ("history 0", "history 1", "tokens 0")
_HISTORIES = (*(f"history {seed}" for seed in range(16)), *(f"tokens {seed}" for seed in range(30)))


@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=[pytest.mark.long] * (each not in _ALWAYS)) for each in _HISTORIES]
)
def test_random_history(worker: Worker, seed: str) -> None:
    """Some of what scripts/fuzz_split.py plays by the thousand, the latter with --tokens."""
    history = worker.ask(seed)
    assert not history["verdict"].startswith("different"), "\n".join([history["verdict"], *history["steps"]])
