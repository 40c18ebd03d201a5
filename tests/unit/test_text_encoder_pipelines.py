"""Encoders of models whose families are still to come, bitwise against diffusers' pipelines on tiny random encoders.

Qwen-Image (Qwen2.5-VL, a template of its own, states as long as the caption), Z-Image (Qwen3, padding left out) and
Stable Diffusion 3 (two CLIPs with their hidden states and projections, T5). Specs are here until a family needs them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from devicebridge.caching import encode, streamed_encoder, text_encoder
from devicebridge.caching.store import CacheStore
from devicebridge.caching.streamed_encoder import StreamPlan
from devicebridge.caching.text_encoder import TextEncoder, load_text_encoder
from devicebridge.caching.text_place import TextPlace, forecast_size
from devicebridge.caching.text_weights import TextScheme, is_rounded
from devicebridge.families.spec import TextEncoderSpec
from devicebridge.tests.noise import decibels
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
from devicebridge.training.batches import join_texts

LENGTH = 64
NUM_LAYERS = 4
TEMPLATE = "<|im_start|>system\nTell.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NUM_DROPPED = 21  # of the toy's tokens, a byte each, in what stands before the caption
CAPTIONS = ["a cat", "", "a dog", "x" * 200, "{0} and {}", "an [IMG] here", "a cow"]

# The published sizes: layers=(28,), max_length=1024 + 34, num_dropped_tokens=34.
QWEN_IMAGE = TextEncoderSpec(
    kind="chat_hidden_states",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=LENGTH + NUM_DROPPED,
    layers=(NUM_LAYERS,),
    prompt_template=TEMPLATE,
    num_dropped_tokens=NUM_DROPPED,
    pads=False,
)
# layers=(35,), max_length=512.
Z_IMAGE = TextEncoderSpec(
    kind="chat_hidden_states",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=LENGTH,
    layers=(NUM_LAYERS - 1,),
    template_options={"add_generation_prompt": True, "enable_thinking": True},
    drop_padding=True,
)
# Layers 11 and 31, max_length=77 and 256. CLIP is small, and its projection is in no residual block.
_CLIPS = {
    f"{kind}_{number}": TextEncoderSpec(
        kind=kind,  # type: ignore[arg-type]
        folder=f"text_encoder{suffix}",
        tokenizer_folder=f"tokenizer{suffix}",
        output=f"{kind}_{number}",
        max_length=LENGTH,
        layers=(NUM_LAYERS - 1,) if kind == "hidden_states" else (),
        keep_full_precision=("*",),
    )
    for number, suffix in ((1, ""), (2, "_2"))
    for kind in ("hidden_states", "projected")
}
_T5 = TextEncoderSpec("last_hidden_state", "text_encoder_3", "tokenizer_3", "t5", LENGTH)
SPECS = {"qwen_image": (QWEN_IMAGE,), "z_image": (Z_IMAGE,), "sd3": (*_CLIPS.values(), _T5)}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    save_tiny_text_encoder(root / "qwen_image", "qwen2_5_vl", 64, NUM_LAYERS, max_length=LENGTH)
    save_tiny_text_encoder(root / "z_image", "qwen3", 64, NUM_LAYERS, max_length=LENGTH)
    sd3 = root / "sd3"
    save_tiny_text_encoder(sd3, "clip_projected", 16, NUM_LAYERS, max_length=LENGTH)
    save_tiny_text_encoder(root / "other", "clip", 16, 1, max_length=LENGTH)
    shutil.copytree(root / "other" / "tokenizer", sd3 / "tokenizer", dirs_exist_ok=True)  # pads with another token
    for number, kind, width in ((2, "clip_projected", 32), (3, "t5", 64)):
        names = {"encoder_name": f"text_encoder_{number}", "tokenizer_name": f"tokenizer_{number}"}
        save_tiny_text_encoder(sd3, kind, width, NUM_LAYERS, number, max_length=LENGTH, **names)  # type: ignore[arg-type]
    return {name: root / name for name in SPECS}


def _part(folder: Path, class_name: str, dtype: torch.dtype) -> torch.nn.Module:
    name = text_encoder._dtype_argument()
    return getattr(transformers, class_name).from_pretrained(folder, **{name: dtype}).eval()


def _pipeline(name: str, folder: Path, dtype: torch.dtype):
    """diffusers' pipeline with the whole text encoders and nothing else."""
    import diffusers

    tokenizers = {
        path.name: transformers.AutoTokenizer.from_pretrained(path) for path in sorted(folder.glob("tokenizer*"))
    }
    if name == "sd3":
        classes = {"": "CLIPTextModelWithProjection", "_2": "CLIPTextModelWithProjection", "_3": "T5EncoderModel"}
        encoders = {
            f"text_encoder{suffix}": _part(folder / f"text_encoder{suffix}", class_name, dtype)
            for suffix, class_name in classes.items()
        }
        return diffusers.StableDiffusion3Pipeline(transformer=None, scheduler=None, vae=None, **encoders, **tokenizers)
    pipeline_class, class_name = {
        "qwen_image": (diffusers.QwenImagePipeline, "Qwen2_5_VLForConditionalGeneration"),
        "z_image": (diffusers.ZImagePipeline, "Qwen3ForCausalLM"),
    }[name]
    encoder = _part(folder / "text_encoder", class_name, dtype)
    pipeline = pipeline_class(scheduler=None, vae=None, text_encoder=encoder, transformer=None, **tokenizers)
    if name == "qwen_image":
        pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx = TEMPLATE, NUM_DROPPED
        pipeline.tokenizer_max_length = LENGTH
    return pipeline


