"""CONDITIONING and LATENT taken apart: what is read, and what is refused rather than lost."""

import pytest
import torch
from devicebridge.encoding.comfy_data import (
    load_encoded,
    read_conditioning,
    read_pairs,
    read_samples,
    save_encoded,
    shared_in_batch,
    store_of_encoded,
)
from devicebridge.encoding.store import CacheStore
from devicebridge.families.comfy.inputs import ComfyReader, fit_mask, option_path
from devicebridge.families.spec import ComfyInputs, LatentSpec

STATES = torch.randn(1, 5, 8)
POOLED = torch.randn(1, 3)
IMAGE = {"samples": (4, 3, 2, 2)}


def _conditioning(**options):
    return [[STATES, options]]


def test_states_and_pooled_output_lose_their_batch():
    options = {"attention_mask": torch.ones(1, 5), "reference_latents": None}
    entry = read_conditioning(_conditioning(pooled_output=POOLED, **options), "it")
    assert entry.keys() == {"cond", "pooled_output"}
    assert torch.equal(entry["cond"], STATES[0]) and torch.equal(entry["pooled_output"], POOLED[0])


@pytest.mark.parametrize(
    "options",
    [
        {"guidance": 3.5}, {"reference_latents": [torch.ones(1)]}, {"hooks": object()}, {"area": (1, 2, 3, 4)},
        {"attention_mask_img_shape": (4, 4)}, {"mask": torch.ones(1, 4, 4)}, {"start_percent": 0.5},
    ],
)  # fmt: skip
def test_options_that_change_what_the_model_is_given_are_refused(options):
    with pytest.raises(ValueError, match=rf"the caption: its CONDITIONING has {next(iter(options))}") as caught:
        read_conditioning(_conditioning(pooled_output=POOLED, **options), "the caption")
    assert ("FluxGuidance node out" in str(caught.value)) == ("guidance" in options)


class _Seen:
    """As CLIP Vision Encode gives it."""

    def __init__(self, **values):
        self.__dict__.update(values)


def test_what_a_native_model_may_read_is_kept_under_its_name():
    ids, frames, latent = torch.arange(7), torch.randn(1, 16, 3, 4, 4), torch.randn(1, 4, 2, 2)
    seen = _Seen(last_hidden_state=torch.randn(1, 5, 8), image_embeds=torch.randn(1, 8), mm_projected=None)
    options = {
        "width": 1024, "is_long": True, "attention_mask": torch.ones(1, 5), "t5xxl_ids": ids,
        "concat_latent_image": frames, "reference_latents": [latent, torch.randn(1, 4, 3, 3), latent],
        "clip_vision_output": seen,
    }  # fmt: skip
    entry = read_conditioning(_conditioning(**options, start_percent=0.0, end_percent=1.0), "it", keeps_all=True)
    assert entry["option.width"].item() == 1024 and entry["option.is_long"].dtype is torch.bool
    assert entry["option.attention_mask"].shape == (5,)
    assert torch.equal(entry["whole.t5xxl_ids"], ids)
    assert torch.equal(entry["option.concat_latent_image"], frames[0])
    assert [entry[f"option.reference_latents.{index}"].shape for index in (0, 1)] == [(4, 2, 2), (4, 3, 3)]
    assert torch.equal(entry["option.clip_vision_output.last_hidden_state"], seen.last_hidden_state[0])
    assert len(entry) == 1 + 10 and len({tensor.data_ptr() for tensor in entry.values()}) == len(entry)
    assert {path[0] for path in map(option_path, entry) if path} == options.keys()


def test_what_a_batch_is_given_once_must_be_equal_in_it():
    options = {"reference_latents_method": "index", "width": 8, "t5xxl_ids": torch.arange(3), "x": torch.ones(1, 2)}
    entry = read_conditioning(_conditioning(**options), "it", keeps_all=True)
    assert shared_in_batch({}, entry).keys() == {"words.reference_latents_method", "option.width", "whole.t5xxl_ids"}
    samples, mask = torch.randn(4, 2, 2, 2), torch.ones(1, 2, 1, 1)
    assert "noise_mask" not in shared_in_batch({"samples": samples, "noise_mask": mask}, {})
    mask[0, 1] = -1  # a place that is not there
    assert torch.equal(shared_in_batch({"samples": samples, "noise_mask": mask}, {})["noise_mask"], mask)
    guides = [{"strength": 0.5, "pixel_mask": torch.rand(1, 1, 2, 4, 4)}]  # LTX-Video takes the first sample's for all
    options = {"keyframe_idxs": torch.ones(1, 3, 4, 2), "guide_attention_entries": guides}
    ((latents, text),) = _pair(torch.randn(1, 4, 2, 2, 2), torch.ones(1, 1, 2, 1, 1), **options)
    names = {f"option.guide_attention_entries.0.{name}" for name in guides[0]}
    assert shared_in_batch(latents, text).keys() == {"noise_mask.varies", *names}


