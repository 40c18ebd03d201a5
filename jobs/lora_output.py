"""The LoRA file that a job leaves: its tensors as the layout names them, and what it says of itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import lora_file
from ..checkpoints.weight_file import tensors_in_pieces
from ..config.job import OutputConfig, job_to_dict
from ..system.files import write_atomically
from ..training.adapter import LoraHandle
from ..training.state import unsaved
from ..version import VERSION
from .checked_job import JobPlan

_log = logging.getLogger(__name__)


def lora_file_tensors(plan: JobPlan, lora: LoraHandle) -> dict[str, torch.Tensor]:
    """The LoRA as the job's layout and type name it."""
    output, settings = plan.job.output, plan.job.lora
    dtype, whole = getattr(torch, output.lora_dtype), lora.tensors()
    trained, text = lora_file.without_text(whole), lora_file.text_lora_for_comfyui(whole, settings.strength)
    if settings.kind != "lora":
        tensors = lora_file.lycoris_for_comfyui(plan.family, lora.tensors_for_comfyui(), settings.strength)
    else:
        for_comfyui = {} if output.lora_layout == "diffusers" else lora_file.without_text(lora.tensors_for_comfyui())
        tensors = text | lora_file.make_lora_tensors(
            plan.family, output.lora_layout, trained, for_comfyui, settings.alpha, settings.rank
        )
    return {name: t if name.endswith(lora_file.EXACT) else t.to(dtype) for name, t in tensors.items()}


def save_lora(plan: JobPlan, lora: LoraHandle, folder: Path, *, must_change: bool = False) -> Path:
    """Write the LoRA with its metadata to folder/<output.name>.safetensors, atomically; not where that is so already.
    must_change: also refuse a LoRA that changes nothing. Raises: RuntimeError for weights that are not finite in the
    file's type, OSError naming the file if the disk refuses; the file that was there stays."""
    path = folder / plan.job.output.file_name
    tensors = lora_file_tensors(plan, lora)
    if wrong := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        found = f"{len(wrong)} of {len(tensors)} tensors are not finite as {plan.job.output.lora_dtype}"
        helps = 'resume with output.lora_dtype = "float32", which holds all that was trained, or start anew with'
        helps += " another output.folder and a lower optimizer.learning_rate"
        raise RuntimeError(f"{path} is not written: {found}, first {wrong[0]}; {helps}")
    at_start = {"lokr": ("lokr_w1",), "loha": ("hada_w2_b",), "oft": (lora_file.OFT,)}
    zero = at_start.get(plan.job.lora.kind, ("lora_B.weight", "lora_up.weight"))
    if must_change and not any(tensor.any() for name, tensor in tensors.items() if name.endswith(zero)):
        found = f"after {plan.job.train.steps} steps the LoRA changes nothing, for {zero[0]} is zero in every layer"
        helps = "start anew with another output.folder, and a higher optimizer.learning_rate or more steps"
        raise RuntimeError(f"{path} is not written: {found} (as {plan.job.output.lora_dtype}); {helps}")
    data = b"".join(tensors_in_pieces(tensors, lora_metadata(plan)))
    if not (path.is_file() and path.read_bytes() == data):
        try:
            write_atomically(path, data)
        except OSError as error:
            raise unsaved(path, error) from error
    return path


def describe_kind(output: OutputConfig) -> str:
    """Layout and number type: what a file of the same weights may differ in."""
    return f"{output.lora_layout} {output.lora_dtype}"


def describe_file(plan: JobPlan) -> str:
    """Who reads the job's LoRA file; one line."""
    if (kind := plan.job.lora.kind) != "lora":
        return f"{lora_file.TITLES[kind]}{' with DoRA' * plan.job.lora.dora}, for ComfyUI"
    return lora_file.describe_readers(plan.family, plan.targets, plan.job.output.lora_layout, plan.job.lora.dora)


def warn_of_losses(plan: JobPlan) -> None:
    """Warn where a loader of LoRA files leaves out or refuses the job's DoRA."""
    job = plan.job
    is_dora = job.lora.dora and job.lora.kind == "lora"
    if is_dora and lora_file.what_is_lost(plan.family, plan.targets, job.output.lora_layout, dora=True):
        _log.warning("the LoRA file has DoRA in the %s", describe_file(plan))


def lora_metadata(plan: JobPlan) -> dict[str, str]:
    """What the file says of itself: ss_* as other trainers write it, modelspec, and our config.
    No paths and no dates: they would tell about the user's machine, and make equal results unequal files."""
    job = plan.job
    resolution = plan.resolution
    text_source, latent_source = job.cache.text_source, job.cache.latent_source
    if plan.encoded:
        text_source, latent_source = "comfyui CONDITIONING", "comfyui LATENT"
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{plan.family.modelspec_architecture}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": job.output.name,
        "modelspec.resolution": f"{resolution}x{resolution}",
        "modelspec.prediction_type": plan.family.prediction_target,
        "ss_base_model_version": plan.family.ss_base_model_version,
        "ss_network_module": "networks.lora" if job.lora.kind == "lora" else "lycoris.kohya",
        "ss_network_dim": str(job.lora.rank),
        "ss_network_alpha": str(job.lora.alpha),
        "ss_learning_rate": str(job.optimizer.learning_rate),
        **({"ss_text_encoder_lr": str(job.optimizer.text_rate)} if job.lora.text_encoder else {}),
        "ss_optimizer": job.optimizer.name,
        "ss_lr_scheduler": job.schedule.name,
        "ss_max_train_steps": str(job.train.steps),
        "ss_seed": str(job.train.seed),
        "ss_num_train_images": str(len(plan.training_samples)),
        "devicebridge_version": VERSION,
        "devicebridge_text_source": text_source or "transformers",  # in use it needs the same encoders
        "devicebridge_latent_source": latent_source or "diffusers",
        "devicebridge_variant": plan.variant.name,
        "devicebridge_file": describe_kind(job.output),
        "devicebridge_config": json.dumps(_without_places(job_to_dict(job)), sort_keys=True),
    }


def _names_of(folder: dict[str, Any], key: str) -> dict[str, Any]:
    """A folder of images, and those beside it, by their names; key is its own."""
    references = [Path(each).name for each in folder["references"]]
    named = {each: Path(folder[each]).name for each in (key, "control")}
    return {**folder, **named, "references": references}


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what belongs to one machine: folders become names, devices and saving cadence go."""
    config["model"]["path"] = Path(config["model"]["path"]).name
    del config["model"]["quantized_cache"], config["model"]["second_expert"]
    del config["train"]["offload_activations"], config["train"]["cuda_graphs"]
    config["lora"]["start_from"] = Path(config["lora"]["start_from"]).name
    config["data"]["folders"] = [_names_of(folder, "path") for folder in config["data"]["folders"]]
    config["data"]["encoded"] = Path(config["data"]["encoded"]).name
    config["evaluation"] = _names_of(config["evaluation"], "folder")
    for section in ("split", "parallel", "cache", "output", "samples"):
        del config[section]
    return config
