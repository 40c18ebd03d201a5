"""Whether torch's attention kernels give the right gradient whatever layout came before, and what each of them takes.

    python benchmarks/attention_gradients.py [--out results.json] [--tokens 1536 4608]

Attention of 24 and 48 heads of 128 (FLUX.1, FLUX.2) in bfloat16. "errors": relative distance of the gradients of q, k
and v from those in float32, for one call after another in a new process; the gradient of the output holds the same
numbers in three layouts: "heads" [B, N, S, H] as it is, "rows" a view of [B, S, N, H], "slice" a view of wider rows, as
where attention's output is joined with something else. A kernel that is right has errors below 0.01 in every row; what
ends the process is said. "times": milliseconds forward and backward of such a slice, medians, the kernels in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import available_devices  # noqa: E402
from devicebridge.patches.attention import sound_attention  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

# Name -> kernel, and what it runs in.
KERNELS: dict[str, tuple[SDPBackend, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, contextlib.nullcontext),
    "cudnn, as the pack trains": (SDPBackend.CUDNN_ATTENTION, sound_attention),
    "flash": (SDPBackend.FLASH_ATTENTION, contextlib.nullcontext),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, contextlib.nullcontext),
}
ORDERS = (("heads", "slice"), ("slice", "heads"), ("slice", "rows"), ("rows", "slice", "heads"), ("slice", "slice"))
TOKENS, HEADS, WIDTH, MLP = 1536, 24, 128, 12288  # of the errors: FLUX.1 at 512 px
NUM_WARM_UPS, NUM_ROUNDS = 3, 15


def make_inputs(device: torch.device, tokens: int, heads: int) -> list[torch.Tensor]:
    """q, k and v [B, N, S, H], each a view of [B, S, N, H]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, heads, WIDTH)
    drawn = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(3)]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in drawn]


def make_grads(device: torch.device) -> dict[str, torch.Tensor]:
    """The same numbers in three layouts."""
    generator = torch.Generator(device).manual_seed(1)
    wide = torch.randn(1, TOKENS, HEADS * WIDTH + MLP, device=device, generator=generator).bfloat16()
    part = wide[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    return {
        "slice": part,
        "heads": part.contiguous(),
        "rows": part.transpose(1, 2).contiguous().transpose(1, 2),
    }


def gradients(inputs: Sequence[torch.Tensor], grad: torch.Tensor, kernel: SDPBackend) -> tuple[torch.Tensor, ...]:
    with sdpa_kernel(kernel):
        output = torch.nn.functional.scaled_dot_product_attention(*inputs)
    return torch.autograd.grad(output, inputs, grad)


def errors(device: torch.device, kernel: str, order: Sequence[str]) -> dict[str, list[float]]:
    """Of q, k and v, call by call."""
    inputs, grads = make_inputs(device, TOKENS, HEADS), make_grads(device)
    wider = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = gradients(wider, grads["heads"].float(), SDPBackend.MATH)
    backend, surroundings = KERNELS[kernel]
    found = {}
    for index, name in enumerate(order):
        with surroundings():
            pairs = zip(gradients(inputs, grads[name], backend), expected, strict=True)
        found[f"{index + 1}. {name}"] = [round(float((a.float() - b).norm() / b.norm()), 5) for a, b in pairs]
    return found


def errors_in_a_process(kernel: str, order: Sequence[str]) -> Any:
    """A kernel that reads what is not its own may end its process."""
    command = [sys.executable, __file__, "--only", kernel, *order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    return said[-1] if said else f"ended with {done.returncode}"


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def times(device: torch.device, tokens: int, heads: int) -> dict[str, dict[str, float]]:
    """Milliseconds, forward and backward, of all but bare cuDNN: it would leave its plans to the one that is mended."""
    inputs = make_inputs(device, tokens, heads)
    grad = torch.randn(1, tokens, heads, 4 * WIDTH, device=device).bfloat16()[..., :WIDTH].transpose(1, 2)  # a slice
    kernels = {name: kernel for name, kernel in KERNELS.items() if name != "cudnn"}
    marks: dict[str, list[tuple[Any, Any, Any]]] = {name: [] for name in kernels}
    for _ in range(NUM_WARM_UPS + NUM_ROUNDS):
        for name, (kernel, surroundings) in kernels.items():
            with surroundings():
                start = _mark(device)
                with sdpa_kernel(kernel):
                    output = torch.nn.functional.scaled_dot_product_attention(*inputs)
                middle = _mark(device)
                torch.autograd.grad(output, inputs, grad)
                marks[name].append((start, middle, _mark(device)))
    found = {}
    for name, rounds in marks.items():
        rounds[-1][-1].synchronize()
        forward = [start.elapsed_time(middle) for start, middle, _ in rounds[NUM_WARM_UPS:]]
        backward = [middle.elapsed_time(end) for _, middle, end in rounds[NUM_WARM_UPS:]]
        found[name] = {
            "forward_ms": round(statistics.median(forward), 3),
            "backward_ms": round(statistics.median(backward), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1536, 4608], help="of the times")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)  # kernel and order, in the process itself
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = [device for device in available_devices() if device.type == "cuda"]
    if not devices:
        parser.error("this needs a CUDA or ROCm GPU and found none")
    if options.only:
        sys.stdout.write(json.dumps(errors(devices[0], options.only[0], options.only[1:])) + "\n")
        return
    report: dict[str, Any] = {"cudnn": torch.backends.cudnn.version(), **describe_run()}
    report["errors"] = {name: [errors_in_a_process(name, order) for order in ORDERS] for name in KERNELS}
    report["times"] = {
        f"{heads} heads, {tokens} tokens": times(devices[0], tokens, heads)
        for heads in (24, 48)
        for tokens in options.tokens
    }
    report["elapsed_s"] = round(elapsed_s(), 1)
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
