"""Jobs on several processes against the same jobs in one: every strategy, and resumed on another number of ranks."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from devicebridge.config.job import save_job
from devicebridge.data.samples import BatchOrder
from devicebridge.jobs import resolve
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.ranks import held_bytes, plan_shared
from devicebridge.jobs.read_job import read_job, subject_of
from devicebridge.planning.cards import Card
from devicebridge.planning.search import HEADROOM
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.ranks.launching import ENVIRONMENT, ROOT, run_jobs
from devicebridge.tests.tiny_pipeline import make_tiny_job, run_steps, save_tiny_pipeline
from PIL import Image
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over a loopback device"),
    pytest.mark.usefixtures("short_texts"),
]

LONG = bool(os.environ.get("LONG_TESTS"))
STEPS, SPLIT_AT = 20 if LONG else 3, (7, 13)
CARDS = [f"lazy:{index}" for index in range(4)]
BRIEF = {"steps": 3}
SHORT = {} if LONG else BRIEF
PICTURES = {"train": {"steps": 2, "gradient_accumulation_steps": 3}, "samples": {"prompts": ["a cat"], "steps": 2}}
KINDS = {
    "lokr": {"lora": {"kind": "lokr"}, "train": {**BRIEF, "ema_decay": 0.5}},
    "loha": {"lora": {"kind": "loha"}, "train": {"steps": 2}}, "oft": {"lora": {"kind": "oft"}, "train": {"steps": 2}},
}  # fmt: skip
HALF = {"model": {"dtype": "bfloat16"}, "train": {"steps": 3}, "evaluation": {"folder": ""}}
MACHINES = {"train": {"steps": 2}, "samples": {"prompts": ["a cat"]}}
# On two ranks. Cards are emulated ones, two for each rank; they are slow, so those runs are short in a short run.
ON_TWO = {
    "copies": {"parallel": {"strategy": "data"}},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "pipeline in each": {"parallel": {"strategy": "pipeline"}, "split": {"devices": CARDS}, "train": SHORT},
}
LONG_ON_TWO = {
    "fsdp, compiled": {"parallel": {"strategy": "fsdp"}, "train": {**SHORT, "compile": "auto"}},
    "data, a broken compiler": {"parallel": {"strategy": "data"}, "train": {**SHORT, "compile": "auto"}},
    "fsdp, compiled and kept": {
        "parallel": {"strategy": "fsdp"},
        "train": {**SHORT, "compile": "auto", "gradient_checkpointing": False},
    },
}
ON_TWO |= LONG_ON_TWO if LONG else {}

# Of the last rank alone -> what the first one says. {folder} has a second model and LoRA.
OTHERS = {
    "steps": ({"train": {"steps": 2}}, "train.steps: 1 on rank 0 (", ", 2 on rank 1 ("),
    "microbatches": ({"train": {"gradient_accumulation_steps": 2}}, "train.gradient_accumulation_steps: 4 on"),
    "objective": ({"objective": {"shift": 3.0}}, "objective.shift: '' on rank 0 ("),
    "saves": ({"output": {"save_every_steps": 3}}, "output.save_every_steps: 5 on"),
    "folders": ({"data": {"folders": [{"path": "{folder}/data", "loss_weight": 0.5}]}}, "data.folders.loss_weight: 1"),
    "model": ({"model": {"path": "{folder}/other/model"}}, "files of the model: "),
    "start": ({"lora": {"start_from": "{folder}/other.safetensors"}}, "lora.start_from: "),
    "encoders": ({"cache": {"text_encoders": "{folder}/other/model"}}, "do not have the same samples"),
}
SHORT_OTHERS = ("steps", "folders", "model", "encoders")  # which settings are compared is in test_same_job.py
# Ranks of fsdp that are planned as cards: by name, settings and how many blocks keep their activations.
KEPT = {
    "recomputed": ({}, []), "chosen": ({}, [2]), "stopped": ({}, [2]), "resumed": ({}, [3]),
    "asked": ({"split": {"blocks_without_checkpointing": [1, 1]}}, [1]),
    "all asked": ({"train": {"gradient_checkpointing": False}}, []), "too small": ({}, [0]),
}  # fmt: skip


def _job(folder, name, **sections):
    """A job of many steps of four microbatches, of two sizes; and its file."""
    data = {"resolutions": [64], **sections.pop("data", {})}  # at 32 all pictures have one size
    train = {"steps": STEPS, "batch_size": 1, "gradient_accumulation_steps": 4, **sections.pop("train", {})}
    output = {"folder": str(folder / name.replace(" ", "_").replace(",", "")), "save_every_steps": 5, "keep_last": 9}
    job = make_tiny_job(folder, "flux2", train=train, output=output, data=data, cache={"vae_device": "cpu"}, **sections)
    file = folder / f"{name}.toml"
    save_job(job, file)
    return job, file


def _lora(job, step=STEPS):
    return load_file(f"{job.output.folder}/checkpoints/step-{step:06d}/adapter.safetensors")


def _losses(job):
    lines = (Path(job.output.folder) / "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"]


def _difference(found, expected):
    """The largest of all tensors, relative to the tensor's length."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job, _ = _job(folder, "alone")
    result = run_job(job)
    torch.set_num_threads(threads)
    return result, job


