"""Forecasts for MiniMax H3, pruned and in int8, on two cards: the table of docs/guides/minimax_h3_on_two_24gb_cards.md.
The file is hollow: names and shapes of the model, no values. Takes ComfyUI's folder; runs with ComfyUI's Python."""

import itertools
import json
import math
import os
import runpy
import sys
import tempfile
from pathlib import Path

sys.path[0], sys.argv = sys.argv[1], sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from comfy.supported_models import MiniMaxH3  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.jobs.job import plan_job  # noqa: E402
from devicebridge.nodes.host.native.model import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.planning.cards import parse_cards  # noqa: E402
from devicebridge.planning.plan import describe_plan  # noqa: E402
from devicebridge.tests.comfy.full_sizes import _FILES  # noqa: E402

CASES, CUT = ((480, 22), (480, 56), (480, 124), (768, 124)), "\n\n"  # what follows are details
REST = {"train": {"steps": 1000, "gradient_accumulation_steps": 4}, "output": {"folder": "nowhere"}}
REST["cache"] = {"stock_clip": ["clip"], "stock_clip_type": "minimax", "stock_vae": "vae"}
NOTE = json.dumps({"format": "int8_tensorwise"}).encode()

config = MiniMaxH3(dict(_FILES["MiniMax H3 pruned"][1]))
model = config.get_model({}, "", device=torch.device("meta")).diffusion_model
notes, rest, header, end = {}, {}, {}, 0
for name, shape in ((name, tuple(each.shape)) for name, each in model.state_dict().items()):
    is_rounded = len(shape) == 2 and "blocks." in name
    rest[name] = ("I8" if is_rounded else "BF16", shape, math.prod(shape) * (1 if is_rounded else 2))
    if is_rounded:
        notes[name.removesuffix("weight") + "comfy_quant"] = ("U8", (len(NOTE),), len(NOTE))
        rest[f"{name}_scale"] = ("F32", (shape[0], 1), 4 * shape[0])
for name, (kind, shape, size) in (notes | rest).items():
    header[name], end = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}, end + size
text = json.dumps(header).encode()

with tempfile.TemporaryDirectory() as folder, native_training():
    path = Path(folder) / "minimax_h3_pruned_int8.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + NOTE * len(notes))
    os.truncate(path, 8 + len(text) + end)
    info = read_native(path, "bfloat16")
    print(f"{end / 1e9:.1f} GB")
    for cards, (side, frames) in itertools.product(("2x3090", "2x4090"), CASES):
        data = {"folders": [{"path": "clips"}], "resolutions": [side], "frames": [frames]}
        job = make_job({"model": {"path": str(path), "family": "comfyui", "quantize": "auto"}, "data": data, **REST})
        plan = plan_job(job, parse_cards(cards), info=info, has_data=False)
        print(f"\n{cards}, {side} squared, {frames} frames\n{describe_plan(plan).partition(CUT)[0]}")
