"""Tiny text encoders and tokenizers with random weights, in the folders a diffusers model has them, made offline.

The tokenizer is the same for all kinds: one token per byte and a few special tokens, so a caption of n letters has n
tokens and lengths are easy to choose. The chat templates ask of their messages what the real ones ask: Mistral's wants
typed parts, Qwen3's a string.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

EncoderKind = Literal["mistral3", "qwen3", "t5", "umt5", "clip"]

# [IMG] is token 10 in Mistral 3 as well.
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
_SPECIAL += ["<|im_start|>", "<|im_end|>", "[IMG]", "<think>", "</think>"]

_MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'][0]['text'] }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{% for part in message['content'] %}{{ part['text'] }}{% endfor %}[/INST]{% endif %}"
    "{% endfor %}"
)
_QWEN3_TEMPLATE = (
    "{% for message in messages %}{% set content = message['content'] if message['content'] is string else '' %}"
    "<|im_start|>{{ message['role'] }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def save_tiny_text_encoder(
    folder: str | Path, kind: EncoderKind, hidden_size: int = 32, layers: int = 4, seed: int = 0, *,
    encoder_name: str = "text_encoder", tokenizer_name: str = "tokenizer", max_length: int = 64, known_text: str = "",
) -> None:  # fmt: skip
    """Write `folder`/`encoder_name` and `folder`/`tokenizer_name`, loadable by AutoModel and AutoTokenizer.

    Args:
        hidden_size: width of the text states, a multiple of 16.
        layers: number of transformer layers.
        seed: of the random weights.
        max_length: tokens the tokenizer says the model takes, and CLIP's number of positions.
        known_text: a text that is one token, wherever it occurs.
    """
    folder = Path(folder)
    tokenizer = _make_tokenizer(kind, max_length, known_text)
    tokenizer.save_pretrained(folder / tokenizer_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MODELS[kind](hidden_size, layers, len(tokenizer), max_length)
    # Random norms and biases too: with those of a fresh model, forgetting one would not show.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.save_pretrained(folder / encoder_name)


def save_each(root: Path, kinds: Iterable[Any], **options: Any) -> dict[str, Path]:
    """One of each kind, 64 wide, below root."""
    for kind in kinds:
        save_tiny_text_encoder(root / kind, kind, 64, **options)
    return {kind: root / kind for kind in kinds}


def copy_parts(source: Path, target: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """All files of an encoder but its weights; the copy, and the weights."""
    for folder in ("text_encoder", "tokenizer"):
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return target, load_file(source / "text_encoder" / "model.safetensors")


def _make_tokenizer(kind: EncoderKind, max_length: int, known_text: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shape = {"clip": "<s> $A </s>", "mistral3": "<s> $A"}.get(kind, "$A </s>")
    if kind == "qwen3":
        shape = "$A"
    tokenizer.post_processor = processors.TemplateProcessing(single=shape, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if kind in {"clip", "mistral3"} else None, eos_token="</s>",
        unk_token="<unk>", pad_token="</s>" if kind == "clip" else "<pad>",
        additional_special_tokens=[*_SPECIAL[4:], *([known_text] if known_text else [])], model_max_length=max_length,
        padding_side="left" if kind == "mistral3" else "right",
        chat_template={"mistral3": _MISTRAL_TEMPLATE, "qwen3": _QWEN3_TEMPLATE}.get(kind),
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def _make_mistral3(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**_decoder_sizes(hidden_size, layers, vocab_size), sliding_window=None)
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28,
        patch_size=14,
    )  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=_SPECIAL.index("[IMG]"))
    return Mistral3ForConditionalGeneration(config)


def _make_qwen3(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = _decoder_sizes(hidden_size, layers, vocab_size)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))


def _decoder_sizes(hidden_size: int, layers: int, vocab_size: int) -> dict[str, int]:
    return {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden_size // 4,
        "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _make_t5(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_sizes(hidden_size, layers, vocab_size)))


def _make_umt5(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_sizes(hidden_size, layers, vocab_size)))


def _t5_sizes(hidden_size: int, layers: int, vocab_size: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size, "d_model": hidden_size, "d_kv": hidden_size // 4, "d_ff": 2 * hidden_size,
        "num_layers": layers, "num_heads": 4, "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


def _make_clip(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(hidden_size, layers, vocab_size, max_length))


def _clip_config(hidden_size: int, layers: int, vocab_size: int, max_length: int):
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, projection_dim=hidden_size,
        num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=max_length, pad_token_id=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


_MODELS = {"mistral3": _make_mistral3, "qwen3": _make_qwen3, "t5": _make_t5, "umt5": _make_umt5, "clip": _make_clip}
