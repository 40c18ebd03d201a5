"""`devicebridge convert`: a job or dataset file of another trainer becomes a job file of ours. A reader per format."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.job import make_job
from ..config.ranges import toml_bytes
from ..data.caption_files import own_captions
from ..data.captions import Tables
from ..data.folders import is_media, repeats_of
from ..system.files import read_ordinary, write_atomically
from ..system.telling import printable, say
from .other_trainers import MOST_BYTES, Made, Values, flat, read_values, rows_of, tables

_WITHOUT_DECAY = {"adam", "adam8bit", "adam_8bit", "prodigy", "adafactor"}  # where weight_decay is not said
_OF_EVERY_NOISE = {f"objective.{each}" for each in ["loss_weighting", "min_snr_gamma", "lowest_noise", "highest_noise"]}
_REQUIRED = {"model.path": "-", "train.steps": 1, "output.folder": "-"}  # with what a check of the rest takes for each


def convert(options: argparse.Namespace) -> int:
    if options.output and options.output.exists():
        raise ValueError(f"{options.output} is there already; choose another name for --output")
    values, notes, trainer = convert_file(options.file, options.model)
    head = [f"Made of {options.file.name} of {trainer}. devicebridge check reads it without training.", *notes]
    comments = (printable(line).replace("\n", "\\n") for line in head)  # a line of its own would be a setting
    text = "".join(f"# {line}\n" for line in comments).encode() + b"\n" + toml_bytes(values)
    if options.output:
        write_atomically(options.output, text)
        say("\n".join([f"{options.output} is written; devicebridge check reads it", *notes]), sys.stderr)
    else:
        say(text.decode())
    return 0


def convert_file(path: Path, model: Path | None = None) -> tuple[dict[str, Any], list[str], str]:
    """The values of a job of ours, lines about what was left out or is missing, and the trainer's name.
    path: the file, or a folder with folders such as 10_name. model: takes the place of the file's.
    Raises: ValueError naming file, key and line of what cannot be read, or what no job takes."""
    values, text = ({"train_data_dir": str(path.resolve())}, "") if path.is_dir() else read_values(path)
    first = values[0] if isinstance(values, list) and values and isinstance(values[0], dict) else {}
    names = {*first, *(name for name, _ in _arguments(values))}
    trainer = next((trainer for trainer, marks in tables()["marks"].items() if names.intersection(marks)), "")
    if not trainer:
        raise ValueError(
            f"{path} is no file of ai-toolkit, diffusion-pipe, kohya's scripts, musubi-tuner, OneTrainer or "
            "SimpleTuner; give one of these, or a folder with folders such as 10_name"
        )
    made = Made(path, text, trainer)
    try:
        _READERS[made.trainer](made, values)
        made.own["is_job"] = any(key.startswith(("model.", "lora.", "optimizer.")) for key in made.values)
        if model:
            made.values["model.path"] = str(model)
        return _finished(made)
    except (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is not built as {made.trainer} writes it: {error!r:.200}") from error
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def _arguments(values: Any) -> Iterator[tuple[str, Any]]:
    """Arguments of a command line in a file, whose sections count for nothing."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping) and name != "general":
            yield from _arguments(value)
        else:
            yield str(name).removeprefix("--"), value


