"""What the page asks of folders of images: only those that are there, and nothing but captions is written."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import caption_files
from devicebridge.data.caption_files import ANY_MODEL, media_file, media_files
from devicebridge.data.folders import scan_folders
from devicebridge.runs import api as api_module
from devicebridge.runs import datasets
from devicebridge.runs.api import Answer, Api, Host
from devicebridge.runs.queue import JobQueue
from devicebridge.runs.store import NotThere, RunStore
from devicebridge.system import locks
from devicebridge.tests.clips import save_image
from PIL import Image

JSON = {"Content-Type": "application/json"}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "input" / "dogs"
    for name, caption in (("a", "a dog"), ("b", "")):
        save_image(place / f"{name}.png", 64, 96, caption=caption)
    return place


@pytest.fixture
def api(folder: Path, tmp_path: Path) -> Api:
    return make_api(tmp_path / "runs", folder.parent, ["dogs"])


def make_api(runs: Path, base: Path, names: list[str]) -> Api:
    store = RunStore(runs)
    host = Host(lambda: runs, list, lambda: None, lambda: names, lambda name, file: base / name, lambda job: ("cpu",))
    return Api(store, JobQueue(store, runs.parent / "memory"), host)


def _get(api: Api, name: str, query: str = "") -> Answer:
    return api.answer("GET", name, query, {}, b"")


def _write(api: Api, **values: Any) -> Answer:
    given = {"folder": "dogs", "file": "b.png", "was": None, **values}
    return api.answer("POST", "caption", "", JSON, json.dumps(given).encode())


def test_a_folder_is_shown_with_captions_and_buckets_missing_first(api: Api) -> None:
    assert _get(api, "datasets").values == {"folders": ["dogs"]}
    found = _get(api, "dataset", "folder=dogs&resolutions=64,%2032&trigger_word=ohwx&regularisation=false").values
    shown = [(each["file"], each["caption"], each["size"]) for each in found["files"]]
    assert shown == [("b.png", None, (96, 64)), ("a.png", "a dog", (96, 64))]
    assert [each["trained_as"] for each in found["files"]] == ["ohwx", "ohwx, a dog"]
    assert found["files"][0]["buckets"] == [(80, 48), (32, 32)]


def test_what_is_wrong_with_a_file_is_said_without_the_folders_around_it(api: Api, folder: Path) -> None:
    (folder / "a.png").write_bytes(b"nonsense")
    (folder / "b.txt").write_bytes(b"\xff")
    files = _get(api, "dataset", "folder=dogs").values["files"]
    problems = {each["file"]: each["problem"].partition(":")[0] for each in files}
    assert problems == {"a.png": "a.png", "b.png": "b.txt"} and str(folder) not in str(files)


def test_a_folder_with_settings_of_its_own_is_shown_as_training_takes_it(api: Api, folder: Path) -> None:
    Image.new("RGB", (96, 64)).save(folder / "c.png")
    (folder / "c.txt").write_text("")
    for given, sizes in (("96", (96,)), ("auto", (64,)), ("64,%0A32", (64, 32))):
        query = f"folder=dogs&resolutions=64&folder_resolutions={given}&default_caption=any+dog&trigger_word=ohwx"
        found = {each["file"]: each for each in _get(api, "dataset", query).values["files"]}
        own = FolderConfig(str(folder), resolutions=() if given == "auto" else sizes, caption="any dog")
        config = DataConfig(folders=(own,), resolutions=(64,), trigger_word="ohwx")
        for name in ("a.png", "b.png", "c.png"):
            samples = [each for each in scan_folders(config, ANY_MODEL) if Path(each.path).name == name]
            assert found[name]["buckets"] == [each.bucket[::-1] for each in samples] and len(samples) == len(sizes)
            assert {found[name]["trained_as"]} == {each.caption for each in samples}
    long = "a very long caption for every dog " * 100
    assert _write(api, caption="x", default_caption=long).status == 200
    others = "regularisation=false&caption_template=&bucket_step=0&max_aspect_ratio=2"
    others += "&caption_lines=false&shuffle_tags=true&keep_tags=0&tag_dropout=0.1&tag_variants=8"
    assert _get(api, "dataset", f"{query}&{others}").status == 200, "all settings at once"


def test_a_page_is_told_what_the_run_of_a_node_is_called(api: Api) -> None:
    named = {"trigger_word=ohwx+dog&images=dogs": "ohwx_dog", "images=a/my+dogs&name=": "my_dogs", "": "my_lora"}
    for given, name in named.items():
        assert _get(api, "name", given).values == {"name": name}


def test_captions_are_shown_by_the_settings_that_say_which_are_trained(api: Api, folder: Path) -> None:
    (folder / "a.txt").write_text("a dog, brown, wet\na dog, asleep, white")
    tags = {"shuffle_tags": True, "keep_tags": 1, "tag_dropout": 0.3, "tag_variants": 5}
    for given in ({"caption_lines": True}, tags):
        asked = (f"{key}={str(value).lower()}" for key, value in given.items())
        query = "&".join(["folder=dogs&resolutions=64", *asked])
        shown = {each["file"]: each["trained_as"] for each in _get(api, "dataset", query).values["files"]}
        config = DataConfig(folders=(FolderConfig(str(folder)),), resolutions=(64,), **given)
        (sample,) = [each for each in scan_folders(config, ANY_MODEL) if each.path.endswith("a.png")]
        assert shown["a.png"] == "\n".join(sample.captions[:2])
    page = (Path(datasets.__file__).parents[1] / "web" / "js" / "dataset.js").read_text(encoding="utf-8")
    asked = re.findall(r"'(\w+)'", page.partition("const SETTINGS = [")[2].partition("]")[0])
    assert {*asked} == datasets._Settings.model_fields.keys(), "the page says all that is read"


def test_settings_that_do_not_fit_are_said(api: Api) -> None:
    wrong = _get(api, "dataset", "folder=dogs&caption_template=%7Btrigger%7D%20here")
    assert wrong.status == 400 and "there is no trigger_word" in wrong.values["error"]
    for query in ("resolutions=a", "resolutions=", "bucket_step=x", "regularisation=maybe", "max_aspect_ratio=inf"):
        assert _get(api, "dataset", f"folder=dogs&{query}").status == 400, query


def test_a_caption_is_written_once_and_not_over_what_somebody_else_wrote(api: Api, folder: Path) -> None:
    answer = _write(api, caption=" a second dog ")
    assert (answer.status, answer.values["caption"]) == (200, "a second dog")
    assert (folder / "b.txt").read_text() == "a second dog\n"
    late = _write(api, caption="another")
    assert late.status == 409 and "was changed meanwhile" in late.values["error"]
    assert _write(api, caption="another", was="a second dog").status == 200
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "a.txt", "b.png", "b.txt"]


def test_a_caption_of_json_is_shown_and_its_edit_is_a_caption_file(api: Api, folder: Path, tmp_path: Path) -> None:
    (folder / "captions.json").write_text('{"b.png": ["of json", "of json, too"]}')
    shown = {each["file"]: each for each in _get(api, "dataset", "folder=dogs").values["files"]}
    assert (shown["b.png"]["caption"], shown["b.png"]["trained_as"]) == ("of json", "of json\nof json, too")
    assert _write(api, caption="mine", was="another").status == 409
    answer = _write(api, caption="mine", was="of json")
    assert (answer.status, answer.values["caption"]) == (200, "mine") and (folder / "b.txt").read_text() == "mine\n"
    assert _write(api, caption="late", was="of json").status == 409
    (folder / "b.txt").unlink()
    (folder / "captions.json").rename(tmp_path / "elsewhere.json")
    (folder / "captions.json").symlink_to(tmp_path / "elsewhere.json")
    assert _get(api, "dataset", "folder=dogs").values["files"][0]["caption"] is None  # a link is not followed here
    (folder / "other.json").write_text("{broken")
    assert "other.json" in _get(api, "dataset", "folder=dogs").values["files"][0]["problem"]


def _at_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *asked: Callable[[], Answer]) -> list[Answer]:
    """The answers to two requests, of which each waits in a function for the other to be there, too, if it can be."""
    both, real = threading.Barrier(2), getattr(owner, name)

    def meet(*args: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
        return real(*args)

    monkeypatch.setattr(owner, name, meet)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda each: each(), asked))


def test_of_two_pages_that_save_one_caption_at_once_the_later_is_told_what_is_there(api, folder, monkeypatch):
    for was in (None, "kept"):
        if was:
            (folder / "b.txt").write_text(was)
        texts = [f"of page {number}" for number in range(2)]
        saves = [partial(_write, api, caption=text, was=was) for text in texts]
        with monkeypatch.context() as patched:
            answers = _at_once(patched, caption_files, "write_atomically", *saves)
        assert sorted(each.status for each in answers) == [200, 409]
        won = next(text for text, answer in zip(texts, answers, strict=True) if answer.status == 200)
        lost = next(answer for answer in answers if answer.status == 409)
        assert (folder / "b.txt").read_text() == f"{won}\n"
        assert lost.values["now"] == {**_get(api, "dataset", "folder=dogs").values["files"][1], "caption": won}
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "a.txt", "b.png", "b.txt"]


_OTHER_PROCESS = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.system.locks import alone
folder = Path(sys.argv[2])
with alone(folder / ".b.txt.lock") as is_alone:
    print(is_alone, flush=True)
    sys.stdin.readline()
    (folder / "b.txt").write_text("of another process")
"""


