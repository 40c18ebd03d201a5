"""What nodes say: in the words of their sockets, and warnings where the user looks."""

import ast
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from devicebridge.config.job import job_keys
from devicebridge.parallel.local.tokens import RowsError
from devicebridge.tests import comfy_stub

ROOT = Path(__file__).resolve().parents[3]
_log = logging.getLogger("devicebridge.jobs.checks")


@pytest.fixture
def nodes(nodes: ModuleType) -> ModuleType:
    for node in nodes.NODES:  # as ComfyUI does when it loads the pack
        node.define_schema()
    return nodes


def test_no_key_of_a_job_file_is_left_in_a_nodes_message(nodes: ModuleType) -> None:
    for path in job_keys():
        text = nodes.saying.in_sockets(f"set {path} = 3, or leave {path} out")
        assert path not in text and "job" not in text.split(), path


_REACHED = ("config", "data", "encoding", "planning", "checkpoints", "families", "jobs", "quantization", "training")
# What only the command line runs: files of jobs, and processes that were started by hand.
_OF_COMMANDS = {"config/job.py", "jobs/ranks.py", "planning/times.py"}
# What no socket can ask for: a job without its ComfyUI, a pair of experts, packages that are imported by name.
_OF_COMMANDS |= {"families/registry.py", "jobs/resolve.py", "training/optimizer.py", "nodes/host/folders.py"}
_INTERNAL = ("job file", "torchrun", "devicebridge train", "devicebridge plan", "devicebridge check")


