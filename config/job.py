"""The job a user describes: all of its sections, checked, and its TOML form.

Every section rejects unknown keys and contradictions when it is built, so the code below need not check again. The same
config is what the nodes assemble, what `devicebridge train job.toml` reads and what a LoRA's metadata records.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..system.files import read_ordinary, write_atomically
from .data import CacheConfig, DataConfig, EvaluationConfig
from .data import FolderConfig as FolderConfig
from .model import COMFYUI, ModelConfig, SplitConfig, Strategy, holds_copies
from .model import ModelScheme as ModelScheme
from .model import ParallelConfig as ParallelConfig
from .ranges import CONTROL, STRICT, parse_toml, problems_of, toml_bytes
from .setting import Key, keys_of, with_todays_names
from .training import (
    LoopConfig,
    LoraSettings,
    ObjectiveConfig,
    OptimizerConfig,
    OutputConfig,
    SamplesConfig,
    ScheduleConfig,
)

_log = logging.getLogger(__name__)
Resume = bool | Literal["continue"]  # whether a run goes on: as it was, or with the settings and pictures of now
_MAX_JOB_BYTES = 10_000_000
_MOST_ENTRIES = 10_000  # of a list or a section
_MOST_PROBLEMS, _LONGEST_PROBLEM = 20, 600  # that a message spells out


@dataclass(frozen=True, config=STRICT)
class JobConfig:
    """One training job."""

    model: ModelConfig
    data: DataConfig
    train: LoopConfig
    output: OutputConfig
    split: SplitConfig = Field(default_factory=SplitConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    samples: SamplesConfig = Field(default_factory=SamplesConfig)

    @property
    def needs_comfyui(self) -> bool:
        """Whether only a process with ComfyUI in it can run this job."""
        return self.model.family == COMFYUI or self.cache.needs_stock_encoders

    @property
    def limits(self) -> Iterator[tuple[str, tuple[Strategy, ...]]]:
        """Each setting that not every strategy can train, with the strategies that can."""
        if self.lora.text_encoder:  # one model computes one microbatch at a time
            yield "lora.text_encoder = true", ("none",)
        if self.objective.masked_prior:  # a model goes without its LoRA while nothing else is in it
            yield f"objective.masked_prior = {self.objective.masked_prior:g}", ("none", "data")

    def __post_init__(self) -> None:
        if fault := next(self._contradictions(), ""):
            raise ValueError(fault)
        if self.optimizer.kahan:  # of two numbers in bfloat16 a weight took the memory of one in float32
            object.__setattr__(self, "lora", dataclasses.replace(self.lora, dtype="float32"))

    def _contradictions(self) -> Iterator[str]:
        """Settings of several sections that do not go together, with what does."""
        data, strategy, balance = self.data, self.parallel.requested, self.split.balance
        for key, known in self.limits:
            if strategy not in (None, *known):
                found = f'{key} is trained with parallel.strategy {" or ".join(known)}, and it is "{strategy}"'
                yield f'{found}; set it to "auto", or remove {key.partition(" ")[0]}'
        if self.lora.text_encoder:
            if self.model.family != COMFYUI:
                found = "lora.text_encoder trains the CLIP of SD 1.5, SD 2 and SDXL, as ComfyUI builds them"
                yield f'{found}; set model.family = "{COMFYUI}" for one of these, or remove lora.text_encoder'
            found = "lora.text_encoder encodes captions in every step, but"
            if self.parallel.processes > 1:
                yield f"{found} parallel.processes = {self.parallel.processes} would each hold encoders; set it to 1"
            if data.encoded:
                yield f"{found} data.encoded holds captions that are encoded already; give folders of images instead"
            if data.condition:
                yield f'{found} data.condition = "{data.condition}" is encoded with captions; remove one of the two'
        elif self.optimizer.text_encoder_learning_rate:
            yield "optimizer.text_encoder_learning_rate needs lora.text_encoder = true; set it"
        if self.objective.masked_prior and self.train.compile != "off":
            found = "objective.masked_prior computes blocks without the LoRA, too, for which none is compiled"
            yield f'{found}; set train.compile to "off", or remove it'
        if data.condition and self.model.family != COMFYUI:
            yield f'data.condition is for a model of ComfyUI\'s own; set model.family = "{COMFYUI}", or remove it'
        for key in ("references", "control"):
            if vars(self.evaluation)[key] and not data.condition:
                yield f"evaluation.{key} needs data.condition, which says how the model is given it; set it"
        for key, given in (("evaluation.folder", self.evaluation.folder), ("samples.prompts", self.samples.prompts)):
            if data.encoded and given:
                yield f"{key} would be encoded, but a job on data.encoded has no encoders; remove it"
        for key in ("text_source", "latent_source", "stock_clip", "stock_vae", "stock_audio_vae", "stock_vision"):
            if data.encoded and vars(self.cache)[key]:
                yield f"cache.{key} is for images; data.encoded is encoded already; remove one of the two"
        if self.model.second_expert and balance == "manual":
            found = "model.second_expert gives each of two experts cards of its own"
            yield f'split.balance = "manual" cuts one model, but {found}; remove one of the two'
        if strategy and balance != "memory" and holds_copies(strategy):
            found = f'parallel.strategy = "{strategy}" puts all of it on every device'
            yield f'split.balance = "{balance}" says where to cut the model, but {found}; remove one of the two'


@functools.cache
def job_keys() -> Mapping[str, Key]:
    """Every key of the job file by its path, such as "train.steps" or "data.folders.repeats"."""
    return {key.path: key for section, kind in get_type_hints(JobConfig).items() for key in keys_of(kind, section)}


def make_job(values: Mapping[str, Any]) -> JobConfig:
    """Build a job from nested plain values, e.g. parsed TOML or JSON; keys of older versions count as today's.
    Raises: ValueError with one line per problem, each naming its key as "section.key"."""
    _refuse_endless(values)
    today, _ = with_todays_names(job_keys(), values)
    try:
        return TypeAdapter(JobConfig).validate_python(today)  # not by keywords, which the file names
    except ValidationError as error:
        problems = problems_of(error)
        lines = [_shortened(_describe(problem)) for problem in problems[:_MOST_PROBLEMS]]
        if more := len(problems) - len(lines):
            lines.append(f"and {more} more")
        raise ValueError("the job config has problems:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _refuse_endless(values: Any, place: str = "") -> None:
    """Raises: ValueError naming a list or section that is longer than any job's."""
    if not isinstance(values, (Mapping, list, tuple)):
        return
    if len(values) > _MOST_ENTRIES:
        place = _shortened(place.removeprefix(".")) or "the job"
        raise ValueError(f"{place} has {len(values)} entries, and takes up to {_MOST_ENTRIES}; remove some")
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        _refuse_endless(value, f"{place}.{key}")


