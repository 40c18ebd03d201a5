"""The bounds of settings: what trains nothing, or takes all memory, is refused with the range that works."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import pytest
from devicebridge.config import ranges
from devicebridge.config.job import JobConfig, LoraSettings, OptimizerConfig, job_keys, load_job, make_job
from devicebridge.config.ranges import BACKSLASHES, LONGEST_NAME, STATE_FILES, check_path, check_plain
from devicebridge.config.setting import Key
from devicebridge.system.files import write_atomically
from pydantic import AfterValidator

MINIMAL: dict[str, Any] = {
    "model": {"path": "/models/a"}, "data": {"folders": [{"path": "/data/cats"}]}, "train": {"steps": 10},
    "output": {"folder": "/runs/a"},
}  # fmt: skip


_WIDE = {code: code + 0xFEE0 for code in range(ord("a"), ord("z") + 1)}  # letters that some disks take for a to z


def _kind(key: Key) -> set[str]:
    kinds = {"path": check_path, "file": check_plain}
    return {name for name, check in kinds.items() if AfterValidator(check) in key.parts}


def _job(key: str, value: Any) -> JobConfig:
    section, name = key.split(".")
    values = copy.deepcopy(MINIMAL)
    values.setdefault(section, {})[name] = value
    return make_job(values)


GARBAGE = [
    ("optimizer.learning_rate", math.inf, "from 1e-10 to 1"), ("optimizer.learning_rate", 1e30, "from 1e-10 to 1"),
    ("optimizer.learning_rate", math.nan, "from 1e-10 to 1"), ("optimizer.learning_rate", 0, "from 1e-10 to 1"),
    ("train.clip_norm", 1e-30, "is 0 or a number from 0.0001 to 1e+06"),
    ("train.steps", 1e30, "is a whole number from 1 to 10000000"),
    ("train.steps", 2.5, "is a whole number from 1 to 10000000"),
    ("train.seed", 2**70, "from 0 to 9223372036854775807"), ("objective.logit_mean", math.inf, "from -10 to 10"),
    ("objective.shift", 1e-300, "from 0.01 to 100"), ("objective.guidance", math.inf, "from 0 to 1000"),
    ("data.fps", math.inf, "from 0.1 to 1000"), ("data.resolutions", [10**9], "from 1 to 8192"),
    ("evaluation.quantiles", [1.0], "from 0.001 to 0.999"), ("split.memory_limit_gb", [math.inf], "from 0 to 100000"),
    ("split.offloaded_blocks", [-1], "from 0 to 10000"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), GARBAGE)
def test_a_setting_that_trains_garbage_is_refused_with_its_range(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        _job(key, value)
    wrong, place = (value[0], f"{key}.0: ") if isinstance(value, list) else (value, key)
    assert place in str(refused.value) and message in str(refused.value) and f"(found {wrong!r})" in str(refused.value)
    assert not isinstance(value, list) or len(str(refused.value).splitlines()) == 2, "one line for one mistake"


@pytest.mark.parametrize("value", [True, "3"])
@pytest.mark.parametrize(
    "key", ["train.steps", "lora.rank", "optimizer.learning_rate", "lora.dropout", "train.seed", "data.num_windows"]
)
def test_neither_true_nor_a_text_is_taken_for_a_number(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key}: is a (whole )?number from"):
        _job(key, value)


def test_numbers_at_the_ends_and_whole_floats_are_taken() -> None:
    assert _job("train.clip_norm", 0).train.clip_norm == 0
    assert _job("train.steps", 10_000_000.0).train.steps == 10_000_000
    assert _job("optimizer.learning_rate", 1).optimizer.learning_rate == 1.0
    assert _job("data.fps", "source").data.fps == "source"
    assert _job("objective.shift", "dynamic").objective.shift == "dynamic"
    assert _job("train.seed", 2**63 - 1).train.seed == 2**63 - 1


def test_a_part_made_by_a_node_is_held_to_the_same_ranges() -> None:
    with pytest.raises(ValueError, match="is a whole number from 1 to 1024"):
        LoraSettings(rank=100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maximize": True}, "options.maximize = True would raise the loss"),
        ({"capturable": True}, "options.capturable"), ({"eps": math.inf}, "options.eps = inf is not finite"),
        ({"betas": [0.9, math.nan]}, "is not finite"),
    ],
)  # fmt: skip
def test_options_that_train_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(options=options)


@pytest.mark.parametrize("key", ["model.path", "output.folder"])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_path_is_named(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}: is empty; give a path"):
        _job(key, value)


@pytest.mark.parametrize(
    "key", ["model.path", "model.quantized_cache", "output.folder", "cache.folder", "cache.vae", "evaluation.folder"]
)
def test_a_path_with_nul_or_a_part_too_long_is_named(key: str, tmp_path: Path) -> None:
    for value, message in (("/a\\u0000b", "x00"), (f"/runs/{'x' * 256}", "256 bytes.*255; choose a shorter name")):
        section, name = key.split(".")
        lines = {"model": 'path = "m"', "train": "steps = 1", "output": 'folder = "o"', "cache": "", "evaluation": ""}
        lines[section] = f'{name} = "{value}"' + ("" if name in ("path", "folder") else f"\n{lines[section]}")
        text = "".join(f"[{each}]\n{line}\n" for each, line in lines.items())
        (tmp_path / "job.toml").write_text(text + '[[data.folders]]\npath = "d"\n')
        with pytest.raises(ValueError, match=rf"job\.toml[^\n]*\n  {key}: .*{message}"):
            load_job(tmp_path / "job.toml")


def test_a_name_leaves_room_for_every_ending_we_add() -> None:
    assert _job("output.name", "x" * LONGEST_NAME).output.name == "x" * LONGEST_NAME
    for name in ("x" * (LONGEST_NAME + 1), "é" * LONGEST_NAME, "x" * 250):
        with pytest.raises(ValueError, match=rf" {LONGEST_NAME} fit; choose a shorter one"):
            _job("output.name", name)


@pytest.mark.parametrize("name", ["", ".", "a\0b", "a\nb", "a/b", "a\\b", ".a", "a\x1b[31m", "a\u202eb", "a\udcff"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="^the job config has problems:\n  output: output.name"):
        _job("output.name", name)


@pytest.mark.parametrize("name", ["a:b", "a?", " a", "a ", "a.", "con", "Aux.v2", "nul .x", "COM1", "lpt¹", "CONIN$"])
def test_a_name_that_is_none_on_windows_is_refused_there_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere earlier runs may have it, and are to be resumed."""
    monkeypatch.setattr(ranges, "_IS_WINDOWS", False, raising=False)
    assert _job("output.name", name).output.name == name
    monkeypatch.setattr(ranges, "_IS_WINDOWS", True, raising=False)
    with pytest.raises(ValueError, match="^the job config has problems:\n  output: output.name"):
        _job("output.name", name)


