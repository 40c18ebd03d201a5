"""One process with ComfyUI's Python: trains tiny models of ComfyUI's own classes; run by test_native_training.py.

Takes ComfyUI's folder, a folder for files and names of tiny_checkpoints.FAMILIES. Prints one line of JSON per name:
{"name", "losses": {way: [...]}, "difference": {way: of the LoRA from the plain one}, "keys": [found, trained]}.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER, *NAMES = sys.argv[1:]
sys.path[0] = CHECKOUT
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import comfy.lora  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.encoding.comfy_data import read_pairs  # noqa: E402
from devicebridge.encoding.encoded import save_encoded  # noqa: E402
from devicebridge.encoding.store import CacheStore  # noqa: E402
from devicebridge.jobs.job import run_job  # noqa: E402
from devicebridge.nodes.host.native.context import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint, small_sizes  # noqa: E402
from devicebridge.tests.emulated import emulated_cards  # noqa: E402

CARDS = {"devices": ["lazy:0", "lazy:1"]}
TWO = {"gradient_accumulation_steps": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"train": {"gradient_checkpointing": False}},
    "recompute": {},
    "split": {"split": CARDS},
    "accumulated": {"train": TWO},
    "pipeline": {"split": CARDS, "train": TWO, "parallel": {"strategy": "pipeline"}},
    "data": {"split": CARDS, "train": TWO, "parallel": {"strategy": "data"}},
    "activation offload": {"split": CARDS, "train": {"offload_activations": "on"}},
}


def train(name: str) -> dict[str, Any]:
    family, folder = FAMILIES[name], Path(FOLDER) / name
    folder.mkdir(parents=True)
    with small_sizes(family), native_training():
        path = save_checkpoint(family, folder / "model.safetensors")
        info = read_native(path, "float32")
        generator = torch.Generator().manual_seed(3)
        latents = [{"samples": torch.randn(1, *family.latent, generator=generator)} for _ in range(2)]
        pairs = read_pairs(latents, [family.condition(seed) for seed in (1, 2)])
        encoded = save_encoded(pairs, CacheStore(folder / "cache"))
        results = {}
        for way, sections in WAYS.items():
            with emulated_cards():
                job = _job(path, encoded, folder / way, sections)
                results[way] = run_job(job, info=info)
        seen: list[Any] = []
        job = _job(path, encoded, folder / "stopped", {})
        run_job(job, info=info, on_event=seen.append, should_stop=lambda: any(e.kind == "step" for e in seen))
        results["resumed"] = run_job(job, info=info, resume=True)
        base = comfy.sd.load_diffusion_model(str(path))
        plain = results["plain"].lora
        found = comfy.lora.load_lora(dict(plain), comfy.lora.model_lora_keys_unet(base.model, {}))
    reference = {way: results["accumulated" if way in ("pipeline", "data") else "plain"].lora for way in results}
    return {
        "name": name,
        "losses": {way: result.losses for way, result in results.items()},
        "difference": {
            way: max(float((tensor - reference[way][key]).abs().max()) for key, tensor in result.lora.items())
            for way, result in results.items()
        },
        "keys": [len(found), sum(key.endswith("lora_A.weight") for key in plain)],
    }


def _job(path: Path, encoded: Path, folder: Path, sections: dict[str, Any]) -> Any:
    return make_job(
        {
            "model": {"path": str(path), "family": "comfyui", "dtype": "float32"},
            "split": {"devices": ["cpu"]},
            "data": {"encoded": str(encoded)},
            "lora": {"rank": 2, "alpha": 2.0},
            "optimizer": {"learning_rate": 0.01},
            **sections,
            "train": {"steps": 3, "seed": 3, **sections.get("train", {})},
            "output": {"folder": str(folder), "tensorboard": False, "lora_dtype": "float32"},
        }
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in NAMES:
        print(json.dumps(train(each)), flush=True)