def _shortened(line: str) -> str:
    half = _LONGEST_PROBLEM // 2
    return line if len(line) <= _LONGEST_PROBLEM else f"{line[:half]} ... {line[-half:]}"


def _describe(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "job"
    if problem["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        name = str(problem["loc"][-1])
        meant = {"lr": "learning_rate"}.get(name, name)  # as other trainers call it
        near = [each.path for each in job_keys().values() if each.name == meant]  # of another section
        section = ".".join(part for part in problem["loc"][:-1] if isinstance(part, str))
        beside = [each.name for each in job_keys().values() if each.section == section]
        near = near or difflib.get_close_matches(name, beside or list(get_type_hints(JobConfig)), n=1)
        return f"{key}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] in {"missing", "missing_argument"}:
        return f"{key}: is required"
    if problem["type"] == "dataclass_type" and isinstance(problem["input"], list):
        return f"{key}: is one section, [{key}], and not a list of sections, [[{key}]]"
    if problem["type"] == "tuple_type" and isinstance(problem["input"], dict):
        return f"{key}: is a list of sections, [[{key}]], and not one, [{key}]"
    if problem["type"] == "tuple_type":
        return f"{key}: is a list, such as [{problem['input']!r}] (found {problem['input']!r})"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = [each.strip("'") for each in re.split(", | or ", problem["ctx"]["expected"])]
        near = difflib.get_close_matches(problem["input"], choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{key}: is one of {problem['ctx']['expected']} (found {problem['input']!r}){hint}"
    values = problem["input"] if isinstance(problem["input"], list) else [problem["input"]]
    is_plain = all(isinstance(each, (str, int, float, type(None))) for each in values)  # no section, nor the whole job
    found = f" (found {problem['input']!r})" if is_plain else ""
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}{found}"


def values_at(job: JobConfig, path: str) -> list[Any]:
    """What a job says for a key of job_keys: one value, or of a list of sections each one's, in order."""
    *sections, name = path.split(".")
    found: list[Any] = [job]
    for section in sections:
        inner = [getattr(each, section) for each in found]
        found = [one for each in inner for one in (each if isinstance(each, tuple) else (each,))]
    return [getattr(each, name) for each in found]


def job_to_dict(job: JobConfig) -> dict[str, dict[str, Any]]:
    """Plain nested values; make_job of them gives an equal job."""
    return json.loads(json.dumps(dataclasses.asdict(job)))  # type: ignore[call-overload]


def paths_of(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Every file and folder that a job names, with its key; those of ComfyUI may be names in its folders."""
    for key, _, section in _sections(job_to_dict(job)):
        if key.is_path or key.path in STOCK_FILES:
            given = section[key.name]
            yield from ((key.path, each) for each in (given if isinstance(given, list) else [given]) if each)


def load_job(path: str | Path) -> JobConfig:
    """Read a TOML job. Relative paths in it are taken relative to the file's folder.
    Raises: ValueError naming the file, for TOML errors and config problems alike."""
    path = Path(path)
    try:
        values = parse_toml(read_ordinary(path, _MAX_JOB_BYTES, "a job file (TOML)"))
        values, renamed = with_todays_names(job_keys(), values)
        _anchor_paths(values, path.resolve().parent)
        job = make_job(values)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error.reason}); save it as UTF-8 text") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give the path of a job file (TOML)") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    for line in renamed:
        _log.warning("%s: %s", path, line)
    return job


def save_job(job: JobConfig, path: str | Path) -> None:
    """Write the job as TOML; load_job reads it back equal when its paths are absolute."""
    sections = job_to_dict(job).items()
    values = {name: {key: each for key, each in section.items() if each is not None} for name, section in sections}
    write_atomically(Path(path), toml_bytes(values))


def resume_flags(resume: Resume) -> list[str]:
    """Of `devicebridge train`."""
    return ["--continue" if resume == "continue" else "--resume"] * bool(resume)


def save_for_process(job: JobConfig, file: Path) -> None:
    """The job as a file that another process reads. Raises: ValueError if that would read another job."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_job(job, file)
    if load_job(file) != job:
        raise ValueError(f"{file} does not say the same as the job; give absolute paths in it")


def differing_keys(old: JobConfig, new: JobConfig) -> list[str]:
    """ "section.key: old -> new" for every setting that differs and matters to a resumed run.
    Where the run and its data lie does not: what they hold is compared besides (jobs/resume.py)."""
    free = {key.path for key in job_keys().values() if key.is_free}
    # Not the model: its path also leads to text encoders and VAE, and its name may decide which variant it is.
    places = [key for key in job_keys().values() if key.is_path]
    free |= {key.path for key in places if key.section.split(".")[0] in ("data", "evaluation")}
    free |= {key.path for key in places if key.path in ("cache.folder", "output.folder")}
    if old.schedule.name == "constant":  # the steps done so far are the same in a longer or shorter run
        free.add("train.steps")
    if "int8-compute" not in (old.model.quantize, new.model.quantize):  # nothing else is rotated
        free.add("model.rotation")
    before, after = _settings_of(old, free), _settings_of(new, free)
    names = [name for name in sorted(before | after) if before.get(name, ...) != after.get(name, ...)]
    shown = [[repr(each[name]) if name in each else "nothing" for each in (before, after)] for name in names]
    return [f"{name}: {was} -> {now}" for name, (was, now) in zip(names, shown, strict=True)]


def _settings_of(job: JobConfig, left_out: Collection[str]) -> dict[str, Any]:
    """By key; of a list of sections each by its number, as data.folders.0.repeats. Paths are without links."""
    found = {}
    for key, index, section in _sections(job_to_dict(job)):
        if key.path not in left_out:
            number = f"{index}." if "." in key.section else ""
            value = section[key.name]
            is_full = key.is_path and isinstance(value, str) and os.path.isabs(value)
            found[f"{key.section}.{number}{key.name}"] = os.path.realpath(value) if is_full else value
    return found


# What a resumed run may change, but not one rank alone: it says when ranks exchange, and which weights they share.
_AGREED = {"parallel.strategy", "evaluation.every_steps", "output.save_every_steps"}
WRITTEN = ("output.folder", "cache.folder", "model.quantized_cache")  # places that a job writes to
STOCK_FILES = {"cache.stock_clip", "cache.stock_vae", "cache.stock_audio_vae", "cache.stock_vision"}
_OF_A_MACHINE = {"cache.vae_device", *STOCK_FILES}


def shared_settings(job: JobConfig) -> dict[str, list[Any]]:
    """What all processes of one job must request alike, by key: of a list of sections every one's value.
    Left out is what may differ by machine: paths, devices, and what each process decides for itself. Of paths of the
    data it says which are given."""
    found: dict[str, list[Any]] = {}
    for key, _, values in _sections(job_to_dict(job)):
        section = key.section.split(".")[0]
        is_shared = not key.is_free or key.path in _AGREED or section == "samples"
        if section == "split" or key.path in _OF_A_MACHINE or not is_shared:
            continue
        if not key.is_path or section in ("data", "evaluation"):
            value = values[key.name]
            found.setdefault(key.path, []).append(bool(value) if key.is_path else value)
    return found


def _anchor_paths(values: dict[str, Any], base: Path) -> None:
    """Relative paths start at base. What is no path here is refused later, by name.
    A model that ComfyUI builds may also be the name of a file in its folders, which it alone knows."""
    for key, _, section in _sections(values):
        may_be_name = key.path == "model.path" and section.get("family") == COMFYUI
        given = section.get(key.name)
        if key.is_path and isinstance(given, list):
            section[key.name] = [_anchored(each, base) for each in given]
        elif key.is_path and key.name in section:
            section[key.name] = _anchored(given, base, may_be_name=may_be_name)


def _anchored(given: Any, base: Path, *, may_be_name: bool = False) -> Any:
    if not isinstance(given, str) or not given or CONTROL.search(given):
        return given
    try:
        own = Path(given).expanduser()
    except RuntimeError:  # the home folder of somebody unknown
        return given
    if own.is_absolute() and ".." not in own.parts:
        return str(own)
    path = base / own
    return given if may_be_name and not path.exists() else os.path.realpath(path)  # which takes links in a circle


def _sections(values: dict[str, Any]) -> Iterator[tuple[Key, int, dict[str, Any]]]:
    """Each key, and the section that may have it; of a list of sections each, by its number."""
    lists = {key.section for key in job_keys().values()}  # a section inside one comes by its keys
    for key in job_keys().values():
        outer, _, inner = key.section.partition(".")
        section = values.get(outer)
        within = section.get(inner) if inner and isinstance(section, dict) else section
        for index, each in enumerate(within if inner and isinstance(within, list) else [within]):
            if isinstance(each, dict) and key.path not in lists:
                yield key, index, each