@pytest.mark.parametrize("ending", ["", ".safetensors"])
@pytest.mark.parametrize("spelt", [str, str.upper, str.title, lambda name: name.translate(_WIDE)])
def test_the_name_of_a_file_of_a_checkpoint_is_refused(spelt: Callable[[str], str], ending: str) -> None:
    """The LoRA lies beside these files; on a disk without case, other spellings are the same file."""
    for file in STATE_FILES:
        name = spelt(file.removesuffix(".safetensors"))
        with pytest.raises(ValueError, match="which every checkpoint has"):
            _job("output.name", name + ending)
        assert _job("output.name", f"{name}_2").output.name == f"{name}_2"


@pytest.mark.parametrize(
    "key",
    [key for key in job_keys().values() if {"path", "file"} & _kind(key)],
    ids=lambda key: f"{key.section}.{key.name}",
)
def test_no_path_or_file_of_a_job_holds_a_control_character(key: Key) -> None:
    """What "C:\\train\\new" is in double quotes: a training would write there."""
    values = copy.deepcopy(MINIMAL) | {"evaluation": {"folder": "/e"}}
    section = values.setdefault(key.section.split(".")[0], {})
    section = section["folders"][0] if "." in key.section else section
    for text in ("C:\train\new", "a\x1b[2Jb", "a\x7fb"):
        section[key.name] = [text] if get_origin(key.kind) is tuple else text
        with pytest.raises(ValueError) as refused:
            make_job(values)
        assert key.name in str(refused.value) and BACKSLASHES in str(refused.value)


def test_a_name_of_other_bytes_than_utf_8_is_a_path_all_the_same() -> None:
    assert _job("output.folder", "/runs/\udcff\x85").output.folder == "/runs/\udcff\x85"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * LONGEST_NAME}_high_noise.safetensors"
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_job_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = '[model]\npath = "m"\n[[data.folders]]\npath = "d"\n[train]\nsteps = 1\n[output]\nfolder = "o"\n'
    (tmp_path / "job.toml").write_text(text, encoding="utf-8-sig")
    assert load_job(tmp_path / "job.toml").train.steps == 1
