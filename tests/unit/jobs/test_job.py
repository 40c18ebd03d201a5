"""Whole jobs on tiny models: against a plain training loop, interrupted and resumed, killed, refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from devicebridge.checkpoints.lora_start import read_start
from devicebridge.config.job import differing_keys, job_to_dict, make_job, save_job
from devicebridge.events import EventLog
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs import job as job_module
from devicebridge.jobs import resume
from devicebridge.jobs.encode_job import cache_job
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.lora_output import _without_places
from devicebridge.parallel.ranks.group import Ranks
from devicebridge.system.stopping import Stopped, on_progress
from devicebridge.tests.tiny_pipeline import assert_same_run, make_tiny_job, plain_losses, run_on_cards, run_steps
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("short_texts")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["flux2", "wan", pytest.param("flux1", marks=pytest.mark.long)])
def test_steps_of_the_split_trainer_are_those_of_a_plain_loop(name, tmp_path):
    """So many that a difference in how they are driven shows; in a long run fifty of the quickest family."""
    steps = 50 if name == "wan" and os.environ.get("LONG_TESTS") else 8
    job = make_tiny_job(
        tmp_path, name, train={"steps": steps, "batch_size": 2, "seed": 3}, evaluation={"folder": ""},
        output={"save_every_steps": 0}, split={"devices": ["lazy:0", "lazy:1"]}, cache={"vae_device": "cpu"},
    )  # fmt: skip
    expected = plain_losses(dataclasses.replace(job, split=dataclasses.replace(job.split, devices=("cpu",))))
    result = run_on_cards(job, 2)
    assert result.step == steps and len(set(result.losses)) == steps
    assert result.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "flux2" else pytest.mark.long) for each in sorted(FAMILIES)]
)
def test_stopped_and_resumed_equals_uninterrupted(name, tmp_path):
    straight = run_job(make_tiny_job(tmp_path, name, lora={"dropout": 0.3}, output={"folder": str(tmp_path / "a")}))
    job = make_tiny_job(tmp_path, name, lora={"dropout": 0.3}, output={"folder": str(tmp_path / "b")})
    assert "resume" in run_steps(job, 3).resume_hint
    resumed = run_job(job, resume=True)
    assert (resumed.status, resumed.step) == ("finished", 6)
    assert_same_run(resumed, straight)


def test_several_captions_with_shuffled_tags_are_encoded_each_and_drawn_alike_after_a_resume(tmp_path):
    make_tiny_job(tmp_path, "flux2")  # makes the folders
    images = sorted(tmp_path.glob("data/*.png"))
    for path in (tmp_path / "data").glob("*.txt"):
        path.unlink()
    texts = {path.name: [f"{path.stem}, red, round, small", "prose"] for path in images if "mask" not in path.name}
    (tmp_path / "data" / "captions.json").write_text(json.dumps(texts))
    tags = {"shuffle_tags": True, "tag_dropout": 0.2, "keep_tags": 1, "tag_variants": 3, "caption_dropout": 0.2}

    def job(run, **data):
        small = {"train": {"steps": 4}, "output": {"folder": str(tmp_path / run)}}
        return make_tiny_job(tmp_path, data={**tags, **data}, **small)

    straight = run_job(job("a"))
    stopped = job("b")
    run_steps(stopped, 2)
    resumed = run_job(stopped, resume=True)
    assert_same_run(resumed, straight)
    with pytest.raises(ValueError, match=r"tag_variants"):
        run_job(job("b", tag_variants=4), resume=True)
    plan = check_job(job("d"))
    with EventLog(tmp_path / "e") as events:
        data, held_out = cache_job(plan, events)
    assert {len(each.captions) for each in data.samples} == {6} and {each.others for each in held_out.samples} == {()}
    for index, caption in ((0, 0), (0, 4), (1, 2)):  # as the only caption of that image
        own = make_tiny_job(tmp_path, data={"folders": [{"path": str(tmp_path / "one")}]}, evaluation={"folder": ""})
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / "a.png").write_bytes(Path(data.samples[index].path).read_bytes())
        (tmp_path / "one" / "a.txt").write_text(data.samples[index].captions[caption])
        with EventLog(tmp_path / "e") as events:
            alone, _ = cache_job(check_job(own), events)
        expected, found = (each.load([at], [n]).text for each, at, n in ((alone, 0, 0), (data, index, caption)))
        assert all(torch.equal(expected[name], each) for name, each in found.items())


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    """A job of 14 steps that saves every 4, and the LoRA of its uninterrupted run."""
    folder = tmp_path_factory.mktemp("long")
    sections = {"train": {"steps": 14, "batch_size": 2, "seed": 3}, "evaluation": {"folder": ""}}
    job = make_tiny_job(folder, **sections, output={"folder": str(folder / "straight"), "save_every_steps": 4})
    assert run_job(job).status == "finished"
    return folder, job


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.parametrize(
    "name", ["SIGKILL", "SIGTERM", *(pytest.param(each, marks=pytest.mark.long) for each in ("SIGINT", "SIGHUP"))]
)
def test_a_run_that_a_signal_ends_is_resumed_to_the_same_bytes(long_job, name):
    """Those that can be heard finish the step, save and say how to resume."""
    folder, job = long_job
    job = dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(folder / name)))
    job_file = folder / f"{name}.toml"
    save_job(job, job_file)
    code = "import runpy, sys; sys.argv[0] = 'devicebridge'; "
    code += f"runpy.run_path({str(ROOT / 'bootstrap.py')!r})['load_pack'](); "
    code += "from devicebridge.tests.tiny_pipeline import short_texts; texts = short_texts(); texts.__enter__(); "
    code += "from devicebridge.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-u", "-c", code, "train", str(job_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert any("step-000004" in line for line in process.stdout)
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate()
    if name == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130 and "--resume" in output and "resume to continue" in output, output
        assert (folder / name / "lora.safetensors").exists()
    result = run_job(job, resume=True)
    assert result.step == 14
    assert result.lora_path.read_bytes() == (folder / "straight" / "lora.safetensors").read_bytes()


def test_a_run_written_under_older_keys_is_the_same_run(tmp_path):
    train = {"steps": 2, "gradient_accumulation_steps": 3}
    job = make_tiny_job(tmp_path, train=train, parallel={"strategy": "data"}, split={"offloaded_blocks": [1]})
    config = job_to_dict(job)
    config["train"]["accumulation"] = config["train"].pop("gradient_accumulation_steps")
    config["pipeline"] = {"schedule": "replicas", "ahead": config.pop("parallel")["microbatches_ahead"]}
    for today, before in (("blocks_without_checkpointing", "kept_blocks"), ("offloaded_blocks", "swapped_blocks")):
        config["split"][before] = config["split"].pop(today)
    config["split"]["balance"] = "bytes"
    config["output"]["name"] = "Adapter"  # which is refused today
    identity = dict.fromkeys(resume._IDENTITY, "the same")
    state = SimpleNamespace(path=tmp_path, facts={"config": config, **identity})
    assert resume.differences(job, identity, state) == []
    config["train"]["accumulation"] = 2
    assert resume.differences(job, identity, state) == ["train.gradient_accumulation_steps: 2 -> 3"]


def test_a_run_whose_rate_falls_to_its_end_is_not_made_longer(tmp_path):
    longer = {"steps": 4, "batch_size": 2, "seed": 3}
    falling = {"schedule": {"name": "linear"}, "output": {"folder": str(tmp_path / "falling")}}
    run_job(make_tiny_job(tmp_path, train=longer | {"steps": 2}, **falling))
    with pytest.raises(ValueError, match="train.steps: 2 -> 4"):
        run_job(make_tiny_job(tmp_path, train=longer, **falling), resume=True)


def test_a_run_that_was_moved_with_its_data_resumes(tmp_path):
    """With another path of the model it does not: text encoders and VAE may be others there."""
    longer, here, there = {"steps": 4, "batch_size": 2, "seed": 3}, tmp_path / "here", tmp_path / "there"
    straight = run_job(make_tiny_job(here, train=longer, output={"folder": str(here / "straight")}))
    run_job(make_tiny_job(here, train=longer | {"steps": 2}))
    here.rename(there)
    with pytest.raises(ValueError, match=r"model\.path: .* -> "):
        run_job(make_tiny_job(there, train=longer), resume=True)
    here.mkdir()
    (there / "model").rename(here / "model")
    (there / "model").symlink_to(here / "model")  # or a second one would be made
    resumed = run_job(make_tiny_job(there, train=longer, model={"path": str(here / "model")}), resume=True)
    assert resumed.step == 4 and resumed.losses == straight.losses


def test_resume_of_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, caplog):
    straight = run_job(make_tiny_job(tmp_path, train={"steps": 2}))
    resumed = run_job(make_tiny_job(tmp_path, train={"steps": 2}, output={"folder": str(tmp_path / "b")}), resume=True)
    assert "starts from its first step" in caplog.text
    assert resumed.lora_path.read_bytes() == straight.lora_path.read_bytes()


def test_resume_refuses_other_held_out_images(tmp_path):
    job = make_tiny_job(tmp_path, train={"steps": 2})
    run_job(job)
    (tmp_path / "held_out" / "image_1.txt").write_text("another caption")
    with pytest.raises(ValueError, match="evaluation: images, captions or masks have changed"):
        run_job(job, resume=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"name": "torch.optim.Nope"}}, "cannot be imported"),
        ({"optimizer": {"options": {"speed": 1}}}, "does not take the options"),
        ({"cache": {"vae_device": "cuda:7"}}, "cuda:7"), ({"cache": {"vae": "/nonexistent"}}, "/nonexistent"),
        ({"cache": {"text_encoders": "/nonexistent"}}, "/nonexistent"),
        ({"lora": {"targets": ["*.nothing"]}}, "nothing"), ({"objective": {"guidance": 3.5}}, "has no guidance input"),
    ],
)  # fmt: skip
def test_what_would_fail_late_is_refused_early(sections, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_job(make_tiny_job(tmp_path, "wan" if "objective" in sections else "flux2", **sections))


def test_a_job_stopped_at_once_leaves_nothing_in_the_way(tmp_path):
    job = make_tiny_job(tmp_path)
    phases = []
    note = lambda event: phases.append(event.values.get("name"))  # noqa: E731
    stopped = run_job(job, on_event=note, should_stop=lambda: "training" in phases)
    assert (stopped.status, stopped.step, stopped.checkpoint) == ("stopped", 0, None)
    assert run_job(job).status == "finished"


@pytest.mark.parametrize("layout", ["original", "diffusers", "both"])
def test_lora_file_says_how_it_was_made_and_reads_back(layout, tmp_path):
    job = make_tiny_job(tmp_path, train={"steps": 2, "batch_size": 2, "seed": 3}, output={"lora_layout": layout})
    result = run_job(job)
    metadata = _metadata(result.lora_path)
    assert metadata["ss_network_dim"] == "4" and metadata["modelspec.architecture"].endswith("/lora")
    config = json.loads(metadata["devicebridge_config"])
    assert config["lora"]["rank"] == 4 and str(tmp_path) not in json.dumps(metadata)
    tensors = load_file(result.lora_path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in result.lora.items())
    num_alphas = sum(name.endswith(".alpha") for name in tensors)
    # in diffusers' layout alpha is multiplied into B: its loaders refuse names without "lora" in them
    assert num_alphas == (sum(name.endswith(".lora_A.weight") for name in tensors) if layout == "original" else 0)
    trained = load_file(result.checkpoint / "adapter.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in trained if name.endswith(".lora_A.weight")]
    sizes = {n: (len(trained[f"{n}.lora_B.weight"]), trained[f"{n}.lora_A.weight"].shape[1]) for n in names}
    layers = read_start(result.lora_path, FAMILIES["flux2"], sizes)
    back = {f"{name}.{kind}": tensor for name, layer in layers.items() for kind, tensor in layer.items()}
    assert back.keys() == trained.keys() and all(torch.equal(back[name], trained[name]) for name in trained)


def test_a_layout_that_loses_dora_is_warned_of_when_the_job_is_checked_and_when_the_file_is_written(tmp_path, caplog):
    sections = {"lora": {"dora": True, "rank": 2}, "train": {"steps": 1}}
    job = make_tiny_job(tmp_path, output={"lora_layout": "diffusers"}, **sections)
    result = run_job(job)
    warning = 'DoRA in the diffusers layout, for diffusers: ComfyUI leaves out DoRA\'s magnitudes; lora_layout = "both"'
    assert result.status == "finished" and caplog.text.count(warning) == 2
    caplog.clear()
    both = dataclasses.replace(job, output=dataclasses.replace(job.output, lora_layout="both"))
    assert check_job(both).family.name == "flux2" and "DoRA" not in caplog.text


def test_a_dora_file_for_both_readers_holds_each_readers_magnitudes(tmp_path):
    """dora_scale restated for ComfyUI, which divides by other norms, and PEFT's as it was trained."""
    sections = {"lora": {"dora": True, "rank": 2}, "train": {"steps": 2}}
    result = run_job(make_tiny_job(tmp_path, **sections, output={"lora_layout": "both", "lora_dtype": "bfloat16"}))
    trained = load_file(result.checkpoint / "adapter.safetensors")
    ends = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "dora_scale")
    modules = [name.removesuffix(".dora_scale") for name in trained if name.endswith(".dora_scale")]
    assert sorted(result.lora) == sorted(f"transformer.{module}.{end}" for module in modules for end in ends)
    for module in modules:
        magnitude = result.lora[f"transformer.{module}.lora_magnitude_vector"]
        restated = result.lora[f"transformer.{module}.dora_scale"]
        assert torch.equal(magnitude, trained[f"{module}.dora_scale"]) and restated.shape == (len(magnitude), 1)
        kinds = restated.dtype, result.lora[f"transformer.{module}.{ends[0]}"].dtype
        assert kinds == (torch.float32, torch.bfloat16)
        assert not torch.equal(magnitude, restated[:, 0]) and torch.allclose(magnitude, restated[:, 0], rtol=0.05)


