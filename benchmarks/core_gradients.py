"""Whether the gradients of ComfyUI's own Train LoRA node are those of its own loss, on a GPU, with tiny models.

    python benchmarks/core_gradients.py --comfyui ~/ComfyUI [--model FLUX.1] [--device cuda:0] [--out results.json]

The node's first step with its default, gradient checkpointing, and without. The reference is the same LoRA, noise and
loss on this pack's model without recomputation, in float32. Figures: the cosine between the two gradients, 1 where they
agree; "raises" is what the node says instead. On the CPU tests/comfy/native_steps.py records the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI"))
    parser.add_argument("--model", nargs="+", default=["FLUX.2", "FLUX.1", "HunyuanVideo", "Chroma", "Z-Image"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


OPTIONS = parse()
sys.path.insert(0, str(Path(OPTIONS.comfyui).expanduser()))
sys.argv = ["main.py", *(["--cpu"] if OPTIONS.device == "cpu" else []), "--disable-dynamic-vram", "--force-fp32"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import runpy  # noqa: E402

import cuda_malloc  # noqa: E402, F401

runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import dataclasses  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager, nullcontext  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import comfyui_version  # noqa: E402
import torch  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.tests.comfy import native_steps  # noqa: E402
from provenance import describe_run, print_or_write, say, write_json  # noqa: E402

_CORE_STEP, _PREDICT = native_steps._core_step, native_steps.predict


def to_cpu(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.cpu())


def predict(family: Any, model: Any, noisy: Any, sigmas: Any, batch: Any, guidance: Any) -> torch.Tensor:
    """The pack's, with inputs and the result on the CPU."""
    given = map_tensors((noisy, sigmas, batch), lambda tensor: tensor.to(OPTIONS.device))
    return _PREDICT(family, model, *given, guidance).cpu()


def core_step(bench: Any, *, backward: bool) -> Any:
    """The node's step on the device; what it leaves on the CPU."""
    found = _CORE_STEP(bench, backward=backward)
    used = {str(each.device) for each in found.lora.values()}
    say(f"{bench.name}: the node trained on {', '.join(sorted(used))}")
    return dataclasses.replace(found, **{f.name: to_cpu(getattr(found, f.name)) for f in dataclasses.fields(found)})


@contextmanager
def on_device(*, checkpointing: bool) -> Iterator[None]:
    """Inside, both sides compute on --device; the node recomputes nothing if checkpointing is False."""
    plain = {**native_steps._PLAIN, "split": {"devices": [OPTIONS.device]}}
    changes: list[tuple[Any, str, Any]] = [
        (native_steps, "_PLAIN", plain),
        (native_steps, "_cards", lambda job: nullcontext()),
        (native_steps, "_core_step", core_step),
        (native_steps, "predict", predict),
    ]
    if not checkpointing:
        changes.append((native_steps.nodes_train, "patch", lambda *args, **kwargs: None))
    with ExitStack() as cleanup:
        for change in changes:
            cleanup.enter_context(mock.patch.object(*change))
        yield


def measure(name: str, folder: Path) -> dict[str, Any]:
    found = {}
    for way, checkpointing in (("with checkpointing", True), ("without", False)):
        bench = native_steps.Bench(name, folder / way / name)
        with on_device(checkpointing=checkpointing):
            found[way] = native_steps.core_gradients(bench)
    return found


def main() -> None:
    report: dict[str, Any] = {**describe_run(), "comfyui": comfyui_version.__version__, "device": OPTIONS.device}
    with tempfile.TemporaryDirectory() as folder:
        for name in OPTIONS.model:
            try:
                found = measure(name, Path(folder))
            except Exception as error:
                traceback.print_exc()
                found = {"failed": native_steps.one_line(error)}
            report.setdefault("models", {})[name] = found
            say(f"{name}: {found}")
            write_json(report, OPTIONS.out)
    print_or_write(report, OPTIONS.out)


if __name__ == "__main__":
    main()
