"""One text encoder, run exactly as diffusers' pipelines do, each text alone: a batch would round differently. Of
chat_hidden_states hidden_states[k] enters layer k: no later layer is loaded. With `zero_padding` it is WanPipeline's
way (cleaned, padding masked, then zero), else FluxPipeline's. B captions, S tokens (max_length), D width, L layers
kept."""

from __future__ import annotations

import contextlib
import html
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.model_class import refuse_absurd_sizes
from ..checkpoints.weight_file import refuse_zeros
from ..families.spec import TextEncoderSpec
from ..patches.hooks import HookSet, parameters_on_meta
from ..system.files import expect, read_json_object
from .text_weights import (
    WHAT_WORKS,
    Storage,
    StreamedLayers,
    TextScheme,
    applied_scheme,
    find_sources,
    layer_list,
    read_weights,
)
from .vae import as_damage

logger = logging.getLogger(__name__)

_PROBE = "a caption to try the chat template with"


@dataclass(frozen=True)
class TextEncoder:
    """A loaded encoder with its tokenizer; `stream` holds the layers where they pass through the device."""

    spec: TextEncoderSpec
    model: torch.nn.Module
    tokenizer: Any
    device: torch.device
    image_placeholder: str = ""  # the token that stands for an image, which a caption must not contain
    stream: StreamedLayers | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """States of prepared texts in the encoder's dtype, [S, L * D], [S, D] or [D] by kind; bit by bit those of each
        text alone. On its device; of streamed layers on the CPU, to leave the next pass its room."""
        found: dict[str, torch.Tensor] = {}
        for batch in self.plan_batches(texts):
            with torch.inference_mode():
                states = _encode(self, batch)
                found.update(zip(batch, states if self.stream is None else [s.to("cpu") for s in states], strict=True))
        return [found[text] for text in texts]

    def plan_batches(self, texts: Iterable[str]) -> list[list[str]]:
        """The different texts in batches: single ones where the encoder is resident, else as many as one pass takes,
        those that fill all tokens apart from those that are padded."""
        unique = list(dict.fromkeys(texts))
        if self.stream is None:
            return [[text] for text in unique]
        groups: dict[bool, list[str]] = {}
        sees_mask = self.spec.kind == "chat_hidden_states" or self.spec.zero_padding  # else it cannot tell
        for text in unique:
            fills_all = sees_mask and _count_tokens(self, *_source(self, text)) >= self.spec.max_length
            groups.setdefault(fills_all, []).append(text)
        size, ordered = self.stream.captions_per_pass, [group for _, group in sorted(groups.items())]
        return [group[start : start + size] for group in ordered for start in range(0, len(group), size)]

    def close(self) -> None:
        """Give back what a streamed encoder holds beside its model; encode nothing afterwards."""
        if self.stream is not None:
            self.stream.close()


def prepare_text(caption: str, spec: TextEncoderSpec) -> str:
    """The text that is tokenized: for zero_padding cleaned as by WanPipeline, which needs ftfy for mojibake."""
    if not spec.zero_padding:
        return caption
    with contextlib.suppress(ModuleNotFoundError):
        import ftfy

        caption = ftfy.fix_text(caption)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def load_text_encoder(
    spec: TextEncoderSpec,
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: TextScheme = "none",
    captions_per_pass: int = 0,
) -> TextEncoder:
    """Load what `spec` needs from a diffusers model folder, offline and without gradients; close() it when done. dtype:
    of the computation and of what is not quantized. captions_per_pass: of layers that pass through the device, without
    a scheme; 0 has all of the encoder there. Raises: ValueError for a folder that lacks files, is quantized or of
    another kind, and for a scheme that the device cannot hold."""
    folder, device = Path(folder), torch.device(device)
    tokenizer = _load_tokenizer(folder / spec.tokenizer_folder)
    config = _read_config(folder / spec.folder)
    image_token = config.get("image_token_index", config.get("image_token_id"))
    storage = Storage(device, dtype, applied_scheme(spec, quantize), spec.keep_full_precision)
    model, stream = make_empty_encoder(spec, folder), None
    sources = find_sources(model, folder / spec.folder)
    if captions_per_pass:
        stream = StreamedLayers(model, sources, storage, captions_per_pass)
    else:
        read_weights(model, sources, storage)
    placeholder = "" if image_token is None else tokenizer.convert_ids_to_tokens(image_token) or ""
    return TextEncoder(spec, model.requires_grad_(False).eval(), tokenizer, device, placeholder, stream)


