"""Times measured on cards: what is timed, when, what is remembered, and what the planner makes of it. No test waits
for a clock: times are made up, or only have to be there."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.checkpoints.load import make_empty_transformer
from devicebridge.cli.main import main
from devicebridge.config.job import LoraSettings, save_job
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.spec import BlockList
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.job import plan_job, run_job
from devicebridge.jobs.resolve import MEASURING
from devicebridge.parallel.offload.block_call import checkpoint_calls
from devicebridge.parallel.placement import block_names
from devicebridge.parallel.stopwatch import link_speed, make_stopwatch
from devicebridge.patches import attention
from devicebridge.planning import block_clock, calibration, measurements
from devicebridge.planning.block_clock import CardTimes, KindTimes, time_blocks
from devicebridge.planning.block_times import FlopTimes
from devicebridge.planning.calibration import (
    CalibrationFailed,
    CalibrationStore,
    CardBench,
    LinkSpeed,
    MeasuredTimes,
    NotMeasured,
    measured_times,
    plan_calibrated,
)
from devicebridge.planning.cards import Card
from devicebridge.planning.dry_run_block import BlockCost
from devicebridge.planning.plan_training import TrainingPlan, plan_training
from devicebridge.planning.question import Question
from devicebridge.planning.report import describe_pace, describe_plan, plan_values
from devicebridge.planning.search import is_possible
from devicebridge.planning.short_model import Work
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.system.files import user_cache_folder
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.plans import MadeUpCosts, make_question
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.toy import TINY
from torch import nn

GB = 10**9
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What tests measure is no measurement of this machine."""
    monkeypatch.setenv("DEVICEBRIDGE_CACHE", str(tmp_path / "user"))
    return tmp_path / "user" / "calibration"


# ---- blocks on a card


def _tiny(name: str, scheme: str = "none", **lora: Any) -> tuple[CheckpointInfo, Any, Work]:
    tiny = TINY[name]
    variant = tiny.family.variants[0]
    variant = dataclasses.replace(
        variant, text_encoders=tuple(dataclasses.replace(e, max_length=8) for e in variant.text_encoders)
    )
    config = {**tiny.transformer_config, **tiny.encoder_widths}
    info = CheckpointInfo(Path("x"), tiny.family, variant, config, "diffusers", {}, None)
    quantize = None if scheme == "none" else QuantizeSettings(scheme)  # type: ignore[arg-type]
    return info, variant, Work(tiny.latent_shape, 2, torch.bfloat16, quantize, LoraSettings(rank=4, **lora))


class _Script:
    """A stopwatch that reads its times off a script: forward 1 s and backward 10 s, but for warm-ups and outliers."""

    def __init__(self) -> None:
        forwards, backwards = [99, 99, 99, 1, 60, 1], [99, 99, 99, 10, 10, 500]
        self.deltas = [delta for pair in zip(forwards, backwards, strict=True) for delta in (7, *pair)]
        self.now = self.count = 0

    def mark(self) -> int:
        self.now += self.deltas[self.count % len(self.deltas)]
        self.count += 1
        return self.now

    def between(self, start: int, end: int) -> float:
        return end - start


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_kind_of_block_is_timed_once_and_by_medians(name):
    info, variant, work = _tiny(name)
    script = _Script()
    found = time_blocks(info, variant, work, CPU, lambda device: script)
    model = make_empty_transformer(info)
    names = block_names(model, info.family)
    expected: dict[Any, list[int]] = {}
    for index, fqn in enumerate(names):
        expected.setdefault((fqn.partition(".")[0], type(model.get_submodule(fqn))), []).append(index)
    assert [list(kind.blocks) for kind in found.kinds] == list(expected.values())
    assert [kind.first for kind in found.kinds] == [names[indices[0]] for indices in expected.values()]
    assert all((kind.forward_s, kind.backward_s) == (1, 10) for kind in found.kinds)
    num_ends = 6 * 4  # start, first block, last block, end
    assert script.count == 18 * len(expected) + num_ends


