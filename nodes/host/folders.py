"""Names from sockets become paths here, and nowhere else. A workflow is often somebody else's: what a node reads lies
in a folder of ComfyUI's, or in one that the user allows in a file that no workflow can write (`settings_file`). A link
counts as what it leads to. The refusal of a path elsewhere does not tell whether it is there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import NoReturn

import folder_paths
from PIL.Image import Image as Picture

from ...checkpoints.model_files import first
from ...config.job import STOCK_FILES, WRITTEN, JobConfig, paths_of
from ...config.ranges import check_path, parse_toml
from ...runs.queue import MEMORY
from ...system.files import Looked, go_on, links_below

USE_PATH = "[path below]"
OWN_PART = "[model folder]"  # of a diffusers model, which brings it
_OF_MODELS = ("diffusion_models", "checkpoints")
_MOST_LISTED, _MOST_NAMED = 1000, 8  # in a list; in a message
_MAY_BE_NAMES = {"model.path", "samples.vae", *STOCK_FILES}  # in ComfyUI's folders


def folder_in_input(name: str, what: str, ask: Callable[[], None] = go_on) -> Path:
    """A folder to read from: a name inside ComfyUI's input folder, or the full path of one that may be read.
    ask: called while the folder is looked through; raises to stop.
    Raises: ValueError if it is no folder there, or something in it lies where nodes may not read."""
    return _without_links_outside(_named_folder(name, what), what, ask)


def _named_folder(name: str, what: str) -> Path:
    if not (name := name.strip()):
        raise ValueError(f"{what} is empty; give the name of a folder in ComfyUI's input folder, or a full path")
    path = _expanded(name, what)
    if not path.is_absolute():
        path = _inside(Path(folder_paths.get_input_directory()), name, what)
    _refuse_unreadable(path, name, what)
    if not path.is_dir():
        raise ValueError(f"{what} {name!r} is no folder: looked for {path}")
    return path


def readable_path(name: str, what: str) -> Path:
    """A file or folder, by its full path. Raises: ValueError if it is not there, or lies where nodes may not read."""
    path = _expanded(name, what)
    _refuse_unreadable(path, name, what)
    if not path.exists():
        raise ValueError(f"{what} {str(path)!r} does not exist")
    return _without_links_outside(path, what)


def find_component(kind: str, name: str) -> str:
    """Path of a VAE or text encoder by its name inside models/<kind>, or full path; "" stays "". Raises: ValueError."""
    if not (name := name.strip()):
        return ""
    is_name, bases = not _expanded(name, kind).is_absolute(), folder_paths.get_folder_paths(kind)
    places = [str(_inside(Path(base), name, kind)) for base in bases if is_name]
    found = next(filter(os.path.exists, places), None) if is_name else name
    if found is None:
        raise ValueError(f"{kind} {name!r} is not there; looked for {', '.join(places)}")
    return str(readable_path(found, kind))


def list_components(kind: str) -> list[str]:
    files = [name for name in folder_paths.get_filename_list(kind) if Path(name).suffix in (".safetensors", ".sft")]
    found = (entry for base in folder_paths.get_folder_paths(kind) for entry in _folders_in(Path(base)))
    marks = ("config.json", "model_index.json", "text_encoder")
    folders = [entry.name for entry in found if any((entry / mark).exists() for mark in marks)]
    shown = [name for name in files if name.replace(os.sep, "/").split("/")[0] not in folders]
    return sorted({*shown, *folders})


def list_input_folders() -> list[str]:
    """Folders with files, or folders with files: in ComfyUI's input folder, two deep, and those the user allows."""
    base, allowed = Path(folder_paths.get_input_directory()), list[Path]()
    with suppress(ValueError):  # reading a folder says so
        allowed = list(map(Path, _allowed("folders")))
    own, more = ([part for each in of for part in (each, *_folders_in(each))] for of in (_folders_in(base), allowed))
    names = sorted(folder.relative_to(base).as_posix() for folder in own if _holds_files(folder))
    return names[:_MOST_LISTED] + [str(folder) for folder in more if _holds_files(folder)][:_MOST_LISTED]