@torch.no_grad()
def _theirs(name: str, pipeline, caption: str) -> dict[str, torch.Tensor]:
    """What the pipeline hands to its transformer, of one caption."""
    if name == "qwen_image":
        states, mask = pipeline.encode_prompt(caption, device="cpu", max_sequence_length=LENGTH)
        assert mask is None
        return {"prompt_embeds": states[0]}
    if name == "z_image":
        states, _ = pipeline.encode_prompt(
            caption, device="cpu", do_classifier_free_guidance=False, max_sequence_length=LENGTH
        )
        return {"prompt_embeds": states[0]}
    found = pipeline.encode_prompt(
        *[caption] * 3, device="cpu", do_classifier_free_guidance=False, max_sequence_length=LENGTH
    )
    return {"prompt_embeds": found[0][0], "pooled": found[2][0]}


def _as_the_transformer_gets_it(name: str, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a family's make_inputs makes of the cached states: for SD3 it puts five together."""
    if name != "sd3":
        return dict(found)
    clip = torch.cat([found["hidden_states_1"], found["hidden_states_2"]], dim=-1)
    clip = torch.nn.functional.pad(clip, (0, found["t5"].shape[-1] - clip.shape[-1]))
    pooled = torch.cat([found["projected_1"], found["projected_2"]])
    return {"prompt_embeds": torch.cat([clip, found["t5"]]), "pooled": pooled}


def _assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, states in found.items():
        assert states.dtype == expected[name].dtype and torch.equal(states, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_states_equal_those_of_the_pipeline(folders: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    pipeline = _pipeline(name, folders[name], dtype)
    encoders = [load_text_encoder(spec, folders[name], "cpu", dtype) for spec in SPECS[name]]
    for caption in CAPTIONS:
        found = {encoder.spec.output: encoder.encode(caption) for encoder in encoders}
        _assert_equal(_as_the_transformer_gets_it(name, found), _theirs(name, pipeline, caption))


def test_lengths_are_those_of_the_captions(folders: dict[str, Path]) -> None:
    qwen = load_text_encoder(QWEN_IMAGE, folders["qwen_image"], "cpu", torch.float32)
    after = len("|\n||\n") - 1 + len("assistant")  # the template behind the caption; a special token is one
    assert [len(qwen.encode(text)) for text in ("", "a cat", "x" * 200)] == [after, after + 5, LENGTH]
    z_image = load_text_encoder(Z_IMAGE, folders["z_image"], "cpu", torch.float32)
    lengths = [len(z_image.encode(text)) for text in ("", "a cat", "x" * 200)]
    assert lengths[1] == lengths[0] + 5 < LENGTH == lengths[2]


def test_a_batch_of_several_lengths_is_padded_as_the_pipeline_pads_it(folders: dict[str, Path]) -> None:
    """The pipeline encodes them together, so that values agree up to float32's rounding; masks and zeros exactly."""
    captions = ["a cat", "", "a longer caption", "a dog"]
    pipeline = _pipeline("qwen_image", folders["qwen_image"], torch.float32)
    with torch.no_grad():
        expected, mask = pipeline.encode_prompt(captions, device="cpu", max_sequence_length=LENGTH)
    encoder = load_text_encoder(QWEN_IMAGE, folders["qwen_image"], "cpu", torch.float32)
    batch = join_texts([{"states": encoder.encode(caption)} for caption in captions], {"states"})
    assert torch.equal(batch["states_mask"], mask.bool())
    assert not batch["states"][~batch["states_mask"]].any()
    assert decibels(expected, batch["states"]) > 100


@pytest.mark.parametrize("keeps_host_copy", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_streamed_states_are_those_of_the_resident_encoder(
    folders: dict[str, Path], name: str, keeps_host_copy: bool
) -> None:
    for spec in SPECS[name]:
        resident = load_text_encoder(spec, folders[name], "cpu", torch.bfloat16)
        expected = {caption: resident.encode(caption) for caption in CAPTIONS}
        streamed = load_text_encoder(spec, folders[name], "cpu", torch.bfloat16, stream=StreamPlan(3, keeps_host_copy))
        for company in (CAPTIONS, CAPTIONS[::-1], ["a cat", "a dog", "a cow"]):
            for caption, states in zip(company, streamed.encode_batch(company), strict=True):
                assert torch.equal(states, expected[caption]), (spec.output, caption)
        streamed.close()


def test_a_pass_takes_captions_of_one_length_where_nothing_is_padded(folders: dict[str, Path]) -> None:
    encoder = load_text_encoder(QWEN_IMAGE, folders["qwen_image"], "cpu", torch.float32, stream=StreamPlan(2))
    batches = encoder.plan_batches(["a cat", "a", "a dog", "a cow", "b", "x" * 90, "y" * 99])
    # the long ones are cut to one length
    assert batches == [["a", "b"], ["a cat", "a dog"], ["a cow"], ["x" * 90, "y" * 99]]
    encoder.close()


def test_a_layers_arguments_are_taken_apart_by_their_names() -> None:
    """Of three captions: [3, 3, S, D] and [3, 3, S] have the batch second, [3, S, D] and a mask have it first."""
    rotary, mask = torch.arange(3 * 3 * 2).view(3, 3, 2, 1), torch.arange(3 * 4).view(3, 1, 2, 2)
    given = {"position_embeddings": (rotary, rotary), "position_ids": rotary[..., 0], "attention_mask": mask}
    args, kwargs = streamed_encoder._caption((mask,), given, 1, 3)
    assert torch.equal(kwargs["position_embeddings"][1], rotary[:, 1:2])
    assert torch.equal(kwargs["position_ids"], rotary[:, 1:2, :, 0])
    assert torch.equal(kwargs["attention_mask"], mask[1:2]) and torch.equal(args[0], mask[1:2])
    flat = streamed_encoder._caption((), {"position_embeddings": rotary[0]}, 1, 3)[1]["position_embeddings"]
    assert torch.equal(flat, rotary[0, 1:2])


def _round_as(encoder: TextEncoder, model: torch.nn.Module) -> int:
    """Give the linears of a pipeline's encoder the weights that ours holds in 8 bits; returns how many there are."""
    theirs = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    rounded = 0
    for name, module in encoder.model.named_modules():
        if is_rounded(module, name, encoder.spec.keep_full_precision):
            (twin,) = [other for path, other in theirs.items() if path.endswith(f".{name}") and "visual" not in path]
            twin.weight.data = module.weight.dequantize()
            rounded += 1
    return rounded


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_8_bit_states_are_those_of_the_pipeline_with_the_rounded_weights(
    folders: dict[str, Path], name: str, scheme: TextScheme
) -> None:
    encoder = load_text_encoder(SPECS[name][0], folders[name], "cpu", torch.float32, scheme)
    pipeline = _pipeline(name, folders[name], torch.float32)
    exact = _theirs(name, pipeline, "a cat")["prompt_embeds"]
    assert _round_as(encoder, pipeline.text_encoder) == 7 * SPECS[name][0].layers[0]
    expected = _theirs(name, pipeline, "a cat")["prompt_embeds"]
    found = encoder.encode("a cat")
    assert decibels(expected, found) > 100 > 60 > decibels(expected, exact)


@pytest.mark.parametrize("name", SPECS)
def test_sizes_are_known_before_loading(folders: dict[str, Path], name: str) -> None:
    for spec in SPECS[name]:
        held = load_text_encoder(spec, folders[name], "cpu", torch.float32).model
        num_bytes = sum(parameter.numel() * 4 for parameter in held.parameters())
        assert forecast_size(spec, folders[name], torch.float32).whole == num_bytes


def test_what_does_not_fit_the_folder_is_refused(folders: dict[str, Path]) -> None:
    def load(name: str, spec: TextEncoderSpec, **changes) -> None:
        load_text_encoder(dataclasses.replace(spec, **changes), folders[name], "cpu", torch.float32)

    with pytest.raises(ValueError, match="makes 21 tokens of the prompt template's beginning, and states of 20"):
        load("qwen_image", QWEN_IMAGE, num_dropped_tokens=20)
    projected, hidden = _CLIPS["projected_1"], _CLIPS["hidden_states_1"]
    with pytest.raises(ValueError, match="holds a CLIPTextModelWithProjection, and a CLIPTextModel was expected"):
        load("sd3", projected, kind="pooled")
    with pytest.raises(ValueError, match="holds a T5EncoderModel, and a CLIPTextModelWithProjection was expected"):
        load("sd3", projected, folder="text_encoder_3")
    for layers in ((), (0,), (5,)):
        with pytest.raises(ValueError, match="has 1 to 4"):
            load("sd3", hidden, layers=layers)


def test_a_caption_without_states_is_refused(folders: dict[str, Path]) -> None:
    spec = dataclasses.replace(QWEN_IMAGE, prompt_template=TEMPLATE[: TEMPLATE.index("{}") + 2])
    encoder = load_text_encoder(spec, folders["qwen_image"], "cpu", torch.float32)
    assert len(encoder.encode("a")) == 1
    with pytest.raises(RuntimeError, match="gave no states for ''.*21 first"):
        encoder.encode("")


def test_contradictions_are_refused() -> None:
    def change(spec: TextEncoderSpec, **changes) -> None:
        dataclasses.replace(spec, **changes)

    for spec, changes, message in (
        (_T5, {"pads": False}, "are for chat_hidden_states, not for last_hidden_state"),
        (_T5, {"prompt_template": "a {}"}, "are for chat_hidden_states"),
        (QWEN_IMAGE, {"system_prompt": "x"}, "one of them"),
        (QWEN_IMAGE, {"prompt_template": "{} {}"}, "once, for the caption"),
        (QWEN_IMAGE, {"num_dropped_tokens": QWEN_IMAGE.max_length}, "some must be left"),
        (Z_IMAGE, {"num_dropped_tokens": 3}, "must begin with them"),
        (Z_IMAGE, {"zero_padding": True}, "cannot be both"),
    ):
        with pytest.raises(ValueError, match=message):
            change(spec, **changes)


def test_captions_of_one_length_come_together_in_the_cache(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six captions of two lengths in turn, three to a pass: two passes, where their own order would take four."""
    copies = []
    close = streamed_encoder.StreamedLayers.close
    monkeypatch.setattr(
        streamed_encoder.StreamedLayers, "close", lambda layers: copies.append(layers.num_copies) or close(layers)
    )
    place = TextPlace(torch.device("cpu"), StreamPlan(3), "for this test")
    monkeypatch.setattr(encode, "plan_text_place", lambda *args: place)
    captions = ["a", "bcd", "e", "fgh", "i", "jkl"]
    store = CacheStore(tmp_path)
    keys = encode.encode_captions(captions, [QWEN_IMAGE], folders["qwen_image"], "cpu", torch.float32, store)
    assert copies == [2 * NUM_LAYERS]
    resident = load_text_encoder(QWEN_IMAGE, folders["qwen_image"], "cpu", torch.float32)
    for caption in captions:
        assert torch.equal(store.get(keys[caption])["prompt_embeds"], resident.encode(caption))
