"""A LoRA that is sharded with the weights under FSDP2 beside one that is whole on every process.

    torchrun --nproc-per-node 2 benchmarks/rank_lora.py [--rank 32] [--microbatches 4]
    sudo unshare -n bash -c "ip link set lo up; GLOO_SOCKET_IFNAME=lo torchrun ... "    for the bytes of it alone

Both are diffusers, PEFT and `fully_shard`, on a FLUX.2 of random weights. "sharded" has the LoRA inside: it is gathered
with its block, and its gradients are reduced and scattered, a block and microbatch at a time. "sharded_once" adds
gradients up first and reduces them in the last microbatch. "whole" is what the pack does: gradients in one flat
all-reduce per step.

One line of JSON per way from the first process: seconds per step (the median), MB through the loopback device per step,
MB that each process's own memory rose by at its peak (start each way alone for it), MB that it holds of LoRA, gradients
and optimizer, and the last loss, by which they can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from peft import LoraConfig
from random_job import make_config
from ranks import _host_peak
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WAYS = ("whole", "sharded", "sharded_once")
_TOKENS, _TEXT = 256, 64
_CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="the model's width, in heads of 128")
    parser.add_argument("--layers", type=int, nargs=2, default=(1, 4))
    parser.add_argument("--microbatches", type=int, default=1, help="of each process and step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    has_card = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_card else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if has_card else _CPU
    if has_card:
        torch.cuda.set_device(device)
    for way in options.ways.split(","):
        told = _measure(way, options, device)
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
        gc.collect()
    dist.destroy_process_group()


def _measure(way: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    config = make_config(tuple(options.layers), num_attention_heads=options.heads)
    times, losses, passed = [], [], []
    with _host_peak() as host_mb:
        model, parameters = _make(way, config, options.rank, device)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
        for step in range(options.steps + 1):
            dist.barrier()
            before, start = _passed_mb(), time.perf_counter()
            losses.append(_step(way, model, parameters, config, options.microbatches, step, device))
            optimizer.step()
            if device != _CPU:
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
            dist.barrier()
            passed.append(_passed_mb() - before)
            held = _held_mb(parameters, optimizer)
            optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device != _CPU else host_mb[0]
    loss = torch.tensor(losses[-1], device=device)
    dist.all_reduce(loss)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, round(peak))
    return {
        "way": way,
        "processes": dist.get_world_size(),
        "rank": options.rank,
        "microbatches": options.microbatches,
        "lora_parameters": sum(each.numel() for each in parameters),
        "s_per_step": round(_median(times[1:]), 3),
        "passed_mb": round(_median(passed[1:]), 1),
        "held_mb": round(held, 1),
        "peak_mb": peaks,
        "last_loss": round(float(loss) / dist.get_world_size(), 6),
    }


def _make(way: str, config: dict[str, Any], rank: int, device: torch.device) -> tuple[Any, list[nn.Parameter]]:
    dtype = torch.float32 if device == _CPU else torch.bfloat16
    with torch.device("meta"):
        model: Any = diffusers.Flux2Transformer2DModel.from_config(config).to(dtype)
    model.requires_grad_(False)
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".attn." in name]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    model.enable_gradient_checkpointing()
    model.train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    ignored = set(parameters) if way == "whole" else None
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    model.to_empty(device=device)
    _fill(model)
    return model, [each for each in model.parameters() if each.requires_grad]


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """The same values whether a tensor is divided or not."""
    for index, each in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        whole = torch.randn(each.shape, generator=generator) * 0.02
        if isinstance(each, DTensor):
            size, rank = dist.get_world_size(), dist.get_rank()
            rows = whole.chunk(size)
            each.to_local().copy_(rows[rank] if rank < len(rows) else whole[:0])
        else:
            each.copy_(whole)


def _step(
    way: str,
    model: Any,
    parameters: list[nn.Parameter],
    config: dict[str, Any],
    count: int,
    step: int,
    device: torch.device,
) -> float:
    total = 0.0
    for index in range(count):
        if way == "sharded_once":
            model.set_requires_gradient_sync(index == count - 1)
        seed = (step * count + index) * dist.get_world_size() + dist.get_rank()
        loss = _loss(model, config, seed, device) / count
        loss.backward()
        total += float(loss.detach())
    if way == "whole":
        flat = torch.cat([each.grad.flatten().float() for each in parameters if each.grad is not None])
        dist.all_reduce(flat)
        parts = (flat / dist.get_world_size()).split([each.numel() for each in parameters])
        for each, part in zip(parameters, parts, strict=True):
            each.grad = part.view(each.shape).to(each.dtype)
    return total


def _loss(model: Any, config: dict[str, Any], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if device == _CPU else torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    output = model(
        hidden_states=draw(1, _TOKENS, config["in_channels"]),
        encoder_hidden_states=draw(1, _TEXT, config["joint_attention_dim"]),
        timestep=torch.full((1,), 0.5, device=device, dtype=dtype),
        guidance=torch.ones(1, device=device, dtype=dtype),
        img_ids=torch.zeros(1, _TOKENS, 4, device=device),
        txt_ids=torch.zeros(1, _TEXT, 4, device=device),
        return_dict=False,
    )[0]
    return (output.float() - draw(1, _TOKENS, config["in_channels"]).float()).square().mean()


def _held_mb(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> float:
    """Of this process: LoRA, its gradients and the optimizer's state."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors: list[Any] = [*parameters, *[each.grad for each in parameters if each.grad is not None], *states]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.nbytes for each in local) / 1e6


def _passed_mb() -> float:
    """Through this machine's loopback device so far; 0 where nobody tells."""
    file = Path("/proc/net/dev")
    for line in file.read_text(encoding="ascii").splitlines() if file.exists() else ():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0]) / 1e6
    return 0.0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
