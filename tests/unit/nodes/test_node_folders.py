"""Where nodes read: ComfyUI's own folders and those that the user has allowed, and nowhere else."""

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from devicebridge.config.job import STOCK_FILES, DataConfig, FolderConfig, JobConfig, job_keys, make_job, paths_of
from devicebridge.data import folders as data
from devicebridge.data.folders import scan_folders
from devicebridge.families.registry import FAMILIES
from devicebridge.system import files
from devicebridge.tests import comfy_stub
from devicebridge.tests.clips import save_image


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> comfy_stub.FakeHost:
    (tmp_path / "comfy").mkdir()
    return comfy_stub.install(monkeypatch, tmp_path / "comfy")


@pytest.fixture
def folders(nodes: ModuleType) -> ModuleType:
    return importlib.import_module("devicebridge.nodes.host.folders")


def _image_folder(folder: Path) -> Path:
    save_image(folder / "a.png", caption="a dog")
    return folder


WAYS: dict[str, Callable[[ModuleType, Path], Any]] = {  # every socket that takes a full path, and what reads it
    "dataset": lambda folders, path: folders.folder_in_input(str(path), "folder"),
    "model": lambda folders, path: folders.find_model(folders.USE_PATH, str(path)),
    "vae": lambda folders, path: folders.find_component("vae", str(path)),
    "text_encoders": lambda folders, path: folders.find_component("text_encoders", str(path)),
}


@pytest.mark.parametrize("socket", WAYS)
def test_a_path_elsewhere_is_refused_alike_whether_or_not_it_is_there(folders, tmp_path, socket):
    there, missing = _image_folder(tmp_path / "private_a"), tmp_path / "private_b"
    messages = []
    for path in (there, missing):
        with pytest.raises(ValueError, match=r"devicebridge\.toml") as refused:
            WAYS[socket](folders, path)
        messages.append(str(refused.value).replace(path.name, "NAME"))
    assert messages[0] == messages[1] and "exist" not in messages[0] and "bytes" not in messages[0]


@pytest.mark.parametrize("socket", WAYS)
@pytest.mark.parametrize("place", ["input", "output", "temp", "user", "models/vae", "../allowed"])
def test_comfyuis_own_folders_and_those_that_the_user_allows_are_read(folders, host, place, socket):
    host.allow(host.root.parent / "allowed")
    folder = _image_folder((host.root / place).resolve() / "dogs")
    assert Path(WAYS[socket](folders, folder)) == folder


def test_extra_model_paths_are_read_and_other_packs_code_is_not(folders, host, tmp_path):
    extra = _image_folder(tmp_path / "other_disk" / "vae")
    host.folder_names_and_paths["vae"] = ([str(extra)], set())
    assert folders.find_component("vae", str(extra)) == str(extra)
    pack = _image_folder(host.root / "custom_nodes" / "pack")
    with pytest.raises(ValueError, match="not in a folder that nodes read from"):
        folders.folder_in_input(str(pack), "folder")


@pytest.mark.parametrize("name", ["{allowed}/../private", "{allowed}_evil", "{allowed}/link", "~root", "/"])
def test_no_name_leads_out_of_an_allowed_folder(folders, host, tmp_path, name):
    allowed = _image_folder(tmp_path / "allowed")
    _image_folder(tmp_path / "allowed_evil")
    (allowed / "link").symlink_to(_image_folder(tmp_path / "private"))
    host.allow(allowed)
    with pytest.raises(ValueError, match="not in a folder that nodes read from"):
        folders.folder_in_input(name.format(allowed=allowed), "folder")


def test_one_file_of_a_dataset_is_found_without_a_look_at_the_others(folders, host, tmp_path):
    place, outside = _image_folder(host.root / "input" / "dogs"), _image_folder(tmp_path / "outside")
    assert folders.own_dataset("dogs", "") == place
    (place / "clip").mkdir()
    (place / "clip" / "1.png").symlink_to(outside / "a.png")
    (host.root / "input" / "linked").symlink_to(outside)
    assert folders.own_dataset("dogs", "a.png") == place
    for name, file in (("dogs", ""), ("dogs", "clip"), ("linked", "a.png"), ("..", "a.png"), (str(outside), "a.png")):
        with pytest.raises(ValueError, match="not in a folder that nodes read|leads out of"):
            folders.own_dataset(name, file)


