"""Runs in ComfyUI's Python: writes linears in its 8-bit formats, loads them again with its own code, and writes what it
found. Arguments: ComfyUI's folder, the folder to write to."""

import json
import sys
from pathlib import Path

import torch

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


def main() -> None:
    host, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[:1] + ["--cpu"]
    sys.path.insert(0, str(host))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # ComfyUI looks for a GPU when it is imported
    import comfy.ops
    import comfy.quant_ops
    import comfy.utils
    from safetensors.torch import save_file

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
        save_file(tensors, folder / f"{name}.safetensors")
        save_file({"x.weight": _loaded(comfy.ops, tensors)}, folder / f"{name}.found")
        if name == "fp8":
            _write_old(comfy, folder, values, params.scale)


def _write_old(comfy: object, folder: Path, values: torch.Tensor, scale: torch.Tensor) -> None:
    from safetensors.torch import save_file

    tensors = {
        "x.weight": values, "x.scale_weight": scale, "x.scale_input": torch.tensor(0.25),
        "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }  # fmt: skip
    save_file(tensors, folder / "fp8_scaled.safetensors")
    converted, _ = comfy.utils.convert_old_quants(dict(tensors))
    save_file({"x.weight": _loaded(comfy.ops, converted)}, folder / "fp8_scaled.found")


def _loaded(ops: object, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    classes = ops.mixed_precision_ops(compute_dtype=torch.float32)
    linear = classes.Linear(512, 48, bias=False, device="cpu", dtype=torch.float32)
    linear.load_state_dict({name.removeprefix("x."): tensor.clone() for name, tensor in tensors.items()}, strict=False)
    return linear.weight.dequantize().detach().float().contiguous()


if __name__ == "__main__":
    main()
