"""Two experts from one job: the files of two separate jobs, captions and latents computed once, stopped and resumed."""

import json
import time
from pathlib import Path

import pytest
from devicebridge.cli.main import main
from devicebridge.config.job import save_job
from devicebridge.events import Event
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs import in_processes as experts_module
from devicebridge.jobs.in_processes import expert_jobs, num_at_once, run_pair
from devicebridge.jobs.job import check_job, run_job
from devicebridge.tests.tiny_pipeline import make_tiny_job, run_steps, save_tiny_pipeline
from devicebridge.tests.toy import TINY

pytestmark = pytest.mark.usefixtures("one_thread")
HIGH, LOW = "wan2.2-t2v-a14b-high", "wan2.2-t2v-a14b-low"


def _save_pair(folder: Path) -> None:
    save_tiny_pipeline(folder, "wan")
    tiny = TINY["wan"]
    tiny.make_model(7, **tiny.encoder_widths).save_pretrained(folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.875}
    (folder / "model_index.json").write_text(json.dumps(index))


def _job(tmp_path, folder, *, variant=HIGH, second=True, **sections):
    if not (tmp_path / "model" / "transformer_2").exists():
        make_tiny_job(tmp_path, "wan")
        _save_pair(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "variant": variant}
    values = {
        "model": model | ({"second_expert": str(tmp_path / "model")} if second else {}),
        "train": {"steps": 2, "batch_size": 1, "seed": 3}, "lora": {"dropout": 0.2}, "evaluation": {"folder": ""},
        "output": {"folder": str(tmp_path / folder), "name": "mine", "save_every_steps": 1}, "cache": {"folder": ""},
    }  # fmt: skip
    return make_tiny_job(tmp_path, "wan", **{**values, **sections})


@pytest.fixture
def together(monkeypatch):
    """As if the CPU were a card for each."""
    monkeypatch.setattr(experts_module, "num_at_once", lambda experts: 2)


def test_both_are_the_bytes_of_two_separate_jobs(tmp_path, together):
    """Real processes at the same time, with dropout; one has been stopped after its first step, the other is new."""
    job = _job(tmp_path, "pair")
    run_steps(expert_jobs(job, ["cpu"])["high_noise"])
    events: list[Event] = []
    result = run_pair(job, ["cpu"], resume=True, on_event=events.append)
    assert list(result) == ["high_noise", "low_noise"] and {each.status for each in result.values()} == {"finished"}
    files = []
    for variant, name in ((HIGH, "high_noise"), (LOW, "low_noise")):
        output = {"folder": str(tmp_path / name), "name": f"mine_{name}", "save_every_steps": 1}
        cache = {"folder": str(tmp_path / f"{name} cache")}
        alone = run_job(_job(tmp_path, name, variant=variant, second=False, output=output, cache=cache))
        found = result[name]
        assert found.lora_path == tmp_path / "pair" / name / f"mine_{name}.safetensors"
        files.append(found.lora_path.read_bytes())
        assert files[-1] == alone.lora_path.read_bytes()
        assert list(found.losses) == alone.losses and found.step == 2
    assert files[0] != files[1]
    # computed once; one log of everything
    assert all(e.step == e.total for e in events if e.kind == "progress" and e.values["expert"] != "caches")
    assert {e.values["expert"] for e in events if e.kind == "step"} == {"high_noise", "low_noise"}
    told = [json.loads(line) for line in (tmp_path / "pair" / "events.jsonl").read_text().splitlines()]
    assert [each["expert"] for each in told] == [event.values["expert"] for event in events]
    assert (tmp_path / "pair" / "cache").is_dir() and not (tmp_path / "pair" / "low_noise" / "cache").exists()


_PROGRAM = """
import json, pathlib, signal, sys, time
command, file, *rest = sys.argv[1:]
name = "caches" if command == "cache" else pathlib.Path(file).parent.name
here = pathlib.Path(__file__).parent
with (here / "started").open("a") as started:
    started.write(name + chr(10))
folder = here / "pair" / pathlib.Path(file).parent.name
actions = json.loads((here / "actions").read_text())
action = actions.get(name, "end")
if action == "fail":
    sys.exit("devicebridge: its card is on fire")
if action == "die":
    sys.exit(7)
def fail(*args):  # as with compilers that the signal has ended
    sys.exit(1)
signal.signal(signal.SIGTERM, fail)
with (folder / "events.jsonl").open("a") as events:
    values = {"loss": 1.0, "learning_rate": 1.0, "elapsed_s": 1.0}
    events.write(json.dumps({"kind": "step", "step": 1, "total": 3, **values}))
    events.write(chr(10))
if action == "wait":
    for _ in range(600):
        if (folder / "stop_now").exists():
            sys.exit(130)
        time.sleep(0.1)
print("WARNING it is warm" + " again" * ("--resume" in rest))
"""


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """A command that does what is set for each name, and trains nothing; a function that lists what was started."""
    actions: dict[str, str] = {}
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    monkeypatch.setattr("devicebridge.runs.queue._MAIN", program)

    def save(**changed):
        actions.update(changed)
        (tmp_path / "actions").write_text(json.dumps(actions))

    save()
    return save, lambda: (tmp_path / "started").read_text().split()


