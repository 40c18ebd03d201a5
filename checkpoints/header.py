"""The header of a safetensors file: names, shapes and types of its tensors, read without touching the weights.

A file is 8 bytes of header length, the header as JSON, then the data. Whatever is not such a file, or holds weights we
cannot train on, is refused here by what it is, so that a user who picked the wrong file reads which one it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from .file_header import read_file_header

# Types a frozen base can be read from, as safetensors spells them; in the second list a number needs a scale, or is one
# of a plain cast.
FLOAT_TYPES = ("BF16", "F16", "F32", "F64")
EIGHT_BIT_TYPES = ("F8_E4M3", "F8_E5M2", "I8")
FILE_ENDINGS = (".safetensors", ".sft")

# What the first bytes say about files that are called safetensors and are not.
_MAGIC = (
    (b"GGUF", "a GGUF file; GGUF is not supported, use the bf16 safetensors file"),
    (b"PK\x03\x04", "a pickle (saved by torch.save); pickles are not read, convert it to safetensors"),
    (b"\x80\x02", "a pickle (saved by torch.save); pickles are not read, convert it to safetensors"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with git lfs pull"),
    (b"<!DOCTYPE", "a web page, not the file itself; download it again"),
    (b"<html", "a web page, not the file itself; download it again"),
)
_ENDINGS = {
    ".gguf": "is a GGUF file; GGUF is not supported, use the bf16 safetensors file",
    ".ckpt": "is a pickle; pickles are not read, convert it to safetensors",
    ".pt": "is a pickle; pickles are not read, convert it to safetensors",
    ".pth": "is a pickle; pickles are not read, convert it to safetensors",
    ".bin": "is a pickle; pickles are not read, convert it to safetensors",
}

_LORA_NAME = re.compile(r"(\.|_)(lora_A|lora_down|lora\.down|hada_w1_a|lokr_w1|lokr_w1_a|oft_blocks)(\.|$)")
# First match wins; each names what the file is, and the pattern of the names that tell.
_OTHER_KINDS = tuple(
    (what, re.compile(pattern))
    for what, pattern in (
        ("a Stable Diffusion checkpoint (UNet)", r"(^|\.)(input_blocks|output_blocks|down_blocks\.\d+\.resnets)\."),
        ("a ControlNet", r"^(controlnet_|control_model\.|input_hint_block\.)"),
        (
            "a VAE",
            r"^(vae\.|first_stage_model\.)?(encoder|decoder)\."
            r"(conv_in|conv1|down|up|down_blocks|up_blocks|downsamples|upsamples)\.",
        ),
        (
            "a text encoder",
            r"^(text_model|text_projection|encoder\.block|shared|token_embedding|(language_model\.)?model\.layers"
            r"|(language_model\.)?model\.embed_tokens|model\.language_model)\.",
        ),
        ("an image encoder", r"^(vision_model|visual)\."),
    )
)


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies and what it is.

    Args:
        file, key: of the tensor that is read.
        shape: after rows were cut out.
        dtype: as safetensors spells it, e.g. "BF16".
        rows: start and end of the rows that are taken; None for all.
        swap_halves: whether the two halves of dim 0 change places.
        scale: of an 8-bit tensor: what it is multiplied by, one number or one per row; None for 1.
        rotation: of an 8-bit tensor: block of the rotation (quantization/eight_bit.py) it was rounded after, 0 for
        none. convrot: the same for ComfyUI's rotation, whose matrix is another.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int] | None = None
    swap_halves: bool = False
    scale: TensorRecord | None = None
    rotation: int = 0
    convrot: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.dtype in EIGHT_BIT_TYPES

    def cut(self, start: int, end: int) -> TensorRecord:
        """Rows start to end alone, with their scales."""
        scale = self.scale.cut(start, end) if self.scale and prod(self.scale.shape) > 1 else self.scale
        return replace(self, shape=(end - start, *self.shape[1:]), rows=(start, end), scale=scale)

    def swapped(self) -> TensorRecord:
        """The halves of dim 0 exchanged, with their scales."""
        scale = self.scale.swapped() if self.scale and prod(self.scale.shape) > 1 else self.scale
        return replace(self, swap_halves=True, scale=scale)


@dataclass(frozen=True)
class Header:
    """What a file says about its tensors, by name, and about itself."""

    tensors: dict[str, TensorRecord]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The tensors of one safetensors file by name, and its metadata.

    Raises: ValueError if it is something else, cut short or damaged; it says what was found.
    """
    if file.suffix in _ENDINGS:
        raise ValueError(f"{file} {_ENDINGS[file.suffix]}")
    if not file.is_file():
        raise ValueError(f"{file} is no file of weights; give a .safetensors file")
    with open(file, "rb") as stream:
        start = stream.read(64)
        for magic, what in _MAGIC:
            if start.startswith(magic):
                raise ValueError(f"{file} is {what}")
        stream.seek(0)
        found = read_file_header(stream)
    records = {key: TensorRecord(file, key, entry.shape, entry.dtype) for key, entry in found.tensors.items()}
    return Header(records, dict(found.metadata))


def refuse_lora(path: Path, records: Mapping[str, TensorRecord]) -> None:
    """Raises: ValueError if these are the tensors of a LoRA."""
    found = [match for match in map(_LORA_NAME.search, records) if match]
    if found:
        raise ValueError(
            f"{path} is a LoRA file: {len(found)} {found[0][2]} tensors; give the model it belongs to instead"
        )


def describe_other(records: Mapping[str, TensorRecord]) -> str:
    """What a file of no supported family is, as far as its names tell; "" if they do not."""
    for what, pattern in _OTHER_KINDS:
        found = [name for name in records if pattern.search(name)]
        if found:
            return f"{what}: {len(found)} tensors such as {found[0]}"
    return ""
