"""Running workflows, against a make-believe ComfyUI and comfy-cli that are real processes."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.cli.main import main
from devicebridge.headless import run as headless
from devicebridge.headless import run as server
from devicebridge.headless.run import parse_setting
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import read_workflow, set_values

FAKE_SERVER = """
import json, os, sys, pathlib
from http.server import BaseHTTPRequestHandler, HTTPServer

here = pathlib.Path(__file__).parent
(here / "arguments.json").write_text(json.dumps(sys.argv[1:]))
(here / "server.pid").write_text(str(os.getpid()))
if (here / "broken").exists():
    sys.exit("no module named aiohttp")
for line in ("[INFO] hello", "[INFO] split: cuda:0 gets 23 blocks", "\\x1b[33m[WARNING]\\x1b[0m split: it is tight"):
    print(line, flush=True)
running = [1]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if (here / "interrupted").exists() and not (here / "saving").exists():
            running.clear()
        answers = {"/system_stats": {}, "/queue": {"queue_running": running}}
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        (here / "interrupted").write_text(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

FAKE_CLIENT = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / "client.json").write_text(json.dumps(sys.argv[1:]))
(here / "client.pid").write_text(str(os.getpid()))
workflow = pathlib.Path(sys.argv[sys.argv.index("--workflow") + 1])
(here / "workflow.json").write_text(workflow.read_text())
outputs = [{{"filename": "x.png", "subfolder": "sub", "type": "output"}},
           {{"filename": "t.png", "subfolder": "", "type": "temp"}}]
print(json.dumps({{"type": "executed", "node": "3", "title": "Train", "outputs": outputs}}), flush=True)
print(json.dumps({{"type": "executing", "node": "3", "title": "Train"}}), flush=True)
for done in (1, 2, 3):
    print(json.dumps({{"type": "progress", "node": "3", "completed": done, "total": 3}}), flush=True)
{ending}
"""
SUCCEEDS = 'print(json.dumps({"type": "envelope", "error": None}))'
FAILS = """
error = {"message": "Workflow has 1 validation error(s)", "details": {"node_errors": [
    {"node_id": "5", "class_type": "Loader", "message": "Value not in list", "details": "model: 'x'"}]}}
print(json.dumps({"type": "envelope", "error": error}))
sys.exit(1)
"""
REFUSES = """
errors = [
    {"node_id": "7", "code": "unknown_class_type", "message": "class_type 'DeviceBridgeSplitModel' not found in "
     "object_info", "hint": "run `comfy nodes search <name>` to find available classes", "suggestions": []},
    {"node_id": "8", "code": "value_not_in_list", "message": "'x' is not an option of model"}]
hint = "node 7: class_type 'DeviceBridgeSplitModel' not found in object_info\\nask the server"
error = {"message": "Workflow has 2 validation error(s) against server", "hint": hint, "details": {"errors": errors}}
print(json.dumps({"type": "envelope", "error": error}))
sys.exit(1)
"""
HANGS = "time.sleep(60)"


@pytest.fixture
def comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ComfyUI"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text(FAKE_SERVER)
    monkeypatch.setattr(server, "has_accelerator", lambda python: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a log that is kept is kept here
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a client that ends so; the command of it, beside a workflow."""
    if os.name == "nt":
        pytest.skip("the make-believe client is a script with a shebang")
    (program := tmp_path / "bin" / "comfy").parent.mkdir()
    graph = {"3": {"class_type": "Train", "inputs": {"steps": 5, "model": ["1", 0]}}}
    (tmp_path / "workflow.json").write_text(json.dumps(graph))

    def install(ending: str) -> Path:
        program.write_text(FAKE_CLIENT.format(python=sys.executable, ending=ending))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(headless, "find_comfy_cli", lambda: program)
        return program

    return install


@pytest.fixture
def run(tmp_path: Path, comfyui: Path, install: Any) -> Callable[..., headless.RunResult]:
    """Runs the workflow with a client that ends so; the server is gone afterwards."""

    def run(ending: str, **how: Any) -> headless.RunResult:
        install(ending)
        result = headless.run_workflow(tmp_path / "workflow.json", comfyui=comfyui, **how)
        assert not _is_alive(comfyui / "server.pid")
        return result

    return run


def _is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text(encoding="utf-8")), 0)
    except ProcessLookupError:
        return False
    return True


def _arguments(comfyui: Path) -> list[str]:
    return json.loads((comfyui / "arguments.json").read_text(encoding="utf-8"))


