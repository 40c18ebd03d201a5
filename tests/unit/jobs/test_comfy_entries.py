"""Jobs on what ComfyUI's encoders made: with the encoders, with what they left, and with lists that arrived encoded."""

import dataclasses
import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from devicebridge.data.samples import Condition
from devicebridge.encoding.comfy_data import read_pairs, save_encoded
from devicebridge.encoding.key import comfy_text_key
from devicebridge.encoding.store import CacheStore
from devicebridge.events import EventLog
from devicebridge.families.comfy.inputs import read_latents, read_text
from devicebridge.families.registry import find_family
from devicebridge.jobs import job as job_module
from devicebridge.jobs.encode_job import (
    CACHE_PARTS,
    ComfyEncoders,
    cache_job,
    cache_store,
    fill_cache,
    missing_prompts,
    prune_caches,
    verify_cache,
    wanted_conditions,
)
from devicebridge.jobs.job import check_job, run_job
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.unit.encoding.test_sources import StubClip, StubVae
from safetensors import safe_open
from safetensors.torch import load_file

SOURCES = {"text_source": StubClip.fingerprint, "latent_source": StubVae.fingerprint}


class TinyVae(StubVae):
    """As many channels as the tiny FLUX.2 takes."""

    def encode(self, pixels):
        self.pixels.append(pixels)
        return torch.nn.functional.pixel_unshuffle(pixels.movedim(-1, 1), 4)[:, :16]


def _encoders(width=48, pooled=0):
    return ComfyEncoders(StubClip(width, pooled), TinyVae())


def _job(folder: Path, family: str = "flux2", **sections):
    """Of which the model's own encoders are gone."""
    job = make_tiny_job(folder, family, **{"cache": SOURCES, **sections})
    for name in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"):
        shutil.rmtree(folder / "model" / name, ignore_errors=True)
    return job