def test_on_one_device_they_follow_each_other(tmp_path, scripted):
    job = _job(tmp_path, "pair")
    assert num_at_once(expert_jobs(job, ["cpu"])) == 1 and num_at_once(expert_jobs(job, ["cuda:0", "cuda:1"])) == 2
    act, started = scripted
    events: list[Event] = []
    assert len(run_pair(job, ["cpu"], on_event=events.append)) == 2
    assert started() == [event.values["expert"] for event in events] == ["caches", "high_noise", "low_noise"]
    act(high_noise="wait")
    stopped = run_pair(job, ["cpu"], on_event=events.append, should_stop=lambda: len(events) > 4)
    assert stopped["high_noise"].status == "stopped"
    assert started()[3:] == ["caches", "high_noise"]  # the second is not begun


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        ({"high_noise": "wait", "low_noise": "fail"}, "low_noise: its card is on fire"),
        ({"caches": "die"}, "caches: .*exit code 7"),
    ],
)
def test_an_error_of_one_stops_the_other_and_says_which(tmp_path, scripted, together, acts, message):
    scripted[0](**acts)
    with pytest.raises(RuntimeError, match=message):
        run_pair(_job(tmp_path, "pair"), ["cpu"])


def test_an_interrupt_leaves_no_process(tmp_path, scripted, together):
    scripted[0](high_noise="wait", low_noise="wait")
    running = []
    begin = time.monotonic()

    def interrupt(event):
        running.append(event.values["expert"])
        if len(running) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pair(_job(tmp_path, "pair"), ["cpu"], on_event=interrupt)
    assert time.monotonic() - begin < 30, "a process went on to its end"


def test_warnings_say_whose_they_are(tmp_path, scripted, caplog):
    run_pair(_job(tmp_path, "pair"), ["cpu"], resume=True)
    assert "low_noise: it is warm again" in caplog.messages


def test_devices_and_what_is_said_of_them_are_divided(tmp_path):
    split = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "blocks_without_checkpointing": [1, 0, 2]}
    job = _job(tmp_path, "pair", split=split)
    high, low = expert_jobs(job, split["devices"]).values()
    assert high.split.devices == ("cuda:0", "cuda:1") and low.split.devices == ("cuda:2",)
    assert high.split.blocks_without_checkpointing == (1, 0) and low.split.blocks_without_checkpointing == (2,)
    assert (high.model.variant, low.model.variant) == (HIGH, LOW)
    # either may be named first
    turned = expert_jobs(_job(tmp_path, "pair", variant=LOW, split=split), split["devices"])
    assert list(turned.items()) == [("high_noise", high), ("low_noise", low)]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"variant": "wan2.1-t2v-14b"}}, "which is whole"),
        ({"model": {"second_expert": "transformer"}}, "are the same files"),
        ({"split": {"devices": ["cuda:0", "cuda:1"], "memory_limit_gb": [1.0]}}, "give one"),
        ({"split": {"devices": ["cuda:0", "cuda:1"], "balance": "manual", "split_at": [1]}}, "cards of its own"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path, sections, message):
    job = _job(tmp_path, "pair")
    model = sections.get("model", {})
    if "second_expert" in model:
        model["second_expert"] = str(tmp_path / "model" / model["second_expert"])
    with pytest.raises(ValueError, match=message):
        changed = {**{"model": {}, "split": {}}, **sections}
        values = {"path": job.model.path, "variant": HIGH, "second_expert": job.model.second_expert} | model
        expert_jobs(_job(tmp_path, "pair", model=values, split=changed["split"]), ["cuda:0", "cuda:1"])


def test_other_ways_to_train_refuse_a_pair(tmp_path):
    with pytest.raises(ValueError, match="trains both experts"):
        check_job(_job(tmp_path, "pair"))


def test_every_partner_is_each_others(tmp_path):
    pairs = [v for family in FAMILIES.values() for v in family.variants if v.partner]
    assert len(pairs) == 4
    for variant in pairs:
        partner = next(v for family in FAMILIES.values() for v in family.variants if v.name == variant.partner)
        assert partner.partner == variant.name and partner.latent == variant.latent
        assert {variant.transformer_folder, partner.transformer_folder} == {"transformer", "transformer_2"}
        low, high = sorted([variant.sigma_range, partner.sigma_range])
        assert low[0] == 0.0 and low[1] == high[0] and high[1] == 1.0


def test_the_command_plans_checks_and_trains_a_pair(tmp_path, capsys, scripted):
    job = tmp_path / "job.toml"
    save_job(_job(tmp_path, "pair", train={"steps": 1}), job)
    assert main(["plan", str(job), "--cards", "1GB,1GB"]) == 0
    text = capsys.readouterr().out
    assert text.index("== high_noise") < text.index("cuda:0") < text.index("== low_noise") < text.index("cuda:1")
    assert main(["plan", str(job), "--cards", "1GB", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"high_noise", "low_noise"}
    assert main(["check", str(job)]) == 0 and "== low_noise" in capsys.readouterr().out
    assert main(["train", str(job)]) == 0
    text = capsys.readouterr().out
    assert "[low_noise] step 1/3: loss" in text
    scripted[0](low_noise="fail")
    assert main(["train", str(job)]) == 2 and "low_noise: its card is on fire" in capsys.readouterr().err
