"""The job config: strict, and the same in TOML and as dataclasses."""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from devicebridge.config.job import differing_keys, job_to_dict, load_job, make_job, save_for_process, save_job
from devicebridge.config.ranges import BACKSLASHES

MINIMAL = {
    "model": {"path": "/models/a"}, "data": {"folders": [{"path": "/data/cats", "repeats": 2}]}, "train": {"steps": 10},
    "output": {"folder": "/runs/a"},
}  # fmt: skip
CLIP = f"comfyui 0.33.0 CLIP {'0a' * 32}"


def _with(section, **values):
    job = copy.deepcopy(MINIMAL)
    job.setdefault(section, {}).update(values)
    return job


def test_toml_round_trip(tmp_path):
    folder = {"path": "/data/cats", "loss_weight": 0.5, "regularisation": True, "resolutions": [64]}
    job = make_job(
        _with("split", devices=["cuda:0", "cuda:1"], balance="manual", split_at=[3])
        | {"optimizer": {"name": "adamw", "options": {"betas": [0.9, 0.95], "eps": 1e-8}}, "objective": {"shift": 3.0}}
        | {"lora": {"layers": "attention"}, "data": {"folders": [folder], "trigger_word": "ohwx"}}
    )
    save_job(job, tmp_path / "job.toml")
    assert load_job(tmp_path / "job.toml") == job
    assert make_job(job_to_dict(job)) == job


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"stpes": 3}, r"train\.stpes: there is no such key; did you mean steps\?"),
        ("train", {"learning_rate": 1}, r"train\.learning_rate: there .*; did you mean optimizer\.learning_rate\?"),
        ("train", {"lr": 1e-4}, r"train\.lr: there is no such key; did you mean optimizer\.learning_rate\?"),
        ("paralel", {}, r"paralel: there is no such key; did you mean parallel\?"),
        ("data", {"folders": {"path": "a"}}, r"data\.folders: is a list of sections, \[\[data\.folders\]\]"),
        ("split", {"devices": "cuda:0"}, r"split\.devices: is a list, such as \['cuda:0'\]"),
        ("split", {"split_at": [3]}, r'split: split_at = \[3\] belongs to balance = "manual", not "memory"'),
        ("split", {"balance": "manual"}, r'split: balance = "manual" needs split_at, '),
        ("lora", {"rank": 0}, r"lora\.rank: is a whole number from 1 to 1024 \(found 0\)"),
        ("model", {"quantize": "int3"}, r"model\.quantize: is one of 'none', .* \(found 'int3'\)"),
        ("model", {"quantize": "fp8_compute"}, r"\(found 'fp8_compute'\); did you mean 'fp8-compute'\?"),
        ("split", {"devices": ["a", "b"], "balance": "manual", "split_at": [1, 2]}, "give 1, the first block"),
        ("output", {"name": "../x"}, "plain file name"), ("data", {"caption_dropout": 1.5}, r"data\.caption_dropout"),
        ("nonsense", {"a": 1}, r"nonsense: there is no such key"),
        ("__dataclass_self__", {"a": 1}, r"__dataclass_self__: there is no such key"),
        ("pipeline", {"schedule": "none", "depth": 3}, "pipeline: there is no such key"),
        ("optimizer", {"text_encoder_learning_rate": 0.5}, r"needs lora\.text_encoder = true; set it"),
        ("data", {"encoded": "a.json"}, "folders of images, or encoded, and not both"),
        ("data", {"folders": []}, "folders of images, or encoded, and not both"),
        ("data", {"folders": [], "encoded": "a.json", "caption_dropout": 0.1}, "caption_dropout needs"),
        ("cache", {"text_source": "some CLIP"}, r"cache\.text_source"),
        ("cache", {"latent_source": CLIP}, r"cache\.latent_source"),
        ("cache", {"text_source": CLIP, "text_encoders": "/t"}, "remove text_encoders and text_quantize"),
        ("cache", {"text_source": CLIP, "text_quantize": "int8"}, "remove text_encoders and text_quantize"),
        ("cache", {"latent_source": CLIP.replace("CLIP", "VAE"), "vae": "/v"}, "encodes; remove vae"),
    ],
)  # fmt: skip
def test_problems_are_named(section, values, message):
    with pytest.raises(ValueError, match=message):
        make_job(_with(section, **values))


