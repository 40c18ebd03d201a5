"""ComfyUI's own CLIP and VAE as sources of the cache: what they make, and a name for everything that decides it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.fingerprint import settings_fingerprint, tensors_fingerprint
from ...families.comfy.inputs import read_song
from ...parallel.devices import own_random_states
from ...patches.changes import replaced_methods
from .compiler import outside

AS_LOADED = "connect it as it comes from its loader"
_OF_SONGS = ("AceT5Tokenizer", "ACE15Tokenizer")  # whose nodes give lyrics beside tags
_PLAIN = (str, bool, int, float, type(None))
# Text encoders whose pooled output no model reads. CLIP computes it by a projection that checkpoints of SD leave out;
# ComfyUI then has whatever was in that memory, other numbers at every load.
_POOLED_BY_NOBODY = {"SDXLClipModel": "clip_l", "SD2ClipModel": "clip_h"}
# What SDClipModel and its like read while encoding; layer choices are in options_default, the others vary per call.
_ENCODER_SETTINGS = (
    "options_default max_length num_layers special_tokens enable_attention_masks zero_out_masked "
    "layer_norm_hidden_state return_attention_masks"
)
_VISION_SETTINGS = "image_size image_mean image_std model_type config return_all_hidden_states dtype"
_VAE_SETTINGS = "vae_dtype latent_channels latent_dim output_channels pad_channel_value crop_input not_video"
_STEREO = 2


def release_models() -> None:
    from comfy.model_management import soft_empty_cache, unload_all_models

    unload_all_models()
    soft_empty_cache()


class _Encoder:
    """The value of a socket called stock_<kind>. Raises: ValueError if it is not of ComfyUI's class, or has no name."""

    def __init__(self, value: Any, kind: str, own: type, loader: str = "one of its loaders") -> None:
        if type(value) is not own:
            found = f"stock_{kind.lower()} is a {_class_name(value)}"
            raise ValueError(f"{found}, not ComfyUI's own {own.__name__}; use {loader}")
        _refuse_replaced(value, kind)
        self.stock: Any = value

    release = staticmethod(release_models)


class _LiteralTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._inner = _without_embeddings(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **options: Any) -> Any:
        if self._reads_escapes:
            text = re.sub(r"[()]", r"\\\g<0>", text)
        return self._inner.tokenize_with_weights(text, return_word_ids, **options)

    @functools.cached_property
    def _reads_escapes(self) -> bool:
        """Some tokenizers of ComfyUI have no syntax, and would see the backslashes. One parenthesis weighs nothing."""
        plain, escaped = (self._inner.tokenize_with_weights(text) for text in ("a (", r"a \("))
        return bool(plain == escaped)


def _without_embeddings(tokenizer: Any) -> Any:
    """A copy of a tokenizer and those inside it, to whom no word is the name of a file."""
    made = copy.copy(tokenizer)
    for key, value in vars(tokenizer).items():
        if hasattr(value, "tokenize_with_weights"):
            setattr(made, key, _without_embeddings(value))
    if hasattr(made, "embedding_identifier"):
        made.embedding_identifier = "\ud800"  # half of a character, which no UTF-8 holds
    return made


