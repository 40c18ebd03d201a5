"""Forecasts for a toy UNet, whose skips live at home and whose blocks are called child by child, against what emulated
cards hold while it trains."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.config.job import LoraSettings
from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.families.registry import find_family
from devicebridge.families.spec import BlockList, LatentSpec
from devicebridge.parallel.block_lists import called_modules
from devicebridge.parallel.local.block_split import BlockSplit, apply_block_split
from devicebridge.parallel.offload.block_call import checkpoint_calls
from devicebridge.parallel.placement import Placement, block_names
from devicebridge.planning.cards import Card
from devicebridge.planning.dry_run_whole import WholeCost, dry_run_whole
from devicebridge.planning.forecast import (
    CARD_WORKSPACE_BYTES,
    CONTEXT_BYTES,
    Backend,
    Optimizer,
    StagePlan,
    StepSettings,
)
from devicebridge.planning.meter import Kernels
from devicebridge.planning.plan_training import TrainingPlan, plan_training
from devicebridge.planning.question import ModelCosts, Question, Resident, forecaster_for
from devicebridge.planning.short_model import Work
from devicebridge.planning.space import SearchSpace
from devicebridge.tests.emulated import CARDS, EmulatedTensor, emulated_cards, live_bytes
from devicebridge.training.adapter import apply_lora
from devicebridge.training.objective import predict, prediction_loss
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoraSettings(rank=16, alpha=16.0)
SHAPE = 4, 1, 32, 32
WIDTHS = 16, 32, 48  # of the levels
SMALL = 2**10  # bytes; a peak is looked for when a larger tensor is made


class Residual(nn.Module):
    """Convolutions, and a linear of the time."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, out, 3, padding=1)
        self.emb, self.skip = nn.Linear(8, out), nn.Conv2d(width, out, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(torch.tanh(self.norm(x))) + self.emb(emb)[..., None, None]) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).mT[:, None]
        found = functional.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, dim=-1))
        return x + self.out(found)[:, 0].mT.unflatten(2, x.shape[2:])


class Resize(nn.Module):
    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.conv, self.factor = nn.Conv2d(width, width, 3, padding=1), factor

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return self.conv(functional.interpolate(x, scale_factor=self.factor, mode="nearest"))


