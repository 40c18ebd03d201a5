"""Weights in ComfyUI's 8-bit formats, written by ComfyUI: we read the numbers that ComfyUI reads."""

import json

import comfy.ops
import comfy.quant_ops
import comfy.utils
import torch
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.quantized_files import dequantize, pair_scales, read_scales
from devicebridge.checkpoints.weight_file import read_records
from devicebridge.tests.comfy.cases import FOLDER, case
from safetensors.torch import save_file

# name: layout, format, arguments of quantize, what the note says beyond the format
FORMATS = {
    "fp8": ("TensorCoreFP8E4M3Layout", "float8_e4m3fn", {"scale": "recalculate"}, {}),
    "e5m2": ("TensorCoreFP8E5M2Layout", "float8_e5m2", {"scale": "recalculate"}, {}),
    "int8": ("TensorWiseINT8Layout", "int8_tensorwise", {"scale": "recalculate"}, {}),
    "int8_rows": ("TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True}, {}),
    "int8_convrot": ("TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True, "convrot": True}, {}),
    "int8_convrot_16": (
        "TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
        {"convrot_groupsize": 16},
    ),
}  # fmt: skip


@case
def a_weight_is_what_comfyui_takes_it_for() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 512)
    for name, (layout, kind, arguments, more) in FORMATS.items():
        values, params = comfy.quant_ops.get_layout_class(layout).quantize(weight, **arguments)
        note = {"format": kind, **({"convrot": True} if "convrot" in arguments else {}), **more}
        tensors = {
            "x.weight": values,
            "x.weight_scale": params.scale.contiguous(),
            "x.comfy_quant": torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8),
        }
        _is_read_alike(name, tensors, tensors)
        if name == "fp8":
            mark = torch.zeros(2, dtype=torch.float8_e4m3fn)
            old = {"x.scale_weight": params.scale, "x.scale_input": torch.tensor(0.25), "scaled_fp8": mark}
            old["x.weight"] = values
            _is_read_alike("fp8_scaled", old, comfy.utils.convert_old_quants(dict(old))[0])


def _is_read_alike(name: str, written: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    save_file(written, file := FOLDER / f"{name}.safetensors")
    header = read_header(file)
    given = header.records()
    records = pair_scales(file, given, [header.metadata])
    assert records.keys() == {"x.weight"} and records["x.weight"].is_quantized
    ((_, values),) = read_records(records)
    found = dequantize(values, read_scales(records)["x.weight"], records["x.weight"], torch.float32)
    classes = comfy.ops.mixed_precision_ops(compute_dtype=torch.float32)
    linear = classes.Linear(512, 48, bias=False, device="cpu", dtype=torch.float32)
    linear.load_state_dict({key.removeprefix("x."): each.clone() for key, each in loaded.items()}, strict=False)
    expected = linear.weight.dequantize().detach().float()
    # Rotating back sums 16 or 256 float32 products in an order of its own; nothing else differs.
    assert expected.std() > 0.9
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 if "convrot" in name else 0), name