@pytest.mark.parametrize(
    "options",
    [
        {"guidance": 3.5}, {"reference_latents": [torch.ones(2, 4, 2, 2)]},
        {"reference_latents": [torch.ones(1, 4, 2, 2), None]},
        {"reference_latents": [torch.ones(1, 4, 2, 2), object()]}, {"reference_latents": []},
        {"a": {"name.with.points": 1.0}}, {"start_percent": 0.2}, {"keyframe_idxs": torch.ones(1, 3, 4, 2)},
        {"unclip_conditioning": [{"strength": 1.0}]}, {"hooks": object()}, {"mask": torch.ones(1, 4, 4)},
    ],
)  # fmt: skip
def test_what_cannot_be_kept_for_a_native_model_is_refused(options):
    with pytest.raises(ValueError, match=rf"it: its CONDITIONING has {next(iter(options))}"):
        read_conditioning(_conditioning(**options), "it", keeps_all=True)


@pytest.mark.parametrize(
    ("need", "given", "words"),
    [
        ("concat_latent_image", "concat_latent_image", ["which Wan is given beside the noise"]),
        ("clip_vision_output", "clip_vision_output.image_embeds", ["embedder of Wan", "stock_vision", "VisionEncode"]),
    ],
)
def test_a_model_asks_for_what_it_is_given_beside_the_noise(need, given, words):
    native = ComfyInputs("cond", "", lambda samples: samples, reads_all=True, needs=(need,))
    reader, shapes = ComfyReader(native, {}, LatentSpec(4, 8), "Wan"), {"cond": (5, 8), "option.width": ()}
    assert all(each in reader.text_problem(shapes) for each in [f"no {need}", *words])
    assert not reader.text_problem({**shapes, f"option.{given}": (16, 3, 4, 4)})


@pytest.mark.parametrize(
    "wrong",
    [
        _conditioning() * 2, [], None, [[STATES]], [[STATES[0], {}]], [[STATES.expand(2, 5, 8), {}]],
        _conditioning(pooled_output=torch.ones(3)),
    ],
)  # fmt: skip
def test_anything_else_is_no_conditioning(wrong):
    with pytest.raises(ValueError, match=r"it: .*(CONDITIONING|pooled_output)"):
        read_conditioning(wrong, "it")


def test_samples_keep_their_shape():
    image, video = torch.randn(2, 4, 6, 8), torch.randn(1, 16, 3, 6, 8)
    assert [entry["samples"].shape for entry in read_samples(image, "it")] == [(4, 6, 8)] * 2
    assert torch.equal(read_samples(video, "it")[0]["samples"], video[0])
    for wrong in (torch.ones(6, 8), torch.ones(0, 4, 6, 8), None, [image]):
        with pytest.raises(ValueError, match="it: samples are a tensor"):
            read_samples(wrong, "it")


def test_pairs_follow_cores_convention():
    """One LATENT and CONDITIONING each, or a batch with an item per sample, as Resolution Bucket gives them."""
    images = torch.randn(3, 4, 2, 2)
    texts = [torch.randn(1, length, 8) for length in (5, 6, 7)]
    items = [[states, {"pooled_output": POOLED + index}] for index, states in enumerate(texts)]
    single = read_pairs([{"samples": image[None]} for image in images], [[item] for item in items])
    batched = read_pairs([{"samples": images[:2]}, {"samples": images[2:], "batch_index": [2]}], [items[:2], items[2:]])
    for pairs in (list(single), list(batched)):
        assert len(pairs) == 3
        for index, (latents, text) in enumerate(pairs):
            assert torch.equal(latents["samples"], images[index])
            assert torch.equal(text["cond"], texts[index][0]) and torch.equal(text["pooled_output"], POOLED[0] + index)


@pytest.mark.parametrize(
    ("latents", "conditioning", "words"),
    [
        ([{"samples": torch.ones(1, 4, 2, 2)}], [], "1 latents and 0 conditionings"),
        ([{"samples": torch.ones(2, 4, 2, 2)}], [_conditioning()], "entry 1 of 1: a latent of 2 samples"),
        ([{"samples": torch.ones(1, 4, 2, 2)}], [_conditioning() * 2], "no combined prompts"),
        ([{"samples": torch.ones(1, 4, 2, 2), "noise_mask": torch.ones(1)}], [_conditioning()], "noise_mask"),
        ([torch.ones(1, 4, 2, 2)], [_conditioning()], "a LATENT is"),
        ([{"samples": torch.full((1, 4, 2, 2), torch.nan)}], [_conditioning()], "entry 1 of 1: samples holds NaN"),
    ],
)
def test_lists_that_do_not_belong_together_are_refused(latents, conditioning, words):
    with pytest.raises(ValueError, match=words):
        list(read_pairs(latents, conditioning))