def test_a_run_reports_progress_and_outputs_and_stops_the_server(tmp_path, comfyui, run):
    lines: list[str] = []
    result = run(SUCCEEDS, on_progress=lines.append, server_arguments=["--disable-api-nodes"])
    assert (result.exit_code, result.message) == (0, "")
    assert result.outputs == [comfyui / "output" / "sub" / "x.png"]
    told = [line for line in lines if "split: " in line]
    assert told == ["split: cuda:0 gets 23 blocks", "[WARNING] split: it is tight"]
    rest = [line for line in lines if "split: " not in line]
    assert rest == [f"starting ComfyUI in {comfyui}", "Train", "Train 1/3", "Train 3/3"]
    assert result.log is None
    assert json.loads((tmp_path / "bin" / "workflow.json").read_text())["3"]["inputs"]["steps"] == 5
    assert {"--wait", "--skip-prompt", "--json"} <= set(json.loads((tmp_path / "bin" / "client.json").read_text()))
    assert not (comfyui / "interrupted").exists()
    arguments = _arguments(comfyui)
    assert {"--cpu", "--extra-model-paths-config", "--disable-auto-launch", "--disable-api-nodes"} <= set(arguments)
    assert arguments[arguments.index("--listen") + 1] == "127.0.0.1"
    assert "--base-directory" not in arguments, "models and outputs are the user's own"


def test_the_command_sets_values_and_hands_on_folder_and_flags(tmp_path, comfyui, install, capsys):
    bin_folder, base = install(SUCCEEDS).parent, tmp_path / "data"
    command = ["run", str(tmp_path / "workflow.json"), "--comfyui", str(comfyui), "--base-directory", str(base)]
    command += ["--set", "Train.steps=7", "--set", "3.name=cat", "--", "--lowvram", "--reserve-vram", "2"]
    assert main(command) == 2, "the node has no such input"
    error = capsys.readouterr().err
    assert "3.name: the node has no such input" in error and not (comfyui / "arguments.json").exists()
    command[command.index("3.name=cat")] = "3.steps=8"
    assert main(command) == 0
    assert json.loads((bin_folder / "workflow.json").read_text())["3"]["inputs"]["steps"] == 8
    arguments = _arguments(comfyui)
    assert arguments[arguments.index("--base-directory") + 1] == str(base)
    assert arguments[-3:] == ["--lowvram", "--reserve-vram", "2"]
    assert capsys.readouterr().out.splitlines()[-1] == str(base / "output" / "sub" / "x.png")


@pytest.mark.parametrize("text", ["steps=3", "Train.steps", "Train"])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not NODE\.INPUT=VALUE"):
        parse_setting(text)


def test_values_are_json_where_they_can_be() -> None:
    texts = ["A.a=3", "A.a=0.5", "A.a=true", "A.a=cat", "A.a=", 'A.a="3"']
    assert [parse_setting(text)[1] for text in texts] == [3, 0.5, True, "cat", "", "3"]


def test_an_error_passes_on_its_exit_code_and_says_which_node(run):
    result = run(FAILS)
    assert result.exit_code == 1
    assert result.message == "Workflow has 1 validation error(s)\nnode 5 Loader Value not in list model: 'x'"
    assert result.log is not None and "split: it is tight" in result.log.read_text()


def test_a_refusal_names_every_error_once_and_the_missing_pack(run):
    *lines, pack = run(REFUSES).message.splitlines()
    assert lines == [
        "Workflow has 2 validation error(s) against server",
        "node 7 class_type 'DeviceBridgeSplitModel' not found in object_info "
        "run `comfy nodes search <name>` to find available classes",
        "node 8 'x' is not an option of model",
        "ask the server",
    ]
    assert "custom_nodes" in pack and str(server.ROOT) in pack


def test_what_the_server_itself_refuses_is_listed_error_by_error() -> None:
    node = {"node_id": "5", "class_type": "Loader", "errors": [{"message": "Not in list", "details": "a"}, "odd"]}
    error = {"message": "refused", "hint": "inspect `details.node_errors`", "details": {"node_errors": [node]}}
    assert headless._describe_error(error) == "refused\nnode 5 Loader Not in list a\nnode 5 Loader odd"
    other = {"code": "unknown_class_type", "message": "class_type 'Foo' not found"}
    assert "DeviceBridge" not in headless._describe_error({"message": "no", "details": {"errors": [other]}})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("split: Flux, 56 blocks", "split: Flux, 56 blocks"),
        ("\x1b[32m[INFO]\x1b[0m \x1b[32msplit: a\x1b[0m", "split: a"),
        ("\x1b[1m\x1b[31m[ERROR]\x1b[0m split: no", "[ERROR] split: no"), ("[INFO] the split: of it", ""),
        ("[INFO] training: Step 3/9: loss 0.5", "training: Step 3/9: loss 0.5"), ("[INFO] 100%|##| 1/1", ""),
    ],
)  # fmt: skip
def test_lines_of_the_split_are_told_from_others(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "log").write_text(f"{line}\n", encoding="utf-8")
    said: list[str] = []
    with server.tell_lines(tmp_path / "log", said.append):
        pass
    assert said == list(filter(None, [told]))