@pytest.mark.parametrize(
    ("section", "values"), [("evaluation", {"folder": "/held_out"}), ("cache", {"text_source": CLIP})]
)
def test_a_dataset_that_arrived_encoded_needs_no_encoders(section, values):
    job = {**MINIMAL, "data": {"encoded": "/cache/datasets/a.json"}}
    assert make_job(job).data.folders == ()
    with pytest.raises(ValueError, match=r"data\.encoded"):
        make_job({**job, section: values})


def test_settings_that_contradict_each_other_are_named_without_all_others():
    job = _with("split", balance="time") | {"parallel": {"strategy": "data"}}
    for values, key in ((job, "job"), (_with("split", split_at=[3]), "split")):
        with pytest.raises(ValueError, match=rf"  {key}: .*split_at|  {key}: .*balance") as refused:
            make_job(values)
        assert "found" not in str(refused.value) and "/data/cats" not in str(refused.value)


def test_several_problems_come_at_once():
    said = (r"lora\.rank", r"train\.colour", r"train\.steps: is required", r"parallel: is one section, \[parallel\]")
    with pytest.raises(ValueError, match="(?s)" + "".join(f"(?=.*{each})" for each in said)):
        make_job(_with("lora", rank=-1) | {"train": {"colour": "red"}, "parallel": [{"strategy": "pipeline"}]})


def test_relative_paths_start_at_the_file(tmp_path):
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "m"\n[[data.folders]]\npath = "d"\n[train]\nsteps = 1\n[output]\nfolder = "out"\n'
    )
    job = load_job(tmp_path / "job.toml")
    assert job.model.path == str(tmp_path / "m") and job.data.folders[0].path == str(tmp_path / "d")
    assert job.output.folder == str(tmp_path / "out") and job.cache.folder == ""
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "m"\n[data]\nencoded = "c/datasets/a.json"\n[train]\nsteps = 1\n[output]\nfolder = "out"\n'
    )
    assert load_job(tmp_path / "job.toml").data.encoded == str(tmp_path / "c" / "datasets" / "a.json")


def test_relative_folders_of_a_list_start_at_the_file(tmp_path):
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "m.safetensors"\nfamily = "comfyui"\n[data]\ncondition = "kontext"\n'
        '[[data.folders]]\npath = "after"\nreferences = ["before", "~/style", "/elsewhere"]\n'
        '[train]\nsteps = 1\n[output]\nfolder = "out"\n'
    )
    job = load_job(tmp_path / "job.toml")
    wanted = (tmp_path / "before", Path("~/style").expanduser(), Path("/elsewhere"))
    assert job.data.folders[0].references == tuple(str(each.resolve()) for each in wanted)
    assert job.model.path == "m.safetensors", "a name that ComfyUI's folders may have"