class _Pairs(nn.Module):
    """As one of ComfyUI's own: blocks are called with keywords and give nested results."""

    is_gradient_checkpointing = False

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: Any, *, scale: torch.Tensor) -> Any:
            x, y = pair
            return self.linear(x) * scale, {"y": y + 1}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sum()
        for block in self.blocks:
            x, made = block((x, y), scale=torch.ones(1))
            y = made["y"]
        return self.out(x) + y

    def enable_gradient_checkpointing(self, checkpoint: Any) -> None:
        checkpoint_calls(self.blocks, checkpoint, ())


class _PairsHost:
    def make(self, *, is_empty: bool) -> nn.Module:
        with torch.device("meta"):
            return _Pairs()

    def predict(self, model: Any, noisy: torch.Tensor, sigmas: Any, given: Any, guidance: Any) -> torch.Tensor:
        return model(noisy)

    def example(self, batch: int, device: torch.device, text: Any) -> dict[str, torch.Tensor]:
        return {}


def test_blocks_that_are_called_with_keywords_are_timed_as_others_are():
    family = dataclasses.replace(
        TINY["flux2"].family,
        native=NativeModel("Pairs", "toy", ("blocks",), ("out",), "a toy"),
        host=_PairsHost(),  # type: ignore[arg-type]
        block_lists=(BlockList("blocks"),),
        tail=("out",),
        lora_targets=("blocks.*",),
        keep_full_precision=(),
    )
    variant = dataclasses.replace(family.variants[0], text_encoders=(), training_guidance=None)
    info = CheckpointInfo(Path("x"), family, variant, {}, "original", {}, None)
    work = Work((3, 1, 5, 4), 1, torch.float32, None, LoraSettings(rank=2))
    script = _Script()
    found = time_blocks(info, variant, work, CPU, lambda device: script)
    assert [(kind.blocks, kind.forward_s, kind.backward_s) for kind in found.kinds] == [((0, 1, 2), 1, 10)]


def test_front_and_tail_are_what_is_outside_the_blocks():
    info, variant, work = _tiny("flux2")
    script = _Script()
    script.deltas = [0] * 36 + [1000, 3, 100, 20] * 6
    script.deltas[1::3] = script.deltas[2::3] = [1] * 20  # blocks take some time, or nothing would be positive
    script.deltas[36:] = [1000, 3, 100, 20] * 6
    found = time_blocks(info, variant, work, CPU, lambda device: script)
    assert (found.front_s, found.tail_s) == (3, 20)


def test_a_block_with_other_lora_targets_is_a_kind_of_its_own():
    info, variant, work = _tiny("flux2", targets=("transformer_blocks.1.attn.to_q", "single_*.attn.to_out"))
    found = time_blocks(info, variant, work, CPU)
    assert [kind.blocks for kind in found.kinds] == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize(("name", "scheme"), [("flux2", "fp8-compute"), ("wan", "int8"), ("flux1", "int8-compute")])
def test_blocks_run_as_in_training_and_leave_nothing_behind(name, scheme, monkeypatch):
    info, variant, work = _tiny(name, scheme, dropout=0.1)
    seen = []
    ordinary = block_clock._Course._time

    def watched(self: Any, block: Any, args: Any) -> Any:
        found = ordinary(self, block, args)
        assert attention._our_kernel._num_inside == 1  # with the gradients of attention that training has
        assert {parameter.device for parameter in block.parameters()} == {CARDS[0]}
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        assert trained and all(parameter.grad is not None for parameter in trained)
        assert all(tensor.grad is None for tensor in args if isinstance(tensor, torch.Tensor) and tensor.is_leaf)
        others = [other for other in self._short.modules if other is not block]
        assert {p.device.type for other in others for p in other.parameters()} <= {"meta"}  # one at a time
        seen.append(sum(isinstance(module, FrozenLinear8) for module in block.modules()))
        return found

    monkeypatch.setattr(block_clock._Course, "_time", watched)
    before = torch.get_rng_state()
    with emulated_cards(1), torch.inference_mode():  # as in ComfyUI's nodes
        found = time_blocks(info, variant, work, CARDS[0])
        assert live_bytes(CARDS[0]) == 0
    assert len(seen) == len(found.kinds) and all(bool(count) == scheme.endswith("compute") for count in seen)
    assert torch.equal(before, torch.get_rng_state())
    assert found.front_s > 0 and found.tail_s > 0 and all(k.forward_s > 0 < k.backward_s for k in found.kinds)


