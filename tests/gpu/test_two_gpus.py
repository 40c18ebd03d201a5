"""The same jobs on two real GPUs. Needs two CUDA or ROCm devices; skipped, with the reason, elsewhere."""

import dataclasses

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs.job import run_job
from devicebridge.parallel.offload import weights as weights_module
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.tests.gpu.conftest import NEEDS_TWO
from devicebridge.tests.placed import apply_block_split, apply_weight_offload, place
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.unit.parallel.test_weight_offload import CHAIN, Chain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_algorithms"), NEEDS_TWO]

NAMES = sorted(FAMILIES)
LONGER = {"steps": 12, "batch_size": 2, "seed": 3}


def _split(devices):
    """Cards draw dropout, so runs that are compared are cut alike: not by measured times, nor by free memory."""
    return {"devices": devices} | ({"balance": "manual", "split_at": [1]} if len(devices) > 1 else {})


def _run(folder, name, devices, run, resume=False, **sections):
    sections["output"] = {"folder": str(folder / run)}
    job = make_tiny_job(folder, name, split=_split(devices), train=LONGER, **sections)
    return run_job(job, resume=resume)


@pytest.mark.parametrize("name", NAMES)
def test_split_run_is_the_run_of_one_gpu_bit_for_bit(name, tmp_path):
    one = _run(tmp_path, name, ["cuda:0"], "one", model={"dtype": "bfloat16"})
    two = _run(tmp_path, name, ["cuda:0", "cuda:1"], "two", model={"dtype": "bfloat16"})
    assert one.losses == two.losses and one.eval_after == two.eval_after
    assert all(torch.equal(one.lora[key], two.lora[key]) for key in one.lora)


@pytest.mark.parametrize("name", NAMES)
def test_resume_on_two_gpus_is_bit_for_bit(name, tmp_path):
    devices, dropout = ["cuda:0", "cuda:1"], {"lora": {"dropout": 0.3}}
    straight = _run(tmp_path, name, devices, "straight", **dropout)
    job = make_tiny_job(
        tmp_path, name, split=_split(devices), train=LONGER, output={"folder": str(tmp_path / "b")}, **dropout
    )
    seen = []
    run_job(job, on_event=seen.append, should_stop=lambda: any(e.kind == "step" and e.step == 5 for e in seen))
    resumed = run_job(dataclasses.replace(job), resume=True)
    assert resumed.losses == straight.losses
    assert resumed.lora_path.read_bytes() == straight.lora_path.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_quantized_base_trains_on_two_gpus(name, tmp_path):
    plain = _run(tmp_path, name, ["cuda:0", "cuda:1"], "plain", model={"dtype": "bfloat16"})
    small = _run(tmp_path, name, ["cuda:0", "cuda:1"], "fp8", model={"dtype": "bfloat16", "quantize": "fp8"})
    assert small.losses == pytest.approx(plain.losses, rel=0.03) and small.losses != plain.losses
    assert torch.cuda.max_memory_allocated(1) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_is_plain_accumulation_bit_for_bit(name, tmp_path):
    """Losses, LoRA and, by dropout, the cards' random numbers, on side streams and two backward threads."""
    train = {"steps": 4, "batch_size": 1, "gradient_accumulation_steps": 5, "seed": 3}
    results = []
    for strategy in ("none", "pipeline"):
        job = make_tiny_job(
            tmp_path, name, split=_split(["cuda:0", "cuda:1"]), train=train, lora={"dropout": 0.3},
            parallel={"strategy": strategy}, output={"folder": str(tmp_path / strategy)},
        )  # fmt: skip
        results.append(run_job(job))
    for found in results[1:]:
        assert found.losses == results[0].losses and found.eval_after == results[0].eval_after
        assert found.lora_path.read_bytes() == results[0].lora_path.read_bytes()


def test_blocks_compiled_for_any_number_of_tokens_train_in_a_pipeline(tmp_path, caplog):
    """Several sizes share the graphs; losses as uncompiled."""
    found = {}
    caplog.set_level("INFO")
    for name in ("off", "auto"):
        job = make_tiny_job(
            tmp_path, "flux2", data={"resolutions": [32, 64]}, split=_split(["cuda:0", "cuda:1"]),
            train={"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 4, "seed": 3, "compile": name},
            output={"folder": str(tmp_path / name)},
        )  # fmt: skip
        found[name] = run_job(job)
    assert "compiled for any number of tokens" in caplog.text and "graphs were compiled" in caplog.text
    assert found["auto"].losses == pytest.approx(found["off"].losses, rel=1e-4)
    assert found["auto"].losses != found["off"].losses  # the last bits tell that it was compiled


@pytest.mark.parametrize(
    ("quantize", "strategy", "compile"),
    [("none", "none", "off"), ("none", "pipeline", "off"), ("fp8", "pipeline", "off"), ("none", "pipeline", "auto")],
)
def test_streamed_blocks_train_as_resident_ones_bit_for_bit(quantize, strategy, compile, tmp_path, monkeypatch):
    """Losses and LoRA of whole jobs, with dropout; three blocks of the second card pass through its two slots."""
    monkeypatch.setattr(weights_module, "SMALLEST_BYTES", 1024)
    results = []
    for swapped in ([0, 0], [0, 3]):
        torch._dynamo.reset()
        job = make_tiny_job(
            tmp_path, "flux2", model={"dtype": "bfloat16", "quantize": quantize},
            split={
                "devices": ["cuda:0", "cuda:1"], "balance": "manual", "split_at": [1],
                "blocks_without_checkpointing": [0, 0], "offloaded_blocks": swapped,
            },
            train={"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 4, "seed": 3, "compile": compile},
            lora={"dropout": 0.3}, parallel={"strategy": strategy},
            output={"folder": str(tmp_path / f"swapped_{swapped[1]}")},
        )  # fmt: skip
        results.append(run_job(job))
    assert results[1].losses == results[0].losses and results[1].eval_after == results[0].eval_after
    assert results[1].lora_path.read_bytes() == results[0].lora_path.read_bytes()


def test_copies_and_kernels_of_large_blocks_wait_for_each_other():
    """The host runs far ahead of 12 linears of 64 MB; every step's gradient is that of resident ones."""
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    model = Chain(12, 4096).requires_grad_(False)
    split = apply_block_split(model, CHAIN, plan_manual(block_names(model, CHAIN), [device], []))
    x = torch.randn(64, 4096, device=device)

    def steps():
        gradients = []
        for index in range(6):
            start = (x * (1 + index)).requires_grad_(True)
            model(start, split.checkpoint).square().sum().backward()
            gradients.append(start.grad)
        return gradients

    expected = steps()
    swap = apply_weight_offload(split, list(split.placement.blocks[::2]))
    assert all(block.host.is_pinned for block in swap._blocks.values())
    found = steps()
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(found, expected, strict=True))
    assert swap.num_copies == 6 + 4 + 5 * 8
    swap.remove()
    place(model, split.placement)
    assert all(torch.equal(a, b) for a, b in zip(steps(), expected, strict=True))