class First(nn.Conv2d):
    """No linear is in it, and what it is given needs no gradient."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Unet(nn.Module):
    """Three levels down and up, as openaimodel.py goes through them."""

    is_gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        a, b, c = WIDTHS
        self.time = nn.Linear(1, 8)
        down = [[First(4, a, 3, padding=1)], [Residual(a, a)], [Resize(a, 0.5)], [Residual(a, b), Attention(b)]]
        down += [[Resize(b, 0.5)], [Residual(b, c), Attention(c)]]
        up = [[Residual(2 * c, c), Attention(c)], [Residual(c + b, c), Resize(c, 2.0)], [Residual(c + b, b)]]
        up += [[Residual(b + a, b), Attention(b), Resize(b, 2.0)], [Residual(b + a, a)], [Residual(2 * a, a)]]
        self.input_blocks = nn.ModuleList(nn.Sequential(*layers) for layers in down)
        self.middle_block = nn.Sequential(Residual(c, c), Attention(c), Residual(c, c))
        self.output_blocks = nn.ModuleList(nn.Sequential(*layers) for layers in up)
        self.out = nn.Sequential(nn.GroupNorm(4, a), nn.Conv2d(a, 4, 3, padding=1))

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        emb, skips = self.time(times[:, None]), []
        for block in self.input_blocks:
            x = _through(block, x, emb)
            skips.append(x)
        x = _through(self.middle_block, x, emb)
        for block in self.output_blocks:
            x = _through(block, torch.cat([x, skips.pop()], dim=1), emb)
        return self.out(x)

    def enable_gradient_checkpointing(self, checkpoint: Any) -> None:
        names = block_names(self, FAMILY)
        checkpoint_calls([each for name in names for each in called_modules(self, FAMILY, name)], checkpoint, ())
        self.is_gradient_checkpointing = True


def _through(block: nn.Sequential, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
    for layer in block:
        x = layer(x, emb)
    return x


class Host:
    """Makes and calls it."""

    def make(self, *, is_empty: bool) -> nn.Module:
        with torch.device("meta"):
            return Unet()

    def predict(self, model: Any, noisy: Any, sigmas: torch.Tensor, given: Any, guidance: Any) -> torch.Tensor:
        return model(noisy[:, :, 0], sigmas).unsqueeze(2)

    def example(self, batch: int, device: torch.device, text: Any) -> dict[str, torch.Tensor]:
        return {}


_LISTS = "input_blocks", "middle_block", "output_blocks"
ROW = next(row for row in NATIVE_MODELS if row.class_name == "UNetModel")
FAMILY = dataclasses.replace(
    find_family("flux2"),
    title="a toy UNet",
    native=ROW,
    host=Host(),  # type: ignore[arg-type]
    block_lists=tuple(map(BlockList, _LISTS)),
    tail=("out",),
    lora_targets=tuple(f"{name}.*" for name in _LISTS),
    keep_full_precision=(),
    tensor=(),
    latent=LatentSpec(channels=4, spatial_stride=8),
)
VARIANT = dataclasses.replace(
    FAMILY.variants[0], transformer_config={"in_channels": 4}, text_encoders=(), training_guidance=None, latent=None
)
INFO = CheckpointInfo(Path("x"), FAMILY, VARIANT, {"in_channels": 4}, "original", {}, None)


def _dry_run(shape: tuple[int, int, int, int] = SHAPE) -> WholeCost:
    with torch.device("meta"):
        model = Unet()
    work = Work(shape, 1, torch.float32, None, LORA)
    return dry_run_whole(model, INFO, VARIANT, work, Kernels(has_fused=False, rounding=1))


def _loss(model: nn.Module, shape: tuple[int, int, int, int]) -> torch.Tensor:
    drawn = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    noisy, times = drawn.to(CARDS[0]), torch.full((1,), 0.5).to(CARDS[0])
    said = predict(FAMILY, model, noisy, times, {}, None)
    return prediction_loss(said, drawn.to(CARDS[0]))


def _measured(
    plans: list[StagePlan],
    monkeypatch: pytest.MonkeyPatch,
    *,
    accumulation: int = 1,
    offload_from: int | None = None,
    picture: tuple[int, int, int, int] | None = None,
) -> list[int]:
    """The most that each card held in the second of two steps, and while it draws a picture."""
    gc.collect()
    with emulated_cards():
        torch.manual_seed(0)
        model = Unet().requires_grad_(False)
        names = block_names(model, FAMILY)
        devices = tuple(card for card, plan in zip(CARDS, plans, strict=False) for _ in range(plan.num_blocks))
        split = _split(model, Placement(names, devices, CARDS[0]), plans, offload_from)
        lora = apply_lora(model, FAMILY, LORA, seed=0)
        model.train()
        model.enable_gradient_checkpointing(split.checkpoint)
        optimizer = torch.optim.AdamW(lora.parameters().values(), lr=1e-4, foreach=False)

        def step() -> None:
            for _ in range(accumulation):
                _loss(model, SHAPE).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        peaks = [0] * len(plans)

        def made(tensor: EmulatedTensor, data: torch.Tensor, device: torch.device) -> None:
            if data.untyped_storage().nbytes() >= SMALL:
                peaks[:] = [max(peak, live_bytes(card)) for peak, card in zip(peaks, CARDS, strict=False)]

        with monkeypatch.context() as patch:
            patch.setattr(EmulatedTensor, "__init__", made)
            step()
            if picture is not None:
                with torch.no_grad():
                    _loss(model, picture)
    return peaks


def _split(model: nn.Module, placement: Placement, plans: list[StagePlan], offload_from: int | None) -> BlockSplit:
    split = apply_block_split(model, FAMILY, placement)
    split.keep_activations([plan.num_uncheckpointed for plan in plans])
    if offload_from is not None:
        split.offload_inputs(min_bytes=offload_from)
    return split


def _plans(*ends: int, kept: tuple[int, ...] = ()) -> list[StagePlan]:
    starts = (0, *ends[:-1])
    kept = kept or (0,) * len(ends)
    return [StagePlan(i, len(ends), *each) for i, each in enumerate(zip(starts, ends, kept, strict=True))]


@pytest.mark.parametrize(
    ("plans", "accumulation"),
    [
        (_plans(13), 1),
        pytest.param(_plans(13, kept=(13,)), 1, marks=pytest.mark.long),
        (_plans(13, kept=(5,)), 2),
        pytest.param(_plans(6, 13), 1, marks=pytest.mark.long),  # all of the way down at home
        (_plans(2, 13), 2),  # most skips have both ends elsewhere
        pytest.param(_plans(11, 13, kept=(2, 0)), 1, marks=pytest.mark.long),
        (_plans(6, 13, kept=(2, 3)), 1),
        pytest.param(_plans(3, 8, 13, kept=(0, 1, 0)), 1, marks=pytest.mark.long),
    ],
)
def test_the_forecast_is_what_emulated_cards_hold(
    plans: list[StagePlan], accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _measured(plans, monkeypatch, accumulation=accumulation)
    errors = _errors(measured, plans, StepSettings(accumulation=accumulation))
    # 4.3 % above where a Resize keeps its activations: its input is counted, and no operation of it needs that.
    assert all(-0.005 < error < (0.05 if plans[0].num_uncheckpointed == 13 else 0.02) for error in errors), errors


def _errors(measured: list[int], plans: list[StagePlan], settings: StepSettings, **named: Any) -> list[float]:
    backend = Backend(workspace=0, fragmentation=0.0, context=0)
    forecaster = forecaster_for(_dry_run(), Optimizer(state=8, step=0), settings, backend=backend, **named)
    forecast = [forecaster.device("a card", plan).allocated for plan in plans]
    return [said / held - 1 for said, held in zip(forecast, measured, strict=True)]


@pytest.mark.parametrize("plans", [pytest.param(_plans(13), marks=pytest.mark.long), _plans(6, 13)])
def test_inputs_in_host_memory_are_left_out(plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StepSettings(offload_from=2**13)
    measured = _measured(plans, monkeypatch, offload_from=2**13)
    errors = _errors(measured, plans, settings)
    assert all(-0.005 < error < 0.05 for error in errors), errors
    assert max(_errors(measured, plans, StepSettings())) > 0.05, "else it does not matter"


@pytest.mark.parametrize("plans", [pytest.param(_plans(13), marks=pytest.mark.long), _plans(6, 13)])
def test_a_larger_picture_is_a_moment_of_its_own(plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = 4, 1, 96, 96
    measured = _measured(plans, monkeypatch, picture=shape)
    errors = _errors(measured, plans, StepSettings(), picture=_dry_run(shape))
    assert all(-0.01 < error < 0.05 for error in errors), errors


def test_operations_are_those_of_convolutions_at_each_resolution() -> None:
    flops = _dry_run().block_flops
    assert flops[0] == 2 * 32 * 32 * 9 * 4 * WIDTHS[0]
    a = WIDTHS[0]
    convolutions, linear = 2 * 32 * 32 * a * a * (9 + 1), 2 * 8 * a
    assert convolutions + linear <= flops[1] < 1.001 * convolutions
    assert flops[2] == 2 * 16 * 16 * 9 * a * a


SPACE = SearchSpace(
    schemes=("none",),
    optimizers=("adamw",),
    strategies=("none",),
    offloads=(False,),
    ahead=0,
    split_at=(),
    uncheckpointed=(),
    offloaded=(),
    memory_limit_gb=(),
    is_cut_by_time=False,
    is_checkpointing=True,
    is_compiled=False,
    accumulation=1,
    batch_size=1,
    dtype=torch.float32,
    rotation=0,
    lora=LORA,
    resolution=512,
    can_stream=False,
)


def _plan(costs: ModelCosts, *usable: int) -> TrainingPlan:
    """For cards with so many bytes each."""
    cards = (Card(CARDS[i], size, size) for i, size in enumerate(usable))
    return plan_training(Question(costs, SPACE, tuple(cards), (512, 512)))


@pytest.mark.parametrize(("is_checkpointing", "of_sample"), [(True, 1000), (False, 1000 + 30_000)])
def test_what_text_encoders_keep_is_on_the_first_card_as_long_as_blocks_compute(
    is_checkpointing: bool, of_sample: int
) -> None:
    costs = ModelCosts(INFO, VARIANT)
    space = dataclasses.replace(SPACE, batch_size=2, is_checkpointing=is_checkpointing)
    plain = Question(costs, space, (Card(CARDS[0], 10**10, 10**10),), (512, 512))
    kept = dataclasses.replace(plain, beside=Resident(0, 0, 0, inputs=1000, kept=30_000))
    setting = plan_training(plain).setting
    for plan, expected in zip(_plans(6, 13), (2 * of_sample, 0), strict=True):
        without, found = (each.forecaster(setting).device("a card", plan) for each in (plain, kept))
        assert found.allocated - without.allocated == found.checkpoints - without.checkpoints == expected
        assert found.moment == without.moment != "optimizer step"


def test_the_planner_cuts_it_and_recomputes_what_must_be() -> None:
    costs = ModelCosts(INFO, VARIANT)
    roomy = _plan(costs, 10**10)
    assert roomy.uncheckpointed == (13,) and roomy.step_s > 0
    fixed = roomy.devices[0].context + roomy.devices[0].workspace
    most = roomy.devices[0].needed - fixed
    tight = _plan(costs, fixed + int(0.8 * most))
    assert 0 <= tight.uncheckpointed[0] < 13 and tight.devices[0].needed <= fixed + 0.8 * most
    least = _plan(costs, fixed + int(0.6 * most), fixed + int(0.6 * most))
    assert sum(device.num_blocks for device in least.devices) == 13 and len(least.devices) == 2
    assert all(device.needed <= fixed + 0.6 * most for device in least.devices)
    with pytest.raises(ValueError, match="does not fit"):
        _plan(costs, CARD_WORKSPACE_BYTES + CONTEXT_BYTES + 10**5)