def _pair(samples, mask, **options):
    latent = {"samples": samples, "noise_mask": mask}
    return list(read_pairs([latent], [_conditioning(**options) * samples.shape[0]]))


def test_a_noise_mask_is_kept_as_samplers_share_it_among_the_samples():
    """A video takes one of four sides for frames of one mask; a batch begins again with the first."""
    frames, images = torch.rand(3, 5, 7) + 0.1, torch.rand(2, 8, 8)
    found = [entry["noise_mask"] for entry, _ in _pair(torch.randn(2, 4, 3, 2, 2), frames)]
    assert all(torch.equal(each, frames[None]) for each in found)
    found = [entry["noise_mask"] for entry, _ in _pair(torch.randn(3, 4, 2, 2), images)]
    assert [torch.equal(each[0], images[index]) for index, each in enumerate(found[:2])] == [True, True]
    assert torch.equal(found[2], found[0])
    own = torch.rand(2, 1, 3, 1, 1)
    found = [entry["noise_mask"] for entry, _ in _pair(torch.randn(2, 4, 3, 2, 2), own)]
    assert torch.equal(torch.stack(found), own)


def test_a_noise_mask_of_ones_is_none_at_all():
    samples = torch.randn(1, 4, 3, 2, 2)
    ((masked, text),) = _pair(samples, torch.ones(1, 1, 3, 1, 1))
    ((plain, same),) = read_pairs([{"samples": samples}], [_conditioning()])
    assert masked.keys() == plain.keys() and text.keys() == same.keys()
    ((guided, _),) = _pair(samples, torch.ones(1, 1, 3, 1, 1), keyframe_idxs=torch.ones(1, 3, 4, 2))
    assert "noise_mask" in guided, "the model looks where the guides are by it"


def test_guides_are_kept_with_the_noise_mask_of_their_latent():
    entries = [{"pre_filter_count": 4, "strength": 0.5, "pixel_mask": None, "latent_shape": [1, 2, 2]}]
    mask = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1, 1)
    options = {"keyframe_idxs": torch.ones(1, 3, 4, 2), "guide_attention_entries": entries}
    ((_, text),) = _pair(torch.randn(1, 4, 2, 2, 2), mask, **options)
    assert text["option.keyframe_idxs"].shape == (3, 4, 2)
    assert text["option.guide_attention_entries.0.strength"].item() == 0.5
    with pytest.raises(ValueError, match="keyframe_idxs, but its LATENT has no noise_mask; connect the latent"):
        list(read_pairs([{"samples": torch.randn(1, 4, 2, 2, 2)}], [_conditioning(**options)]))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(1, 1, 3, 2, 2), "zero in every cell"),
        (torch.full((1, 1, 3, 2, 2), torch.nan), "noise_mask holds NaN"),
        (torch.rand(1, 3, 3, 2, 2), "a mask has one, or as many"),
        (torch.rand(1, 1, 1, 3, 2, 2), "a mask has one, or as many"), ([1.0], "noise_mask is a tensor"),
    ],
)  # fmt: skip
def test_a_noise_mask_that_cannot_be_meant_is_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        _pair(torch.randn(1, 4, 3, 2, 2), mask)


def test_a_noise_mask_that_no_latent_cell_sees_leaves_nothing_to_learn():
    """A spot of two pixels lies between the places that samplers look at."""
    spot = torch.zeros(1, 1, 64, 64)
    spot[..., :2, :2] = 1
    assert not fit_mask(spot[0], (1, 8, 8)).any()
    with pytest.raises(ValueError, match=r"zero in every cell of the latent.*nothing to learn.*larger"):
        _pair(torch.randn(1, 4, 8, 8), spot)
    spot[..., :4, :4] = 1
    assert len(_pair(torch.randn(1, 4, 8, 8), spot)) == 1


def test_an_empty_latent_that_holds_a_first_frame_alone_is_no_clip_to_learn():
    """As Wan22ImageToVideoLatent and LTXVImgToVideo make it, to begin a sampling with."""
    mask = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1, 1)
    samples = torch.randn(1, 4, 3, 2, 2)
    samples[:, :, 1:] = torch.randn(1, 4, 1, 1, 1)
    with pytest.raises(ValueError, match=r"empty where its noise_mask denoises.*VAE Encode"):
        _pair(samples, mask)
    samples[0, 0, 2, 1, 1] += 1
    assert len(_pair(samples, mask)) == 1