@pytest.fixture(scope="module")
def on_four(folder, alone):
    """The first seven steps of a run that goes on on two, in long runs."""
    if not LONG:
        return None
    _, file = _job(folder, "chain", parallel={"strategy": "data"})
    return run_jobs(folder, [{"job": file, "stop": SPLIT_AT[0]}], count=4)[0]


@pytest.fixture(scope="module")
def on_two(folder, alone, on_four):
    """Every strategy of two ranks; the run of four goes on, and a pipeline of one process becomes fsdp."""
    jobs = {name: _job(folder, name, **sections) for name, sections in ON_TWO.items()}
    before, _ = _job(folder, "changed", parallel={"strategy": "pipeline"}, split={"devices": CARDS[:2]})
    with emulated_cards():
        run_steps(before, 2)
    after = dataclasses.replace(before, parallel=dataclasses.replace(before.parallel, strategy="fsdp"))
    there = dataclasses.replace(after.split, devices=("cpu",))
    save_job(dataclasses.replace(after, split=there), folder / "changed.toml")
    plan = [{"job": file, "compiler": "fails" if "broken" in name else "works"} for name, (_, file) in jobs.items()]
    if LONG:
        plan += [{"job": folder / "chain.toml", "resume": True, "stop": SPLIT_AT[1] - SPLIT_AT[0]}]
    plan += [
        {"job": folder / "changed.toml", "resume": True},
        {"job": _job(folder, "pictures", parallel={"strategy": "fsdp"}, **PICTURES)[1]},
        *({"job": _job(folder, kind, parallel={"strategy": "fsdp"}, **more)[1]} for kind, more in KINDS.items()),
        {"job": _job(folder, "half", parallel={"strategy": "fsdp"}, **HALF)[1]},
        {"job": _job(folder, "machines", parallel={"strategy": "fsdp"}, **MACHINES)[1], "spread": True},
        *_refused(folder), *_planned_as_cards(folder),
    ]  # fmt: skip
    results = run_jobs(folder, plan, count=2)
    others = [f"other {name}" for name in _others()]
    names = [*jobs, *["chain"] * LONG, "changed", "pictures", *KINDS, "half", "machines", *others, *KEPT]
    return dict(zip(names, results, strict=True))


def _others():
    return OTHERS if LONG else SHORT_OTHERS