def test_weights_come_for_a_while():
    layer = torch.nn.Linear(4, 3, device="meta")
    layer.register_buffer("table", torch.arange(3.0))
    before = [*layer.parameters(), *layer.buffers()]
    with block_clock.filled([layer], CPU):
        assert layer(torch.ones(1, 4)).isfinite().all() and layer.table.tolist() == [0, 1, 2]
        assert 0 < layer.weight.std() < 0.1 and layer.bias.mean().item() == pytest.approx(1, abs=0.1)
    assert all(one is other for one, other in zip(before, [*layer.parameters(), *layer.buffers()], strict=True))


def test_memory_is_given_back_where_a_block_fails(tmp_path, monkeypatch):
    info, variant, work = _tiny("flux2")

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(block_clock._Course, "_time", fails)
    with emulated_cards(1):
        bench = CardBench(info, variant, lambda scheme: work)
        times = MeasuredTimes(bench, [Card(CARDS[0], 1, 1)], NAMES, CalibrationStore(tmp_path), may_measure=True)
        with pytest.raises(CalibrationFailed, match=r"none on lazy:0: CUDA out of memory"):
            times.of(0, Card(CARDS[0], 1, 1), "none")
        assert live_bytes(CARDS[0]) == 0


def test_links_are_bytes_over_seconds(monkeypatch):
    script = _Script()
    script.deltas = [0, 99, 0, 0.25, 0, 0.25, 0, 0.5, 0, 2, 0, 2]
    assert link_speed(CPU, CPU, script) == 4 * 2**26 / 0.5  # 4 copies of 64 MiB
    with emulated_cards(2):
        assert link_speed(CARDS[0], CARDS[1]) > 0 and link_speed(CPU, CARDS[0]) > 0
    watch = make_stopwatch(CPU)
    assert watch.between(watch.mark(), watch.mark()) >= 0


# ---- what is remembered


