"""One process with ComfyUI's Python: samples with noise masks in one batch and alone; run by test_native_batches.py.

Takes ComfyUI's folder and a folder for files. Prints one line of JSON: {build: {"together": the samples of each batch,
"apart": the largest difference of what the network says of a sample in a batch from what it says of it alone}}.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER = sys.argv[1:]
sys.path[0] = CHECKOUT
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.encoding.comfy_data import read_pairs, save_encoded  # noqa: E402
from devicebridge.encoding.store import CacheStore  # noqa: E402
from devicebridge.families.comfy.inputs import NOISE_MASK  # noqa: E402
from devicebridge.tests.comfy.native_forwards import endless_memory  # noqa: E402
from devicebridge.tests.comfy.native_steps import Bench  # noqa: E402
from devicebridge.tests.comfy.trained_families import TRAINED  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from devicebridge.training.objective import noise_latents, predict  # noqa: E402

PIXELS = "with masks of guides"
BUILDS = {
    "LTX-Video": TRAINED["LTX-Video"],
    "LTX-2": dataclasses.replace(TRAINED["LTX-2 without sound"], latent=(128, 3, 4, 4)),
    "Wan 2.2 TI2V 5B": TRAINED["Wan 2.2 TI2V 5B"],
    "Cosmos-Predict2": dataclasses.replace(TRAINED["Cosmos-Predict2"], latent=(16, 2, 4, 4)),
    PIXELS: TRAINED["LTX-Video with guides"],
}


def masks_for(frames: int) -> list[torch.Tensor]:
    """Two of whole frames, two of places."""
    first, weak, corner, half = (torch.ones(1, 1, frames, 4, 4) for _ in range(4))
    first[:, :, 0], weak[:, :, 0] = 0, 0.5
    corner[..., :2, :2], half[:, :, -1, :2] = 0, 0.25
    return [first, corner, weak, half]


def judge(name: str) -> dict[str, Any]:
    bench = Bench(name, Path(FOLDER) / name.replace(" ", "-"), family=BUILDS[name])
    latents, conditions = samples_of(bench, name == PIXELS)
    bench.encoded = save_encoded(read_pairs(latents, conditions), CacheStore(bench.folder / "cache"))
    with bench.trainer("batches", {"train": {"batch_size": 2, "gradient_checkpointing": False}}) as trainer:
        samples = trainer.train_data.samples
        together = [(i, j) for i, j in combinations(range(4), 2) if samples[i].alike == samples[j].alike]
        alone = [said(bench, trainer, [index])[0] for index in range(4)]
        assert all(each.isfinite().all() and each.std() > 0 for each in alone), [float(each.std()) for each in alone]
        apart = [
            float((found - alone[index]).norm() / alone[index].norm())
            for pair in together
            for index, found in zip(pair, said(bench, trainer, pair), strict=True)
        ]
    return {"together": together, "apart": max(apart)}


def samples_of(bench: Bench, has_guides: bool) -> tuple[list[Any], list[Any]]:
    """Four samples with masks of their own, or, of one mask, with masks of their own for what guides show."""
    generator = torch.Generator().manual_seed(7)
    shape = bench.family.latent
    samples = [torch.randn(1, *shape, generator=generator) for _ in range(4)]
    conditions = [bench.family.condition(seed) for seed in range(4)]
    if not has_guides:
        return [{"samples": s, NOISE_MASK: m} for s, m in zip(samples, masks_for(shape[1]), strict=True)], conditions
    shown = [torch.rand(1, 1, 9, 32, 32, generator=generator) for _ in range(2)]
    for index, condition in enumerate(conditions):
        entries = condition[0][1]["guide_attention_entries"]
        condition[0][1]["guide_attention_entries"] = [{**each, "pixel_mask": shown[index % 2]} for each in entries]
    return [bench.family.latent_of(each) for each in samples], conditions


@torch.no_grad()
def said(bench: Bench, trainer: Trainer, indices: Any) -> torch.Tensor:
    """What the network says of these samples as one batch; each has a noise level and noise of its own."""
    batch = trainer.train_data.load(indices, [False] * len(indices))
    noises = [torch.randn(batch.latents.shape[1:], generator=torch.Generator().manual_seed(i)) for i in indices]
    times = torch.tensor([0.25 + 0.2 * index for index in indices])
    family = bench.info.family
    made = noise_latents(family, batch.latents, torch.stack(noises), times, batch.conditions[NOISE_MASK])
    model, _ = trainer.runner.replica_for(0)
    return predict(family, model, made.noisy, made.sigmas, {**batch.text, **batch.conditions}, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with endless_memory():
        print(json.dumps({name: judge(name) for name in BUILDS}))