def test_events_are_written_announced_and_given_to_tensorboard(tmp_path):
    seen = []
    result = run_job(make_tiny_job(tmp_path, output={"tensorboard": True}), on_event=seen.append)
    written = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in written] == [event.kind for event in seen]
    assert [line["loss"] for line in written if line["kind"] == "step"] == result.losses
    phases = [line["name"] for line in written if line["kind"] == "phase"]
    assert phases == ["captions", "latents", "loading", "training"]
    assert [line["step"] for line in written if line["kind"] == "eval"] == [0, 6]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [scalar.value for scalar in scalars.Scalars("step/loss")] == pytest.approx(result.losses)
    assert [scalar.step for scalar in scalars.Scalars("eval/loss")] == [0, 6]


def test_folders_in_a_lora_file_are_names_alone():
    folders = [{"path": "/home/me/after", "references": ["/home/me/before"], "control": "/home/me/depth"}]
    held_out = {"folder": "/home/me/held", "references": ["/home/me/other"], "control": "/home/me/poses"}
    model = {"path": "/home/me/m.safetensors", "family": "comfyui"}
    given = {"model": model, "data": {"folders": folders, "condition": "vace"}, "evaluation": held_out}
    job = make_job({**given, "train": {"steps": 1}, "output": {"folder": "/home/me/out"}})
    config = _without_places(job_to_dict(job))
    assert "/home" not in json.dumps(config)
    assert config["data"]["folders"][0]["references"] == ["before"] and config["evaluation"]["control"] == "poses"