class HostClip(_Encoder):
    """A CLIP socket's value, as encoding/sources.py asks for one; texts are literal, or weighed as in prompts."""

    def __init__(self, clip: Any, *, weighs: bool = False) -> None:
        import comfy.sd

        super().__init__(clip, "CLIP", comfy.sd.CLIP)
        self.given = clip
        if not weighs:
            self.given = copy.copy(clip)
            self.given.tokenizer = _LiteralTokenizer(clip.tokenizer)
        if clip.patcher.forced_hooks is not None or clip.apply_hooks_to_conds is not None:
            raise ValueError(f"stock_clip has hooks; {AS_LOADED}")
        _refuse_replaced(clip.tokenizer, "tokenizer")
        settings = {
            "layer_idx": _plain(clip.layer_idx),
            "use_clip_schedule": bool(clip.use_clip_schedule),
            "tokenizer_options": _plain(clip.tokenizer_options),
            "tokenizer": list(_tokenizer_facts(clip.tokenizer, "")),
        }
        self.fingerprint = _name("CLIP", clip.patcher, settings)
        self._is_of_songs = type(clip.tokenizer).__name__ in _OF_SONGS

    def encode(self, text: str) -> Any:
        """A CONDITIONING, as CLIPTextEncode gives it of this prompt, or of one that stands for a literal text. Of a
        song it is that of its own node, and of no text ConditioningZeroOut's, which these models sample against."""
        # As ComfyUI runs its nodes; it forgets recordings behind a node only.
        with torch.inference_mode(), outside(about="this CLIP"):
            made = self.given.encode_from_tokens_scheduled(self.tokens(text))
            if text or not self._is_of_songs:
                return made
            from nodes import ConditioningZeroOut  # ComfyUI's own

            return ConditioningZeroOut().zero_out(made)[0]

    def tokens(self, text: str) -> Any:
        """What its tokenizer makes of a text: parts of (token, weight), by text encoder."""
        if not self._is_of_songs:
            return self.given.tokenize(text)
        tags, said = read_song(text)
        return self.given.tokenize(tags, **said, generate_audio_codes=False)


class HostVae(_Encoder):
    """A VAE socket's value, as encoding/sources.py asks for one."""

    def __init__(self, vae: Any) -> None:
        import comfy.sd

        super().__init__(vae, "VAE", comfy.sd.VAE)
        vae.throw_exception_if_invalid()
        settings = {name: _plain(getattr(vae, name)) for name in _VAE_SETTINGS.split()}
        settings["output_dtype"] = str(vae.vae_output_dtype())
        self.fingerprint = _name("VAE", vae.patcher, settings)
        self.takes_clips = bool(vae.latent_dim == 3 and not vae.not_video)  # VAE.encode makes one video of a batch then

    def encode(self, pixels: Tensor) -> Tensor:
        """[F, height, width, 3] in 0..1 -> the samples of a LATENT, as VAEEncode gives them."""
        with torch.inference_mode(), outside(about="this VAE"):
            return self.stock.encode(pixels)

    def encode_sound(self, waveform: Tensor, rate: int, *, is_padded: bool = False) -> Tensor:
        """[channels, samples] at its rate -> the samples of a LATENT, as VAE Encode Audio gives them. is_padded: with
        silence behind what the VAE would crop away on both sides. Raises: ValueError for a VAE of pictures."""
        import torchaudio
        from comfy_extras.nodes_audio import VAEEncodeAudio

        if self.stock.output_channels != _STEREO:
            raise ValueError(f"it is a VAE of {self.stock.output_channels} channels, and those of sound have {_STEREO}")
        own = int(getattr(self.stock, "audio_sample_rate", rate))
        drawn = own_random_states([self.stock.device], 0)  # VAEs of music draw their latents
        with torch.inference_mode(), outside(about="this VAE"), drawn:
            if is_padded:
                waveform = torchaudio.functional.resample(waveform, rate, own) if rate != own else waveform
                waveform = torch.nn.functional.pad(waveform, (0, -waveform.shape[-1] % int(self.stock.downscale_ratio)))
                rate = own
            audio = {"waveform": waveform[None], "sample_rate": rate}
            return VAEEncodeAudio.execute(vae=self.stock, audio=audio).args[0]["samples"]


class HostVision(_Encoder):
    """A CLIP VISION socket's value, which only ComfyUI's conditioning nodes ask."""

    def __init__(self, vision: Any) -> None:
        import comfy.clip_vision

        super().__init__(vision, "VISION", comfy.clip_vision.ClipVisionModel, "Load CLIP Vision")
        settings = {name: _plain(getattr(vision, name)) for name in _VISION_SETTINGS.split()}
        self.fingerprint = _name("VISION", vision.patcher, settings)