def _refused(folder):
    """One machine asked for something else in each."""
    save_tiny_pipeline(folder / "other" / "model", "flux2", seed=7)
    made = run_job(_job(folder, "other", train={"steps": 1, "gradient_accumulation_steps": 1})[0])
    made.lora_path.rename(folder / "other.safetensors")
    for name in _others():
        others, file = OTHERS[name][0], _job(folder, f"other {name}", train={"steps": 1})[1]
        yield {"job": file, "spread": True, "others": json.loads(json.dumps(others).replace("{folder}", str(folder)))}


def _kept_job(folder, name):
    """A stopped run goes on as the resumed one."""
    settings, _ = KEPT[name]
    train = {"steps": 3, "gradient_accumulation_steps": 2, **settings.get("train", {})}
    sections = {"split": settings.get("split", {"devices": ["cpu"]}), "evaluation": {"folder": ""}}
    name = "resumed" if name == "stopped" else name
    return _job(folder, name, parallel={"strategy": "fsdp"}, train=train, data={"resolutions": [32]}, **sections)


def _room_for(job, kept):
    """Bytes of the smallest card on which so many blocks may keep their activations."""
    split = dataclasses.replace(job.split, blocks_without_checkpointing=(kept,))
    train = dataclasses.replace(job.train, gradient_accumulation_steps=1)
    one = dataclasses.replace(job, split=split, train=train)
    one = dataclasses.replace(one, optimizer=dataclasses.replace(one.optimizer, name="adamw"))
    subject = subject_of(read_job(job))
    (device,) = plan_shared(one, subject, Card(torch.device("cpu"), 10**12, 10**12), 2).devices
    return int((device.needed + max(held_bytes(one.model, subject)[0])) / (1 - HEADROOM)) + 2


def _planned_as_cards(folder):
    """Each rank with its own room; of "recomputed" nobody knows any."""
    files = {name: _kept_job(folder, name)[1] for name in KEPT}
    two, three = (_room_for(_kept_job(folder, "chosen")[0], kept) for kept in (2, 3))
    assert two < three, "a block that keeps its activations needs more"
    yield {"job": files["recomputed"]}
    yield {"job": files["chosen"], "rooms": [three, two]}
    yield {"job": files["stopped"], "rooms": [two, three], "stop": 2}
    yield {"job": files["resumed"], "rooms": [three, three], "resume": True}
    for name in ("asked", "all asked"):
        yield {"job": files[name], "rooms": [three, three]}
    yield {"job": files["too small"], "rooms": [10**8, three]}


@pytest.mark.parametrize("name", ON_TWO)
def test_a_strategy_gives_the_losses_and_the_lora_of_one_process(name, folder, alone, on_two):
    expected, alone_job = alone
    found = on_two[name]
    job, _ = _job(folder, name, **ON_TWO[name])
    steps = job.train.steps
    assert (found["status"], found["step"]) == ("finished", steps)
    assert found["losses"] == pytest.approx(expected.losses[:steps], rel=1e-5)
    assert found["before"] == pytest.approx(expected.eval_before, rel=1e-5)
    assert steps < STEPS or found["after"] == pytest.approx(expected.eval_after, rel=1e-5)
    assert _difference(_lora(job, steps), _lora(alone_job, steps)) < 1e-4


def test_the_microbatches_of_a_step_have_two_sizes(alone):
    """So no strategy can take them for one batch."""
    plan = check_job(alone[1])
    order = BatchOrder(plan.training_samples, batch_size=1, seed=3)
    bucket = lambda: plan.training_samples[order.next().indices[0]].bucket  # noqa: E731
    sizes = [{bucket() for _ in range(4)} for _ in range(STEPS)]
    assert max(map(len, sizes)) == 2


