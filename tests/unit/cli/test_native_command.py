"""Jobs that only a process with ComfyUI can run: what the command line does with them where it has none."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.cli.main import main
from devicebridge.config.job import load_job, make_job, save_job
from devicebridge.parallel.ranks.group import ALONE, Ranks
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.runs.queue import JobQueue, native_command
from devicebridge.runs.store import RunStore
from devicebridge.system.processes import ProcessMark
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[3]
_SOURCES = {"text": "CLIP", "latent": "VAE", "vision": "VISION"}
STOCK = {"stock_clip": ["clip.safetensors"], "stock_clip_type": "flux2", "stock_vae": "vae.safetensors"}


def _values(folder: Path, **sections: Any) -> dict[str, Any]:
    values = {"model": {"path": "model.safetensors", "family": "comfyui"}, "train": {"steps": 1}}
    values |= {"data": {"folders": [{"path": str(folder / "images")}]}, "output": {"folder": str(folder / "run")}}
    return values | sections


def _job_file(folder: Path, **sections: Any) -> Path:
    path = folder / "job.toml"
    path.write_text(tomlkit.dumps(_values(folder, **sections)), encoding="utf-8")
    return path


@pytest.mark.parametrize("command", ["train", "check", "plan", "cache"])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, 'model.family = "comfyui" asks for a model that ComfyUI\'s own code trains, but no ComfyUI was found'),
        ({"model": {"path": "flux2"}, "cache": STOCK}, "encoders that only ComfyUI loads, but no ComfyUI was found"),
    ],
)
def test_without_a_comfyui_the_job_is_refused_before_anything_is_read(
    command: str, sections: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def find(**_: Any) -> Any:
        raise RuntimeError("no ComfyUI was found (looked in nowhere)")

    monkeypatch.setattr("devicebridge.cli.native.find_comfyui", find)
    (tmp_path / "images").mkdir()
    assert main([command, str(_job_file(tmp_path, **sections))]) == 2
    assert message in capsys.readouterr().err


def test_the_command_goes_on_with_comfyuis_python_and_the_same_arguments(tmp_path, monkeypatch):
    """A stand-in for ComfyUI's Python takes this process's place and prints what it was given."""
    comfyui = tmp_path / "ComfyUI"
    (comfyui / "comfy").mkdir(parents=True)
    (comfyui / "main.py").touch()
    python = comfyui / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    prints = "import json, os, sys\nprint(json.dumps([os.getpid(), *sys.argv]))\nexit(7)\n"
    python.write_text(f"#!{sys.executable}\n{prints}")
    python.chmod(0o755)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['load_pack'](); "
    code += "from devicebridge.cli.main import main; sys.exit(main(sys.argv[2:]))"
    arguments = ["-v", "train", str(_job_file(tmp_path)), "--resume"]
    command = [sys.executable, "-c", code, str(ROOT / "bootstrap.py"), *arguments]
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=120)
    pid, program, start, *given = json.loads(output)
    assert (process.returncode, program) == (7, str(python))
    assert os.name == "nt" or pid == process.pid
    assert Path(start) == ROOT / "nodes" / "host" / "native" / "start.py"
    assert given == [str(comfyui), str(comfyui), *arguments]


def test_a_name_in_comfyuis_folders_is_no_path_beside_the_job_file(tmp_path: Path) -> None:
    path = _job_file(tmp_path)
    assert load_job(path).model.path == "model.safetensors"
    (tmp_path / "model.safetensors").touch()
    assert load_job(path).model.path == str(tmp_path / "model.safetensors")
    other = _job_file(tmp_path, model={"path": "missing.safetensors"})
    assert load_job(other).model.path == str(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({**STOCK, "text_encoders": "folder"}, "stock_clip says that ComfyUI's CLIP encodes"),
        ({**STOCK, "vae": "folder"}, "stock_vae says that ComfyUI's VAE encodes"),
        ({"stock_clip_type": "flux2"}, "stock_clip_type says what the files of stock_clip are"),
    ],
)
def test_encoders_of_comfyui_and_of_the_model_contradict_each_other(cache: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_job(_values(tmp_path, cache=cache))


def test_a_file_of_no_family_here_names_the_other_way(tmp_path: Path) -> None:
    import torch

    save_file({"layers.0.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match='is trained with model.family = "comfyui"'):
        read_checkpoint(tmp_path / "other.safetensors")


def test_the_queue_starts_such_a_job_with_the_comfyui_that_it_belongs_to(tmp_path, monkeypatch):
    started: list[list[str]] = []

    def start(command: list[str], log: Path, environment: Mapping[str, str]) -> ProcessMark:
        started.append(list(map(str, command)))
        return ProcessMark(1, 0.0, "nowhere")

    monkeypatch.setattr("devicebridge.runs.queue.start_detached", start)
    comfyui = SimpleNamespace(__file__="/comfy/code/folder_paths.py", base_path="/comfy/base")
    monkeypatch.setitem(sys.modules, "folder_paths", comfyui)
    monkeypatch.setitem(sys.modules, "comfy.cli_args", comfyui)
    native = native_command(sys.executable, "/comfy/code", "/comfy/base")
    queue = JobQueue(RunStore(tmp_path), tmp_path / "user", lambda job: None)
    for name, family in (("ours", ""), ("theirs", "comfyui")):
        model, output = {"path": "/m", "family": family}, {"folder": str(tmp_path / name)}
        job = make_job(_values(tmp_path, model=model, output=output))
        save_job(job, tmp_path / f"{name}.toml")
        queue.add(job, [f"cuda:{name}"], is_resumed=name == "theirs")
    queue.tick()
    ours, theirs = started
    assert ours[0] == sys.executable and "--resume" not in ours
    assert theirs == [*native, "train", str(queue.kept.file(tmp_path / "theirs")), "--resume"]


def test_every_process_learns_by_what_the_first_one_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from devicebridge.cli import native

    sources = {f"{kind}_source": f"comfyui 0.33.0 {name} {'0' * 64}" for kind, name in _SOURCES.items()}
    done = make_job(_values(tmp_path, cache={**STOCK, **sources}))
    monkeypatch.setattr(native, "with_encoders", lambda *given: nullcontext((SimpleNamespace(job=done), None)))
    monkeypatch.setattr(native, "cache_job", lambda *given: None)
    job = make_job(_values(tmp_path, cache={**STOCK, "stock_vision": "vision.safetensors"}))
    found = native.encoded(job, None, ALONE).cache
    assert {name: getattr(found, name) for name in sources} == sources


def test_the_first_process_of_another_machine_needs_no_run_folder(tmp_path, monkeypatch):
    from devicebridge.cli import native

    told: list[Any] = []
    monkeypatch.setattr(native, "with_encoders", lambda job, stop: nullcontext((SimpleNamespace(job=job), None)))
    monkeypatch.setattr(native, "cache_job", lambda plan, events, *more: told.append(events.emit("phase")))
    job = make_job(_values(tmp_path, cache=STOCK))
    native.encoded(job, None, Ranks(RankPlace(1, 2, 0, 1)))
    assert told == [None] and not (tmp_path / "run").exists()
    native.encoded(job, told.append, ALONE)
    assert len(told) == 3 and (tmp_path / "run" / "events.jsonl").exists()


def test_an_interrupt_while_comfyui_is_imported_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(*_: str) -> None:
        raise KeyboardInterrupt

    begin = runpy.run_path(str(ROOT / "nodes" / "host" / "native" / "start.py"))["main"]
    monkeypatch.setitem(begin.__globals__, "prepare", interrupt)
    assert begin(["comfy", "base", "doctor", "--bench"]) == 130
    assert capsys.readouterr().err == "devicebridge: interrupted\n"
