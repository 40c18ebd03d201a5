"""Files that belong to an image or clip by its name: found, or refused with the name that is missing."""

import re

import pytest
from devicebridge.config.data import DataConfig, EvaluationConfig, FolderConfig
from devicebridge.config.job import job_keys
from devicebridge.data.folders import scan_folders
from devicebridge.data.samples import BatchOrder, dataset_fingerprint
from devicebridge.families.comfy.conditions import WAYS, evaluation_problem, vision_problem, way_problem
from devicebridge.tests.clips import save_clip, save_image
from devicebridge.tests.unit.data.test_samples import LATENT, VIDEO


def _scan(folder, condition, latent=LATENT, **options):
    given = {name: options.pop(name) for name in ("references", "control") if name in options}
    config = FolderConfig(str(folder), **given)
    return scan_folders(DataConfig((config,), resolutions=(64,), condition=condition, **options), latent)


@pytest.fixture
def folders(tmp_path):
    for seed, name in enumerate(("after/cat.png", "after/dog.png", "before/cat.webp"), start=1):
        save_image(tmp_path / name, seed=seed)
    for seed, name in enumerate(("dog.jpg", "dog_1.png", "dog_2.png", "dog_4.png"), start=5):
        save_image(tmp_path / "before" / name, height=32, width=48, seed=seed)
    return tmp_path / "after", tmp_path / "before"


def _names(sample):
    return [path.replace("\\", "/").rsplit("/", 1)[-1] for path in sample.condition.references]


def test_references_have_the_name_of_their_image_and_numbers_behind_it(folders):
    after, before = folders
    cat, dog = _scan(after, "reference", references=(str(before),))
    assert _names(cat) == ["cat.webp"] and _names(dog) == ["dog.jpg", "dog_1.png", "dog_2.png"]
    assert cat.condition.sizes == ((64, 64),) and dog.condition.sizes == ((32, 48),) * 3
    assert cat.condition.way == "reference" and cat.condition.control is None is cat.condition.clip


def test_several_folders_follow_each_other(folders, tmp_path):
    after, before = folders
    for name in ("cat", "dog"):
        save_image(tmp_path / "style" / f"{name}_1.png", seed=9)
    cat, dog = _scan(after, "reference", references=(str(tmp_path / "style"), str(before)))
    assert _names(cat) == ["cat_1.png", "cat.webp"] and _names(dog) == [
        "dog_1.png", "dog.jpg", "dog_1.png", "dog_2.png",
    ]  # fmt: skip


def test_an_images_own_name_is_nobodys_second_reference(folders):
    after, before = folders
    save_image(after / "dog_1.png", seed=20)
    _, dog, second = _scan(after, "reference", references=(str(before),))
    assert _names(dog) == ["dog.jpg"] and _names(second) == ["dog_1.png"]


def test_a_missing_reference_is_named_with_all_others(folders):
    after, before = folders
    save_image(after / "bird.png", seed=30)
    (before / "cat.webp").unlink()
    with pytest.raises(ValueError, match=r"2 of 3 images") as caught:
        _scan(after, "reference", references=(str(before),))
    for name in ("bird", "cat"):
        assert f"{name}.png: has no reference in {before}; put {name}.png or {name}_1.png there" in str(caught.value)


def test_two_files_of_a_name_a_broken_one_and_too_many_are_refused(folders):
    after, before = folders
    save_image(before / "cat.png", seed=31)
    (before / "dog_1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"has more than one image of its name, cat \(cat.png, cat.webp\)") as caught:
        _scan(after, "reference", references=(str(before),))
    assert "dog_1.png: cannot be read as an image" in str(caught.value)
    (before / "cat.png").unlink()
    save_image(before / "dog_1.png", seed=32)
    with pytest.raises(ValueError, match="dog.png: has 3 references, and data.condition takes 1"):
        _scan(after, "qwen-image-edit", references=(str(before),))


def test_folders_that_a_condition_lacks_or_does_not_take_are_refused(folders):
    after, before = folders
    for condition, given, words in (
        ("kontext", {}, "needs references of this folder"), ("vace", {}, "needs control of this folder"),
        ("vace", {"control": str(before), "references": (str(before),)}, "takes no references"),
        ("kontext", {"references": (str(before / "none"),)}, "does not exist"),
        ("kontext", {"references": (str(after),)}, "to lie in another folder"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            _scan(after, condition, **given)
    with pytest.raises(ValueError, match="needs condition, which says how the model is given it"):
        DataConfig((FolderConfig("x", references=("y",)),))


def _clips(folder, frames=9, size=(64, 64), count=1):
    folder.mkdir()
    for index in range(count):
        save_clip(folder / f"{index}.mp4", frames, size=size)


def test_a_control_clip_is_cut_as_its_clip_is(tmp_path):
    _clips(tmp_path / "clips", frames=9, size=(64, 96))
    _clips(tmp_path / "depth", frames=9, size=(32, 48))
    (sample,) = _scan(tmp_path / "clips", "vace", VIDEO, control=str(tmp_path / "depth"), frames=(5,))
    control = sample.condition.control
    assert control.path == str(tmp_path / "depth" / "0.mp4")
    assert (control.resize, control.crop, control.frames) == (sample.resize, sample.crop, sample.frames)
    assert len(sample.frames) == 5 and sample.condition.clip is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"frames": 5}, "has 5 frames, but .* has 9"),
        ({"size": (64, 64)}, "is 64x64, but .* is 96x64; one shape is needed"),
        ({"count": 0}, "has no clip or image of its name, 0"),
    ],
)
def test_another_control_clip_is_refused(tmp_path, other, words):
    _clips(tmp_path / "clips", frames=9, size=(64, 96))
    _clips(tmp_path / "depth", **{"frames": 9, "size": (32, 48), **other})
    with pytest.raises(ValueError, match=words):
        _scan(tmp_path / "clips", "vace", VIDEO, control=str(tmp_path / "depth"), frames=(5,))


