"""One text encoder: loading no more of it than is needed, and running it exactly as diffusers' pipelines do.

chat_hidden_states (Mistral 3 for FLUX.2-dev, Qwen3 for FLUX.2-klein). hidden_states[k] is what enters layer k, so
layers from max(k) on are not needed, nor are the vision tower, the projector and lm_head. The language model is
therefore built with max(k) layers and without the final norm, on no device, and only its own tensors are read from
the files, each straight to where it will compute. The result is bitwise that of the whole model: the layers left out
come later.

last_hidden_state (T5 for FLUX.1, UMT5 for Wan) and pooled (CLIP) use the whole encoder. With `zero_padding` a text is
handled as WanPipeline does: cleaned first, padding masked in the encoder and zero afterwards. Without it, as
FluxPipeline does: the text as it is, and no mask, so that the padding is encoded too. In full precision from_pretrained
loads them; to be held in 8 bits they are read tensor by tensor, as the language models always are.

Texts are encoded one by one. In a batch, matrix products of another size would round differently, and what is cached
for a caption would depend on which captions happened to be missing beside it.

Shape legend: S tokens (the spec's max_length), D width, L number of layers kept.
"""

from __future__ import annotations

import html
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..families.spec import TextEncoderSpec
from .text_weights import (
    WHAT_WORKS,
    Storage,
    TextScheme,
    applied_scheme,
    encoder_sources,
    first_names,
    language_model_sources,
    read_weights,
    refuse_eight_bit,
    weight_files,
)

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PROBE = "a caption to try the chat template with"


@dataclass(frozen=True)
class TextEncoder:
    """A loaded encoder with its tokenizer, both as `spec` wants them used."""

    spec: TextEncoderSpec
    model: torch.nn.Module
    tokenizer: Any
    device: torch.device
    image_placeholder: str = ""

    def encode(self, text: str) -> torch.Tensor:
        """States of one prepared text, in the encoder's dtype on its device: [S, L * D], [S, D] or [D] by kind.

        Raises: RuntimeError if the states are not finite, or the installed transformers lacks an argument we need.
        """
        with torch.inference_mode():
            states = _ENCODE[self.spec.kind](self, text)
        if not torch.isfinite(states).all():
            raise RuntimeError(
                f"{self.spec.folder} gave states that are not finite in {states.dtype} for {_shorten(text)}; "
                'set cache.dtype to "bfloat16" or "float32"'
            )
        return states


def prepare_text(caption: str, spec: TextEncoderSpec) -> str:
    """The text that is tokenized: cleaned as WanPipeline cleans it for zero_padding specs, else the caption itself.

    Mojibake is repaired only where ftfy is installed, as in diffusers.
    """
    if not spec.zero_padding:
        return caption
    try:
        import ftfy
    except ModuleNotFoundError:
        repaired = caption
    else:
        repaired = ftfy.fix_text(caption)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(repaired))).strip()


def load_text_encoder(
    spec: TextEncoderSpec,
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: TextScheme = "none",
) -> TextEncoder:
    """Load what `spec` needs from a diffusers model folder, offline, in eval mode and without gradients.

    Weights come from safetensors only. This is the seam for streaming: an encoder larger than its device would be
    placed layer by layer here, and encode() would not change.

    Args:
        dtype: of the computation and of what is not quantized.
        quantize: what the linears are rounded to as they are read, those in spec.keep_full_precision excepted.
    Raises: ValueError if a folder or file is missing, quantized, or is not the kind of encoder the spec describes, or
        if the device cannot hold the scheme; RuntimeError if torchao is needed and missing.
    """
    folder, device = Path(folder), torch.device(device)
    tokenizer = _load_tokenizer(folder / spec.tokenizer_folder)
    config = _read_config(folder / spec.folder)
    storage = Storage(device, dtype, applied_scheme(spec, quantize), spec.keep_full_precision)
    if spec.kind == "chat_hidden_states":
        model = _load_language_model(folder / spec.folder, spec.layers, storage)
    elif storage.scheme == "none":
        model = _load_encoder(folder / spec.folder, config, dtype).to(device)
    else:
        model = _load_encoder_by_layer(folder / spec.folder, config, storage)
    return TextEncoder(
        spec=spec,
        model=model.requires_grad_(False).eval(),
        tokenizer=tokenizer,
        device=device,
        image_placeholder=_image_placeholder(config, tokenizer),
    )