# --- running ---------------------------------------------------------------------------------------------------------


def _encode(encoder: TextEncoder, texts: Sequence[str]) -> Iterable[torch.Tensor]:
    """By kind: chat_hidden_states [S, L * D], as the encode_prompt of Flux2Pipeline and Flux2KleinPipeline; pooled [D],
    as FluxPipeline._get_clip_prompt_embeds; last_hidden_state [S, D], as FluxPipeline._get_t5_prompt_embeds and, with
    zero_padding, as WanPipeline's."""
    tokens = _tokenize(encoder, texts)
    if encoder.spec.kind == "chat_hidden_states":
        found = _layer_outputs(encoder, tokens)
        return [torch.cat([state[index] for state in found], dim=-1) for index in range(len(texts))]
    if not encoder.spec.zero_padding:
        output = encoder.model.forward(input_ids=tokens["input_ids"])
        return output.pooler_output if encoder.spec.kind == "pooled" else output.last_hidden_state
    states = encoder.model.forward(**tokens).last_hidden_state.clone()
    for state, length in zip(states, tokens["attention_mask"].sum(dim=1), strict=True):
        state[int(length) :] = 0
    return states


def _layer_outputs(encoder: TextEncoder, tokens: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """[B, S, D] for each of the spec's layers: number k is what layer k - 1 gives, the last one behind the norm."""
    _, layers = layer_list(encoder.model)
    found: dict[int, torch.Tensor] = {}
    hooks = HookSet()

    def keep(number: int, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found[number] = output[0] if isinstance(output, tuple) else output

    for number in set(encoder.spec.layers):
        hooks.after(layers[number - 1], partial(keep, number))
    try:
        output = encoder.model.forward(**tokens, use_cache=False)
    finally:
        hooks.remove()
    if len(layers) in found:
        found[len(layers)] = output.last_hidden_state
    return [found[number] for number in encoder.spec.layers]


def _tokenize(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [B, S] on the encoder's device; warns of each caption that does not fit."""
    spec, tokens = encoder.spec, []
    for text in texts:
        source, adds_special = _source(encoder, text)
        length = _count_tokens(encoder, source, adds_special)
        if length > spec.max_length:
            message = "%s reads %d tokens and the caption %.60r needs %d: its end is cut off"
            logger.warning(message, spec.folder, spec.max_length, text, length)
        options = {"padding": "max_length", "max_length": spec.max_length, "truncation": True, "return_tensors": "pt"}
        tokens.append(encoder.tokenizer(source, add_special_tokens=adds_special, return_attention_mask=True, **options))
    names = ("input_ids", "attention_mask")
    return {name: torch.cat([one[name] for one in tokens]).to(encoder.device) for name in names}


def _count_tokens(encoder: TextEncoder, source: str, adds_special: bool) -> int:
    return len(encoder.tokenizer(source, add_special_tokens=adds_special, verbose=False)["input_ids"])


def _source(encoder: TextEncoder, text: str) -> tuple[str, bool]:
    """What the tokenizer reads for a text, and whether it is to add its special tokens."""
    if encoder.spec.kind != "chat_hidden_states":
        return text, True
    caption = text.replace(encoder.image_placeholder, "") if encoder.image_placeholder else text
    rendered = render_chat(encoder.tokenizer, caption, encoder.spec)
    # Most templates write the first token themselves; PixtralProcessor tells it the same way.
    begin = encoder.tokenizer.bos_token
    return rendered, not (begin and rendered.startswith(begin))


def render_chat(tokenizer: Any, caption: str, spec: TextEncoderSpec) -> str:
    """The caption in the tokenizer's chat template, behind the system prompt. Templates want content as typed parts or
    a string: a form counts from which a probe and the system prompt come out whole. Raises: ValueError for neither."""
    expected = [_PROBE] if spec.system_prompt is None else [_PROBE, spec.system_prompt]
    for has_parts in (True, False):
        probe = _render(tokenizer, _PROBE, spec, has_parts)
        if all(text in probe for text in expected) and "'type'" not in probe:
            return _render(tokenizer, caption, spec, has_parts)
    raise ValueError(
        f"the chat template of {spec.tokenizer_folder} leaves out the caption or the system prompt; "
        "use the tokenizer folder published with the model"
    )


def _render(tokenizer: Any, caption: str, spec: TextEncoderSpec, has_parts: bool) -> str:
    """The rendered conversation, or "" where the template cannot take this form of content."""
    from jinja2 import TemplateError

    said = [("system", spec.system_prompt), ("user", caption)]
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}
        for role, text in said
        if text is not None
    ]
    options = {"add_generation_prompt": False, **spec.template_options}
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError):  # e.g. '[INST]' + content, with content a list
        return ""