def test_measurements_are_kept_where_the_platform_keeps_caches(monkeypatch, tmp_path):
    assert calibration.calibration_folder() == tmp_path / "user" / "calibration"
    monkeypatch.delenv("DEVICEBRIDGE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache_folder() == tmp_path / "xdg" / "devicebridge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == Path.home() / ".cache" / "devicebridge"


def _times(forward: float = 1.0, count: int = 10, front: float = 1e-9, tail: float = 1e-9) -> CardTimes:
    """Two kinds: the later half of the blocks takes twice as long, and backward as long as forward."""
    half = count // 2
    kinds = (
        KindTimes("a.0", tuple(range(half)), forward, forward),
        KindTimes("b.0", tuple(range(half, count)), 2 * forward, 2 * forward),
    )
    return CardTimes(kinds, front, tail, 1.5, "2026-11-22")


class _Bench:
    """Made-up cards: a model name and seconds of a block per device."""

    def __init__(self, *cards: tuple[str, float], error: Exception | None = None, **times: Any) -> None:
        self.cards, self.error, self._times = dict(enumerate(cards)), error, times
        self.measured: list[tuple[int, str]] = []
        self.links: list[Any] = []

    def block_key(self, device: torch.device, scheme: str) -> dict[str, Any]:
        return {"card": {"name": self.cards[device.index][0]}, "scheme": scheme}

    def blocks(self, device: torch.device, scheme: str) -> CardTimes:
        self.measured.append((device.index, scheme))
        if self.error is not None and device.index == len(self.cards) - 1:
            raise self.error
        seconds = self.cards[device.index][1] * {"none": 1.0, "fp8-compute": 2.0}.get(scheme, 3.0)
        return _times(seconds, **self._times)

    def link_key(self, source: torch.device | None, target: torch.device) -> dict[str, Any]:
        return {"ends": [str(source), str(target)]}

    def link(self, source: torch.device | None, target: torch.device) -> float:
        self.links.append((source, target))
        if source is not None:
            return 5e9
        return 25e9 / (1 + target.index)


def _cards(*sizes_gb: float, refuses: frozenset[str] = frozenset()) -> list[Card]:
    return [Card(torch.device("cuda", i), int(gb * GB), int(gb * GB), refuses=refuses) for i, gb in enumerate(sizes_gb)]


NAMES = tuple(f"transformer_blocks.{index}" for index in range(10))


def _measured(bench: Any, cards: list[Card], folder: Path, may_measure: bool = True) -> MeasuredTimes:
    return MeasuredTimes(bench, cards, NAMES, CalibrationStore(folder), may_measure=may_measure)


def test_one_measurement_per_kind_of_card_and_scheme_and_none_again(tmp_path):
    bench, cards = _Bench(("A", 1.0), ("B", 3.0), ("A", 99.0)), _cards(1, 1, 1)
    times = _measured(bench, cards, tmp_path)
    assert bench.measured == []  # nothing before it is asked for
    assert [times.of(block, cards[0], "none") for block in (0, 4, 5, 9)] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert times.of(9, cards[1], "none") == (6, 6) and times.of(0, cards[2], "none") == (1, 1)
    assert times.ends(cards[0], "none") == (1e-9, 1e-9)
    assert bench.measured == [(0, "none"), (1, "none")]
    assert times.of(0, cards[0], "fp8-compute") == (2, 2) and bench.measured[2:] == [(0, "fp8-compute")]
    later = _Bench(("A", 7.0), ("B", 7.0), ("A", 7.0))
    again = _measured(later, cards, tmp_path, may_measure=False)
    assert again.times(cards[1], "none") == times.times(cards[1], "none") and later.measured == []
    with pytest.raises(NotMeasured):
        again.of(0, cards[1], "fp8-compute")


def test_cards_alike_share_a_measurement_where_the_disk_refuses(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    bench, cards = _Bench(("A", 1.0), ("A", 99.0)), _cards(1, 1)
    times = _measured(bench, cards, tmp_path / "file")
    assert times.of(0, cards[0], "none") == times.of(0, cards[1], "none") == (1, 1)
    assert bench.measured == [(0, "none")] and "not kept" in caplog.text


def test_links_are_of_one_card_each(tmp_path):
    bench, cards = _Bench(("A", 1.0), ("A", 1.0)), _cards(1, 1)
    times = _measured(bench, cards, tmp_path)
    assert (times.link(cards[0]), times.link(cards[1]), times.speed(cards[0], cards[1])) == (25e9, 12.5e9, 5e9)
    again = _measured(_Bench(("A", 1.0), ("A", 1.0)), cards, tmp_path, may_measure=False)
    assert again.link(cards[1]) == 12.5e9 and again.speed(cards[1], cards[0]) is None
    assert again.link(cards[0]) == 25e9 and len(bench.links) == 3
    bench.link = lambda source, target: 1 / 0 if source else (_ for _ in ()).throw(RuntimeError("no"))
    assert _measured(bench, cards, tmp_path / "b").link(cards[0]) == FlopTimes([]).link(cards[0])


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (dict, list, tuple)) and value:
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, (*path, name))
    else:
        yield path


def test_a_change_of_anything_in_the_key_measures_again(tmp_path):
    info, variant, work = _tiny("flux2", "int8-compute")
    key = json.loads(json.dumps(CardBench(info, variant, lambda scheme: work).block_key(CPU, "int8-compute")))
    store = CalibrationStore(tmp_path)
    store.put(key, _times())
    assert store.get(key, CardTimes) == _times()
    paths = list(_leaves(key))
    assert len(paths) > 30
    for path in paths:
        other = copy.deepcopy(key)
        owner = other
        for part in path[:-1]:
            owner = owner[part]
        owner[path[-1]] = "something else"
        assert store.get(other, CardTimes) is None, path