def _fill(job, encoders):
    with EventLog(Path(job.output.folder)) as events:
        return cache_job(check_job(job), events, encoders=encoders)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the files of a job whose cache a stock CLIP and VAE have filled."""
    folder = tmp_path_factory.mktemp("made")
    _fill(_filled_job(folder), _encoders())
    return folder


@pytest.fixture
def filled(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return _filled_job(tmp_path)


def _filled_job(folder):
    settings = {"evaluation": {"folder": ""}, "data": {"use_masks": False}, "train": {"batch_size": 1, "steps": 3}}
    return _job(folder, **settings)


def test_batches_are_what_comfyuis_model_gets(filled):
    """States behind zeros up to 512 tokens, latents as the VAE made them."""
    job = filled
    data, _ = _fill(job, ComfyEncoders())
    samples = [index for index, sample in enumerate(data.samples) if sample.bucket == (32, 32)][:2]
    batch = data.load(samples, [False, True])
    assert batch.latents.shape == (2, 16, 1, 8, 8) and batch.latents.dtype == torch.float32
    for row, text in enumerate((data.samples[samples[0]].caption, "")):
        states = StubClip(48, 0).encode(text)[0][0][0]
        found = batch.text["prompt_embeds"][row]
        assert found.shape == (512, 48) and torch.equal(found[-len(states) :], states)
        assert not found[: -len(states)].any()
    store = cache_store(job)
    raw = store.get(data.samples[samples[0]].latents_key)["samples"]
    assert torch.equal(batch.latents[0, :, 0], raw)


def test_each_family_reads_its_latents():
    flux1, wan = find_family("flux1").comfy, find_family("wan").comfy
    image, clip = torch.randn(4, 8, 12), torch.randn(16, 2, 4, 6)
    assert torch.equal(read_latents(flux1, {"samples": image}), ((image - 0.1159) * 0.3611)[:, None])
    text = read_text(flux1, {"cond": torch.ones(5, 8), "pooled_output": torch.ones(3)})
    shapes = {"prompt_embeds": (5, 8), "pooled_prompt_embeds": (3,)}
    assert {name: value.shape for name, value in text.items()} == shapes
    assert torch.allclose(read_latents(wan, {"samples": clip})[3], (clip[3] - 0.1075) / 2.6558)


def test_without_comfyui_the_job_trains_on_what_is_there_and_says_so(filled):
    result = run_job(filled)
    with safe_open(result.lora_path, "pt") as file:
        metadata = file.metadata()
    assert metadata["devicebridge_text_source"] == SOURCES["text_source"]
    assert metadata["devicebridge_latent_source"] == SOURCES["latent_source"]
    for name in ("text_source", "latent_source"):
        other = dataclasses.replace(filled.cache, **{name: SOURCES[name][:-1] + "0"})
        with pytest.raises(ValueError, match=rf"cache\.{name}: 'comfyui"):
            run_job(dataclasses.replace(filled, cache=other), resume=True)


def test_what_is_missing_is_refused_before_the_model_is_loaded(filled, monkeypatch):
    monkeypatch.setattr(job_module, "assemble_for_training", lambda *given: pytest.fail("the model was loaded"))
    shutil.rmtree(filled.cache.folder)
    with pytest.raises(ValueError, match="6 captions are not in the cache.*which only ComfyUI can"):
        run_job(filled)


def test_another_encoder_than_named_is_refused(tmp_path):
    job = _job(tmp_path, cache={**SOURCES, "text_source": SOURCES["text_source"][:-1] + "0"})
    with pytest.raises(ValueError, match=r"cache\.text_source names .*but the encoder given is"):
        _fill(job, _encoders())


def test_entries_of_another_model_are_refused(filled, tmp_path):
    """One cache folder serves many models: what a CLIP made for one may be there already."""
    other = _job(tmp_path / "other", "flux1", cache={**SOURCES, "folder": filled.cache.folder})
    shutil.rmtree(tmp_path / "other" / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "other" / "data")
    with pytest.raises(ValueError, match="ComfyUI's CLIP does not fit: of the caption '', its states are 48 wide"):
        run_job(dataclasses.replace(other, evaluation=filled.evaluation))


def test_texts_of_different_lengths_share_no_batch(tmp_path):
    """FLUX.1 pads nothing here: the captions have 12 tokens, the empty one 3."""
    job = make_tiny_job(tmp_path, "flux1", cache={"text_source": StubClip.fingerprint})
    encoders = ComfyEncoders(StubClip(16, 16))
    _fill(job, encoders)
    dropping = dataclasses.replace(job, data=dataclasses.replace(job.data, caption_dropout=0.1))
    with pytest.raises(ValueError, match=r"batch_size is above 1, but .* to 3 to 12 tokens, so they cannot share"):
        _fill(dropping, ComfyEncoders())
    (tmp_path / "data" / "image_1.txt").write_text("a longer picture")
    with pytest.raises(ValueError, match=r"to 12 to 19 tokens.*shorten the longest, 'a longer picture'"):
        _fill(job, ComfyEncoders(StubClip(16, 16)))
    single = dataclasses.replace(dropping, train=dataclasses.replace(job.train, batch_size=1))
    data, _ = _fill(single, ComfyEncoders())
    assert data.load([0], [True]).text["prompt_embeds"].shape == (1, 3, 16)


def test_prompts_that_are_no_captions_are_encoded_once_and_by_the_captions_clip(filled):
    """As a node does before a training that has no CLIP."""
    prompts = dataclasses.replace(filled.samples, prompts=("a blue boat", "a green boat"))
    job, told = dataclasses.replace(filled, samples=prompts), []
    plan = dataclasses.replace(check_job(filled), job=job)
    assert missing_prompts(job) == list(prompts.prompts) and missing_prompts(filled) == []
    with EventLog(Path(job.cache.folder), told.append) as events:
        with pytest.raises(ValueError, match=r"cache\.text_source names"):
            fill_cache(plan, "captions", events, encoders=ComfyEncoders(_OtherClip(48, 0)))
        fill_cache(plan, "captions", events, encoders=_encoders())
    assert missing_prompts(job) == [] and [each.step for each in told if each.kind == "progress"] == [6, 7, 8]
    kept = cache_store(job).get(comfy_text_key("a blue boat", StubClip.fingerprint))
    assert torch.equal(kept["cond"], StubClip(48, 0).encode("a blue boat")[0][0][0])


class _OtherClip(StubClip):
    fingerprint = StubClip.fingerprint[:-1] + ("0" if StubClip.fingerprint[-1] != "0" else "1")


class _TextsOfPictures:
    """As a text encoder that is shown the references: states as long as the caption."""

    sees_with = ""

    def make(self, parts):
        return StubClip(48, 0).encode(parts.caption)

    def release(self):
        pass


def _edit_plan(job, held_out=()):
    """The job's plan, as for a way whose text encoder sees each sample's reference: the sample itself. held_out:
    captions of held-out samples, of the first picture."""
    plan = check_job(job)
    way = {"data": dataclasses.replace(job.data, condition="qwen-image-edit")}
    asked = dataclasses.replace(job, model=dataclasses.replace(job.model, family="comfyui"), **way)
    samples = tuple(
        dataclasses.replace(each, condition=Condition("qwen-image-edit", (each.path,), ((32, 32),)))
        for each in plan.samples
    )
    kept = tuple(dataclasses.replace(samples[0], caption=caption) for caption in held_out)
    return dataclasses.replace(plan, job=asked, samples=samples, eval_samples=kept)


def test_texts_that_are_read_with_pictures_share_a_batch_by_their_own_entries(tmp_path):
    job = _job(tmp_path, evaluation={"folder": ""}, data={"use_masks": False}, train={"batch_size": 2, "steps": 3})
    encoders = dataclasses.replace(_encoders(), conditioner=_TextsOfPictures())
    with EventLog(Path(job.output.folder)) as events:
        data, _ = cache_job(_edit_plan(job), events, encoders=encoders)
        assert len({each.text_keys[0] for each in data.samples}) == len(data.samples)
        assert data.prompt_keys.keys() == {""}
        assert not any(each.text_keys[-1] for each in data.samples)
        (tmp_path / "data" / "image_1.txt").write_text("a longer picture")
        with pytest.raises(ValueError, match="batch_size is above 1, but .* has conditions of other sizes"):
            cache_job(_edit_plan(job), events, encoders=encoders)


def test_what_conditions_held_out_samples_shares_no_batch_and_drops_no_caption(tmp_path):
    """They are loaded one at a time, each with its caption."""
    job = _job(tmp_path, evaluation={"folder": ""}, data={"use_masks": False}, train={"batch_size": 2, "steps": 3})
    encoders = dataclasses.replace(_encoders(), conditioner=_TextsOfPictures())
    plan = _edit_plan(job, held_out=["a much longer caption than the others"])
    with EventLog(Path(job.output.folder)) as events:
        _, held_out = cache_job(plan, events, encoders=encoders)
    assert held_out.load([0], [0]).text["prompt_embeds"].shape[0] == 1
    dropping = dataclasses.replace(plan.job, data=dataclasses.replace(plan.job.data, caption_dropout=0.1))
    wanted = wanted_conditions(dataclasses.replace(plan, job=dropping))
    (kept,) = plan.eval_samples
    assert [caption for caption, files in wanted].count("") == len(plan.samples)
    assert wanted[-1] == (kept.caption, kept.condition) and wanted[-2][0] == ""


def _lists(filled):
    """The filled job's samples as ComfyUI would hand them on, in the job's order."""
    data, _ = _fill(filled, ComfyEncoders())
    latents = [{"samples": data.store.get(each.latents_key)["samples"][None]} for each in data.samples]
    return latents, [StubClip(48, 0).encode(sample.caption) for sample in data.samples]


def _encoded_job(filled, latents, conditioning, name):
    path = save_encoded(read_pairs(latents, conditioning), CacheStore(Path(filled.cache.folder).parent / name))
    return dataclasses.replace(
        filled,
        data=dataclasses.replace(filled.data, folders=(), encoded=str(path)),
        cache=dataclasses.replace(filled.cache, folder="", text_source="", latent_source=""),
        output=dataclasses.replace(filled.output, folder=str(Path(filled.output.folder).parent / f"run_{name}")),
    )


def test_lists_train_the_lora_that_their_images_train(filled):
    job = _encoded_job(filled, *_lists(filled), "lists")
    found, expected = run_job(job), run_job(filled)
    tensors, wanted = load_file(found.lora_path), load_file(expected.lora_path)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted) and found.losses == expected.losses
    with safe_open(found.lora_path, "pt") as file:
        metadata = file.metadata()
    assert metadata["devicebridge_text_source"] == "comfyui CONDITIONING"
    assert metadata["ss_num_train_images"] == "5" and str(Path(job.data.encoded).parent) not in str(metadata)
    plan = check_job(job)
    assert str(verify_cache(plan, CACHE_PARTS)).endswith("conditions: 0 entries whole, 0 missing, 0 damaged'], 0)")
    assert "\n0 entries deleted" in prune_caches({"job": plan}, CACHE_PARTS)[0]
    assert run_job(job, resume=True).losses == expected.losses


def test_the_model_of_the_job_before_is_gone_when_the_next_one_is_loaded(filled, monkeypatch):
    jobs = [_encoded_job(filled, *_lists(filled), name) for name in ("first", "second")]
    models, plain = [], job_module.assemble_for_training

    def assemble(*args):
        gone.append(all(each() is None for each in models))
        made = plain(*args)
        models.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(job_module, "assemble_for_training", assemble)
    gone: list[bool] = []
    gc.disable()  # whose time nobody knows
    try:
        for job in jobs:
            run_job(job)
    finally:
        gc.enable()
    assert gone == [True, True]


def test_lists_with_other_content_are_another_run(filled):
    latents, conditioning = _lists(filled)
    job = _encoded_job(filled, latents, conditioning, "lists")
    run_job(job)
    latents[2]["samples"] = latents[2]["samples"] + 0.5
    changed = _encoded_job(filled, latents, conditioning, "lists")
    with pytest.raises(ValueError, match=r"data: images, captions or masks have changed"):
        run_job(changed, resume=True)


def test_samples_of_one_size_and_text_length_share_batches(filled):
    latents, conditioning = _lists(filled)
    long = [[torch.randn(1, 600, 48), {}]]
    plan = check_job(_encoded_job(filled, latents, [*conditioning[:-1], long], "lists"))
    buckets = [sample.bucket for sample in plan.encoded]
    assert buckets[0] == (8, 8, 512) and buckets[-1] == (8, 8, 600) and (9, 6, 512) not in buckets


@pytest.mark.parametrize(
    ("samples", "conditioning", "words"),
    [
        (torch.ones(1, 4, 8, 8), [[torch.ones(1, 5, 48), {}]], "latents of sample 1: it has 4 channels"),
        (torch.ones(1, 16, 1, 8, 8), [[torch.ones(1, 5, 48), {}]], "VAE makes that of an image"),
        (torch.ones(1, 16, 8, 8), [[torch.ones(1, 5, 40), {}]], "text of sample 1: its states are 40 wide"),
        (torch.ones(1, 16, 8, 8), [[torch.ones(1, 5, 48), {"pooled_output": torch.ones(1, 2)}]], "has a pooled_output"),
    ],
)
def test_lists_of_another_model_are_refused(filled, samples, conditioning, words):
    job = _encoded_job(filled, [{"samples": samples}], [conditioning], "lists")
    with pytest.raises(ValueError, match=words):
        check_job(job)


def test_flux1_needs_pooled_output_and_even_sides(tmp_path):
    job = make_tiny_job(tmp_path, "flux1", evaluation={"folder": ""})
    latents = [{"samples": torch.ones(1, 4, 8, 7)}]
    with pytest.raises(ValueError) as refused:
        check_job(_encoded_job(job, latents, [[[torch.ones(1, 5, 16), {}]]], "lists"))
    assert "it has no pooled_output, which flux1-dev needs" in str(refused.value)
    assert "8 high and 7 wide, but flux1-dev takes multiples of 2" in str(refused.value)


def test_entries_that_are_gone_are_missed_before_the_model_is_loaded(filled, monkeypatch):
    monkeypatch.setattr(job_module, "assemble_for_training", lambda *given: pytest.fail("the model was loaded"))
    job = _encoded_job(filled, *_lists(filled), "lists")
    store = cache_store(job)
    store.remove(check_job(job).encoded[1].latents_key)
    with pytest.raises(ValueError, match="1 of 10 entries of the encoded dataset are gone"):
        run_job(job)