# --- loading ---------------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; give a diffusers model folder that has its text encoders")
    config = read_json_object(file)
    refuse_absurd_sizes(file, config)
    if "quantization_config" in config:
        raise ValueError(f"the text encoder in {folder} is quantized; {WHAT_WORKS}")
    return config


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer alone, also where the folder holds a processor (whose image half would need torchvision)."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"there is no tokenizer folder {folder}; give a diffusers model folder that has it")
    with as_damage(folder, "a tokenizer", "download its JSON files again"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer(_PROBE)  # some values are first looked at here
    processor_template = folder / "chat_template.json"  # a processor's template goes before the tokenizer's own
    if processor_template.is_file():
        found = read_json_object(processor_template).get("chat_template")
        tokenizer.chat_template = expect(found, str, f"{processor_template}: chat_template")
    return tokenizer


def check_encoder(spec: TextEncoderSpec, folder: str | Path, width: int | None) -> None:
    """Refuse an encoder that does not fit its files or the model, by configs and headers. width: of the states that the
    transformer takes; None where nobody says. Raises: ValueError naming the folder or file."""
    folder = Path(folder)
    model: Any = make_empty_encoder(spec, folder)
    refuse_zeros(folder / spec.folder, find_sources(model, folder / spec.folder))
    found = model.config.hidden_size * max(1, len(spec.layers))
    if width is not None and found != width:
        raise ValueError(
            f"{folder / spec.folder} makes text states of width {found}, but this transformer takes {width}; use the "
            "text encoders published with the model"
        )


def make_empty_encoder(spec: TextEncoderSpec, folder: Path) -> torch.nn.Module:
    """The encoder as `spec` needs it, weights on meta and buffers on the CPU. Raises: ValueError for other folders."""
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding

    folder = folder / spec.folder
    found = str(_read_config(folder).get("architectures"))
    if spec.kind == "pooled" and (other := "CLIPTextModelWithProjection") in found:
        fault = f"{folder} holds a {other}, and a CLIPTextModel was expected"
        raise ValueError(f"{fault}; use the folder published with the model")
    made_by = AutoModel if spec.kind == "chat_hidden_states" else AutoModelForTextEncoding  # of T5 the encoder half
    needs_norm = True
    with as_damage(folder, "a text encoder", "download its JSON files again"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if spec.kind == "chat_hidden_states":
            config = config.get_text_config()
            num_layers, layers = config.num_hidden_layers, spec.layers
            if not layers or min(layers) < 1 or max(layers) > num_layers:
                raise ValueError(
                    f"{folder} holds a text encoder of {num_layers} layers, and this model is taken for one that reads "
                    f"layers {list(layers)} of its own; set model.variant to the model that it belongs to, or to auto"
                )
            config.num_hidden_layers = max(layers)  # it ends with the last of the requested hidden states
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: max(layers)]
            needs_norm = max(layers) == num_layers  # the last hidden state of the whole model is behind the norm
        with parameters_on_meta():  # rotary frequencies are buffers that no file holds
            model = made_by.from_config(config)
    if not needs_norm:
        model.norm = torch.nn.Identity()
    return model