def test_the_key_has_whatever_changes_a_time(monkeypatch):
    """Each change of card, versions, model, LoRA or batch is seen in the key."""

    def key(**changes: Any) -> str:
        info, variant, work = changes.pop("tiny", None) or _tiny("flux2", "int8-compute")
        info = dataclasses.replace(info, **changes.pop("info", {}))
        variant = dataclasses.replace(variant, **changes.pop("variant", {}))
        work = dataclasses.replace(work, **changes)
        return json.dumps(CardBench(info, variant, lambda scheme: work).block_key(CPU, "int8-compute"))

    info, variant, work = _tiny("flux2", "int8-compute")
    encoders = tuple(dataclasses.replace(e, max_length=9) for e in variant.text_encoders)
    keys = [
        key(),
        key(latent_shape=(16, 1, 8, 8)),
        key(latent_shape=(16, 3, 4, 6)),
        key(batch_size=3),
        key(dtype=torch.float32),
        key(quantize=QuantizeSettings("int8-compute", 16)),
        key(quantize=None),
        key(lora=LoraSettings(rank=8)),
        key(lora=LoraSettings(rank=4, dora=True)),
        key(lora=LoraSettings(rank=4, dropout=0.1)),
        key(lora=LoraSettings(rank=4, dtype="bfloat16")),
        key(lora=LoraSettings(rank=4, targets=("*.to_q",))),
        key(variant={"text_encoders": encoders}),
        key(variant={"name": "other"}),
        key(info={"config": {**info.config, "num_layers": 3}}),
        key(info={"family": dataclasses.replace(info.family, keep_full_precision=("*",))}),
        key(tiny=_tiny("flux1", "int8-compute")),
    ]
    changes = [
        (torch, "__version__", "1.0"),
        (torch.version, "cuda", "99.9"),
        (torch.version, "hip", "9.9"),
        (calibration, "VERSION", "9"),
        (calibration, "installed_version", lambda package: "9"),
        (calibration, "file_fingerprint", lambda path: "another kernel"),
        (calibration, "describe_card", lambda device: {"name": "another"}),
        (calibration, "_ATTENTION", (lambda: False,)),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_what_makes_a_card_is_name_memory_and_capability(monkeypatch):
    properties = type("P", (), {"name": "A", "major": 8, "minor": 6, "multi_processor_count": 28, "uuid": "u"})
    module = type("Module", (), {"get_device_properties": staticmethod(lambda device: properties)})
    monkeypatch.setattr(measurements, "device_module", lambda device: module)
    monkeypatch.setattr(measurements, "total_bytes", lambda device: 12 * GB)
    first, second = (torch.device("cuda", index) for index in range(2))
    found = measurements.describe_card(first)
    assert found == {"name": "A", "total_bytes": 12 * GB, "capability": [8, 6], "multiprocessors": 28}
    assert found == measurements.describe_card(second)
    assert measurements.describe_slot(first) != measurements.describe_slot(second)
    for name in ("name", "major", "minor", "multi_processor_count"):
        with monkeypatch.context() as changed:
            changed.setattr(properties, name, 5)
            assert measurements.describe_card(first) != found


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1]",
        lambda text: text.replace('"forward_s": 1.0', '"forward_s": -1.0'),
        lambda text: text.replace('"forward_s": 1.0', '"forward_s": NaN'),
        lambda text: text.replace('"front_s"', '"frnt_s"'),
        lambda text: text.replace('"blocks": [', '"blocks": [77,'),
        lambda text: text.replace('"scheme": "none"', '"scheme": "fp8"'),
        lambda text: b"\xff\xfe" + text.encode(),
    ],
)
def test_a_damaged_file_is_measured_again(damage, tmp_path, caplog):
    bench, cards = _Bench(("A", 1.0)), _cards(1)
    _measured(bench, cards, tmp_path).of(0, cards[0], "none")
    (path,) = tmp_path.glob("*.json")
    whole = path.read_bytes()
    damaged = damage(path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    assert _measured(bench, cards, tmp_path).of(0, cards[0], "none") == (1, 1)
    assert len(bench.measured) == 2 and path.read_bytes() == whole
    assert caplog.text.count("it is measured again") == 1


def test_times_of_another_number_of_blocks_are_not_taken(tmp_path):
    bench, cards = _Bench(("A", 1.0), count=8), _cards(1)
    CalibrationStore(tmp_path).put(bench.block_key(cards[0].device, "none"), _times(count=8))
    times = MeasuredTimes(_Bench(("A", 1.0)), cards, NAMES, CalibrationStore(tmp_path), may_measure=False)
    with pytest.raises(NotMeasured):
        times.of(0, cards[0], "none")


def test_a_card_that_is_elsewhere_is_not_measured(tmp_path):
    times = _measured(_Bench(("A", 1.0)), _cards(1), tmp_path)
    with pytest.raises(AssertionError, match="no card of this machine"):
        times.of(0, _cards(1, 1)[1], "none")
    assert CalibrationStore(tmp_path).get({"a": 1}, LinkSpeed) is None


# ---- plans


def _ask(cards: list[Card], cuts: Any = None, **sections: dict[str, Any]) -> Question:
    """Of ten blocks of 1 GB."""
    block = BlockCost(1000 * 10**6, 0, 0, 10**7, {}, 10**7, 10**8, 10**7, 10**8, 2 * 10**8, 2 * 10**8)
    return make_question(MadeUpCosts(block), cards, cuts=cuts, **{"model": {"quantize": "none"}} | sections)


def _counts(plan: TrainingPlan) -> list[int]:
    return [device.num_blocks for device in plan.devices]


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"strategy": "pipeline"}, "train": {"gradient_accumulation_steps": 6}},
        {"split": {"balance": "time"}},
    ],
)
@pytest.mark.parametrize("speeds", [(1.0, 2.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0, 1.7)])
def test_the_cut_follows_measured_times(tmp_path, speeds, sections):
    """Against every cut there is, by sums of its own: the second half of the blocks takes twice as long, every block
    is recomputed, the first card has the embedders, and in a pipeline the last has the tail."""
    split = {"blocks_without_checkpointing": [0, 0, 0]} | sections.get("split", {})
    bench = _Bench(*((f"model {s}", s) for s in speeds), front=0.5, tail=4.0)
    question = _ask(_cards(100, 100, 100), **sections | {"split": split})
    plan = plan_calibrated(question, "where it decides", bench=bench, store=CalibrationStore(tmp_path))
    is_pipeline = "parallel" in sections

    def stages(a: int, b: int) -> list[float]:
        units = [1.0] * 5 + [2.0] * 5
        found = [3 * s * sum(units[x:y]) for s, x, y in zip(speeds, (0, a, b), (a, b, 10), strict=True)]
        found[0] += 0.5
        found[2 if is_pipeline else 0] += 4.0
        return found

    best = min(max(stages(a, b)) for a, b in itertools.combinations(range(1, 10), 2))
    counts = _counts(plan)
    chosen = stages(counts[0], counts[0] + counts[1])
    assert max(chosen) == pytest.approx(best)
    if is_pipeline:  # 1F1B with one ahead holds 4 on the first of 3 cards
        expected = sum(chosen) + 5 * max(max(chosen), sum(chosen) / 4)
    else:
        expected = sum(chosen)
    assert plan.step_s == pytest.approx(expected)
    assert bench.measured == [(i, "none") for i in range(3) if speeds[i] not in speeds[:i]]


