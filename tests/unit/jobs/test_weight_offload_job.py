"""Jobs whose blocks stream from host memory: loaded past their cards, trained, stopped, resumed, planned."""

import dataclasses
import gc

import pytest
import torch
from devicebridge.assembly import ExecutionPlan, assemble_for_training
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.load import make_empty_transformer
from devicebridge.config.job import LoraSettings
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.job import check_job, run_job
from devicebridge.parallel.offload import weights as weights_module
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.planning.cards import Card
from devicebridge.quantization import eight_bit
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.emulated import CARDS, EmulatedTensor, emulated_cards, live_bytes, on_cpu
from devicebridge.tests.quantized import plain_parts
from devicebridge.tests.tiny_pipeline import assert_same_run, make_cards_job, run_steps
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts", "tiny_weights_leave")
CPU = torch.device("cpu")
_PIECE = 512


@pytest.fixture
def info(tmp_path):
    model = TINY["flux2"].make_model(num_layers=1, num_single_layers=6).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="300KB")  # several files: a layer may lie in two
    return read_checkpoint(tmp_path)


def _assemble(info, scheme, swapped, cache=None):
    """A model on two cards, and the most that each held before the slots were made."""
    names = block_names(make_empty_transformer(info), info.family)
    placement = plan_manual(names, list(CARDS[:2]), [2])
    gc.collect()
    before = {card: live_bytes(card) for card in CARDS[:2]}
    peaks = dict.fromkeys(before, 0)
    ordinary, done = EmulatedTensor.__init__, []

    def made(tensor, data, device):
        if not done:
            for card in peaks:
                peaks[card] = max(peaks[card], live_bytes(card) - before[card])

    def attach(model):
        done.append(1)
        return apply_lora(model, info.family, LoraSettings(rank=2), seed=0)

    EmulatedTensor.__init__ = made
    try:
        plan = ExecutionPlan(
            placement, torch.bfloat16, quantize=None if scheme is None else QuantizeSettings(scheme, rotation=0),
            quantized_cache=cache, offloaded_blocks=swapped,
        )  # fmt: skip
        built = assemble_for_training(info, plan, attach)
    finally:
        EmulatedTensor.__init__ = ordinary
    gc.collect()
    return built, peaks, {card: live_bytes(card) - before[card] for card in before}


def _values(model):
    """LoRA as numbers: emulated tensors report another type, but keep their numbers, when a module changes its type."""
    lora = {n: [on_cpu(p).float()] for n, p in model.named_parameters() if "lora" in n}
    return lora | {n: parts for n, parts in _bytes(model).items() if n not in lora}


def _bytes(model):
    return {n: plain_parts(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("scheme", [None, "int8", pytest.param("fp8-compute", marks=pytest.mark.long)])
def test_offloaded_blocks_are_never_on_their_card_together(info, scheme, monkeypatch, tmp_path):
    monkeypatch.setattr(eight_bit, "_PIECE", _PIECE)  # as small beside these layers as the real ones beside FLUX.2's
    with emulated_cards(2):
        plain, _, resident = _assemble(info, scheme, ())
        expected = _values(plain.model)
        layer = max(p.nbytes for p in make_empty_transformer(info).to(torch.bfloat16).parameters())
        del plain
        cache = None if scheme is None else tmp_path / "cache"
        for _ in range(1 if cache is None else 2):  # the second time from the cache
            built, peaks, final = _assemble(info, scheme, (0, 5), cache)
            found = _values(built.model)
            assert found.keys() == expected.keys()
            equal = {n: all(map(torch.equal, parts, found[n])) for n, parts in expected.items()}
            assert all(equal.values()), [name for name, is_equal in equal.items() if not is_equal]
            slots = 2 * max(block.host.tensor.nbytes for block in built.weight_offload._blocks.values())
            second = CARDS[1]
            # a layer, the same in 8 bits, and pieces of it
            rounding = {None: 0, "fp8-compute": 1.5 * layer + 32 * _PIECE, "int8": 1.5 * layer + 16 * layer}[scheme]
            assert final[CARDS[0]] == resident[CARDS[0]]
            assert peaks[second] <= final[second] - slots + rounding  # LoRA came later, and weighs little
            assert resident[second] - final[second] >= 0.5 * built.weight_offload.host_bytes
            assert built.weight_offload.host_bytes <= 1.1 * (resident[second] - (final[second] - slots))
            assert len(built.weight_offload.places) == 5
            lora = [p for n, p in built.model.named_parameters() if "lora" in n]
            assert lora and all(p.device in CARDS and p.requires_grad for p in lora)
            built.weight_offload.remove()
            del built, found, lora


def _job(tmp_path, folder, swapped=None, *, family="flux2", **sections):
    split = {"devices": ["lazy:0", "lazy:1"]} | ({} if swapped is None else {"offloaded_blocks": swapped})
    split |= {"balance": "manual", "split_at": [1]}
    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
    values = {"split": split, "model": {"quantize": "int8-compute"}, "train": train}
    return make_cards_job(tmp_path, folder, family, **{**values, **sections})


def test_a_whole_job_streams_and_resumes_with_other_blocks(tmp_path, monkeypatch):
    """The files of a run without; stopped, and resumed with no block in host memory."""
    copies = []
    ordinary = weights_module.WeightOffload.remove

    def remove(offload):
        copies.append((len(offload.places), offload.num_copies))
        ordinary(offload)

    monkeypatch.setattr(weights_module.WeightOffload, "remove", remove)
    with emulated_cards(2):
        plain = run_job(_job(tmp_path, "plain"))
        assert plain.status == "finished" and not copies
        job = _job(tmp_path, "swapped", [0, 3])
        run_steps(job)
        assert copies[0][0] == 3 and copies[0][1] > 6
        here = dataclasses.replace(job, split=dataclasses.replace(job.split, offloaded_blocks=()))
        resumed = run_job(here, resume=True)
        assert_same_run(resumed, plain)
        assert len(copies) == 1


def test_a_job_that_does_not_fit_its_cards_streams_by_itself(tmp_path, monkeypatch):
    def cards(sizes):
        return lambda devices: [Card(d, size, size) for d, size in zip(devices, sizes, strict=True)]

    with emulated_cards(2):
        job = _job(tmp_path, "run", family="wan", train={"steps": 1, "batch_size": 1})
        monkeypatch.setattr(resolve_module, "cards_of", cards([10**9, 10**9]))
        plan = check_job(job)
        assert plan.execution.offloaded_blocks == (0, 0)
        kept = dataclasses.replace(job, split=dataclasses.replace(job.split, blocks_without_checkpointing=(0, 0)))
        second = check_job(kept).training.devices[1]
        monkeypatch.setattr(resolve_module, "cards_of", cards([10**9, second.needed - 1]))
        plan = check_job(job)
        assert plan.execution.offloaded_blocks == (0, 3) and plan.execution.kept_blocks[1] == 0
        assert plan.training.devices[1].needed < second.needed
        assert run_job(job).status == "finished"