def test_a_caption_that_another_process_is_writing_is_waited_for(api, folder, monkeypatch):
    command = [sys.executable, "-c", _OTHER_PROCESS, str(ROOT / "bootstrap.py"), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "True\n"
        waits, real = iter([other.stdin.close]), locks.time.sleep
        # the first wait of this process lets the other one write
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: (next(waits, lambda: None)(), real(seconds)))
        answer = _write(api, caption="mine")
    assert (answer.status, answer.values["now"]["caption"]) == (409, "of another process")
    assert (folder / "b.txt").read_text() == "of another process"


def test_of_two_runs_whose_loras_get_one_name_at_once_the_later_is_refused(tmp_path, monkeypatch):
    for run in ("a/b", "a_b"):
        (tmp_path / run / "checkpoints" / "step-000001").mkdir(parents=True)
        (tmp_path / run / "checkpoints" / "step-000001" / "lora.safetensors").write_bytes(run.encode())
    page = make_api(tmp_path, tmp_path, [])

    def use(run: str) -> Answer:
        return page.answer("POST", "use", "", JSON, json.dumps({"run": run, "step": 1}).encode())

    answers = _at_once(monkeypatch, api_module, "write_atomically", partial(use, "a/b"), partial(use, "a_b"))
    assert sorted(each.status for each in answers) == [200, 409]
    won = ("a/b", "a_b")[[each.status for each in answers].index(200)]
    assert (tmp_path / "a_b_step_000001.safetensors").read_text() == won