def test_a_card_half_as_fast_gets_fewer_blocks(tmp_path):
    sections = {
        "parallel": {"strategy": "pipeline"},
        "train": {"gradient_accumulation_steps": 8},
        "split": {"blocks_without_checkpointing": [0, 0]},
    }
    question = _ask(_cards(100, 100), **sections)
    bench = _Bench(("fast", 0.1), ("slow", 0.2))
    plan = plan_calibrated(question, "where it decides", bench=bench, store=CalibrationStore(tmp_path))
    assert _counts(plan) == [8, 2] and _counts(plan_training(question)) == [5, 5]


def test_the_users_cut_wins(tmp_path):
    split = {"balance": "manual", "split_at": [2], "blocks_without_checkpointing": [0, 8]}
    question = _ask(_cards(100, 100), split=split)
    bench = _Bench(("fast", 0.1), ("slow", 0.2), front=0.5, tail=0.25)
    plan = plan_calibrated(question, "always", bench=bench, store=CalibrationStore(tmp_path))
    assert _counts(plan) == [2, 8] and plan.timing is not None
    assert plan.step_s == pytest.approx(2 * 0.3 + (3 * 0.2 + 5 * 0.4) * 2 + 0.75)
    assert plan.relative_time == pytest.approx(plan.step_s / (2 * 0.3 + (3 * 0.2 + 5 * 0.4) * 3 + 0.75))