BRIEF = {"steps": 3}


@pytest.fixture(scope="module")
def bf16_losses(tmp_path_factory):
    return run_job(make_tiny_job(tmp_path_factory.mktemp("plain"), model={"dtype": "bfloat16"}, train=BRIEF)).losses


@pytest.mark.parametrize("scheme", [pytest.param("fp8", marks=pytest.mark.long), "int8-compute"])
def test_quantized_base_trains_from_the_file_and_from_the_cache(scheme, bf16_losses, tmp_path):
    model = {"dtype": "bfloat16", "quantize": scheme, "quantized_cache": str(tmp_path / "quantized")}
    first, second = (
        run_job(make_tiny_job(tmp_path, model=model, train=BRIEF, output={"folder": str(tmp_path / name)}))
        for name in ("a", "b")
    )
    assert first.status == "finished" and first.losses != bf16_losses
    assert first.losses == pytest.approx(bf16_losses, rel=0.02)
    assert second.losses == first.losses and any((tmp_path / "quantized").rglob("*.safetensors"))
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    (said,) = [event for event in events if event["kind"] == "quantized"]
    assert f"linears to {scheme}," in said["summary"]
    assert str(tmp_path) not in json.loads(_metadata(first.lora_path)["devicebridge_config"])["model"].values()
    assert "quantized_cache" not in _metadata(first.lora_path)["devicebridge_config"]