def _without(values: Values, *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


# ---- a reader per trainer


def _ai_toolkit(made: Made, values: Any) -> None:
    process, *others = values["config"]["process"]
    for each in others:
        made.leave("config.process", each.get("type"), "a file with several trainings becomes several jobs; split it")
    made.take(dict(flat(_without(process, "datasets"))))
    made.take_folders(process.get("datasets"))
    if (count := process.get("train", {}).get("gradient_accumulation_steps") or 1) > 1:  # theirs counts each as a step
        for key in ("train.steps", "output.save_every_steps", "samples.every_steps"):
            if steps := made.values.get(key):
                made.values[key] = math.ceil(steps / count)
    if made.values.get("lora.kind") == "lokr" and made.own.get("full_rank", True):
        made.values |= {"lora.rank": 1024, "lora.alpha": 1024.0}
    if made.values.get("optimizer.name") == "prodigy" and (made.values.get("optimizer.learning_rate") or 0) < 0.1:
        made.values["optimizer.learning_rate"] = 1.0  # as theirs does
    if name := values["config"].get("name"):
        folder = made.values.get("output.folder") or "output"
        made.values |= {"output.name": name, "output.folder": f"{folder}/{name}"}
    if (word := made.values.get("data.trigger_word")) and (prompts := made.values.get("samples.prompts")):
        made.values["samples.prompts"] = [each.replace("[trigger]", word) for each in prompts]


def _diffusion_pipe(made: Made, values: Any) -> None:
    dataset = values if "directory" in values else made.read_beside(values.get("dataset", "no dataset"))
    if dataset is not values:
        made.take(dict(flat(_without(values, "dataset"))))
    made.take_folders(dataset.get("directory"), _without(dataset, "directory"))


def _kohya(made: Made, values: Any) -> None:
    given = dict(_arguments(values))
    config = made.read_beside(given["dataset_config"]) if given.get("dataset_config") else given
    settings = _without(given, "datasets", "general", "dataset_config", "train_data_dir", "reg_data_dir")
    network = str(settings.get("network_module") or "networks.lora")
    for name in ("network_args", "optimizer_args"):  # name=value each, in a list or, as kohya_ss has it, in one text
        parts = settings.pop(name, None) or ()
        words = dict(str(part).partition("=")[::2] for part in (parts.split() if isinstance(parts, str) else parts))
        if name == "network_args" and network == "lycoris.kohya":
            settings.setdefault("LoRA_type", words.pop("algo", "lora"))
            if str(settings["LoRA_type"]).lower().endswith("lokr"):
                settings["lokr_factor"] = words.pop("factor", None)
        settings |= {f"{name}.{key}": value for key, value in words.items()}
    names = rows_of("kohya folder").keys() - rows_of("kohya").keys()
    of_folders = {name: value for name, value in settings.items() if name in names}
    for dataset in config.get("datasets") or ():
        general = {**of_folders, **config.get("general", {}), **_without(dataset, "subsets")}
        made.take_folders(dataset.get("subsets", [{}]), general)
    for name in ("train_data_dir", "reg_data_dir") if not config.get("datasets") else ():
        for folder in _repeated_folders(made, given[name]) if given.get(name) else ():
            made.take(of_folders, " folder", folder)
            made.folders.append({**folder, **({"regularisation": True} if name == "reg_data_dir" else {})})
    made.take(_without(settings, *of_folders))
    _weigh_regularisation(made)
    if made.values.get("data.caption_lines"):
        made.leave("enable_wildcard", True, "a line of the file is drawn, and {a|b} in a caption stays as it is")
    if made.own.get("epochs_first"):  # which count over steps
        made.own["epochs"] = made.own["epochs_first"]
        made.values.pop("train.steps", None)
    if not network.startswith("networks.lo") and network != "lycoris.kohya":
        made.leave("network_module", network, "there is nothing like it here")
    kind = network.removeprefix("networks.lora_").removeprefix("networks.lokr_")
    if kind in tables()["words"]["clip_types"]:
        made.own["clip_type"] = tables()["words"]["clip_types"][kind]
    is_of_flow = str(given.get("LoRA_type")).lower() in ("flux1", "sd3") or "pretrained_model_name_or_path" not in given
    _text_encoders_of_kohya(made, network == "networks.lora" and not is_of_flow)
    if (file := made.own.get("prompt_file")) and not str(file).endswith((".json", ".toml")):
        text = read_ordinary(made.beside(file), MOST_BYTES, "a text file of prompts").decode("utf-8-sig")
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        made.values["samples.prompts"] = [re.split(r"\s--\w", line)[0] for line in lines]


def _text_encoders_of_kohya(made: Made, is_stable_diffusion: bool) -> None:
    rate = made.own.get("text_rate")
    rate = rate[0] if isinstance(rate, list) and rate else rate
    if rate is None and "unet_lr" in made.given:
        rate = made.given.get("learning_rate")
    is_trained = is_stable_diffusion and not made.own.get("unet_only") and rate not in (0, "0")
    if is_trained and _is_file(made.values.get("model.path")):
        made.values["lora.text_encoder"] = True
        if rate:
            made.values["optimizer.text_encoder_learning_rate"] = float(rate)
    elif is_trained or "text_rate" in made.own and rate not in (0, "0"):
        made.leave("text_encoder_lr", rate, "text encoders are trained of a Stable Diffusion checkpoint in one file")


def _weigh_regularisation(made: Made) -> None:
    """Its images as often in all as the others, which sd-scripts repeats them to be."""
    draws, weight = {False: 0, True: 0}, float(made.own.get("prior_weight", 1))
    for each in made.folders:
        draws[each.get("regularisation", False)] += len(_images(each)) * each.get("repeats", 1)
    times = max(1.0, draws[False] / draws[True]) if draws[True] else 1.0
    for each in made.folders:
        if each.get("regularisation"):
            each["repeats"] = round(each.get("repeats", 1) * times)
            each |= {"loss_weight": weight} if weight != 1 else {}


def _repeated_folders(made: Made, place: Any) -> list[dict[str, Any]]:
    """kohya's folders, by the rule that trainings go by, or the folder itself; others are named."""
    root = made.find(place) or Path(place)
    parts = [each for each in sorted(root.iterdir()) if each.is_dir()] if root.is_dir() else []
    found = {each: of for each in parts if (of := repeats_of(each.name)) and of[0]}
    for each in parts if found else ():
        if each not in found:
            made.leave("folder", each.name, "names of folders have their repeats in front, as 10_name, up to 999")
    made_of = [{"path": str(each), "repeats": count, "caption": name} for each, (count, name) in found.items()]
    return [{key: value for key, value in each.items() if value} for each in made_of] or [{"path": str(root)}]


def _one_trainer(made: Made, values: Any) -> None:
    concepts = values
    if isinstance(values, dict):
        file = values.get("sample_definition_file_name")
        samples = values.get("samples") or (made.read_beside(file) if file and made.find(file) else ())
        apart = ("concepts", "concept_file_name", "samples", "sample_definition_file_name")
        made.take(dict(flat(_without(values, *apart))))
        made.take({"samples": [each for each in samples if each.get("enabled", True)]})
        listed = values.get("concept_file_name")
        concepts = values.get("concepts") or (made.read_beside(listed) if listed is not None else ())
    for each in concepts:
        if each.get("type") == "VALIDATION" or each.get("validation_concept"):
            made.values["evaluation.folder"] = each["path"]
        elif each.get("type") == "PRIOR_PREDICTION" and each.get("enabled", True):
            reason = "images are the targets here, and not what the model says without the LoRA"
            made.leave("concept of type PRIOR_PREDICTION", each["path"], reason)
        elif each.get("enabled", True):
            counts_samples = each.get("balancing_strategy") == "SAMPLES"
            made.take_folders([_without(each, "balancing") if counts_samples else each])
    if file := made.own.get("output_file"):
        made.values["output.folder"] = made.values.get("output.folder") or str(Path(file).parent)
        made.values["output.name"] = Path(file).stem
    for what, key in (("save", "output.save_every_steps"), ("sample", "samples.every_steps")):
        unit, count = made.own.get(f"{what}_unit"), made.own.get(f"{what}_every")
        if unit == "STEP" and count:
            made.values[key] = int(count)
        elif unit == "EPOCH":
            made.own[f"{what}_epochs"] = count
        elif unit not in (None, "NEVER"):
            made.leave(f"{what}_{'every' if what == 'save' else 'after'}", f"{count} {unit}", f"{key} counts steps")
    made.own["ema"] = made.own.get("ema", "OFF") != "OFF"
    if isinstance(values, dict) and values.get("clip_grad_norm", 1) is None:
        made.values["train.clip_norm"] = 0


def _simple_tuner(made: Made, values: Any) -> None:
    backends = values
    if isinstance(values, dict):
        given = dict(_arguments(values))
        made.take(_without(given, "data_backend_config"))
        backends = made.read_beside(given["data_backend_config"]) if given.get("data_backend_config") else ()
    whole = {name: made.own.pop(name, None) for name in ("resolution", "resolution_type")}
    if isinstance(values, dict) and whole["resolution_type"] != "area":
        whole["resolution"] = whole["resolution"] or 1024  # as theirs
    if size := made.own.get("sample_size"):
        sides = [int(each) for each in str(size).lower().split("x")]
        made.values |= {"samples.width": sides[0], "samples.height": sides[-1]}
    for each in backends:
        if each.get("dataset_type", "image") not in ("image", "video") or each.get("disabled"):
            continue
        if each.get("type", "local") != "local":
            made.leave(str(each.get("id")), each["type"], "a folder on this machine is needed")
            continue
        lines = {"disable_multiline_split": False} if each.get("caption_strategy") == "textfile" else {}  # as theirs
        made.take_folders([{**lines, **each}], whole)
        size, kind = made.own.pop("resolution", None), made.own.pop("resolution_type", "pixel_area")
        if kind == "pixel":
            reason = "a size is that of a square of the same area here, not the shorter side"
            made.leave("resolution_type", kind, reason)
        if size and made.folders:  # an area is given in megapixels
            made.folders[-1]["resolutions"] = [round(1024 * math.sqrt(float(size)) if kind == "area" else float(size))]


_READERS: dict[str, Callable[[Made, Any], None]] = {
    "ai-toolkit": _ai_toolkit,
    "diffusion-pipe": _diffusion_pipe,
    "kohya": _kohya,
    "OneTrainer": _one_trainer,
    "SimpleTuner": _simple_tuner,
}


# ---- what depends on several settings


def _finished(made: Made) -> tuple[dict[str, Any], list[str], str]:
    own = made.own
    if transformer := own.get("transformer"):
        made.values["model.path"] = transformer
    notes = _name_encoders(made)
    made.anchor()
    resolutions = [each.get("resolutions") for each in made.folders]
    if made.folders and resolutions[0] and all(each == resolutions[0] for each in resolutions):
        made.values["data.resolutions"] = resolutions[0]
        for each in made.folders:
            del each["resolutions"]
    if made.folders:
        made.values["data.folders"] = made.folders
    _count_steps(made)
    _name_further_lines(made)
    _draw_noise(made)
    names = [name for name, row in rows_of(made.trainer).items() if row == ["optimizer.name", "optimizers"]]
    optimizers = {str(made.given.get(each)).lower() for each in names}
    if optimizers & _WITHOUT_DECAY:
        made.values.setdefault("optimizer.weight_decay", 0.0)
    for key, value in tables()["defaults"].get(made.trainer, {}).items() if own["is_job"] else ():
        made.values.setdefault(key, value)
    if rank := made.values.get("lora.rank"):
        made.values.setdefault("lora.alpha", float(rank))  # diffusion-pipe's and SimpleTuner's rule
    if not own.get("ema"):
        made.values.pop("train.ema_decay", None)
    elif not made.values.get("train.ema_decay"):
        made.values["train.ema_decay"] = 0.999
    gamma = own.get("min_snr")
    if own.get("clip_type"):
        is_debiased = bool(made.values.pop("objective.loss_weighting", ""))
        for name, value in {"min_snr_gamma": gamma, "debiased_estimation_loss": is_debiased}.items():
            if value:
                made.leave(name, value, "flow models have no weights by noise level")
    elif gamma:
        made.values |= {"objective.loss_weighting": "min_snr", "objective.min_snr_gamma": float(gamma)}
    if own.get("no_samples"):
        made.values = {key: value for key, value in made.values.items() if not key.startswith("samples.")}
    _check(made)
    notes += [f"To be filled in: {key}" for key in _REQUIRED if made.values.get(key) is None]
    notes += [f"Left out, {reason}: {', '.join(settings)}" for reason, settings in made.left.items()]
    return _nested(made.values), notes, made.trainer


def _nested(values: Values) -> dict[str, Any]:
    """Sections, of values by "section.name"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        functools.reduce(lambda inner, each: inner.setdefault(each, {}), sections, found)[name] = value
    return found


def _check(made: Made) -> None:
    """Raises: ValueError for what no job takes, with the name and line of each setting in the file."""
    try:
        make_job(_nested({"data.folders": [{"path": "-"}], **_REQUIRED, **made.values}))
    except ValueError as error:
        first, *lines = str(error).splitlines()
        named = [(line, re.sub(r"\.\d+", "", line.strip().split(":")[0])) for line in lines]
        said = [f"{line} ({made.origins[key]})" if key in made.origins else line for line, key in named]
        raise ValueError("\n".join([f"{made.path}: {first}", *said])) from error


def _is_file(name: Any) -> bool:
    return str(name).lower().endswith((".safetensors", ".gguf", ".sft", ".ckpt", ".pt", ".pth", ".bin"))


def _name_encoders(made: Made) -> list[str]:
    if _is_file(made.values.get("model.path")):
        made.values["model.family"] = "comfyui"
    if vae := made.own.get("vae"):
        made.values["cache.stock_vae" if _is_file(vae) else "cache.vae"] = str(vae)
    clips = [one for each in made.own.get("clip", ()) for one in (each if isinstance(each, list) else [each])]
    for each in clips:
        if not _is_file(each):
            made.leave("text encoder", each, "a file of ComfyUI's text encoders is named in cache.stock_clip")
    if not (files := [str(each) for each in clips if _is_file(each)]):
        return []
    made.values["cache.stock_clip"] = files
    if kind := made.own.get("clip_type"):
        made.values["cache.stock_clip_type"] = kind
    return [] if kind else ["To be filled in: cache.stock_clip_type, which ComfyUI's CLIP loader calls type"]


def _draw_noise(made: Made) -> None:
    """Noise levels as their trainer draws them: where a job of ours says nothing its model's family decides."""
    given, of = made.given, made.trainer
    if of == "kohya":
        of = "musubi" if "dit" in given else str(made.own.get("network", "lora")).rpartition(".")[2]
        if of in ("lora", "kohya"):  # of Stable Diffusion, or of what kohya_ss says beside it
            kind = str(given.get("LoRA_type")).lower()
            of = "lora_flux" if kind == "flux1" or given.get("flux1_checkbox") or given.get("ae") else kind
            for key in list(made.values) if of not in ("lora_flux", "sd3") else ():
                if key.startswith("objective.") and key not in _OF_EVERY_NOISE:
                    name = made.origins[key].partition(",")[0]
                    made.leave(name, made.values.pop(key), "it is of flow models there")
    name, value, shift = tables()["noise"].get(of, ("", "", 0.0))
    is_flow = {
        "ai-toolkit": given.get("train.noise_scheduler") == "flowmatch" or name in given,
        "diffusion-pipe": given.get("model.type") != "sdxl" and not given.get("model.flux_shift"),
        "SimpleTuner": not re.match(r"sd(?!3)|kolors|deepfloyd|pixart", str(given.get("model_family"))),
    }
    if not name or not made.own["is_job"] or not is_flow.get(of, True):
        return
    of_flux = {"guidance_scale": 3.5, "model_prediction_type": "sigma_scaled"} if of == "lora_flux" else {}
    made.take({key: each for key, each in {name: value, **of_flux}.items() if key not in given})
    if made.values.get("objective.timestep_sampling") is None:
        return  # it is listed
    if made.trainer == "kohya" and str(given[name]).lower() in ("sigmoid", "uniform"):
        if made.values.get("objective.shift") not in (None, 1):
            reason = f"it has no effect there with {name} {given[name]}"
            made.leave("discrete_flow_shift", given["discrete_flow_shift"], reason)
        made.values["objective.shift"] = 1.0
    elif made.values.get("objective.shift") is None and not given.get("dynamic_timestep_shifting"):
        made.values["objective.shift"] = shift


def _count_steps(made: Made) -> None:
    """Steps of so many epochs, counted from the images of the folders where these are there."""
    images = 0
    for each in made.folders:
        sizes = each.get("resolutions") or made.values.get("data.resolutions") or [0]
        draws = 1 if made.trainer == "OneTrainer" else len(sizes)  # it draws one
        images += len(_images(each)) * each.get("repeats", 1) * draws
    per_step = (made.values.get("train.batch_size") or 1) * (made.values.get("train.gradient_accumulation_steps") or 1)
    keys = {"epochs": "train.steps", "save_epochs": "output.save_every_steps", "sample_epochs": "samples.every_steps"}
    for name, key in keys.items():
        epochs = made.own.get(name)
        if epochs and images and isinstance(per_step, int):
            steps, said = math.ceil(float(epochs) * math.ceil(images / per_step)), made.values.get(key)
            if said and made.trainer != "diffusion-pipe":
                made.leave(name, epochs, f"{key} is said, too")
            else:  # the first of both ends diffusion-pipe's
                made.values[key] = min(steps, said or steps)
        elif epochs and made.values.get(key) is None:
            made.leave(name, epochs, f"{key} counts steps, and no image is there to count them by")


def _images(folder: Values) -> list[Path]:
    root = Path(folder["path"])
    return list(filter(is_media, sorted(root.iterdir()))) if root.is_dir() else []


def _name_further_lines(made: Made) -> None:
    """sd-scripts, but not musubi-tuner, reads the first line of a caption file."""
    is_musubi = not made.given.keys().isdisjoint(("dit", "image_directory", "video_directory"))
    if made.trainer != "kohya" or is_musubi or made.values.get("data.caption_lines"):
        return
    captions = ((path, own_captions(path, Tables())[0]) for each in made.folders for path in _images(each))
    found = [path.name for path, texts in captions if texts and len(texts[0].splitlines()) > 1]
    if not all(Path(each["path"]).is_dir() for each in made.folders):
        found.append("of folders that are not here")
    if found:
        reason = "sd-scripts reads the first line of a caption file, and here all its lines are the caption; cut them"
        made.leave("further lines of captions", ", ".join(found), reason)
