"""Plans before there are files: the same numbers as with them, and what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from devicebridge.cli.main import main
from devicebridge.cli.plan import make_request
from devicebridge.config.job import ModelScheme, load_job, save_job
from devicebridge.families.registry import FAMILIES, find_variant
from devicebridge.planning.question import make_square
from devicebridge.tests.tiny_pipeline import make_tiny_job

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


def _publish_tiny(folder: Path, family_name: str, monkeypatch: pytest.MonkeyPatch, **sections: dict[str, Any]) -> Path:
    """A job over a tiny model, which is published as `tiny` with its own config -> the job's file."""
    job = make_tiny_job(folder, family_name, **{"model": {"dtype": "bfloat16"}} | sections)
    save_job(job, folder / "job.toml")
    config = json.loads((folder / "model/transformer/config.json").read_text())
    family = FAMILIES[family_name]
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    first = family.variants[0]
    channels = family.latent.channels * own["in_channels"] // first.transformer_config["in_channels"]
    latent = dataclasses.replace(family.latent, channels=channels)
    tiny = dataclasses.replace(first, name="tiny", transformer_config=own, latent=latent)
    monkeypatch.setitem(FAMILIES, family_name, dataclasses.replace(family, variants=(tiny,)))
    return folder / "job.toml"


def _values(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--cards", "2x1GB", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_by_its_name_and_squares_are_planned_as_the_files_are(name, tmp_path, monkeypatch, capsys, caplog):
    job = _publish_tiny(tmp_path, name, monkeypatch)
    expected = _values(capsys, job)
    assert expected["model"] == "tiny" and expected["pixels"] == {"height": 32, "width": 32}
    shutil.rmtree(tmp_path / "model")
    assert _values(capsys, job, "--model", "tiny") == expected
    shutil.rmtree(tmp_path / "data")
    said = "data does not exist; the plan is for a square of 32 pixels"
    assert said not in caplog.text
    assert _values(capsys, job, "--model", "tiny", "--resolution", "32") == expected
    assert said in caplog.text
    assert _values(capsys, job, "--model", "tiny", "--resolution", "64")["devices"] != expected["devices"]


def test_without_a_job_the_plan_is_for_what_the_template_trains() -> None:
    template = json.loads((ROOT / "example_workflows/train_FLUX.2_on_two_24_GB_cards.json").read_text(encoding="utf-8"))
    named = {each["type"]: each.get("widgets_values_named", {}) for each in template["nodes"]}
    train, dataset = named["DeviceBridgeTrainLora"], named["DeviceBridgeTrainingDataset"]
    job = make_request(None, model="flux2-dev").job
    assert (job.train.steps, job.train.gradient_accumulation_steps) == (train["steps"], train["accumulation"])
    assert (job.lora.rank, str(job.data.largest_resolution)) == (train["rank"], dataset["resolutions"])


def test_without_a_job_everything_is_at_its_default_and_the_planner_chooses_the_scheme(tmp_path, monkeypatch, capsys):
    _publish_tiny(tmp_path, "flux2", monkeypatch)
    (tmp_path / "short.toml").write_text(
        '[model]\npath = "model"\nquantize = "auto"\n[data]\nresolutions = [48]\n[[data.folders]]\npath = "data"\n'
        '[train]\nsteps = 7\ngradient_accumulation_steps = 4\n[output]\nfolder = "run"\n'
    )
    found = _values(capsys, "--model", "tiny", "--resolution", "48")
    assert found == _values(capsys, tmp_path / "short.toml")
    assert main(["plan", "--model", "tiny", "--resolution", "48", "--cards", "1GB"]) == 0
    verdict, *facts = capsys.readouterr().out.splitlines()
    assert re.fullmatch("verdict +fits", verdict)
    for words in ("RTX 40 cards or newer", "fp8-compute; cuda:0: 4 blocks", "tiny, 48x48 pixels, batch 1,"):
        assert any(words in line for line in facts), words


def test_a_scheme_takes_the_place_of_the_jobs(tmp_path, monkeypatch, capsys):
    job = _publish_tiny(tmp_path, "flux2", monkeypatch, model={"quantize": "fp8"})
    for arguments in ((job,), ("--model", "tiny", "--resolution", "32")):
        for scheme in ("none", "int8", "int8-compute"):
            assert _values(capsys, *arguments, "--quantize", scheme)["setting"]["quantize"] == scheme
    assert _values(capsys, job)["setting"]["quantize"] == "fp8"
    with pytest.raises(SystemExit):
        main(["plan", str(job), "--quantize", "int4"])
    assert f"{{{','.join(get_args(ModelScheme))}}}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, asked, size",
    [
        ("flux2-dev", {}, (1024, 1024, 1)), ("flux1-dev", {"resolution": 500}, (496, 496, 1)),
        ("wan2.1-t2v-14b", {}, (640, 640, 1)), ("wan2.1-t2v-14b", {"frames": 81, "resolution": 480}, (480, 480, 81)),
        ("wan2.2-ti2v-5b", {"resolution": 500}, (512, 512, 1)), ("wan2.2-i2v-a14b-high", {}, (640, 640, 33)),
        ("wan2.2-ti2v-5b-i2v", {"frames": 49}, (640, 640, 49)),
    ],
)  # fmt: skip
def test_the_square_that_is_planned_for(model, asked, size):
    request = make_request(None, model=model, **asked)
    family, variant = find_variant(model)
    square = make_square(request.job.data, variant, family.latent_of(variant))
    assert (*square.bucket, square.num_frames) == size and not request.has_data