def _metadata(file):
    with safe_open(file, framework="pt") as reader:
        return reader.metadata()


def test_a_resumed_run_keeps_its_rounding_and_a_rotation_that_turns_something():
    values = {"data": {"folders": [{"path": "/d"}]}, "train": {"steps": 1}, "output": {"folder": "/o"}}

    def changed(scheme, **model):
        old, new = ({"path": "/m", "quantize": scheme, **each} for each in ({}, model))
        lines = differing_keys(make_job({**values, "model": old}), make_job({**values, "model": new}))
        return [line.partition(":")[0] for line in lines]

    assert changed("int8-compute", quantize="fp8-compute") == ["model.quantize"]
    assert changed("int8-compute", rotation=16) == ["model.rotation"] and changed("fp8-compute", rotation=0) == []


def test_a_job_leaves_the_random_state_of_its_process_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_job(make_tiny_job(tmp_path, lora={"dropout": 0.2}, train={"steps": 1}))
    assert torch.equal(torch.get_rng_state(), before)


class _Watch:
    """How many limits a rank is in, and its signs of life."""

    lost, depth, signs = "", 0, 0

    @contextmanager
    def doing(self, *, is_long):
        self.depth += 1
        yield
        self.depth -= 1

    def alive(self):
        self.signs += 1


def test_a_rank_has_a_limit_while_it_reads_and_checks_a_job_and_none_while_it_encodes(tmp_path, monkeypatch):
    watch, depths = _Watch(), {}

    def noted(name):
        real = getattr(job_module, name)

        def call(*args, **kwargs):
            depths[name] = watch.depth
            if name == "cache_job":
                raise Stopped
            return real(*args, **kwargs)

        monkeypatch.setattr(job_module, name, call)

    names = ("state_for_all", "read_job", "find_identity", "_resolve_and_check")
    for name in (*names, "cache_job"):
        noted(name)
    on_progress(watch.alive)
    try:
        assert run_job(make_tiny_job(tmp_path), ranks=Ranks(watch=watch)).status == "stopped"
    finally:
        on_progress()
    assert depths == {**dict.fromkeys(names, 1), "cache_job": 0}
    assert watch.signs > 3 * 7, "seven images are listed, decoded and hashed"