def own_datasets() -> list[str]:
    """Folders with files in ComfyUI's input folder, where captions may be written."""
    base = Path(folder_paths.get_input_directory())
    return [name for name in list_input_folders() if not Path(name).is_absolute() and _has_files(base / name)]


def own_dataset(name: str, file: str) -> Path:
    """The folder of one of own_datasets. Raises: ValueError if it, or this file or folder in it, leads out."""
    path = _named_folder(name, "folder")
    refuse_writing(path)
    _without_links_outside(path / os.path.basename(file), "folder")
    return path


def refuse_writing(folder: Path) -> None:
    """Raises: ValueError for a dataset folder outside ComfyUI's input folder, where no captions are written."""
    base = os.path.realpath(folder_paths.get_input_directory())
    if not _is_below(folder, [base]):
        raise ValueError(f"captions are written in ComfyUI's input folder only; move {folder} into {base}")


def shown_picture(picture: Picture) -> dict[str, str]:
    """Keep a picture in ComfyUI's temp folder, and say how a node shows it."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    number, path = tempfile.mkstemp(prefix="devicebridge_", suffix=".png", dir=folder)
    with os.fdopen(number, "wb") as file:
        picture.save(file, format="PNG")
    return {"filename": Path(path).name, "subfolder": "", "type": "temp"}


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:  # which knows kinds: a dataset may have 100,000 files
        return [Path(each.path) for each in entries if each.is_dir() and not each.name.startswith(".")]
    return []


def _has_files(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(each.is_file() for each in entries)
    return False


def _holds_files(folder: Path) -> bool:
    return _has_files(folder) or any(map(_has_files, _folders_in(folder)))


def folder_in_output(name: str, what: str) -> Path:
    """A folder to write to, not made yet. Raises: ValueError for one outside of the output folder, also by a link."""
    folder = _inside(Path(folder_paths.get_output_directory()), name.strip(), what)
    _refuse_writing_elsewhere(folder, what)
    return folder


def runs_folder() -> Path:
    """Where the runs of this ComfyUI are, without links; a link to where nodes may not write is left as it is."""
    folder = Path(os.path.realpath(folder_paths.get_output_directory())) / "devicebridge"
    with suppress(ValueError):  # of the settings file: a training says so
        if _is_below(folder, _writable_folders()):
            return Path(os.path.realpath(folder))
    return folder


def output_entry(path: Path) -> dict[str, str] | None:
    """How ComfyUI's history names a file of its output folder; None for a file elsewhere."""
    base = Path(folder_paths.get_output_directory())
    if not path.is_relative_to(base):
        return None
    inner = path.relative_to(base)
    return {"filename": inner.name, "subfolder": inner.parent.as_posix().removeprefix("."), "type": "output"}


def list_models() -> list[str]:
    """Names of files in models/diffusion_models and models/checkpoints, then of folders in models/diffusers."""
    names = [name for kind in _OF_MODELS for name in sorted(folder_paths.get_filename_list(kind))]
    files = [name for name in names if name.endswith((".safetensors", ".sft"))]
    bases = folder_paths.get_folder_paths("diffusion_models")  # whose own list of endings lacks .gguf
    of_gguf = sorted(name for base in bases for name in glob("**/*.gguf", root_dir=base, recursive=True))
    return list(dict.fromkeys([*files, *of_gguf, *sorted(_diffusers_folders())]))


def list_checkpoints() -> list[str]:
    return sorted(folder_paths.get_filename_list("diffusion_models"))


def find_checkpoint(name: str) -> Path:
    """The file of a name of list_checkpoints. Raises: ValueError for any other, and for GGUF."""
    if name.endswith(".gguf"):
        raise ValueError(f"ComfyUI does not load {name!r}; use ComfyUI-GGUF's loader, then Split Model Across GPUs")
    return find_file("unet_name", name, ("diffusion_models",))


def find_model(name: str, path: str) -> Path:
    """An entry of list_models, or a path of the user's own. Raises: ValueError as readable_path and find_file."""
    if name == USE_PATH:
        if not path.strip():
            raise ValueError(f"model is {name!r}, and path is empty; give that of a checkpoint file or model folder")
        return readable_path(path, "model")
    return find_file("model", name, _OF_MODELS, dict.fromkeys(list_models(), "") | _diffusers_folders())


