"""Replayed CUDA graphs on two real GPUs: the numbers of blocks that are called. Needs two CUDA devices."""

from __future__ import annotations

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs.job import run_job
from devicebridge.parallel.local.block_split import apply_block_split
from devicebridge.parallel.local.pipeline import Pipeline
from devicebridge.parallel.placement import Placement, block_names, plan_manual
from devicebridge.parallel.runner import MicroBatch
from devicebridge.patches.attention import sound_attention
from devicebridge.patches.compile_blocks import apply_compile
from devicebridge.patches.cuda_graphs import apply_cuda_graphs
from devicebridge.patches.lora_linear import apply_fused_lora
from devicebridge.quantization.quantize import QuantizeSettings, apply_quantization, refusal
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2 or torch.version.hip is not None,
        reason="needs two CUDA GPUs; torch sees fewer here",
    ),
]
CARDS = [torch.device("cuda", index) for index in range(2)]
# Wide enough for every 8-bit kernel.
WIDE = {
    "flux2": {
        "attention_head_dim": 64,
        "num_attention_heads": 8,
        "axes_dims_rope": (16, 16, 16, 16),
    }
}


def _make(name, scheme, is_compiled):
    family = FAMILIES[name]
    model = TINY[name].make_model(seed=0, **WIDE.get(name, {})).to(torch.bfloat16).requires_grad_(False)
    names = block_names(model, family)
    manual = plan_manual(names, CARDS, [len(names) // 2])
    split = apply_block_split(model, family, Placement(manual.blocks, manual.devices, manual.home, tuple(family.tail)))
    if scheme != "none":
        if reason := refusal(QuantizeSettings(scheme), CARDS):
            pytest.skip(reason)
        apply_quantization(model, family, QuantizeSettings(scheme))
    lora = apply_lora(model, family, LoraSettings(rank=16, alpha=16, dtype="float32"), seed=1)
    apply_fused_lora(model)
    for index, parameter in enumerate(lora.parameters().values()):
        with torch.no_grad():
            parameter.copy_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    model.train()
    torch._dynamo.reset()
    compiled = apply_compile(model, family) if is_compiled else None
    return model, split, lora, compiled


def _batches(model, name, count):
    family, tiny = FAMILIES[name], TINY[name]

    def make(index):
        def forward(inputs):
            moved = {
                key: value.to(CARDS[0], torch.bfloat16 if value.is_floating_point() and key != "timestep" else None)
                for key, value in inputs.items()
            }
            output = family.read_prediction(model(**moved, return_dict=False)[0], tiny.make_latents(seed=index))
            return output.float().square().mean() / count

        return MicroBatch(lambda: tiny.make_inputs(seed=index), forward, lambda inputs: index == 0)

    return [make(index) for index in range(count)]


def _steps(name, scheme, is_compiled, has_graphs, num_steps=3, count=5):
    model, split, lora, compiled = _make(name, scheme, is_compiled)
    handle = None
    found = []
    with sound_attention():
        Pipeline(model, split.bridge).run(_batches(model, name, 1))  # compiles
        for parameter in lora.parameters().values():
            parameter.grad = None
        if has_graphs:
            handle = apply_cuda_graphs(split.kept_blocks)
            handle.is_on = True
        for _ in range(num_steps):
            if handle is not None:
                handle.start_step()
            losses = Pipeline(model, split.bridge).run(_batches(model, name, count))
            found.append(([loss.item() for loss in losses], [p.grad.cpu() for p in lora.parameters().values()]))
            for index, parameter in enumerate(lora.parameters().values()):
                with torch.no_grad():
                    parameter.sub_(
                        0.01
                        * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).to(
                            parameter.device
                        )
                    )
                parameter.grad = None
    if handle is not None:
        assert handle.fault == "" and list(handle.num_slots.values()) == [3, 1]
        handle.remove()
    if compiled is not None:
        compiled.remove()
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("name", "scheme", "is_compiled"),
    [
        *((name, "none", False) for name in sorted(FAMILIES)),
        ("flux2", "none", True),
        ("flux2", "fp8-compute", False),
        ("flux2", "fp8-compute", True),
        ("flux2", "int8-compute", True),
        ("flux2", "fp8", True),
    ],
)
def test_losses_and_gradients_of_a_pipeline_are_those_without(name, scheme, is_compiled):
    """Attention's fastest backward adds up in no fixed order, hence not bit for bit."""
    expected = _steps(name, scheme, is_compiled, has_graphs=False)
    found = _steps(name, scheme, is_compiled, has_graphs=True)
    worst = 0.0
    for (losses, gradients), (others, other_gradients) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-3)
        for gradient, other in zip(gradients, other_gradients, strict=True):
            worst = max(worst, ((gradient - other).norm() / other.norm()).item())
    print(f"{name}, {scheme}, compiled: {is_compiled}: {worst:.2e}")
    assert worst <= 1e-2


def test_a_job_writes_the_same_lora(tmp_path, caplog):
    """With deterministic algorithms the same bytes."""
    caplog.set_level("INFO")
    found = {}
    torch.use_deterministic_algorithms(True)
    try:
        for setting in ("off", "auto"):
            job = make_tiny_job(
                tmp_path,
                "flux2",
                model={"dtype": "bfloat16"},
                split={
                    "devices": ["cuda:0", "cuda:1"],
                    "balance": "manual",
                    "split_at": [2],
                    "blocks_without_checkpointing": [1, 2],
                },
                train={
                    "steps": 4,
                    "batch_size": 1,
                    "gradient_accumulation_steps": 5,
                    "seed": 3,
                    "cuda_graphs": setting,
                },
                output={"folder": str(tmp_path / setting)},
            )
            found[setting] = run_job(job)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "3 blocks are recorded" in caplog.text and "no longer replayed" not in caplog.text
    assert found["auto"].losses == found["off"].losses and found["auto"].eval_after == found["off"].eval_after
    assert found["auto"].lora_path.read_bytes() == found["off"].lora_path.read_bytes()


class AsksTheCard(torch.nn.Module):
    """What a recording cannot do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64, 64), 0.5, device=CARDS[0]))

    def forward(self, x):
        return x @ self.weight * (1.0 if x.sum().item() > -1e30 else 0.0)


def test_a_recording_that_fails_leaves_gradients_allocator_and_random_numbers_whole(caplog):
    block = AsksTheCard()
    handle = apply_cuda_graphs({block: CARDS[0]})
    handle.is_on = True
    x = torch.randn(8, 64, device=CARDS[0])
    for _ in range(2):
        handle.start_step()
        block(x).sum().backward()
    assert torch.allclose(block.weight.grad, 2 * x.sum(0)[:, None].expand(64, 64), atol=1e-4)
    assert handle.fault and caplog.text.count("no longer replayed") == 1
    torch.cuda.empty_cache()  # raises while the allocator takes a recording to be under way
    state = torch.cuda.get_rng_state(CARDS[0])
    drawn = [torch.nn.functional.dropout(x, 0.5)]  # raises while the generator takes one to be
    torch.cuda.set_rng_state(state, CARDS[0])
    drawn.append(torch.nn.functional.dropout(x, 0.5))
    assert torch.equal(*drawn)