@pytest.mark.parametrize(
    ("num_cards", "sections", "cuts", "expected"),
    [
        (2, {}, None, True),
        (1, {}, None, False),
        (1, {"model": {"quantize": "auto"}}, None, True),
        (2, {"split": {"calibrate": "off"}}, None, False),
        (1, {"split": {"calibrate": "on"}}, None, True),
        (2, {"split": {"balance": "manual", "split_at": [5]}}, None, False),
        (2, {}, [4], False),  # a run that is resumed
    ],
)
def test_blocks_are_timed_where_something_depends_on_it(tmp_path, num_cards, sections, cuts, expected):
    bench = _Bench(("A", 1.0), ("A", 1.0))
    refuses = frozenset({"int8-compute", "int8", "fp8"})
    question = _ask(_cards(*[100] * num_cards, refuses=refuses), cuts, **sections)
    known = {"bench": bench, "store": CalibrationStore(tmp_path)}
    wanted = MEASURING[sections.get("split", {}).get("calibrate", "auto")]
    plan = plan_calibrated(question, wanted, **known)
    assert (plan.timing is not None) is expected and bool(bench.measured) is expected
    if "model" in sections:
        assert {scheme for _, scheme in bench.measured} == {"none", "fp8-compute"} and plan.setting.scheme == "none"
    assert plan_calibrated(question, "always", **known).timing is not None
    bench.measured.clear()  # what is known by now is taken without being wanted, unless it is not to be
    assert (plan_calibrated(question, wanted, **known).timing is None) is (wanted == "never") and not bench.measured


def test_a_plan_takes_what_is_known_and_measures_nothing(tmp_path):
    bench, store = _Bench(("A", 1.0), ("B", 2.0)), CalibrationStore(tmp_path)
    question = _ask(_cards(100, 100))
    assert plan_calibrated(question, "known", bench=bench, store=store) == plan_training(question)
    store.put(bench.block_key(torch.device("cuda:0"), "none"), _times())
    found = plan_calibrated(question, "known", bench=bench, store=store)
    assert found.timing is None  # one card of two is not enough: the scales differ
    assert bench.measured == [] and bench.links == []
    measured = plan_calibrated(question, "where it decides", bench=bench, store=store)
    assert bench.measured == [(1, "none")]
    assert plan_calibrated(question, "known", bench=_Bench(("A", 9.0), ("B", 9.0)), store=store) == measured


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory\nmore"), ImportError("no kernel"), OSError()])
def test_a_failure_leaves_estimates_for_all_cards(tmp_path, caplog, error):
    bench = _Bench(("A", 1.0), ("B", 2.0), error=error)
    question = _ask(_cards(100, 60))
    plan = plan_calibrated(question, "where it decides", bench=bench, store=CalibrationStore(tmp_path))
    assert plan == plan_training(question) and plan.timing is None and len(bench.measured) == 2
    (line,) = [r.message for r in caplog.records if "estimated" in r.message]
    assert "none on cuda:1" in line and (str(error).split("\n")[0] or "OSError") in line and "more" not in line
    with pytest.raises(CalibrationFailed):
        times = measured_times(question, may_measure=True, bench=bench, store=CalibrationStore(tmp_path))
        times.of(0, question.cards[1], "none")


def test_what_does_not_fit_is_refused_before_anything_is_measured(tmp_path):
    bench = _Bench(("A", 1.0), ("A", 1.0))
    with pytest.raises(ValueError, match="does not fit"):
        plan_calibrated(_ask(_cards(2, 2)), "always", bench=bench, store=CalibrationStore(tmp_path))
    assert bench.measured == []