def test_a_timeout_cancels_the_prompt_before_the_server_stops(comfyui, run, monkeypatch):
    monkeypatch.setattr(headless.time, "monotonic", lambda: 0.0)  # on Windows it ticks every 16 ms: less seems to pass
    result = run(HANGS, timeout_s=1.0)
    assert (result.exit_code, result.message) == (124, "cancelled: not done after 1 s")
    assert (comfyui / "interrupted").read_text() == "/interrupt"
    assert result.log is not None and result.log.is_file()


COMMAND = """
import pathlib, runpy, sys
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.cli import main as cli
from devicebridge.headless import run
run.find_comfy_cli = lambda: pathlib.Path(sys.argv[2])
run.has_accelerator = lambda python: False
sys.exit(cli.main(["run", sys.argv[3], "--comfyui", sys.argv[4]]))
"""


@pytest.fixture
def started(tmp_path: Path, comfyui: Path, install: Any) -> Iterator[subprocess.Popen[str]]:
    """`devicebridge run` in a process of its own, waiting for a workflow that hangs."""
    command = [sys.executable, "-u", "-c", COMMAND, str(server.ROOT / "bootstrap.py"), str(install(HANGS))]
    command += [str(tmp_path / "workflow.json"), str(comfyui)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "Train 3/3\n" for line in process.stdout)
        yield process
        process.kill()


@pytest.mark.parametrize("name", ["SIGINT", *(pytest.param(e, marks=pytest.mark.long) for e in ("SIGTERM", "SIGHUP"))])
def test_a_signal_cancels_the_prompt_and_ends_what_was_started(tmp_path, comfyui, started, name):
    (comfyui / "saving").touch()
    started.send_signal(getattr(signal, name))
    until((comfyui / "interrupted").exists, 10)
    if name != "SIGINT":  # a closing session sends several
        started.send_signal(getattr(signal, name))
        time.sleep(0.3)
    assert started.poll() is None, "it waits until the state is saved"
    (comfyui / "saving").unlink()
    out, error = started.communicate(timeout=20)
    assert (started.returncode, error) == (130, "cancelled\n")
    saved = str(comfyui / "output" / "sub" / "x.png")
    assert out.splitlines()[-2:] == ["cancelling; waiting until the state is saved", saved]
    assert not _is_alive(comfyui / "server.pid") and not _is_alive(tmp_path / "bin" / "client.pid")


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_run_at_once_with_one_line(comfyui: Path, started: subprocess.Popen[str]) -> None:
    (comfyui / "saving").touch()
    started.send_signal(signal.SIGINT)
    until((comfyui / "interrupted").exists, 10)
    started.send_signal(signal.SIGINT)
    _, error = started.communicate(timeout=20)
    assert (started.returncode, error) == (130, "devicebridge: interrupted\n")
    assert not _is_alive(comfyui / "server.pid")


def test_a_killed_run_leaves_neither_server_nor_client(tmp_path, comfyui, started):
    started.kill()
    started.wait()
    for pid_file in (comfyui / "server.pid", tmp_path / "bin" / "client.pid"):
        until(lambda pid_file=pid_file: not _is_alive(pid_file), 10, lambda: pid_file)  # noqa: B023


def test_a_server_that_does_not_start_says_why(tmp_path, comfyui, run):
    (comfyui / "broken").touch()
    with pytest.raises(RuntimeError, match=f"its log is {tmp_path}.*\n(.*\n)*.*no module named aiohttp"):
        run(SUCCEEDS)


def test_without_comfyui_or_comfy_cli_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(server.processes, "run", lambda *_, **__: None)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="COMFYUI_PATH.*--comfyui.*comfy install"):
        server.find_comfyui()
    with pytest.raises(RuntimeError, match=str(tmp_path / "nowhere")):
        server.find_comfyui(tmp_path / "nowhere")
    monkeypatch.setattr(server.shutil, "which", lambda name, path=None: None)
    with pytest.raises(RuntimeError, match="pip install comfy-cli"):
        server.find_comfy_cli()