def test_a_rank_of_fsdp_reads_its_rows_alone_and_holds_one_tensors_at_a_time(folder, on_two):
    (file,) = (folder / "model" / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    whole = sum(each.nbytes for each in tensors.values())
    first, second = on_two["fsdp"]["read"]
    assert first["all"] + second["all"] == whole and 0.49 * whole < first["all"] < 0.51 * whole
    largest = max(each[: -(-len(each) // 2)].nbytes for each in tensors.values())
    assert first["at_once"] == largest


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_and_its_average_are_those_of_one_process(kind, folder, on_two):
    job, _ = _job(folder, f"{kind} alone", **KINDS[kind])
    expected = run_job(job)
    assert on_two[kind]["losses"] == pytest.approx(expected.losses, rel=1e-5)
    found, wanted = (load_file(folder / name / job.output.file_name) for name in (kind, f"{kind}_alone"))
    mark = {"lokr": "lokr", "loha": "hada", "oft": "oft_blocks"}[kind]
    assert any(mark in name for name in wanted) and _difference(found, wanted) < 1e-4


def test_processes_of_which_one_has_no_bfloat16_all_compute_in_float16(folder, on_two, monkeypatch):
    monkeypatch.setattr(resolve, "has_bf16", lambda device: False)
    job, _ = _job(folder, "half alone", **HALF)
    expected = run_job(job)
    assert on_two["half"]["losses"] == pytest.approx(expected.losses, rel=1e-3)
    runs = [Path(job.output.folder), folder / "half"]
    states = [json.loads((run / "checkpoints" / "step-000003" / "state.json").read_text()) for run in runs]
    assert [state["loss_scale"] for state in states] == [[2.0**16, 3]] * 2


@pytest.mark.long
def test_blocks_are_compiled_inside_fsdp(on_two):
    assert all(count > 0 for count in on_two["fsdp, compiled"]["graphs"])


@pytest.mark.long
def test_no_rank_compiles_where_one_cannot(on_two):
    (told,) = [line for line in on_two["data, a broken compiler"]["log"] if "no longer compiled" in line]
    assert "rank 1: a step compiled by torch" in told and "no code for this graph" in told


@pytest.mark.long
def test_a_run_goes_on_with_four_two_and_one_processes(folder, alone, on_two, on_four):
    expected, alone_job = alone
    assert (on_four["status"], on_four["step"]) == ("stopped", SPLIT_AT[0])
    assert (on_two["chain"]["status"], on_two["chain"]["step"]) == ("stopped", SPLIT_AT[1])
    job, _ = _job(folder, "chain")
    result = run_job(job, resume=True)
    assert result.step == STEPS and result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert _difference(_lora(job), _lora(alone_job)) < 1e-4


def test_a_pipeline_of_one_process_goes_on_as_fsdp(folder, alone, on_two):
    expected, alone_job = alone
    found = on_two["changed"]
    assert found["step"] == STEPS and found["losses"] == pytest.approx(expected.losses, rel=1e-5)
    file = folder / "changed" / "checkpoints" / f"step-{STEPS:06d}" / "adapter.safetensors"
    assert _difference(load_file(file), _lora(alone_job)) < 1e-4


def test_only_one_rank_writes_and_each_process_has_its_own_cards(folder, on_two):
    lines = (folder / "copies" / "events.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    record = json.loads((folder / "pipeline_in_each" / "run.json").read_text())
    assert record["status"] == "finished" and record["devices"] == CARDS
    assert on_two["pipeline in each"]["placements"] == ["lazy:0: 1 blocks, lazy:1: 3 blocks"]


def test_all_ranks_draw_a_picture_and_three_microbatches_are_dealt_to_two(folder, on_two):
    job, _ = _job(folder, "pictures alone", **PICTURES)
    assert on_two["pictures"]["losses"] == pytest.approx(run_job(job).losses, rel=1e-5)
    name = "samples/000002_0.png"
    found, expected = (np.asarray(Image.open(folder / run / name)) for run in ("pictures", "pictures_alone"))
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def test_machines_that_share_no_folder_encode_each_and_have_the_same_entries(folder, alone, on_two):
    found, kept = on_two["machines"], [folder / f"cache-{rank}" for rank in range(2)]
    first, other = ({path.name: path.read_bytes() for path in each.glob("??/*")} for each in kept)
    assert len(first) > 10 and first.items() <= other.items()  # "other encoders" has left some there
    assert len(found["loaded"][0]) == len(found["loaded"][1]) == 2
    assert found["losses"] == pytest.approx(alone[0].losses[:2], rel=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT_OTHERS)) for name in OTHERS]
)
def test_a_machine_that_was_asked_for_another_training_is_refused(name, folder, on_two):
    _, *texts = OTHERS[name]
    first, other = on_two[f"other {name}"]["refused"]
    told = other if name == "encoders" else first
    assert all(text in told for text in texts) and len(told) < 700
    assert not list((folder / f"other_{name}").glob("checkpoints/*"))


@pytest.mark.parametrize("name", [name for name in KEPT if name != "all asked"])
def test_all_ranks_keep_what_the_smallest_card_has_room_for_or_what_was_asked(name, on_two):
    _, kept = KEPT[name]
    assert on_two[name]["kept"] == [kept, kept]


@pytest.mark.parametrize("name", [name for name in KEPT if name not in ("recomputed", "stopped")])
def test_blocks_that_are_not_computed_again_train_the_same_lora_bit_for_bit(name, folder, on_two):
    found, expected = (_lora(_kept_job(folder, each)[0], 3) for each in (name, "recomputed"))
    assert on_two[name]["status"] == "finished" and on_two[name]["losses"] == on_two["recomputed"]["losses"]
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_forecast_of_a_run_counts_the_kept_activations_and_says_what_does_not_fit(on_two):
    assert not on_two["recomputed"]["forecast"]
    names = ("too small", "chosen", "resumed", "all asked")
    recomputed, two, three, whole = (on_two[name]["forecast"][0] for name in names)
    assert recomputed["kept"] == 0 < two["kept"] < three["kept"] < whole["kept"]
    assert recomputed["weights"] == two["weights"] == whole["weights"]
    (told,) = [line for line in on_two["too small"]["log"] if "by the forecast" in line]
    assert "of 0.1 GB" in told and not any("by the forecast" in line for line in on_two["chosen"]["log"])


def _may_make_networks():
    name = f"dbt{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
    return made and subprocess.run(["ip", "netns", "del", name], check=False).returncode == 0


@pytest.fixture(scope="module")
def by_command(folder):
    """The job of one process, by the command that the hosts run: both pad texts to the published length."""
    job, file = _job(folder, "by command", train=BRIEF)
    save_job(dataclasses.replace(job, cache=dataclasses.replace(job.cache, folder=str(folder / "cache alone"))), file)
    command = [sys.executable, str(ROOT / "__main__.py"), "train", str(file)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return job


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_two_hosts_train_the_lora_of_one_process(strategy, folder, by_command):
    """Two network namespaces that reach each other over a virtual cable, each with a cache folder of its own."""
    if not _may_make_networks():
        pytest.skip("makes network namespaces, which takes root and the command ip")
    job, file = _job(folder, f"hosts {strategy}", parallel={"strategy": strategy}, train=BRIEF)
    other, cache = folder / f"hosts {strategy} b.toml", folder / f"cache b {strategy}"
    save_job(dataclasses.replace(job, cache=dataclasses.replace(job.cache, folder=str(cache))), other)
    command = ["bash", str(ROOT / "scripts" / "two_hosts.sh"), str(file)]
    environment = {**ENVIRONMENT, "PYTHON": sys.executable, "JOB_B": str(other)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and "both hosts have ended well" in done.stdout, done.stderr[-3000:]
    assert len(list(cache.glob("??/*"))) > 10
    assert len(_losses(job)) == BRIEF["steps"] and _losses(job) == pytest.approx(_losses(by_command), rel=1e-5)
    assert _difference(_lora(job, BRIEF["steps"]), _lora(by_command, BRIEF["steps"])) < 1e-4
