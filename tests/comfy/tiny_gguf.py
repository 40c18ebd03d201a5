"""Tiny GGUF files of the families in tiny_checkpoints, written with the gguf package as converters write them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, make_weights

_Type = gguf.GGMLQuantizationType
_K_BLOCK, _K_BYTES = gguf.GGML_QUANT_SIZES[_Type.Q4_K]


def save_gguf(family: TinyFamily, path: Path, architecture: str, quantization: str) -> Path:
    """Write a family's weights: matrices of the blocks in this GGUF type where rows divide, the rest in F16 or F32.

    Args:
        architecture: general.architecture of the file, such as flux or wan.
        quantization: F16, Q8_0, Q4_0 or Q4_K; the last takes random blocks, since the gguf package only reads it.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    kind = _Type[quantization]
    for number, (name, tensor) in enumerate(make_weights(family).items()):
        data = tensor.float().numpy()
        if tensor.ndim != 2 or not name.startswith(family.block_lists):
            writer.add_tensor(name, data, raw_dtype=_Type.F32)
        elif kind == _Type.Q4_K and tensor.shape[1] % _K_BLOCK == 0:
            writer.add_tensor(name, _random_q4_k(tensor, number), raw_dtype=kind)
        else:
            fitting = _Type.Q4_0 if kind == _Type.Q4_K else kind
            fitting = fitting if tensor.shape[1] % gguf.GGML_QUANT_SIZES[fitting][0] == 0 else _Type.F16
            writer.add_tensor(name, gguf.quants.quantize(data, fitting), raw_dtype=fitting)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_q4_k(like: torch.Tensor, seed: int) -> np.ndarray:
    """Blocks of random 4-bit numbers: scale and minimum of a block (float16), those of its parts, the numbers."""
    rows, columns = like.shape
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // _K_BLOCK, _K_BYTES), dtype=np.uint8)
    scale = 0.1 * columns**-0.5 / 64  # parts have scales up to 63
    blocks[..., :4] = np.array([scale, 8 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