def _messages(path: Path) -> Iterator[str]:
    """Texts of the errors that a file raises and of its warnings, with {} for what is put in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_warning = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warning"
        if isinstance(node, ast.Raise) or is_warning:
            found = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield "".join(part.value for part in sorted(found, key=lambda part: (part.lineno, part.col_offset)))


def test_no_message_that_a_node_can_raise_speaks_of_job_files(nodes: ModuleType) -> None:
    from devicebridge.cli.main import _make_parser

    commands = next(each for each in _make_parser()._actions if each.choices)
    flags = {flag for parser in commands.choices.values() for each in parser._actions for flag in each.option_strings}
    flags = {flag for flag in flags if flag.startswith("--")} - {"--user-directory"}  # ComfyUI's, too
    key = re.compile(r"(?<![\w./])(?:" + "|".join(map(re.escape, job_keys())) + r")(?![\w/]|\.\w)")
    files = [path for folder in _REACHED for path in (ROOT / folder).rglob("*.py")]
    files += [path for path in (ROOT / "nodes").rglob("*.py")]
    wrong = []
    for path in files:
        for message in _messages(path) if path.relative_to(ROOT).as_posix() not in _OF_COMMANDS else ():
            text = nodes.saying.in_sockets(message)
            found = key.findall(text) + [each for each in (*flags, *_INTERNAL) if re.search(rf"{each}\b", text)]
            wrong += [(path.name, found, text)] if found else []
    assert wrong == [], "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("/m/a.safetensors holds a transformer only; name the text encoders with cache.text_encoders", "stock_clip"),
        ("/m/a.safetensors holds a transformer only; name the vae with cache.vae", "stock_vae"),
        ("name its CLIP vision model with cache.stock_vision", "with stock_vision of Cache Captions and Latents"),
        ("data.frames is [12]", "frames of Training Dataset is [12]"),
        ("train.gradient_checkpointing = true", "gradient_checkpointing of Train LoRA Across GPUs = true"),
        ('name some with --cards, such as "2x24GB"', 'with cards of Plan Training, such as "2x24GB"'),
        ("Set them back to resume, or start anew with another output.folder", "start anew with another name"),
        (
            "start anew with a lower optimizer.learning_rate and another output.folder",
            "Train LoRA Across GPUs and another name",
        ),
        (
            "give each sub-folder as a folder of its own in data.folders, and how",
            "own in Training Dataset (one node for each folder, chained by previous), and how",
        ),
        ("is in use by process 3; wait for that run to end, or choose another output.folder", "choose another name"),
    ],
)
def test_keys_and_options_become_sockets(nodes: ModuleType, said: str, words: str) -> None:
    text = nodes.saying.in_sockets(said)
    assert words in text and "--" not in text and "output." not in text


def test_a_path_that_looks_like_a_key_stays(nodes: ModuleType) -> None:
    assert nodes.saying.in_sockets("/data/train.steps.safetensors is gone") == "/data/train.steps.safetensors is gone"


def _node(nodes: ModuleType, body: Any) -> Any:
    io = nodes.host.io

    class Node(io.ComfyNode):
        @classmethod
        @nodes.saying.said_on_node
        def execute(cls, **sockets: Any) -> Any:
            return body(nodes.host.NodeView("7"), io.NodeOutput)

    return Node


def test_warnings_appear_on_the_node_each_once(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    def body(view: Any, output: Any) -> Any:
        for _ in range(3):
            _log.warning("2 of %d images have no caption file", 5)
        view.show_text("done")
        _log.warning("lower data.resolutions")
        logging.getLogger("another.pack").warning("not ours")
        return output(1, ui={"text": ("report",)})

    output = _node(nodes, body).execute()
    first, second = "2 of 5 images have no caption file", "lower resolutions of Training Dataset"
    assert host.texts == [f"done\nWarning: {first}", f"done\nWarning: {first}\nWarning: {second}"]
    assert output.ui["text"] == ("report", f"Warning: {first}", f"Warning: {second}")
    assert _node(nodes, lambda view, output: view.show_text("next") or output()).execute().ui is None
    assert host.texts[-1] == "next", "warnings are of one node"


def test_a_node_that_shows_nothing_else_shows_its_warnings(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    output = _node(nodes, lambda view, output: _log.warning("the model stays whole") or output("model")).execute()
    assert host.texts == ["Warning: the model stays whole"] and output.args == ("model",)


def test_errors_keep_their_kind_and_speak_of_sockets(nodes: ModuleType) -> None:
    class Special(ValueError):
        pass

    def fail(error: Exception) -> Any:
        def body(view: Any, output: Any) -> Any:
            raise error

        return _node(nodes, body)

    for kind in (RuntimeError, RowsError):
        with pytest.raises(kind, match="start anew with a lower learning_rate of Train LoRA Across GPUs") as caught:
            fail(kind("start anew with a lower optimizer.learning_rate")).execute()
        assert type(caught.value) is kind
    special = Special("cache.vae")
    with pytest.raises(Special) as caught_special:
        fail(special).execute()
    assert caught_special.value is special, "what its type tells ComfyUI is not lost"


def test_what_a_terminal_would_obey_is_in_no_message_of_a_node(nodes: ModuleType) -> None:
    def body(view: Any, output: Any) -> Any:
        raise ValueError("cache.vae \x1b[31m is damaged")

    with pytest.raises(ValueError, match=r"\\u001b\[31m is damaged"):
        _node(nodes, body).execute()


def test_a_package_that_cannot_be_imported_is_named(nodes, tmp_path, monkeypatch):
    (tmp_path / "broken_vision_of_nodes.py").write_text("raise AttributeError('no nms')")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body(view: Any, output: Any) -> Any:
        try:
            importlib.import_module("broken_vision_of_nodes")
        except AttributeError as error:
            raise KeyError("Bloom") from error

    with pytest.raises(RuntimeError, match="broken_vision_of_nodes is installed.*AttributeError: no nms"):
        _node(nodes, body).execute()


def test_torchao_does_not_warn_while_it_is_imported_and_warns_afterwards(nodes, caplog, monkeypatch, tmp_path):
    caplog.set_level(logging.WARNING, "torchao")
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    loud = "import logging\nlogging.getLogger('torchao').warning('a kernel could not be loaded')\n"
    (tmp_path / "torchao" / "part.py").write_text(loud, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patch:
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchao"]:
            patch.delitem(sys.modules, name)

        def body(view: Any, output: Any) -> Any:
            importlib.import_module("torchao.part")
            logging.getLogger("torchao").warning("while the node runs")
            return output()

        _node(nodes, body).execute()
        del sys.modules["torchao.part"], sys.modules["torchao"]
    assert [record.message for record in caplog.records] == ["while the node runs"]
