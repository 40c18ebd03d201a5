"""Text encoders and VAE before a job begins: whole files, sizes that a model may have, and latents that fit.

Reads headers and configs, no weights. What is refused here would otherwise be refused when captions are encoded, or
hours later, when the VAE is loaded.
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.config_sizes import refuse_absurd_sizes
from ..checkpoints.header import TensorEntry, read_header
from ..encoding.vae import check_vae, find_vae
from ..system.json_file import read_json_object
from .checked_job import JobPlan, vae_path


def check_text_encoder_files(folder: Path) -> None:
    """Raises: ValueError naming a file of this text encoder that is cut short, or a size in its config."""
    _check_config(folder)
    _read_headers(folder)


def check_job_vae(plan: JobPlan) -> None:
    """Raises: ValueError naming a VAE of another family, of other latents than the model takes, or a file cut short."""
    source = find_vae(vae_path(plan))
    if source.is_dir():
        _check_config(source)
    records = _read_headers(source) if source.is_dir() else read_header(source).tensors
    shapes = {name: record.shape for name, record in records.items()}
    check_vae(plan.family, plan.variant, source, shapes, _vae_channels(plan))


def _vae_channels(plan: JobPlan) -> int:
    """Channels of the VAE's latents that the transformer takes, before they are packed into tokens or patches."""
    family, config = plan.family, plan.info.config
    cells = family.comfy.cells_per_token if family.comfy else 1
    published = plan.variant.vae_config
    own = published.get("latent_channels") or published.get("z_dim")
    patch = family.latent_of(plan.variant).channels // own if own else 1
    return (config.get("out_channels") or config["in_channels"]) // cells // patch


def _check_config(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        return  # whoever loads it says so
    refuse_absurd_sizes(file, read_json_object(file))


def _read_headers(folder: Path) -> dict[str, TensorEntry]:
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    return {name: record for file in files for name, record in read_header(file).tensors.items()}