def call_accepting(
    function: Callable[..., Any], *, required: Mapping[str, Any], optional: Mapping[str, Any] = _NOTHING
) -> Any:
    """Call by keyword with every required argument and those optional ones that the installed version takes.

    Raises: RuntimeError naming the required arguments that the function does not take.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    refused = [name for name in required if name not in names and not takes_any]
    if refused:
        raise RuntimeError(
            f"{getattr(function, '__qualname__', function)} does not take {', '.join(refused)}, it takes "
            f"{', '.join(sorted(names))}; another version of its library is needed"
        )
    taken = {name: value for name, value in optional.items() if takes_any or name in names}
    return function(**required, **taken)


# --- running ---------------------------------------------------------------------------------------------------------


def _encode_chat(encoder: TextEncoder, text: str) -> torch.Tensor:
    """[S, L * D], as diffusers' Flux2Pipeline and Flux2KleinPipeline make it."""
    caption = text.replace(encoder.image_placeholder, "") if encoder.image_placeholder else text
    rendered = render_chat(encoder.tokenizer, caption, encoder.spec)
    # Most templates write the first token themselves; PixtralProcessor tells it the same way.
    begin = encoder.tokenizer.bos_token
    writes_begin = bool(begin) and rendered.startswith(begin)
    tokens = _tokenize(encoder, rendered, caption=text, add_special_tokens=not writes_begin)
    output = call_accepting(
        encoder.model.forward,
        required={**tokens, "output_hidden_states": True},
        optional={"use_cache": False},
    )
    if output.hidden_states is None:
        raise RuntimeError(f"{type(encoder.model).__name__} took output_hidden_states but returned none")
    return torch.cat([output.hidden_states[layer][0] for layer in encoder.spec.layers], dim=-1)


def _encode_last(encoder: TextEncoder, text: str) -> torch.Tensor:
    """[S, D]; see FluxPipeline._get_t5_prompt_embeds and, with zero_padding, WanPipeline._get_t5_prompt_embeds."""
    tokens = _tokenize(encoder, text, caption=text)
    if not encoder.spec.zero_padding:
        del tokens["attention_mask"]
        return call_accepting(encoder.model.forward, required=tokens).last_hidden_state[0]
    states = call_accepting(encoder.model.forward, required=tokens).last_hidden_state[0].clone()
    states[int(tokens["attention_mask"].sum()) :] = 0
    return states


def _encode_pooled(encoder: TextEncoder, text: str) -> torch.Tensor:
    """[D]; see FluxPipeline._get_clip_prompt_embeds."""
    tokens = _tokenize(encoder, text, caption=text)
    return call_accepting(encoder.model.forward, required={"input_ids": tokens["input_ids"]}).pooler_output[0]


_ENCODE: Mapping[str, Callable[[TextEncoder, str], torch.Tensor]] = MappingProxyType(
    {"chat_hidden_states": _encode_chat, "last_hidden_state": _encode_last, "pooled": _encode_pooled}
)