def test_clip_vision_is_shown_the_sample_that_follows_a_control(tmp_path):
    """As WanFunControlToVideo takes it; VACE has no such input."""
    for name in ("clips", "depth"):
        _clips(tmp_path / name)
    given = {"control": str(tmp_path / "depth"), "frames": (5,)}
    (fun,), (vace,) = (_scan(tmp_path / "clips", way, VIDEO, **given) for way in ("fun-control", "vace"))
    assert fun.condition.clip == fun.image_request() and vace.condition.clip is None


@pytest.mark.parametrize("name", ["first-frame", "fun-control"])
def test_an_image_embedder_without_clip_vision_is_refused_with_what_works(name):
    needs = ("concat_latent_image", "clip_vision_output")
    found = vision_problem(name, needs, is_named=False)
    assert re.search("names no CLIP vision model; .*cache.stock_vision, or .*CLIPVisionEncode", found)
    assert not vision_problem(name, needs, is_named=True) and not vision_problem(name, needs[:1], is_named=False)


def test_a_way_that_gives_no_clip_vision_leads_to_the_graph():
    found = vision_problem("fun-control-2.2", ("clip_vision_output",), is_named=True)
    assert "gives it none" in found and "CLIPVisionEncode" in found and "stock_vision" not in found


def test_a_first_frame_is_the_clips_own_and_images_have_none(tmp_path):
    _clips(tmp_path / "clips", frames=9)
    (sample,) = _scan(tmp_path / "clips", "first-frame", VIDEO, frames=(5,))
    assert sample.condition.clip == sample.image_request()
    save_image(tmp_path / "clips" / "still.png")
    with pytest.raises(ValueError, match="still.png: is one frame"):
        _scan(tmp_path / "clips", "first-frame", VIDEO, frames=(5,))


def test_references_decide_the_dataset_and_the_batches(folders):
    after, before = folders
    for name, size in (("eel", (64, 64)), ("fox", (32, 48))):
        save_image(after / f"{name}.png", seed=40)
        save_image(before / f"{name}.png", *size, seed=41)
    samples = _scan(after, "reference", references=(str(before),))
    plain = _scan(after, "")
    sizes = [{tuple(samples[index].condition.sizes) for index in batch.indices} for batch in _batches(samples)]
    assert all(len(each) == 1 for each in sizes) and len(sizes) == 3 > len(_batches(plain))
    first = dataset_fingerprint(samples)
    assert first != dataset_fingerprint(plain)
    save_image(before / "fox.png", 32, 48, seed=42)
    assert dataset_fingerprint(samples) != first


def _batches(samples):
    return BatchOrder(samples, batch_size=4, seed=0).batches_of(0)


def test_every_name_of_the_setting_is_a_way():
    assert {*filter(None, job_keys()["data.condition"].choices)} == WAYS.keys()


@pytest.mark.parametrize(
    ("name", "model", "channels", "beside", "words"),
    [
        ("kontext", "Flux", 16, 0, ""), ("kontext", "Flux", 128, 0, "it takes reference$"),
        ("reference", "Flux", 128, 0, ""), ("first-frame", "WanModel", 16, 20, ""),
        ("first-frame", "WanModel", 48, 0, ""),
        ("first-frame", "WanModel", 16, 0, "0 beside the noise; nothing of folders conditions it"),
        ("first-frame", "WanModel", 16, 32, "it takes fun-control$"), ("fun-control-2.2", "WanModel", 48, 100, ""),
        ("vace", "VaceWanModel", 16, 0, ""),
        ("z-image-omni", "QwenImageTransformer2DModel", 16, 0, "qwen-image-edit or qwen-image-edit-plus$"),
    ],
)  # fmt: skip
def test_a_way_that_does_not_fit_says_which_does(name, model, channels, beside, words):
    found = way_problem(name, model, channels, beside)
    assert bool(found) == bool(words) and re.search(words, found)


@pytest.mark.parametrize(
    ("name", "references", "control", "missing"),
    [
        ("", False, False, ""), ("first-frame", False, False, ""), ("kontext", False, False, "references"),
        ("kontext", True, False, ""), ("vace", True, False, "control"), ("vace", False, True, ""),
        ("fun-control-2.2", False, True, ""),
    ],
)  # fmt: skip
def test_images_that_are_held_out_need_what_those_that_are_trained_need(name, references, control, missing):
    found = evaluation_problem(name, EvaluationConfig("a", references=("b",) * references, control="c" * control))
    assert bool(found) == bool(missing) and f"evaluation.{missing}" in found + "evaluation."
