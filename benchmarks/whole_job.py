"""A whole job at real size over two GPUs, from a checkpoint on disk to a LoRA file: does it run, where is the memory?

    python benchmarks/whole_job.py [--variant flux2-dev] [--quantize none fp8] [--folder /scratch] [--out results.json]

Writes a single-file checkpoint of the variant's full size with random bf16 weights in the makers' names, a VAE of the
published shape, a text encoder of the right width and depth but few parameters, and four random 512² images; then runs
the job a user would run. Needs as much free disk as the checkpoint (64 GB for FLUX.2-dev). Prints JSON unless --out
takes it.
"""

from __future__ import annotations

import argparse
import resource
import runpy
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import diffusers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.events import Event  # noqa: E402
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.families.spec import ModelFamily, Variant  # noqa: E402
from devicebridge.jobs.job import run_job  # noqa: E402
from devicebridge.quantization.quantize import SCHEMES  # noqa: E402
from devicebridge.tests.toy_encoders import save_tiny_text_encoder  # noqa: E402
from PIL import Image  # noqa: E402
from provenance import describe_run, print_or_write  # noqa: E402
from random_checkpoint import write_single_file  # noqa: E402

ENCODERS = {"flux2-dev": ("mistral3", 31), "flux2-klein-4b": ("qwen3", 28), "flux2-klein-9b": ("qwen3", 28)}


def find(name: str) -> tuple[ModelFamily, Variant]:
    for family in FAMILIES.values():
        for variant in family.variants:
            if variant.name == name:
                return family, variant
    raise ValueError(f"there is no variant {name!r}")


def write_text_encoder(folder: Path, variant: Variant) -> None:
    """The real class, as wide and deep as the published one and thin everywhere else; random weights."""
    kind, layers = ENCODERS[variant.name]
    save_tiny_text_encoder(folder, kind, 16, layers, 0, max_length=512)
    config = transformers.AutoConfig.from_pretrained(folder / "text_encoder")
    text = getattr(config, "text_config", config)
    text.hidden_size = variant.transformer_config["joint_attention_dim"] // 3
    text.intermediate_size, text.num_attention_heads, text.num_key_value_heads, text.head_dim = 64, 4, 1, 64
    model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    shutil.rmtree(folder / "text_encoder")
    model.save_pretrained(folder / "text_encoder")


def prepare(folder: Path, family: ModelFamily, variant: Variant) -> dict[str, Any]:
    start = time.perf_counter()
    num_bytes = write_single_file(folder / f"{variant.name}.safetensors", family, variant)
    elapsed = time.perf_counter() - start
    write_text_encoder(folder / "components", variant)
    getattr(diffusers, family.vae_class)(**dict(variant.vae_config)).save_pretrained(folder / "components" / "vae")
    (folder / "data").mkdir()
    for index in range(4):
        pixels = torch.randint(0, 255, (512, 512, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / "data" / f"{index}.png")
        (folder / "data" / f"{index}.txt").write_text(f"noise number {index}")
    return {"checkpoint_gb": num_bytes / 1e9, "writing_it_s": elapsed}


def run(folder: Path, variant: Variant, quantize: str, steps: int) -> dict[str, Any]:
    job = make_job(
        {
            "model": {"path": str(folder / f"{variant.name}.safetensors"), "quantize": quantize},
            "split": {"devices": ["cuda:0", "cuda:1"]},
            "lora": {"rank": 32, "alpha": 32},
            "data": {"folders": [{"path": str(folder / "data")}], "resolutions": [512]},
            "cache": {
                "folder": str(folder / "cache"),
                "text_encoders": str(folder / "components"),
                "vae": str(folder / "components" / "vae"),
                "text_device": "cuda:0",
            },
            "train": {"steps": steps},
            "output": {"folder": str(folder / f"run-{quantize}"), "tensorboard": False},
        }
    )
    marks: list[tuple[float, Event]] = []
    for index in range(2):
        torch.cuda.reset_peak_memory_stats(index)
    result = run_job(job, on_event=lambda event: marks.append((time.perf_counter(), event)))
    phase = {event.values["name"]: moment for moment, event in marks if event.kind == "phase"}
    seconds = [event.values["elapsed_s"] for _, event in marks if event.kind == "step"]
    placement = next(event.values["placement"] for _, event in marks if "placement" in event.values)
    return {
        "quantize": quantize,
        "status": result.status,
        "placement": placement,
        "captions_and_latents_s": phase["loading"] - phase["captions"],
        "loading_s": phase["training"] - phase["loading"],
        "s_per_step_median": statistics.median(seconds[2:]),
        "peak_gb_per_card": [torch.cuda.max_memory_allocated(index) / 1e9 for index in range(2)],
        "allocated_after_first_step_gb": next(dict(e.values) for _, e in marks if e.kind == "memory"),
        "host_peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "lora_file_mb": result.lora_path.stat().st_size / 1e6 if result.lora_path else None,
        "losses": result.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="flux2-dev", choices=sorted(ENCODERS))
    parser.add_argument("--quantize", nargs="+", choices=("none", *SCHEMES), default=["none", "fp8-compute"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    family, variant = find(options.variant)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        report: dict[str, Any] = {"variant": variant.name, **prepare(folder, family, variant), "runs": []}
        for quantize in options.quantize:
            report["runs"].append(run(folder, variant, quantize, options.steps))
            torch.cuda.empty_cache()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["setup"] = describe_run("diffusers", "torchao")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