def test_held_out_images_are_cut_and_conditioned_as_those_that_are_trained():
    data = {"condition": "vace", "resolutions": [640], "caption_dropout": 0.1}
    given = {**MINIMAL, "model": {"path": "m.safetensors", "family": "comfyui"}}
    given["data"] = {**data, "folders": [{"path": "a", "control": "b"}]}
    job = make_job({**given, "evaluation": {"folder": "c", "control": "d"}})
    held_out = job.evaluation.as_data(job.data)
    assert (held_out.condition, held_out.resolutions, held_out.caption_dropout) == ("vace", (640,), 0.0)
    assert [(each.path, each.control, each.repeats) for each in held_out.folders] == [("c", "d", 1)]
    with pytest.raises(ValueError, match=r"evaluation\.control belongs to the images of evaluation\.folder"):
        make_job({**given, "evaluation": {"control": "d"}})
    given["data"] = {"folders": [{"path": "a"}]}
    with pytest.raises(ValueError, match=r"evaluation\.control needs data\.condition"):
        make_job({**given, "evaluation": {"folder": "c", "control": "d"}})


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_path_over_a_link_is_given_to_another_process_as_it_is_and_compared_by_where_it_leads(tmp_path):
    """As where models are a link to a larger disk; earlier versions kept where it leads."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    sections = {"output": {"folder": str(tmp_path / "link" / "out")}, "data": {"folders": [{"path": str(tmp_path)}]}}
    models = [{"path": str(tmp_path / name / "m")} for name in ("link", "disk", "x")]
    given, real, other = (make_job({**MINIMAL, **sections, "model": each}) for each in models)
    save_for_process(given, tmp_path / "job.toml")
    assert load_job(tmp_path / "job.toml") == given
    assert differing_keys(real, given) == differing_keys(given, real) == []
    assert len(differing_keys(given, other)) == 1


def test_differences_that_matter_on_resume():
    old = make_job(MINIMAL)
    assert differing_keys(old, make_job(_with("output", save_every_steps=5, keep_last=7))) == []
    assert differing_keys(old, make_job(_with("cache", text_source=CLIP))) == [f"cache.text_source: '' -> {CLIP!r}"]
    assert differing_keys(old, make_job(_with("lora", rank=8))) == ["lora.rank: 16 -> 8"]
    given, same = (make_job(_with("optimizer", options=each)) for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1.0}))
    assert differing_keys(given, same) == []


def test_where_files_lie_does_not_matter_on_resume():
    """What they hold is compared by its content. Of several folders only the one that differs is named."""
    old = make_job({**MINIMAL, "data": {"folders": [{"path": "a"}, {"path": "b", "resolutions": [256]}]}})
    moved = {"output": {**MINIMAL["output"], "folder": "r"}, "cache": {"folder": "c"}}
    folders = [{"path": "x/a"}, {"path": "x/b", "resolutions": [256]}]
    assert differing_keys(old, make_job({**MINIMAL, **moved, "data": {"folders": folders}})) == []
    other = make_job({**MINIMAL, "model": {**MINIMAL["model"], "path": "m"}, "data": {"folders": folders}})
    assert [line.partition(":")[0] for line in differing_keys(old, other)] == ["model.path"]  # and encoders with it
    other = make_job({**MINIMAL, "data": {"folders": [folders[0], {**folders[1], "repeats": 3}]}})
    assert differing_keys(old, other) == ["data.folders.1.repeats: 1 -> 3"]
    fewer = differing_keys(old, make_job({**MINIMAL, "data": {"folders": folders[:1]}}))
    assert "data.folders.1.repeats: 1 -> nothing" in fewer and not any(".0." in line for line in fewer)


RENAMED = [
    ("train", "accumulation", 4, "train", "gradient_accumulation_steps", 4),
    ("pipeline", "schedule", "none", "parallel", "strategy", "none"),
    ("pipeline", "schedule", "1f1b", "parallel", "strategy", "pipeline"),
    ("pipeline", "schedule", "gpipe", "parallel", "strategy", "pipeline"),
    ("pipeline", "schedule", "replicas", "parallel", "strategy", "data"),
    ("pipeline", "ahead", 2, "parallel", "microbatches_ahead", 2),
    ("split", "kept_blocks", [2, 4], "split", "blocks_without_checkpointing", [2, 4]),
    ("split", "swapped_blocks", [0, 3], "split", "offloaded_blocks", [0, 3]),
]


@pytest.mark.parametrize(("old_section", "old_key", "old", "section", "key", "value"), RENAMED)
def test_an_older_key_means_the_same_and_is_said_once(tmp_path, caplog, old_section, old_key, old, section, key, value):
    expected = make_job(_with(section, **{key: value}))
    save_job(expected, tmp_path / "job.toml")
    text = (tmp_path / "job.toml").read_text()
    values = tomlkit.parse(text).unwrap()
    del values[section][key]
    values.setdefault(old_section, {})[old_key] = old
    (tmp_path / "job.toml").write_text(tomlkit.dumps(values))
    assert load_job(tmp_path / "job.toml") == expected
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if f"{old_section}.{old_key} is an older name of {section}.{key}" in line]) == 1
    assert len(lines) == 1 + (old != value)
    caplog.clear()
    save_job(expected, tmp_path / "job.toml")  # today's names alone are written
    assert load_job(tmp_path / "job.toml") == expected and not caplog.records


def test_an_older_key_beside_todays_is_refused():
    assert make_job(_with("split", balance="bytes")) == make_job(MINIMAL)
    values = _with("train", accumulation=2, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"train\.accumulation is an older name .* remove train\.accumulation"):
        make_job(values)
    assert values["train"]["accumulation"] == 2  # what was given is not changed
    both = _with("parallel", strategy="none") | {"pipeline": {"schedule": "none"}}
    with pytest.raises(ValueError, match=r"pipeline\.schedule is an older name of parallel\.strategy"):
        make_job(both)


@pytest.mark.parametrize("path", [r"C:\Users\me\cat", r"D:\data\cat", r"D:\train\new", "D:\\data\\"])
def test_a_backslash_that_is_read_as_an_escape_is_explained(path, tmp_path):
    """Whether TOML knows the escape, and makes another path of it, or not."""
    save_job(make_job(MINIMAL), tmp_path / "job.toml")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace('"/data/cats"', f'"{path}"'))
    with pytest.raises(ValueError) as refused:
        load_job(tmp_path / "job.toml")
    assert str(tmp_path / "job.toml") in str(refused.value) and BACKSLASHES in str(refused.value)
    (tmp_path / "job.toml").write_text(text.replace('"/data/cats"', f"'{path}'"))
    assert Path(load_job(tmp_path / "job.toml").data.folders[0].path).name.rstrip("\\") == path.rstrip("\\")


@pytest.mark.parametrize("text", ["[model\n", '[model]\rpath = "m"', '[model]\npath = "C:/x" y\n'])
def test_a_mistake_is_told_with_its_file_and_without_advice_on_backslashes(text, tmp_path):
    (tmp_path / "job.toml").write_bytes(text.encode())
    with pytest.raises(ValueError, match=r"job\.toml.*line [12]") as refused:
        load_job(tmp_path / "job.toml")
    assert BACKSLASHES not in str(refused.value)


def test_names_of_any_bytes_reach_another_process(tmp_path):
    job = make_job(_with("output", folder="/runs/caf\udce9") | {"cache": {"folder": "/caches/\udcff\u00e9"}})
    save_for_process(job, tmp_path / "job.toml")
    assert load_job(tmp_path / "job.toml") == job and make_job(json.loads(json.dumps(job_to_dict(job)))) == job
    (tmp_path / "job.toml").write_bytes((tmp_path / "job.toml").read_bytes().split(b"\n", 1)[1])
    with pytest.raises(ValueError, match="is not in UTF-8"):  # of a user, it is a mistake
        load_job(tmp_path / "job.toml")


def test_a_list_without_end_is_refused_by_name_and_not_spelt_out(tmp_path: Path) -> None:
    values = {**MINIMAL, "data": {"folders": [{"path": "x"}], "resolutions": [64] * 10_001}}
    with pytest.raises(ValueError, match=r"^data\.resolutions has 10001 entries"):
        make_job(values)
    (tmp_path / "job.toml").write_text("a = [" + "1, " * 20_001 + "]")
    with pytest.raises(ValueError, match=r"job\.toml: it has 20001 lines and commas"):
        load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("lora", "k" * 100_000, 1), ("lora", "kind", "lora" * 100_000), ("data", "resolutions", [-1] * 100)],
)
def test_problems_are_told_in_a_message_that_can_be_read(section: str, key: str, value: Any) -> None:
    values = {**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}}
    with pytest.raises(ValueError, match=re.escape(f"{section}.{key[:100]}")) as refusal:
        make_job(values)
    assert len(str(refusal.value)) < 20_000
    assert ("and 80 more" in str(refusal.value)) == isinstance(value, list)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_paths_that_lead_nowhere_are_left_to_whoever_reads_them(tmp_path):
    """Links in a circle, and the home folder of nobody."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    text = '[model]\npath = "m"\n[train]\nsteps = 1\n[output]\nfolder = "o"\n[[data.folders]]\npath = "{}"\n'
    for path, end in (("loop/x", "loop/x"), ("~no_such_user_here/x", "~no_such_user_here/x")):
        (tmp_path / "job.toml").write_text(text.format(path))
        assert load_job(tmp_path / "job.toml").data.folders[0].path.endswith(end)