@pytest.mark.parametrize("place", ["z.png", "clip/z.png", "a.txt"])
def test_a_link_inside_a_dataset_that_leads_out_is_refused(folders, host, tmp_path, place):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = _image_folder(host.root / "input" / "dogs")
    (folder / "a.txt").unlink()
    (folder / "clip").mkdir()
    (folder / place).symlink_to(secret)
    with pytest.raises(ValueError, match=r"the link .* leads to what is not in a folder that nodes read from"):
        folders.folder_in_input("dogs", "folder")
    host.allow(tmp_path)
    assert folders.folder_in_input("dogs", "folder") == folder


@pytest.mark.parametrize(
    "text",
    [
        'allowed_folders = "/data"', 'allowed_folders = ["data"]', "allowed = []", 'allowed_hosts = "comfy.example"',
        "allowed_hosts = [1]", "allowed_folders = [", "[x]\n", "[[a]]\nb = 1\nb = 2\n",
        r'allowed_folders = ["/C:\Users\me"]', r'allowed_folders = ["/C:\train\new"]',
    ],
)  # fmt: skip
def test_settings_that_cannot_be_read_are_named(folders: ModuleType, host: comfy_stub.FakeHost, text: str) -> None:
    _image_folder(host.root / "input" / "dogs")
    (host.root / "user" / "devicebridge.toml").write_text(text)
    with pytest.raises(ValueError, match=r"devicebridge\.toml"):
        folders.folder_in_input("dogs", "folder")


def test_hosts_that_the_user_allows_stand_beside_the_folders(folders: ModuleType, host: comfy_stub.FakeHost) -> None:
    assert folders.allowed_hosts() == []
    hosts = 'allowed_hosts = ["comfy.example"]\n'
    for text, found in ((f'{hosts}allowed_folders = ["/data"]\n', ["comfy.example"]), ("allowed_hosts = [", [])):
        (host.root / "user" / "devicebridge.toml").write_text(text)
        assert folders.allowed_hosts() == found


@pytest.mark.parametrize("place", ["input", "output", "temp"])
def test_settings_that_a_request_could_have_written_are_not_taken(folders, host, monkeypatch, place):
    """As where --output-directory is a folder above ComfyUI's user folder."""
    _image_folder(host.root / "input" / "dogs")
    monkeypatch.setattr(folders.folder_paths, f"get_{place}_directory", lambda: str(host.root))
    host.allow(host.root.parent)
    with pytest.raises(ValueError, match="--user-directory"):
        folders.readable_path(str(host.root.parent), "folder")
    assert folders.allowed_hosts() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dogs\0", "x00"), ("/data\0/../../etc", "x00"), ("D:\train", "control character '.t'"),
        ("x" * 300, "300 bytes"), ("~nobody_of_this_name/x", "home"),
    ],
)  # fmt: skip
def test_names_that_no_file_system_takes_are_refused(folders: ModuleType, name: str, message: str) -> None:
    for read in (folders.folder_in_input, folders.folder_in_output, folders.readable_path):
        with pytest.raises(ValueError, match=message):
            read(name, "folder")