def test_a_model_replaces_nothing_else_of_a_job():
    path = ROOT / "examples" / "flux2.toml"
    job = load_job(path)
    request = make_request(path, model="flux2-klein-9b", resolution=768)
    assert request.info is not None and request.info.variant is find_variant("flux2-klein-9b")[1]
    assert request.job.data == dataclasses.replace(job.data, resolutions=(768,))
    assert dataclasses.replace(request.job, model=job.model, data=job.data) == job
    assert dataclasses.replace(request.job.model, path=job.model.path, variant=job.model.variant) == job.model


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cards", "24GB"], "there is nothing to plan for; give a job file, or the name of a model: --model"),
        (["--model", "FLUX2-dev1"], "the variants are flux2-dev, flux2-klein-4b, .*; did you mean flux2-dev"),
        (["--model", "flux2-dev", "--cards", "24GB", "--frames", "17"], "this model makes images only"),
        (["--model", "flux2-dev", "--cards", "24GB", "--resolution", "9"], "resolution 9 is below 16 pixels"),
        (["--model", "wan2.1-t2v-14b", "--cards", "24GB", "--frames", "16"], "takes 4n . 1 frames; nearest are 13, 17"),
        (["--model", "wan2.2-ti2v-5b-i2v", "--cards", "24GB", "--frames", "1"], "is given the first frame, .* give"),
        (["wan_pair", "--model", "wan2.2-t2v-a14b-high"], "the job trains two; remove model.second_expert"),
        (["flux2", "--model", "flux2-dev"], "the dataset folder /data/my_subject does not exist; .* --resolution 512"),
        (["--model", "z-image"], r"no variant 'z-image'.* model\.family = \"comfyui\"$"),
        (["--model", "flux2-dev", "--frames", "99999999"], "is a whole number from 1 to 10000 .found 99999999"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, message, capsys):
    examples = {"wan_pair", "flux2"}
    given = [str(ROOT / f"examples/{each}.toml") if each in examples else each for each in arguments]
    assert main(["plan", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_a_mistake_in_one_of_several_folders_is_no_reason_for_squares(tmp_path):
    folders = [{"path": str(tmp_path / "data")}, {"path": str(tmp_path / "dtaa")}]
    save_job(make_tiny_job(tmp_path, data={"folders": folders}), tmp_path / "job.toml")
    assert make_request(tmp_path / "job.toml", resolution=64).has_data