def test_advice_for_other_cards_uses_no_measured_times(tmp_path):
    question = _ask(_cards(100, 100))
    times = _measured(_Bench(("A", 1.0)), question.cards, tmp_path)
    measured = dataclasses.replace(question, given_times=times)
    other = measured.changed(cards=tuple(_cards(100, 100, 100)))
    assert isinstance(other.times, FlopTimes) and is_possible(other)


def test_a_plan_says_where_its_times_are_from(tmp_path):
    sections = {"train": {"compile": "auto", "gradient_accumulation_steps": 2}}
    question = _ask(_cards(100, 100), **sections)
    bench = _Bench(("Card A", 0.1), ("Card B", 0.2))
    plan = plan_calibrated(question, "where it decides", bench=bench, store=CalibrationStore(tmp_path))
    text, values = describe_plan(plan), json.loads(json.dumps(plan_values(plan)))
    assert "a step takes about" in text and "compiled blocks are faster" in text
    assert "measured on cuda:0 (Card A), cuda:1 (Card B), 2026-11-22" in text
    assert values["step_s"] == plan.step_s and values["times"]["measured"] is True
    assert values["times"]["links"] == {"cuda:0 -> cuda:1": 5e9}
    card = values["times"]["cards"]["cuda:1"]
    assert card["card"] == "Card B" and card["host_link_bytes_per_s"] == 12.5e9
    assert [kind["forward_s"] for kind in card["kinds"]] == [0.2, 0.4]
    estimate = plan_training(question)
    assert "(estimated)" in describe_plan(estimate) and "measured" not in describe_plan(estimate)
    assert plan_values(estimate)["times"] == {"measured": False} and plan_values(estimate)["step_s"] is None


def test_a_run_is_compared_with_its_forecast(tmp_path):
    question = _ask(_cards(100, 100))
    bench = _Bench(("A", 0.1), ("A", 0.1))
    plan = plan_calibrated(question, "where it decides", bench=bench, store=CalibrationStore(tmp_path))
    plan = dataclasses.replace(plan, step_s=3.3)
    line = describe_pace(plan, [99.0, 3.0, 3.0, 50.0])
    assert line == "step: forecast 3.3 s at 512x512, measured 3 s (forecast +10.0 %)"
    assert describe_pace(plan, [3.0]) == "" == describe_pace(plan_training(question), [3.0, 3.0])


# ---- jobs


def _known_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resolve_module, "cards_of", lambda devices: [Card(device, GB, GB, has_context=True) for device in devices]
    )


def test_a_job_times_its_blocks_trains_and_compares(tmp_path, monkeypatch, own_cache, capsys):
    """On emulated cards, whose times are real and mean nothing; the second job finds what the first has measured."""
    sections = {
        "split": {"devices": ["lazy:0", "lazy:1"], "blocks_without_checkpointing": [0, 0]},
        "cache": {"vae_device": "cpu"},
        "train": {"steps": 3, "batch_size": 1},
        "evaluation": {"folder": ""},
    }
    job = make_tiny_job(tmp_path, **sections)
    save_job(job, tmp_path / "job.toml")
    counted: list[Any] = []
    ordinary = calibration.time_blocks
    monkeypatch.setattr(calibration, "time_blocks", lambda *args: counted.append(args) or ordinary(*args))
    with emulated_cards():
        _known_cards(monkeypatch)
        assert plan_job(job).timing is None and counted == []
        events: list[Any] = []
        result = run_job(job, on_event=events.append)
        assert len(counted) == 1 and len(list(own_cache.glob("*.json"))) == 1 + 3  # blocks, and three links
        assert "forecast" in result.pace and "measured" in result.pace
        assert [e.values.get("pace") for e in events if e.kind == "forecast"] == [None, result.pace]
        assert main(["plan", str(tmp_path / "job.toml"), "--calibrate"]) == 0
        assert "measured on lazy:0" in capsys.readouterr().out and len(counted) == 1
    command = ["plan", str(tmp_path / "job.toml"), "--cards", "1GB,1GB"]
    assert main(command) == 0 and "(estimated)" in capsys.readouterr().out
    assert main([*command, "--calibrate"]) == 2 and "--cards" in capsys.readouterr().err
    assert len(counted) == 1