JOB: dict[str, dict[str, Any]] = {
    "model": {"path": "sdxl.safetensors", "family": "comfyui"}, "data": {"folders": [{"path": "/images"}]},
    "train": {"steps": 1}, "output": {"folder": "/run"}, "lora": {"text_encoder": True},
}  # fmt: skip


def test_a_rank_and_a_rate_of_their_own_are_those_of_the_rest_where_left_out() -> None:
    whole = make_job({**JOB, "lora": {"text_encoder": True, "rank": 8, "alpha": 4.0}})
    assert (whole.lora.text_rank, whole.lora.strength, whole.optimizer.text_rate) == (8, 0.5, 1e-4)
    optimizer = {"text_encoder_learning_rate": 5e-5}
    own = make_job({**JOB, "lora": {"text_encoder": True, "text_encoder_rank": 4}, "optimizer": optimizer})
    assert (own.lora.text_rank, own.optimizer.text_rate) == (4, 5e-5)


@pytest.mark.parametrize("strategy", ["auto", "none"])
def test_one_model_over_any_number_of_devices_is_taken(strategy: str) -> None:
    assert make_job({**JOB, "parallel": {"strategy": strategy}, "split": {"devices": ["cuda:0", "cuda:1"]}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"path": "/m", "family": ""}, r'set model\.family = "comfyui" for one of these'),
        ("parallel", {"strategy": "pipeline"}, r'parallel\.strategy none, .* is "pipeline"; set it to "auto"'),
        ("parallel", {"strategy": "data"}, r'parallel\.strategy none, .* is "data"'),
        ("parallel", {"strategy": "fsdp"}, r'parallel\.strategy none, .* is "fsdp"'),
        ("parallel", {"processes": 2}, r"parallel\.processes = 2 .* set it to 1"),
        ("data", {"encoded": "/e.json"}, r"data\.encoded holds captions that are encoded already; give folders"),
        ("data", {"folders": [{"path": "/i"}], "condition": "first-frame"}, r'data\.condition = "first-frame"'),
        ("lora", {"text_encoder": True, "kind": "lokr"}, r'kind = "lokr" asks for another; remove one'),
        ("lora", {"text_encoder": True, "dora": True}, r"dora asks for another; remove one"),
        ("lora", {"text_encoder_rank": 4}, r"set text_encoder = true, or remove it"),
        ("lora", {"targets": ["lora_te1*"]}, r"set text_encoder = true to train all layers"),
        ("optimizer", {"name": "prodigy", "text_encoder_learning_rate": 0.5}, r"one learning rate for all"),
    ],
)
def test_what_goes_with_no_text_encoder_is_refused_with_what_does(section, values, message):
    with pytest.raises(ValueError, match=message):
        make_job({**JOB, section: values})