def find_file(what: str, name: str, kinds: Iterable[str], others: Mapping[str, str] = {}, helps: str = "") -> Path:
    """A file by its name in ComfyUI's folders of these kinds, or another's path. Raises: ValueError that says helps."""
    paths = (*(folder_paths.get_full_path(kind, name) for kind in kinds), others.get(name))
    if found := next(filter(None, paths), None):
        return Path(found)
    there = sorted({*others, *(each for kind in kinds for each in folder_paths.get_filename_list(kind))})
    places = ", ".join(folder for kind in kinds for folder in folder_paths.get_folder_paths(kind))
    found = f"found there: {first(there, _MOST_NAMED) or 'nothing'}"
    raise ValueError(f"{what} names {name!r}, which is not in ComfyUI's folders ({places}); {found}{helps}")


def _diffusers_folders() -> dict[str, str]:
    """Name -> path of every folder under models/diffusers that holds a whole diffusers model."""
    found: dict[str, str] = {}
    for base in folder_paths.get_folder_paths("diffusers"):
        for folder, subfolders, files in os.walk(base, followlinks=True):
            if "model_index.json" in files:
                found.setdefault(os.path.relpath(folder, base).replace(os.sep, "/"), folder)
                subfolders.clear()
    return found


# --- where nodes may read --------------------------------------------------------------------------------------------


def settings_file() -> Path:
    """Where the user allows folders, and hosts under which a browser may ask (runs/guard.py); it need not exist."""
    return Path(folder_paths.get_user_directory()) / "devicebridge.toml"  # ComfyUI's page writes in sub-folders only


def memory_folder() -> Path:
    """Where the queue and the jobs of runs are remembered: a system user's, which ComfyUI keeps from every request."""
    return Path(folder_paths.get_user_directory()) / MEMORY


def _refuse_unreadable(path: Path, name: str, what: str) -> None:
    if not _is_below(path, _readable_folders()):
        _refuse(f"{what} {name!r}", path)


def refuse_job(job: JobConfig) -> None:
    """Asked by the nodes, and again when a process is started. Raises: ValueError for a job that reads where nodes may
    not, writes elsewhere than below ComfyUI's output folder, or imports a package by name."""
    if job.optimizer.allow_import:
        raise ValueError("optimizer.allow_import runs any code; start this job yourself by devicebridge train job.toml")
    for key, name in paths_of(job):
        path = _expanded(name, key)
        if key in WRITTEN:
            _refuse_writing_elsewhere(path, key)
        elif path.is_absolute():  # there or not: a resumed run does without the LoRA that it began with
            _refuse_unreadable(path, name, key)
            _without_links_outside(path, key)
        elif key not in _MAY_BE_NAMES or path.anchor or ".." in path.parts:
            raise ValueError(f"{key} {name!r} is no full path; give one")


def _refuse_writing_elsewhere(folder: Path, key: str) -> None:
    """Raises: ValueError for a folder that is not below ComfyUI's output folder, or holds a link to elsewhere."""
    output = folder_paths.get_output_directory()
    bases = [os.path.normpath(base) + os.sep for base in (output, os.path.realpath(output))]
    if not (folder.is_absolute() and os.path.normpath(folder).startswith(tuple(bases))):  # links are looked at below
        raise ValueError(f"{key} {str(folder)!r} is not below ComfyUI's output folder, {output}; choose one there")
    folders = _writable_folders()
    for path in (folder, *links_below(folder)):
        if not _is_below(path, folders):
            raise ValueError(f"{key}: {path} leads out of ComfyUI's output folder; remove it, or {_allow(path)}")


def _writable_folders() -> list[str]:
    return [os.path.realpath(place) for place in (folder_paths.get_output_directory(), *_allowed("folders"))]


def refuse_uploads_to(place: Path) -> None:
    """Raises: ValueError for a file or folder that requests write: what lies there may be anybody's."""
    if _is_below(place, map(os.path.realpath, _of_uploads())):
        raise ValueError(f"{place} lies in a folder that uploads go to; start ComfyUI with another --user-directory")


def _refuse(what: str, path: Path) -> NoReturn:
    own = "Move it into one of ComfyUI's (input, output, models, temp, user)"
    raise ValueError(f"{what} is not in a folder that nodes read from. {own}, or {_allow(path)}")