def test_noise_masks_of_whole_frames_share_no_batch_with_those_of_places():
    """What counts is the mask in the size of the latents, in the type of the model."""
    whole = torch.tensor([0.0, 0.5, 1.0]).view(1, 3, 1, 1).expand(1, 3, 8, 8).clone()
    place, hair, unseen = whole.clone(), whole.clone(), whole.clone()
    place[0, 1, :4] = 1
    hair[0, 1, :4] += 1e-6
    unseen[0, 1, 0, 0] = 1  # which no cell of smaller latents is made of

    def varies(mask, side=8):
        entry = {"samples": torch.randn(4, 3, side, side), "noise_mask": mask}
        (found,) = shared_in_batch(entry, {}).values()
        return found.tolist()

    assert varies(whole) == varies(1 - whole) == [False] * 3 and varies(place) == [True] * 3
    assert varies(hair) == [True, False, False], "a model in bfloat16 sees one value"
    assert varies(unseen) == [True] * 3 and varies(unseen, side=2) == [False] * 3
    image = {"samples": torch.randn(4, 8, 8), "noise_mask": place[:, 1]}
    assert shared_in_batch(image, {})["noise_mask.varies"].tolist() == [True] * 3


def test_a_noise_mask_is_resized_as_samplers_do_and_models_of_other_families_refuse_it():
    """Interpolated between the centres of places, without corners aligned."""
    found = fit_mask(torch.tensor([[[0.0, 1.0]]]), (1, 1, 4))
    assert found.shape == (1, 1, 1, 4) and found.flatten().tolist() == [0.0, 0.25, 0.75, 1.0]
    exact = torch.rand(1, 3, 2, 2)
    assert torch.equal(fit_mask(exact, (3, 2, 2)), exact)
    ours = ComfyInputs("states", "width", lambda samples: samples, latent_dims=3)
    problem = ComfyReader(ours, {}, LatentSpec(4, 8), "Wan").latents_problem({"noise_mask": (1, 3, 1, 1), **IMAGE})
    assert "noise_mask, which training of Wan does not read" in problem


def _pairs(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    text = {"cond": torch.randn(5, 8, generator=generator), "pooled_output": torch.randn(4, generator=generator)}
    return [({"samples": torch.randn(4, 2, 3, generator=generator)}, text) for _ in range(count)]


def test_what_was_saved_is_read_back(tmp_path):
    store, told = CacheStore(tmp_path / "cache"), []
    path = save_encoded(_pairs(), store, told.append)
    assert told == [1, 2, 3] and store_of_encoded(path).folder == store.folder
    assert len(list(store.keys())) == 4, "the text they share is kept once"
    for saved, (latents, text) in zip(load_encoded(path), _pairs(), strict=True):
        assert torch.equal(store.get(saved.latents)["samples"], latents["samples"])
        assert all(torch.equal(store.get(saved.text)[name], text[name]) for name in text)
        assert dict(saved.latents_shapes) == {"samples": (4, 2, 3)}
        assert dict(saved.text_shapes) == {"cond": (5, 8), "pooled_output": (4,)}


def test_the_same_samples_are_the_same_list_and_others_another(tmp_path):
    store = CacheStore(tmp_path)
    path = save_encoded(_pairs(), store)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert save_encoded(_pairs(), store) == path
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")} == before
    assert save_encoded(_pairs(2), store) != path != save_encoded(_pairs()[::-1], store)
    views = [({"samples": latents["samples"].double().float()}, text) for latents, text in _pairs()]
    assert save_encoded(views, store) == path, "content decides, not the object"


def test_what_a_batch_must_share_is_named_and_older_lists_name_nothing(tmp_path):
    def pair(method, width):
        text = {"cond": torch.ones(2, 3), "words.method": torch.tensor(list(method), dtype=torch.uint8)}
        return {"samples": torch.ones(4, 2, 3)}, {**text, "option.width": torch.tensor(width)}

    path = save_encoded([pair(b"a", 1), pair(b"a", 1), pair(b"b", 1), pair(b"a", 2)], CacheStore(tmp_path))
    first, second, *others = [each.same for each in load_encoded(path)]
    assert first and first == second and len({first, *others}) == 3
    assert not any(each.same for each in load_encoded(save_encoded(_pairs(), CacheStore(tmp_path))))


def test_who_is_interrupted_leaves_entries_but_no_list(tmp_path):
    store = CacheStore(tmp_path)

    def stop(count):
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_encoded(_pairs(), store, stop)
    assert len(list(store.keys())) == 3 and not (tmp_path / "datasets").exists()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    save_encoded(_pairs(), store)
    now = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert kept.items() <= now.items() and len(now) == 4


def test_no_samples_and_no_list_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no samples"):
        save_encoded([], CacheStore(tmp_path))
    path = save_encoded(_pairs(), CacheStore(tmp_path))
    for text in ("{", "[]", '{"version": 2, "samples": []}', '{"version": 1, "samples": [{"latents": 1}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"data\.encoded: .* is no list of encoded samples"):
            load_encoded(path)
    with pytest.raises(ValueError, match="no list of encoded samples"):
        load_encoded(tmp_path / "missing.json")