@pytest.mark.parametrize(
    "values",
    [
        {"folder": "cats"}, {"folder": ".."}, {"folder": "../input/dogs"}, {"file": "c.png"}, {"file": "b.txt"},
        {"file": "../dogs/b.png"}, {"file": "b.png\0"}, {"caption": 1}, {"caption": None}, {"caption": "a\0b"},
        {"caption": "x" * 8001}, {"was": 1}, {"resolutions": 64}, {"folder_resolutions": True}, {"trigger_word": None},
        {"default_caption": 1.5}, {"regularisation": False}, {"bucket_step": 8},
    ],
)  # fmt: skip
def test_what_is_not_there_or_no_caption_is_refused_and_nothing_is_written(api, folder, values):
    before = {path: path.read_bytes() for path in folder.parent.parent.rglob("*") if path.is_file()}
    answer = _write(api, **{"caption": "new", **values})
    assert 400 <= answer.status < 500, answer
    assert {path: path.read_bytes() for path in folder.parent.parent.rglob("*") if path.is_file()} == before


def test_a_small_picture_is_given_of_what_is_there_only(api: Api) -> None:
    answer = _get(api, "picture", "folder=dogs&file=a.png")
    assert (answer.status, answer.kind, answer.body[:2]) == (200, "image/jpeg", b"\xff\xd8")
    for query in ("folder=dogs&file=..%2F..%2Fx.png", "folder=dogs&file=a.txt", "folder=dogs", "folder=x&file=a.png"):
        assert 400 <= _get(api, "picture", query).status < 500


@pytest.mark.parametrize("route", [("GET", "picture"), ("POST", "caption")])
@pytest.mark.parametrize("name", [".", "..", "dogs/", "../a.png", ".a.png"])
def test_for_a_path_or_a_hidden_file_no_folder_is_looked_at(route: tuple[str, str], name: str) -> None:
    """Beside "dogs", ".." is a folder of others, whose links a refusal would name."""
    routes = datasets.dataset_routes(lambda: ["dogs"], lambda folder, file: pytest.fail(f"{file} of {folder} is found"))
    with pytest.raises(NotThere):
        routes[route]({"folder": "dogs", "file": name})


def test_for_a_small_picture_nothing_but_its_file_is_looked_at(api, folder, monkeypatch, caplog):
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    (folder / "a_mask.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "sea").mkdir()
    (folder / "sea" / "1.png").write_bytes((folder / "a.png").read_bytes())
    assert _get(api, "dataset", "folder=dogs").status == 200
    assert "links to nothing" in caplog.text
    caplog.clear()
    names = [path.name for path in media_files(DataConfig(folders=(FolderConfig(str(folder)),)))]
    listed = {name: media_file(folder, name) is not None for name in sorted(path.name for path in folder.iterdir())}
    assert [name for name, is_there in listed.items() if is_there] == names == ["a.png", "b.png"]
    (folder / "sea.txt").write_text("waves")
    assert media_file(folder, "sea") == folder / "sea"
    caplog.clear()
    monkeypatch.setattr(os, "scandir", lambda place: pytest.fail(f"{place} is listed"))
    assert _get(api, "picture", "folder=dogs&file=a.png").body[:2] == b"\xff\xd8"
    for name in ("gone.png", "a_mask.png", "..", "sub/a.png", "x" * 3000):
        assert _get(api, "picture", f"folder=dogs&file={name}").status == 404, name
    assert caplog.text == ""
