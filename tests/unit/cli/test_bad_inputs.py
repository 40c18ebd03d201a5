"""A fixed part of the wrong inputs, through the real command in this process; scripts/bad_inputs.py has all of them.

What cannot be run here is left out: what needs a fork to be stopped, and what would fill the memory.
"""

import contextlib
import io
import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from devicebridge.cli.main import main
from devicebridge.tests import bad_files, bad_inputs
from devicebridge.tests.bad_inputs import LORA, Case, fault_of, make_base, place_copy

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(os.name == "nt", reason="pipes and links of the cases are POSIX's"),
]
_NUM_KEYS = 100  # of job keys: they end while the job file is read
_NUM_OF_GROUP = 9  # of each other group
_SEED = 20261123


@pytest.fixture(autouse=True)
def _no_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whose Python the command would go on, in place of the tests."""

    def find(**_: object) -> None:
        raise RuntimeError("no ComfyUI was found")

    monkeypatch.setattr("devicebridge.cli.native.find_comfyui", find)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    found = {"plain": make_base(folder), "trained": folder / "trained", "place": folder / "place"}
    place_copy(found["plain"], found["place"])
    code, text = _run(Case("", "", lambda folder: None, ()), found["place"])
    assert code == 0, text
    shutil.copytree(found["place"], found["trained"])
    return found


def _run(case: Case, folder: Path) -> tuple[int, str]:
    """Exit code and all that was printed and logged."""
    said = io.StringIO()
    handler, here, code = logging.StreamHandler(said), Path.cwd(), 0
    logging.getLogger().addHandler(handler)
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for arguments in case.commands:
                code = code or _command(arguments)
    finally:
        os.chdir(here)
        logging.getLogger().removeHandler(handler)
    return code, said.getvalue()


def _command(arguments: tuple[str, ...]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # argparse's
        return int(end.code or 0)


def _fault(case: Case, bases: dict[str, Path]) -> str:
    place = bases["place"]
    place_copy(bases[case.base], place)
    case.spoil(place)
    code, text = _run(case, place)
    lora, whole = place / LORA, bases["trained"] / LORA
    has_same = lora.is_file() and lora.read_bytes() == whole.read_bytes()
    fault = fault_of(case, code, text, has_same_lora=has_same)
    return f"{case.group}: {case.name}: {fault}: {text[-300:]}" if fault else ""


def _some(cases: Iterator[Case], number: int) -> list[Case]:
    found = list(cases)
    return random.Random(_SEED).sample(found, min(number, len(found)))


def test_keys_of_the_job_file_are_refused_by_name(bases: dict[str, Path]) -> None:
    refused = (case for case in bad_inputs.job_key_cases() if case.verdict == "refused")
    cases = [*_some(refused, _NUM_KEYS), *bad_inputs.job_file_cases()]
    assert not list(filter(None, (_fault(case, bases) for case in cases)))


_GROUPS = ["JSON files", "weight files", "datasets", "checkpoints", "caches", "command lines"]


@pytest.mark.parametrize("group", _GROUPS)
def test_damage_is_refused_or_repaired(group: str, bases: dict[str, Path]) -> None:
    made = {
        "JSON files": lambda: bad_files.json_cases(bases["plain"]), "weight files": bad_files.weight_cases,
        "datasets": bad_files.dataset_cases, "checkpoints": lambda: bad_files.checkpoint_cases(bases["trained"]),
        "caches": lambda: bad_files.cache_cases(bases["trained"]), "command lines": bad_files.command_cases,
    }  # fmt: skip
    wanted = (case for case in made[group]() if case.verdict != "any")
    assert not list(filter(None, (_fault(case, bases) for case in _some(wanted, _NUM_OF_GROUP))))


@pytest.mark.parametrize("group", ["checkpoints", "caches"])
def test_a_case_that_were_taken_would_show(group: str, bases: dict[str, Path]) -> None:
    """What is damaged in nothing is no damage that was noticed."""
    case = Case(group, "nothing", lambda folder: None, ("step-000002",), "noticed", (("check", "job.toml"),))
    assert "silent" in _fault(case, bases)