def _allow(path: Path) -> str:
    shown = json.dumps(str(path), ensure_ascii=False)
    return f"allow its folder once, in {settings_file()}:\nallowed_folders = [{shown}]"


def _without_links_outside(path: Path, what: str, ask: Callable[[], None] = go_on) -> Path:
    """Raises: ValueError for a link in this folder, or one folder below, to where nodes may not read."""
    folders = _readable_folders()
    for entry in _entries(path, ask) if path.is_dir() else ():
        if entry.is_symlink() and not _is_below(entry, folders):
            _refuse(f"{what}: the link {str(entry)!r} leads to what", entry)
    return path


def _entries(folder: Path, ask: Callable[[], None]) -> Iterator[Path]:
    """What is in a folder, then what is in its folders. Raises: ValueError for far more than a dataset."""
    looked = Looked(ask)
    entries = looked.entries(folder)
    yield from entries
    for entry in entries:
        if entry.is_dir() and os.access(entry, os.R_OK | os.X_OK):
            yield from looked.entries(entry)


def state_of(place: Path, ask: Callable[[], None] = go_on) -> list[tuple[str, int, int]]:
    """Equal while a file, or the files of a folder and of its folders, are the same. Raises: ValueError as _entries."""
    files = filter(Path.is_file, _entries(place, ask) if place.is_dir() else (place,))
    found = ((each.relative_to(place).as_posix(), each.stat()) for each in files)
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


def _readable_folders() -> list[str]:
    own = [*_of_uploads(), folder_paths.get_user_directory(), folder_paths.models_dir]
    kinds = folder_paths.folder_names_and_paths.items()
    of_models = [base for kind, (bases, *_) in kinds if kind != "custom_nodes" for base in bases]
    return [os.path.realpath(folder) for folder in (*own, *of_models, *_allowed("folders"))]


def _of_uploads() -> list[str]:
    places = folder_paths.get_input_directory, folder_paths.get_output_directory, folder_paths.get_temp_directory
    return [each() for each in places]


def allowed_hosts() -> list[str]:
    """Names under which the user lets browsers ask."""
    with suppress(ValueError):  # reading a folder says so
        return _allowed("hosts")
    return []


def _allowed(what: str) -> list[str]:
    """Folders or hosts of the settings file. Raises: ValueError where it holds something else, or requests write."""
    if not (file := settings_file()).exists():
        return []
    refuse_uploads_to(file)
    try:
        values = parse_toml(file.read_bytes())
        listed = values.get("allowed_folders")
        for folder in listed if isinstance(listed, list) else ():
            check_path(str(folder))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error}); repair or remove it") from error
    folders, hosts = (values.pop(name, []) for name in ("allowed_folders", "allowed_hosts"))
    is_list = all(isinstance(each, list) and all(isinstance(one, str) for one in each) for each in (folders, hosts))
    if values or not is_list or not all(Path(folder).expanduser().is_absolute() for folder in folders):
        raise ValueError(
            f"{file} holds {', '.join(values) or (folders, hosts)}; it takes full paths and names of hosts, such as "
            'allowed_folders = ["/data/images"] and allowed_hosts = ["comfy.example"], and nothing else'
        )
    return hosts if what == "hosts" else [str(Path(folder).expanduser()) for folder in folders]


def _is_below(path: Path, folders: Iterable[str]) -> bool:
    real = os.path.normcase(os.path.realpath(path))
    return any(Path(real).is_relative_to(os.path.normcase(folder)) for folder in folders)


def _expanded(name: str, what: str) -> Path:
    try:
        return Path(check_path(name.strip())).expanduser()
    except (ValueError, RuntimeError) as error:  # the latter for a user whose home folder nobody knows
        raise ValueError(f"{what} {error}") from error


def _inside(base: Path, name: str, what: str) -> Path:
    """base/name without following links."""
    _expanded(name, what)
    normal_base = os.path.normpath(base)
    path = os.path.normpath(os.path.join(normal_base, name))
    if os.path.splitdrive(name)[0] or not path.startswith(normal_base + os.sep):
        raise ValueError(f"{what} {name!r} leads out of {normal_base}; give the name of something inside it")
    return Path(path)