def _tokenize(
    encoder: TextEncoder, text: str, *, caption: str, add_special_tokens: bool = True
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [1, S] on the encoder's device; warns when the caption does not fit."""
    spec, tokenizer = encoder.spec, encoder.tokenizer
    length = len(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    if length > spec.max_length:
        message = "%s reads %d tokens and the caption %s needs %d: its end is cut off"
        logger.warning(message, spec.folder, spec.max_length, _shorten(caption), length)
    tokens = tokenizer(
        text,
        padding="max_length",
        max_length=spec.max_length,
        truncation=True,
        add_special_tokens=add_special_tokens,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {name: tokens[name].to(encoder.device) for name in ("input_ids", "attention_mask")}


def render_chat(tokenizer: Any, caption: str, spec: TextEncoderSpec) -> str:
    """The caption inside the tokenizer's chat template, with the system prompt before it.

    Templates of multimodal models want a message's content as a list of typed parts, others as a string. Parts are
    tried first, and a form counts when a probe caption and the system prompt come out of it whole.

    Raises: ValueError if neither form works with this template.
    """
    for make_content in (_as_parts, _as_string):
        probe = _render(tokenizer, _PROBE, spec, make_content)
        expected = [_PROBE] if spec.system_prompt is None else [_PROBE, spec.system_prompt]
        if all(text in probe for text in expected) and "'type'" not in probe:
            return _render(tokenizer, caption, spec, make_content)
    raise ValueError(
        f"the chat template of {spec.tokenizer_folder} leaves out the caption or the system prompt; "
        "use the tokenizer folder published with the model"
    )


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _as_string(text: str) -> str:
    return text


def _render(tokenizer: Any, caption: str, spec: TextEncoderSpec, make_content: Callable[[str], Any]) -> str:
    """The rendered conversation, or "" where the template cannot take this form of content."""
    from jinja2 import TemplateError

    messages = [] if spec.system_prompt is None else [{"role": "system", "content": make_content(spec.system_prompt)}]
    messages.append({"role": "user", "content": make_content(caption)})
    options = {"add_generation_prompt": False, **spec.template_options}
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError):  # e.g. '[INST]' + content, with content a list
        return ""


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# --- loading ---------------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; give a diffusers model folder that has its text encoders")
    config = json.loads(file.read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError(f"the text encoder in {folder} is quantized; {WHAT_WORKS}")
    return config


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer alone, also where the folder holds a processor (whose image half would need torchvision)."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"there is no tokenizer folder {folder}; give a diffusers model folder that has it")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    processor_template = folder / "chat_template.json"  # a processor's template goes before the tokenizer's own
    if processor_template.is_file():
        tokenizer.chat_template = json.loads(processor_template.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def _image_placeholder(config: Mapping[str, Any], tokenizer: Any) -> str:
    """The token that stands for an image, which a caption must not contain; "" for encoders that read text only."""
    index = config.get("image_token_index", config.get("image_token_id"))
    token = None if index is None else tokenizer.convert_ids_to_tokens(index)
    return token or ""


def _load_encoder(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """The whole encoder in full precision.

    from_pretrained, because some classes keep parts in float32 when the rest is float16.
    """
    encoder_class = _encoder_class(folder, config)
    refuse_eight_bit(weight_files(folder))
    model, report = encoder_class.from_pretrained(
        str(folder),
        **{_dtype_argument(): dtype},
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        raise ValueError(
            f"{folder} lacks weights of its {encoder_class.__name__}: {first_names(report['missing_keys'])}"
        )
    return model


def _encoder_class(folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that a folder's config names; of T5-like models the encoder half."""
    import transformers

    name = (config.get("architectures") or ["none"])[0].replace("ForConditionalGeneration", "EncoderModel")
    if not hasattr(transformers, name):
        raise ValueError(f"{folder} asks for a {name}, which transformers {transformers.__version__} does not have")
    return getattr(transformers, name)


def _dtype_argument() -> str:
    """from_pretrained calls it `dtype` since transformers 4.56; before that `dtype` would be taken for a config key."""
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _load_encoder_by_layer(folder: Path, config: Mapping[str, Any], storage: Storage) -> torch.nn.Module:
    """The whole encoder, never more than one linear of it in full precision."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    encoder_class = _encoder_class(folder, config)
    settings = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = encoder_class(settings)
    read_weights(model, encoder_sources(model, folder), storage)
    return model


def _load_language_model(folder: Path, layers: tuple[int, ...], storage: Storage) -> torch.nn.Module:
    """The language model up to the last hidden state in `layers`, its weights held as `storage` says."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    num_layers = _num_layers_needed(folder, layers, config.num_hidden_layers)
    needs_norm = num_layers == config.num_hidden_layers  # the last hidden state of the whole model is behind the norm
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config.num_hidden_layers = num_layers
    with init_empty_weights(include_buffers=False):  # rotary frequencies are buffers that no file holds
        model = AutoModel.from_config(config)
    if not needs_norm:
        model.norm = torch.nn.Identity()
    read_weights(model, language_model_sources(model, folder), storage)
    return model


def _num_layers_needed(folder: Path, layers: tuple[int, ...], num_layers: int) -> int:
    if not layers or min(layers) < 1 or max(layers) > num_layers:
        raise ValueError(f"hidden states {list(layers)} were asked of {folder}, which has 1 to {num_layers}")
    return max(layers)