def attached_to(patcher: Any) -> list[str]:
    """Names of what nodes behind the loader have attached; object patches apart, which some loaders make."""
    plain = ("patches", "hook_patches", "weight_wrapper_patches", "injections", "additional_models")
    found = [name for name in plain if getattr(patcher, name, None)]
    return found + [name for name in ("wrappers", "callbacks") if any(getattr(patcher, name, {}).values())]


def _name(kind: str, patcher: Any, settings: Mapping[str, Any]) -> str:
    """Raises: ValueError if something was attached to the loaded weights."""
    from comfyui_version import __version__

    if found := attached_to(patcher):
        raise ValueError(f"the {kind} has {', '.join(found)} (a LoRA's, say), which no cache key can name; {AS_LOADED}")
    facts = {
        "settings": settings,
        "object_patches": {name: _plain(value) for name, value in patcher.object_patches.items()},
        "modules": list(_module_facts(patcher.model)),
        "weights": tensors_fingerprint(_weights(patcher)),
    }
    return f"comfyui {__version__} {kind} {settings_fingerprint(facts)}"


def _weights(patcher: Any) -> dict[str, Tensor]:
    """The weights as they were loaded: where a clone with a LoRA has patched the shared module, its backup counts."""
    found = patcher.model.state_dict()
    for backup in (patcher.hook_backup, patcher.backup):  # hooks come on top of patches
        found |= {name: kept[0] for name, kept in backup.items() if name in found}
    pooled_by_nobody = _POOLED_BY_NOBODY.get(type(patcher.model).__name__)
    for name, module in patcher.model.named_modules():
        layers = getattr(module, "options_default", None)  # layer, its index, whether the pooled output is projected
        if layers is not None and (not layers[2] or name == pooled_by_nobody):
            found.pop(f"{name}.transformer.text_projection.weight", None)  # decides nothing that a model is given
    return found


def _module_facts(model: nn.Module) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, class and settings of every module; attributes that loading changes are not looked at."""
    for name, module in model.named_modules():
        _refuse_replaced(module, name)
        settings: dict[str, Any] = {"sizes": module.extra_repr()}  # padding modes and epsilons too
        if hasattr(module, "options_default"):
            settings = {key: _plain(getattr(module, key)) for key in _ENCODER_SETTINGS.split() if hasattr(module, key)}
        config = getattr(module, "config", None)
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            settings["config"] = _plain(dataclasses.asdict(config))
        yield name, _class_name(module), settings


def _refuse_replaced(value: Any, name: str) -> None:
    """Raises: ValueError if another pack has replaced a method: the class does not say what that computes."""
    if replaced := replaced_methods(value):
        what = f"{', '.join(replaced)} of the encoder's {name or 'model'}"
        raise ValueError(f"{what} has been replaced by another pack, which no cache key can name; {AS_LOADED}")


def _tokenizer_facts(tokenizer: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Class, plain settings, vocabulary and saved state of a tokenizer and of those inside it, in order of name."""
    yield name, _class_name(tokenizer)
    if hasattr(tokenizer, "state_dict"):
        for key, value in sorted(tokenizer.state_dict().items()):
            is_tensor = isinstance(value, Tensor)
            yield f"{name}.{key}", tensors_fingerprint({key: value}) if is_tensor else _plain(value)
    if hasattr(tokenizer, "get_vocab"):
        yield f"{name}.vocabulary", settings_fingerprint(tokenizer.get_vocab())
        return  # inside are the tokenizer library's own objects
    for key, value in sorted(vars(tokenizer).items()):
        if key == "embedding_directory":
            continue  # captions ask for files in it, and are refused then
        if hasattr(value, "tokenize_with_weights") or hasattr(value, "get_vocab"):
            yield from _tokenizer_facts(value, f"{name}.{key}")
        elif isinstance(value, _PLAIN):
            yield f"{name}.{key}", _plain(value)


def _plain(value: Any) -> Any:
    """The value as JSON knows it. Raises: ValueError for an object, which has no one spelling."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise ValueError(f"a setting of this encoder is a {_class_name(value)}, which no cache key can name")


def _class_name(value: Any) -> str:
    return str(_plain(type(value)))
