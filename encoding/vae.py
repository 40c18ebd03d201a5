"""Loading a family's VAE, offline and completely, from a diffusers folder or a single file of ComfyUI's: by diffusers'
converters, of which FLUX's lacks what FLUX.2 has beside (0.42.1), and with the variant's config."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.fingerprint import file_fingerprint, folder_fingerprint, settings_fingerprint
from ..checkpoints.header import read_header
from ..checkpoints.model_class import differences, refuse_absurd_sizes, refuse_other_kinds, shapes_of_class
from ..checkpoints.model_files import first
from ..checkpoints.weight_file import open_weights, refuse_zeros
from ..families.spec import ModelFamily, Variant
from ..patches.hooks import parameters_on_meta
from ..system.files import read_json_object

_WHAT_WORKS = "give the VAE file or folder published with the model"
_SAYS_WHAT_TO_DO = re.compile(r"\b(install|update|upgrade|pip)\b", re.IGNORECASE)
_LATENT_CHANNELS = ("latent_channels", "z_dim")  # what VAEs' configs call them


def load_vae(family: ModelFamily, variant: Variant | None, path: str | Path, dtype: torch.dtype) -> Any:
    """The family's VAE on the CPU, without gradients. variant: whose vae_config describes a single file; None for the
    family's first. path: VAE folder, pipeline folder, or safetensors file. dtype: of the parameters; buffers, such as
    FLUX.2's statistics of latents, stay float32. Raises: ValueError for no VAE of this class, or not all its
    weights."""
    source = find_vae(path)
    if source.is_dir():
        import diffusers

        _folder_config(family, source)
        options: dict[str, Any] = {"torch_dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
        with as_damage(source, f"an {family.vae_class}", _WHAT_WORKS):
            vae, report = getattr(diffusers, family.vae_class).from_pretrained(
                str(source), output_loading_info=True, **options
            )
        _refuse(source, "lacks", report["missing_keys"])
    else:
        with open_weights(source) as reader:
            vae = _load_tensors(family, variant, source, reader.all_tensors())
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    return vae.requires_grad_(False).eval()


def find_vae(path: str | Path) -> Path:
    """The VAE folder or single file that this path means. Raises: ValueError if it means none."""
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return path
    for folder in (path, path / "vae"):
        config = folder / "config.json"
        if config.is_file() and str(read_json_object(config).get("_class_name")).startswith("Autoencoder"):
            return folder
    raise ValueError(
        f"{path} is no VAE; give a diffusers VAE folder, a pipeline folder with one, or a .safetensors file"
    )


def check_vae(family: ModelFamily, variant: Variant | None, path: str | Path, channels: int) -> None:
    """Refuse a VAE that load_vae would refuse, or of other channels than the model's. Raises: ValueError."""
    source = find_vae(path)
    config = _folder_config(family, source) if source.is_dir() else {}
    inside = sorted(file for file in source.glob("*.safetensors") if not file.name.startswith("."))
    headers = map(read_header, inside if source.is_dir() else [source])
    records = {name: record for header in headers for name, record in header.records().items()}
    refuse_zeros(source, records)
    if source.is_dir():
        if not records:
            raise ValueError(f"{source} has no safetensors file; {_WHAT_WORKS}")
        plain = {name: value for name, value in config.items() if not name.startswith("_")}
        refuse_other_kinds(source / "config.json", family.vae_class, plain)
        with as_damage(source, f"an {family.vae_class}", _WHAT_WORKS):
            wanted = shapes_of_class(family.vae_class, json.dumps(plain, sort_keys=True))
        # Only names that are in both: diffusers translates those of older versions.
        if wrong := differences(wanted, records).get("mismatched"):
            raise ValueError(
                f"{len(wrong)} weights in {source} are of other shapes than its config.json describes: {first(wrong)}; "
                f"{_WHAT_WORKS}"
            )
    else:
        stand_ins = {name: torch.zeros(()).expand(each.shape) for name, each in records.items()}
        config = _load_tensors(family, variant, source, stand_ins).config
    found = next((config[key] for key in _LATENT_CHANNELS if key in config), channels)
    if found != channels:
        raise ValueError(
            f"{source} makes latents of {found} channels, but this {family.title} takes {channels}; {_WHAT_WORKS}"
        )


def vae_fingerprint(family: ModelFamily, variant: Variant | None, path: str | Path) -> str:
    """Hash of the VAE's weights and config, wherever it lies and whatever it is called."""
    source = find_vae(path)
    if source.is_dir():
        return folder_fingerprint(source)
    return settings_fingerprint([file_fingerprint(source), (variant or family.variants[0]).vae_config])


def _folder_config(family: ModelFamily, folder: Path) -> dict[str, Any]:
    config = read_json_object(folder / "config.json")
    refuse_absurd_sizes(folder / "config.json", config)
    found = config.get("_class_name")
    if found != family.vae_class:
        raise ValueError(f"{folder} is an {found}; {family.title} needs an {family.vae_class}")
    return config


@contextmanager
def as_damage(path: Path, kind: str, remedy: str) -> Iterator[None]:
    """Whatever a library raises for files becomes one message that names them, but for what no others would mend: a
    missing package, too little memory, a disk that fails, a lack of rights."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Rust's readers raise Exception itself
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EACCES):
            raise
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        said = " ".join(str(error).split())
        remedy = "" if _SAYS_WHAT_TO_DO.search(said) else f"; {remedy}"
        raise ValueError(f"{path} cannot be read as {kind} ({type(error).__name__}: {said[:600]}){remedy}") from error


_OWN = re.compile(r"(?:encoder|decoder)\.((?:post_)?quant_conv\..*)")  # where FLUX.2's files have them


def _load_tensors(family: ModelFamily, variant: Variant | None, file: Path, tensors: dict[str, torch.Tensor]) -> Any:
    import diffusers
    from diffusers.loaders import single_file_utils as converters

    whole = ("vae.", "first_stage_model.")  # prefixes in the file of a whole model
    prefix = next((each for each in whole if f"{each}encoder.conv_in.weight" in tensors), "")
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    with as_damage(file, f"an {family.vae_class}", _WHAT_WORKS):  # shapes
        with parameters_on_meta():
            vae = getattr(diffusers, family.vae_class).from_config(dict((variant or family.variants[0]).vae_config))
        if "encoder.conv_in.weight" not in found:
            converted, known = converters.convert_wan_vae_to_diffusers(found), vae.state_dict().keys()
            found = {name: tensor for name, tensor in converted.items() if name in known}
        elif any(name.startswith("encoder.down.") for name in found):
            num_given, named = len(found), {_OWN.sub(r"\1", name): tensor for name, tensor in found.items()}
            statistics = {name: named.pop(name) for name in list(named) if name.startswith("bn.")}
            found = {**converters.convert_ldm_vae_checkpoint(named, vae.config), **statistics}
            if len(found) != num_given:
                raise ValueError(f"it has {num_given} tensors, and {len(found)} of them are known")
        found = {name: each.float() if each.is_floating_point() else each for name, each in found.items()}
        missing, unexpected = vae.load_state_dict(found, strict=False, assign=True)
    _refuse(file, "lacks", [name for name in missing if not name.endswith("num_batches_tracked")])
    _refuse(file, "has unknown", unexpected)
    return vae


def _refuse(source: Path, how: str, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"{source} {how} weights of the VAE: {len(names)}, e.g. {min(names)}; {_WHAT_WORKS}")
