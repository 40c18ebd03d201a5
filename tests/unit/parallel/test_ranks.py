"""Which process of a job this is, which devices it has, and what a job says without any other process."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devicebridge.checkpoints import load as load_module
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.weight_file import open_weights, read_records, read_rows
from devicebridge.jobs import job as job_module
from devicebridge.jobs import ranks as ranks_module
from devicebridge.jobs.job import run_job
from devicebridge.jobs.ranks import resolve_here, state_for_all
from devicebridge.jobs.read_job import read_job, subject_of
from devicebridge.parallel.devices import CPU
from devicebridge.parallel.ranks import group as group_module
from devicebridge.parallel.ranks.group import AcrossRanks, Ranks, _wait_for_all, joined
from devicebridge.parallel.ranks.place import RankPlace, find_place, own_devices, refuse_other_launcher
from devicebridge.parallel.ranks.watch import Watch
from devicebridge.parallel.runner import MicroBatch
from devicebridge.system.stopping import Stopped
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.waiting import until
from devicebridge.tests.weight_files import are_equal
from devicebridge.training import compile_check as check_module
from devicebridge.training.loop import Trainer
from devicebridge.training.state import TrainingState
from safetensors.torch import save_file

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "gpu-a", "MASTER_PORT": "29400"}


def test_a_place_is_what_torchrun_says_and_nothing_without_all_of_it():
    assert find_place({**TORCHRUN, **MASTER}) == RankPlace(5, 8, 1, 4)
    here = {**TORCHRUN, **MASTER, "RANK": "1", "WORLD_SIZE": "4"}
    assert find_place({**here, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}).num_restarts == 2
    with pytest.raises(ValueError, match="--max-restarts.*--resume"):
        find_place({**TORCHRUN, **MASTER, "TORCHELASTIC_MAX_RESTARTS": "3"})
    for name in (*TORCHRUN, *MASTER):
        assert find_place({key: value for key, value in {**TORCHRUN, **MASTER}.items() if key != name}) is None


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"RANK": "one"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_numbers_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError, match="environment"):
        find_place({**TORCHRUN, **MASTER, **wrong})


@pytest.mark.parametrize("left", [{"RANK": "0"}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"} | MASTER])
def test_what_another_launcher_has_left_is_named(left, caplog):
    refuse_other_launcher(left)
    (said,) = caplog.messages
    assert all(f"{name}={value}" in said for name, value in left.items() if name in TORCHRUN) and "LOCAL_RANK" in said


@pytest.mark.parametrize("left", [{"WORLD_SIZE": "4"}, {"RANK": "1", "WORLD_SIZE": "two"}, TORCHRUN])
def test_several_processes_of_another_launcher_do_not_each_train_the_whole_job(left, caplog):
    with pytest.raises(ValueError, match=f"WORLD_SIZE={left['WORLD_SIZE']}.*MASTER_ADDR.*torchrun or --nproc"):
        refuse_other_launcher(left)
    refuse_other_launcher(MASTER)
    assert not caplog.messages


def test_devices_are_dealt_out_evenly_or_not_at_all():
    cards = [torch.device("cuda", index) for index in range(8)]
    assert own_devices(cards, RankPlace(5, 8, 1, 4)) == tuple(cards[2:4])
    assert own_devices([CPU], RankPlace(1, 2, 1, 2)) == (CPU,)
    for count in (3, 7):
        with pytest.raises(ValueError, match="4 processes on this machine share"):
            own_devices(cards[:count], RankPlace(5, 8, 1, 4))


def test_one_process_alone_agrees_with_itself():
    alone = Ranks(own_stop=lambda: True)
    assert alone.should_stop() and alone.gather({"a": 1}) == [{"a": 1}] and alone.share(b"x") == b"x"
    assert alone.distributed(2, lambda index: [float(index)], in_lockstep=True) == [[0.0], [1.0]]
    with pytest.raises(ValueError, match="said"):
        alone.on_all(lambda: (_ for _ in ()).throw(ValueError("said")))


class _SlowWork:
    """A collective that others are late for."""

    def __init__(self, polls):
        self._polls = polls

    def is_completed(self):
        self._polls -= 1
        return self._polls <= 0

    def wait(self):
        assert self._polls <= 0, "it would wait in C++, where Python handles no signal"


def test_a_stop_that_reaches_a_waiting_rank_is_seen_by_the_one_it_waits_for():
    store, is_asked = dist.HashStore(), []
    waiting = Ranks(RankPlace(1, 2, 1, 2), own_stop=lambda: bool(is_asked), control=object(), store=store)
    working = Ranks(RankPlace(0, 2, 0, 2), control=object(), store=store)
    waiting._finish(lambda: _SlowWork(120))
    assert not working.is_stop_asked()
    is_asked.append("by a signal")
    waiting._finish(lambda: _SlowWork(120))
    assert working.is_stop_asked() and waiting.is_stop_asked()


@pytest.mark.parametrize(("stops", "is_stopped"), [((), False), ((0,), True), ((2,), True), ((0, 1, 2), True)])
def test_a_stop_before_all_have_come_ends_the_start_on_all_and_no_later_one(stops, is_stopped):
    store = dist.HashStore()

    def wait(rank):
        if rank == 1 and stops:  # this one comes last, behind the stop
            until(lambda: store.check(["outcome"]), 30)
        _wait_for_all(store, 3, lambda: rank in stops)

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(wait, rank) for rank in range(3)]
        for each in waiting:
            with pytest.raises(Stopped) if is_stopped else nullcontext():
                each.result(60)


@pytest.fixture
def limits(monkeypatch):
    """What this process may take, by what it does, as far as a test notes it; nothing is ended."""
    found = {}
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda limit_s, **options: found.update(now=limit_s))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: found.update(now=0))
    return found


def test_to_connect_and_to_leave_has_half_an_hour(limits, monkeypatch):
    def noted(name):
        return lambda *args, **options: limits.update({name: limits["now"]})

    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(group_module, "_wait_for_all", lambda *args: None)
    monkeypatch.setattr(Watch, "listen", lambda *args: None)
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value])
    monkeypatch.setattr(Ranks, "wait", lambda self: None)
    for name in ("init_process_group", "new_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, noted(name))
    with joined(RankPlace(1, 2, 1, 2), [CPU], 60.0, lambda: False):
        pass
    assert limits == dict.fromkeys(("init_process_group", "new_group", "destroy_process_group"), 1800) | {"now": 0}


@pytest.mark.parametrize("news", [(False, False), (True, False), (False, True)])
def test_a_step_with_a_size_that_is_new_to_any_rank_has_half_an_hour_on_all(news, limits):
    class Inner:
        num_replicas = 1

        def run(self, microbatches):
            limits["step"] = limits["now"]
            return [torch.zeros(())]

    watch = Watch(60.0)
    runner = AcrossRanks(Inner(), [], Ranks(RankPlace(0, 2, 0, 2), watch=watch), 0, in_lockstep=False)
    made = [MicroBatch(lambda: None, lambda given: given, is_new=lambda new=new: new) for new in news]
    runner.run_share(made)
    watch.close()
    assert limits["step"] == (1800 if any(news) else 60)


def test_one_process_is_told_how_to_start_several(tmp_path):
    job = make_tiny_job(tmp_path, parallel={"strategy": "fsdp"})
    with pytest.raises(ValueError, match="this is one alone; set parallel.processes to 2 or more"):
        run_job(job)
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"quantize": "fp8"}}, 'model.quantize = "fp8" keeps rows'),
        ({"model": {"quantize": "stored"}}, 'model.quantize = "stored" keeps rows.*use "int8-compute" or "none"'),
        ({"lora": {"dora": True}}, "lora.dora = true asks for norms of whole weights; set it to false"),
        ({"train": {"offload_activations": "on"}}, 'set it to "off"'),
        ({"split": {"offloaded_blocks": [1]}}, "split.offloaded_blocks asks for blocks that stream"),
    ],
)
def test_what_does_not_go_with_shared_weights_is_refused_with_what_does(sections, message, tmp_path):
    job = make_tiny_job(tmp_path, parallel={"strategy": "fsdp"}, **sections)
    with pytest.raises(ValueError, match=message):
        resolve_here(job, subject_of(read_job(job)), _Launched(RankPlace(0, 2, 0, 2), [CPU]), 1, None)


class _Launched(Ranks):
    """One rank of two, before anything is asked of the other."""

    is_launched = True


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("cut", [None, (2, 8)])
def test_some_rows_of_a_tensor_are_those_of_the_whole(swap, cut, tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"w": torch.arange(40.0).view(10, 4)}, file)
    record = read_header(file).records()["w"]
    record = record.cut(*cut) if cut else record
    record = record.swapped() if swap else record
    ((_, whole),) = read_records({"w": record})
    count = record.shape[0]
    with open_weights(file) as reader:
        for start in range(count):
            for end in range(start + 1, count + 1):
                assert torch.equal(read_rows(reader, dataclasses.replace(record), start, end), whole[start:end])


def test_all_from_loading_on_has_a_limit_and_loading_restoring_and_the_last_save_a_long_one(
    tmp_path, limits, monkeypatch
):
    noted = {}

    def note(owner, name):
        plain = getattr(owner, name)

        def noting(*args, **options):
            noted.setdefault(name, set()).add(limits["now"])
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    for owner, name in (
        (job_module, "build_trainer"), (Trainer, "restore"), (Trainer, "_timed_step"),
        (Trainer, "_save_before_the_end"), (job_module, "_conclude"), (load_module, "put_tensor"),
    ):  # fmt: skip
        note(owner, name)
    alive = []
    monkeypatch.setattr(load_module, "alive", lambda: alive.append(1))
    watch = Watch(60.0)
    job = make_tiny_job(tmp_path, train={"steps": 1}, evaluation={"folder": ""})
    run_job(job, ranks=Ranks(watch=watch))
    assert len(alive) > 10, "one for each tensor"
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, steps=3))
    monkeypatch.setattr(Trainer, "_evaluate_if_due", lambda self, is_end: 1 / (self.step < 2))
    with pytest.raises(ZeroDivisionError):
        run_job(job, resume=True, ranks=Ranks(watch=watch))
    watch.close()
    assert noted.pop("_timed_step") == {60}
    assert set(noted) == {"build_trainer", "restore", "_save_before_the_end", "_conclude", "put_tensor"}
    assert all(each == {1800} for each in noted.values()), noted


def test_sizes_are_new_once_while_blocks_are_compiled(tmp_path, monkeypatch):
    trainers = []
    build = job_module.build_trainer
    monkeypatch.setattr(job_module, "build_trainer", lambda *args: trainers.append(build(*args)) or trainers[0])
    run_job(make_tiny_job(tmp_path, train={"steps": 1, "batch_size": 1}, evaluation={"folder": ""}))
    (trainer,) = trainers
    assert not any(each.is_new() for each in trainer.microbatches(8))
    trainer.compiled = (object(),)
    found = []
    for _ in range(2):
        trainer._num_runs += 1
        found.append([each.is_new() for each in trainer.microbatches(len(trainer.train_data.samples))])
    assert all(found[0]) and not any(found[1])


def test_each_block_that_is_compared_tells_that_it_goes_on(monkeypatch):
    alive = []
    monkeypatch.setattr(check_module, "alive", lambda: alive.append(1))
    check = check_module.BlockCheck()
    check.is_full = True
    check(None, None, None, ((), {}))
    assert alive == [1]


def test_a_state_reaches_other_ranks_as_it_was_found_and_is_not_held_twice_where_it_was(monkeypatch, tmp_path):
    """Two copies of what is sent are all that the first rank holds beside the state."""
    types = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn)
    tensors = {str(each): torch.arange(6.0).to(each).view(2, 3) for each in types} | {"step": torch.tensor(7)}
    values = {"group.0.betas": {"kind": "tuple", "items": [0.9, None]}, "x": {"context": [{"dtype": "float32"}, True]}}
    facts = {"order": {"epoch": 2**70, "index": -1}, "losses": [1e-300, 0.1], "what": ["é"], "is": None}
    found = TrainingState(3, tensors, (tensors, values), {"cpu": torch.ones(3)}, facts, tmp_path, {"losses": []})
    sent: list[bytes] = []

    def rank(*, is_first: bool) -> Any:
        here = SimpleNamespace(is_launched=True, is_first=is_first, on_all=lambda work: work())
        here.share = lambda data: [*sent, data][0] if not is_first else sent.append(data) or data
        return here

    monkeypatch.setattr(ranks_module, "find_state", lambda job, resume: found)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("the first rank has it"))
        job: Any = None
        assert state_for_all(job, rank(is_first=True), resume=True) is found
    other = state_for_all(job, rank(is_first=False), resume=True)
    assert other is not None and are_equal(other.adapter, tensors) and are_equal(other.optimizer[0], tensors)
    rest = (other.step, other.optimizer[1], other.random, other.facts, other.path, other.own)
    assert rest == (3, values, {}, facts, Path(tmp_path), {})

    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(Ranks, "_finish", lambda self, begin: begin())
    first = Ranks(RankPlace(0, 2, 0, 2), control=object())
    assert first.share(sent[0]) is sent[0] and first.share(b"") == b""
    monkeypatch.setattr(ranks_module, "find_state", lambda job, resume: None)
    sent.clear()
    assert state_for_all(job, rank(is_first=True), resume=True) is None
    assert state_for_all(job, rank(is_first=False), resume=True) is None