@pytest.fixture
def crowded(host: comfy_stub.FakeHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with more than anybody looks at."""
    folder = host.root / "input" / "home"
    (folder / "deep").mkdir(parents=True)
    for number in range(30):
        (folder / "deep" / f"{number}.txt").touch()
    monkeypatch.setattr(files, "MAX_ENTRIES", 20)
    return folder


def test_a_folder_that_holds_too_much_is_refused_by_every_look(nodes: ModuleType, crowded: Path) -> None:
    told = nodes.TrainingDatasetNode.fingerprint_inputs(folder="home", evaluation_folder="")
    assert "hold more than 20 files and folders" in told
    config = DataConfig(folders=(FolderConfig(str(crowded)),), resolutions=(64,))
    with pytest.raises(ValueError, match="hold more than 20 files and folders"):
        scan_folders(config, FAMILIES["wan"].latent)


def test_nobody_looks_deeper_than_a_sub_folder(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    folder = _image_folder(host.root / "input" / "dogs")
    (folder / "one" / "two").mkdir(parents=True)
    for name in ("one/1.png", "one/two/2.png"):
        (folder / name).touch()
    (state,) = nodes.TrainingDatasetNode.fingerprint_inputs(folder="dogs", evaluation_folder="")
    assert [name for name, *_ in state] == ["a.png", "a.txt", "one/1.png"]


@pytest.fixture
def read_dogs(nodes: ModuleType, host: comfy_stub.FakeHost) -> Callable[[str], Any]:
    """The dataset node on a folder with one image, at these resolutions."""
    _image_folder(host.root / "input" / "dogs")
    node = nodes.TrainingDatasetNode
    settings = {entry.id: entry.options.get("default") for entry in node.define_schema().inputs}
    return lambda resolutions: node.execute(**{**settings, "folder": "dogs", "resolutions": resolutions})


def test_cancel_ends_the_look_through_a_folder(read_dogs, host, monkeypatch):
    """Pressed while images are read: none but the first of 50 is inspected after it. Or before."""
    folder = host.root / "input" / "dogs"
    for number in range(50):
        (folder / f"{number}.png").write_bytes((folder / "a.png").read_bytes())
    inspected = []

    def inspect(path: Path, *others: object) -> object:
        inspected.append(path)
        host.is_interrupted = True
        return ordinary(path, *others)

    ordinary = data._inspect
    monkeypatch.setattr(data, "_inspect", inspect)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for most in (50, 1):
        inspected.clear()
        host.is_interrupted = most == 1
        with pytest.raises(comfy_stub.InterruptProcessingException):
            read_dogs("64")
        assert len(inspected) < most and not host.is_interrupted


def test_a_resolution_that_would_take_forever_is_refused_by_its_socket(read_dogs):
    with pytest.raises(ValueError, match=r"resolutions.*99999999.*from 1 to 8192"):
        read_dogs("512, 99999999")


@pytest.fixture
def job(host: comfy_stub.FakeHost) -> Callable[..., JobConfig]:
    _image_folder(host.root / "input" / "dogs")
    (host.root / "models" / "m").mkdir(parents=True)
    values = {
        "model": {"path": str(host.root / "models" / "m")},
        "data": {"folders": [{"path": str(host.root / "input" / "dogs")}]}, "train": {"steps": 1},
        "output": {"folder": str(host.root / "output" / "devicebridge" / "a")},
    }  # fmt: skip
    return lambda **sections: make_job({**values, **sections})


KEYS = sorted({key.path for key in job_keys().values() if key.is_path} | STOCK_FILES)
WRITTEN = ["cache.folder", "model.quantized_cache", "output.folder"]


def test_every_key_that_names_a_file_or_folder_is_told(job, monkeypatch):
    made, values, folder = job(), {}, {}
    for key in job_keys().values():
        section: dict[str, Any] = folder if "." in key.section else values.setdefault(key.section, {})
        section[key.name] = [key.path, ""] if key.path == "cache.stock_clip" else key.path
    values["data"]["folders"] = [folder]
    monkeypatch.setattr("devicebridge.config.job.job_to_dict", lambda job: values)
    assert sorted(paths_of(made)) == [(key, key) for key in KEYS]


@pytest.mark.parametrize("key", KEYS)
def test_a_job_that_names_a_place_elsewhere_is_refused_with_its_key(folders, tmp_path, job, monkeypatch, key):
    folders.refuse_job(job())
    places = [
        str(tmp_path / "outside"), "~/outside", "../outside", str(tmp_path / "comfy" / "output" / ".." / ".." / "x"),
    ]  # fmt: skip
    if key not in WRITTEN:
        linked = tmp_path / "comfy" / "input" / "linked"
        linked.symlink_to(tmp_path)
        places += [str(linked), str(linked.parent)]
    for place in places:
        monkeypatch.setattr(folders, "paths_of", lambda job, place=place: [(key, place)])
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}\b"):
            folders.refuse_job(job())
    monkeypatch.setattr(folders, "paths_of", lambda job: [(key, "sub/outside.safetensors")])
    if key in {"model.path", "samples.vae", *STOCK_FILES}:
        folders.refuse_job(job())  # a name, which ComfyUI looks for in its own folders
    else:
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}\b"):
            folders.refuse_job(job())


@pytest.mark.parametrize("key", WRITTEN)
@pytest.mark.parametrize("place", ["input/dogs", "models/m", "output", "user/x"])
def test_what_a_job_writes_lies_below_the_output_folder(folders, host, job, monkeypatch, key, place):
    monkeypatch.setattr(folders, "paths_of", lambda job: [(key, str(host.root / place))])
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}\b.*not below ComfyUI's output folder"):
        folders.refuse_job(job())


@pytest.mark.parametrize("link", ["a", "a/checkpoints", "a/samples/.hidden/deep/1.png", "a/.run.lock"])
def test_a_job_writes_over_no_link_to_elsewhere(folders, host, tmp_path, job, link):
    path, big = host.root / "output" / "devicebridge" / link, tmp_path / "big_disk"
    path.parent.mkdir(parents=True)
    path.symlink_to(big)
    with pytest.raises(ValueError, match=r"^output\.folder.*leads out of ComfyUI's output folder"):
        folders.refuse_job(job())
    host.allow(big)
    folders.refuse_job(job())


@pytest.mark.parametrize("link", ["cache", "cache/captions", "cache/.lock", "cache/deep/er/1.safetensors"])
def test_a_node_writes_over_no_link_to_elsewhere(folders, host, tmp_path, link):
    path = host.root / "output" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "big_disk")
    with pytest.raises(ValueError, match=r"^cache_folder: .*leads out of ComfyUI's output folder"):
        folders.folder_in_output("cache", "cache_folder")
    host.allow(tmp_path / "big_disk")
    assert folders.folder_in_output("cache", "cache_folder") == host.root / "output" / "cache"


@pytest.mark.parametrize("link", ["output", "output/devicebridge"])
def test_runs_lie_where_a_link_leads_if_nodes_may_write_there(folders, host, tmp_path, link):
    elsewhere, place = tmp_path / "big_disk" / link, host.root / link
    (tmp_path / "big_disk" / "output" / "devicebridge").mkdir(parents=True)
    if place.is_dir():
        place.rmdir()
    place.symlink_to(elsewhere)
    found = elsewhere if link == "output/devicebridge" else elsewhere / "devicebridge"
    # The output folder is the user's own, wherever it leads.
    assert folders.runs_folder() == (found if link == "output" else place)
    host.allow(tmp_path / "big_disk")
    assert folders.runs_folder() == found


def test_a_job_that_may_import_is_a_job_of_the_command_line_and_a_lora_may_be_gone(folders, host, job):
    """A resumed run does not read the LoRA that it began with."""
    folders.refuse_job(job(lora={"start_from": str(host.root / "output" / "gone.safetensors")}))
    with pytest.raises(ValueError, match=r"^optimizer\.allow_import"):
        folders.refuse_job(job(optimizer={"allow_import": True}))


@pytest.mark.parametrize("place", ["input", "output/devicebridge", "temp/x"])
def test_what_is_trusted_does_not_lie_where_browsers_send_files(folders, host, place):
    folders.refuse_uploads_to(host.root / "user" / "__devicebridge")
    with pytest.raises(ValueError, match="lies in a folder that uploads go to"):
        folders.refuse_uploads_to(host.root / place / "__devicebridge")