def test_comfyui_is_found_in_order(tmp_path: Path, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"data": {"workspace_path": str(comfyui)}})
    monkeypatch.setattr(server, "find_comfy_cli", lambda: Path("comfy"))
    monkeypatch.setattr(server.processes, "run", lambda *_, **__: answer)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "gone"))
    assert server.find_comfyui().folder == comfyui
    other = tmp_path / "other"
    (other / "comfy").mkdir(parents=True)
    (other / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(other))
    monkeypatch.setattr(server.processes, "run", lambda *_, **__: pytest.fail("comfy-cli takes seconds"))
    assert server.find_comfyui().folder == other
    assert server.find_comfyui(comfyui).folder == comfyui
    (other / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    found = server.find_comfyui(comfyui, python=Path("other/python")).python
    assert found == other / "python", "ComfyUI starts in its own folder; a link is a virtual environment"


def test_a_comfy_cli_without_a_workspace_names_no_comfyui(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its empty text would be the folder that we are in."""
    monkeypatch.chdir(comfyui)
    monkeypatch.setattr(server, "find_comfy_cli", lambda: Path("comfy"))
    monkeypatch.setattr(server.processes, "run", lambda *_, **__: '{"data": {"workspace_path": ""}}')
    assert Path() not in server._places()


def test_comfyuis_own_python_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.find_python(tmp_path) == Path(sys.executable)
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert server.find_python(tmp_path) == own
    assert server.find_python(tmp_path / "elsewhere", tmp_path) == own, "that of the folder of models"
    monkeypatch.setenv("COMFYUI_PYTHON", str(tmp_path / "named"))
    assert server.find_python(tmp_path) == tmp_path / "named"


def test_an_installed_copy_of_the_pack_is_recognised(tmp_path: Path) -> None:
    assert server.find_pack(tmp_path / "missing") is None
    (tmp_path / "some_pack").mkdir()
    (tmp_path / "some_pack" / "pyproject.toml").write_text('name = "other"')
    (tmp_path / "a.disabled").symlink_to(server.ROOT)
    assert server.find_pack(tmp_path) is None
    (tmp_path / "ComfyUI-DeviceBridge").symlink_to(server.ROOT)
    assert server.find_pack(tmp_path) == tmp_path / "ComfyUI-DeviceBridge"


SAVED_FORM = {
    "nodes": [{"id": 3, "type": "Train", "widgets_values": [5, "lora"], "inputs": [
        {"name": "model", "link": 1}, *({"name": each, "widget": {"name": each}} for each in ("steps", "name"))]}],
    "links": [],
}  # fmt: skip


@pytest.mark.parametrize("node", ["3", "Train"])
def test_values_are_set_in_the_saved_form(node: str) -> None:
    changed = set_values(SAVED_FORM, {f"{node}.name": "other"})
    assert changed["nodes"][0]["widgets_values"] == [5, "other"]
    assert SAVED_FORM["nodes"][0]["widgets_values"] == [5, "lora"]


def test_values_are_set_in_the_shipped_example_in_list_and_table() -> None:
    example = read_workflow(server.ROOT / "example_workflows" / "train_a_LoRA_over_two_GPUs.json")
    changed = set_values(example, {"DeviceBridgeTrainLora.steps": 3, "SaveLoRA.prefix": "x"})
    train = next(node for node in changed["nodes"] if node["type"] == "DeviceBridgeTrainLora")
    assert train["widgets_values_named"]["steps"] == 3
    assert train["widgets_values"] == list(train["widgets_values_named"].values())


@pytest.mark.parametrize(
    ("name", "what"), [("9.steps", "no node '9'"), ("3.model", "no such input"), ("3.x", "no such")]
)
def test_a_value_for_nothing_is_refused(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        set_values(SAVED_FORM, {name: 1})


@pytest.mark.parametrize("inputs", [{}, {"inputs": {}}, {"inputs": None}, {"inputs": {"widgets": 1}}])
def test_a_value_for_a_node_of_the_api_form_without_that_input_is_refused(inputs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="3.steps: the node has no such input"):
        set_values({"3": {"class_type": "Train", **inputs}}, {"3.steps": 1})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"1": {"inputs": {}}}', '"text"'])
def test_a_file_that_is_no_workflow_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="w.json is no workflow"):
        headless.read_workflow(path)
    with pytest.raises(ValueError, match="there is no workflow"):
        headless.read_workflow(tmp_path / "missing.json")
