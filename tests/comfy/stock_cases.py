"""What only ComfyUI itself can say about its encoders and models; cases of test_stock_encoders.py.

The forward case: a CONDITIONING and a LATENT go through ComfyUI's sampler code (process_latent_in, extra_conds,
apply_model) and its own model, and through our reading of the cached entries and the diffusers model that is trained,
both with the same weights.
"""

import dataclasses
import tempfile
from typing import Any

import comfy.latent_formats
import torch
from devicebridge.encoding.comfy_data import read_conditioning, read_samples
from devicebridge.encoding.vae import load_vae
from devicebridge.families.comfy.inputs import read_latents, read_text
from devicebridge.families.registry import find_family
from devicebridge.nodes.host.comfy_encoders import HostClip, HostVae
from devicebridge.tests.comfy.cases import case, expect_refusal
from devicebridge.tests.comfy.diffusers_twins import make_twin
from devicebridge.tests.comfy.stock_encoders import make_clip, make_vae, make_video_vae
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES as NATIVE
from devicebridge.tests.comfy.tiny_checkpoints import make_config
from devicebridge.tests.toy import stack_tensors
from safetensors.torch import save_file

import nodes

_SIGMA, _GUIDANCE = 0.6, 2.5


@case
def a_trained_model_is_given_what_comfyuis_own_is_given() -> None:
    """ComfyUI pads texts of FLUX.2 in front, and cuts none."""
    for name, tokens in (("flux1", 6), ("flux2", 6), ("flux2", 515), ("wan", 6)):
        _compare_forwards(name, tokens)


def _compare_forwards(name: str, tokens: int) -> None:
    family, native = find_family(name), NATIVE[name]
    ours = make_twin(name)
    theirs = make_config(native).get_model({}, "")
    state = theirs.model_config.process_unet_state_dict(stack_tensors(family, ours.state_dict()))
    missing, unexpected = theirs.diffusion_model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    condition = native.condition(seed=3, tokens=tokens)
    samples = torch.randn(1, *native.latent, generator=torch.Generator().manual_seed(4)) * 2 + 0.3
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(5))
    expected = _their_velocity(theirs, samples, noise, condition)
    clean = read_latents(family.comfy, read_samples(samples, "test")[0])[None]
    noisy = (1 - _SIGMA) * clean + _SIGMA * noise.view(clean.shape)
    text = read_text(family.comfy, read_conditioning(condition, "test"))
    guidance = None if name == "wan" else _GUIDANCE
    batch = {key: value[None] for key, value in text.items()}
    inputs = family.make_inputs(noisy, torch.tensor([_SIGMA]), batch, guidance)
    found = family.read_prediction(ours(**inputs, return_dict=False)[0], clean).view(expected.shape)
    error = (found - expected).norm() / expected.norm()
    assert error < 1e-4, f"{name}: relative error {error}"


def _their_velocity(model: Any, samples: torch.Tensor, noise: torch.Tensor, condition: Any) -> torch.Tensor:
    """As comfy.samplers does it: normalise, add noise, gather what the condition adds, ask the model."""
    clean = model.process_latent_in(samples)
    sigma = torch.tensor([_SIGMA])
    noisy = model.model_sampling.noise_scaling(sigma.view(-1, *[1] * (samples.ndim - 1)), noise, clean, False)
    states, options = condition[0]
    conds = model.extra_conds(
        noise=noise, device=noise.device, cross_attn=states, latent_image=clean, guidance=_GUIDANCE, **options
    )
    inputs = {key: cond.process_cond(batch_size=1, area=None, device=noise.device).cond for key, cond in conds.items()}
    denoised = model.apply_model(noisy, sigma, **inputs)
    return (noisy - denoised) / _SIGMA


@case
def normalisation() -> None:
    """Ours is ComfyUI's process_in, bit for bit."""
    formats = comfy.latent_formats
    shapes = {
        "flux1": (formats.Flux(), (1, 16, 4, 6)), "flux2": (formats.Flux2(), (1, 128, 4, 6)),
        "wan": (formats.Wan21(), (1, 16, 3, 4, 6)), "wan 2.2": (formats.Wan22(), (1, 48, 3, 4, 6)),
    }  # fmt: skip
    for name, (latent_format, shape) in shapes.items():
        samples = torch.randn(shape) * 3 + 1
        comfy_inputs = find_family(name.partition(" ")[0]).comfy
        (entry,) = read_samples(samples, "test")
        expected = latent_format.process_in(samples).view(1, shape[1], -1, *shape[-2:])
        assert torch.equal(read_latents(comfy_inputs, entry)[None], expected), name


@case
def clips_of_wan() -> None:
    """A batch of frames becomes one video, as VAEEncode makes it and as our own VAE does with the same weights."""
    stock, family = make_video_vae(), find_family("wan")
    vae = HostVae(stock)
    assert vae.takes_clips and not HostVae(make_vae("flux1")).takes_clips
    variant = family.variants[0]
    variant = dataclasses.replace(variant, vae_config={**variant.vae_config, "base_dim": 8})
    with tempfile.TemporaryDirectory() as folder:
        save_file(stock.get_sd(), f"{folder}/vae.safetensors")
        own = load_vae(family, variant, f"{folder}/vae.safetensors", torch.float32)
    for num_frames in (1, 5, 9):
        pixels = torch.rand(num_frames, 32, 48, 3, generator=torch.Generator().manual_seed(num_frames))
        samples = vae.encode(pixels)
        assert torch.equal(samples, nodes.VAEEncode().encode(stock, pixels)[0]["samples"]), num_frames
        found = read_latents(family.comfy, *read_samples(samples, "test"))
        with torch.no_grad():
            expected = family.encode_latents(own, (pixels * 2 - 1).movedim(-1, 0)[None])[0]
        assert found.shape == expected.shape == (16, 1 + num_frames // 4, 4, 6)
        error = (found - expected).norm() / expected.norm()
        assert error < 1e-5, f"{num_frames} frames: relative error {error}"


@case
def captions_are_literal() -> None:
    """Every character reaches the tokenizer as it stands, with weight 1; asked to weigh, a CLIP does as core's node."""
    texts = [
        "a (cat)", "a (cat:1.3), ((dog))", r"\(face\), c:\dir\(1) :)", "(", ")(", "embedding:none, an embedding:x (y)",
    ]  # fmt: skip
    for family, parts in (("sd15", ["clip_l"]), ("sdxl", ["clip_l", "clip_g"]), ("flux1", ["clip_l", "t5xxl"])):
        clip = make_clip(family)
        for part in parts:
            getattr(clip.tokenizer, part).embedding_directory = [tempfile.mkdtemp()]  # else embedding: is a word anyway
        literal, weighing = HostClip(clip), HostClip(clip, weighs=True)
        for text in [*texts, "a cat"]:
            found = literal.tokens(text)
            for part in parts:
                pairs = found[part.removeprefix("clip_")][0]
                ids = getattr(clip.tokenizer, part).tokenizer(text)["input_ids"]
                assert [pair[0] for pair in pairs[: len(ids)]] == ids, (part, text)
                assert {pair[1] for pair in pairs} == {1.0}, (part, text)
            assert weighing.tokens(text) == clip.tokenize(text), text
        own, cores = (each.encode(texts[1])[0][0] for each in (literal, weighing))
        assert torch.equal(own, clip.encode_from_tokens_scheduled(literal.tokens(texts[1]))[0][0])
        assert not torch.equal(own, cores)
        assert torch.equal(literal.encode("a cat")[0][0], weighing.encode("a cat")[0][0])
    clip = make_clip("flux2")
    literal = HostClip(clip)
    for text in texts:
        (pairs,) = literal.tokens(text)["mistral3_24b"]
        ids = clip.tokenizer.mistral3_24b.tokenizer(clip.tokenizer.llama_template.format(text))["input_ids"]
        assert [pair[0] for pair in pairs[-len(ids) :]] == list(ids), text


@case
def a_tokenizer_without_escapes_sees_none() -> None:
    clip = make_clip("sd15")
    asked = []

    class Plain:
        def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **options: Any) -> Any:
            asked.append(text)
            return {"l": [[(ord(letter), 1.0) for letter in text]]}

    clip.tokenizer = Plain()
    HostClip(clip).tokens("a (cat)")
    assert asked[-1] == "a (cat)"


@case
def clip_names() -> None:
    """The same CLIP has the same name, loaded or not, encoded with or not; any difference has another."""
    clip = make_clip("flux2")
    name = HostClip(clip).fingerprint
    HostClip(clip).encode("a cat")
    assert HostClip(clip).fingerprint == name, "encoding has changed it"
    HostClip(clip).release()
    assert HostClip(clip).fingerprint == name, "unloading has changed it"
    assert HostClip(make_clip("flux2")).fingerprint == name, "an equal one has another"
    others = [make_clip("flux2", seed=1), make_clip("flux2", width=32), clip.clone(), clip.clone()]
    others[2].clip_layer(-2)
    others[3].set_tokenizer_option("min_length", 300)
    others += [make_clip("flux2") for _ in range(5)]
    others[4].tokenizer.mistral3_24b.min_length = 300
    others[5].tokenizer.llama_template = "{}"
    others[6].cond_stage_model.mistral3_24b.options_default = ([9, 18, 27], None, True)
    others[7].cond_stage_model.to(torch.bfloat16)
    next(others[8].cond_stage_model.mistral3_24b.transformer.parameters()).data.view(-1)[0] += 1
    names = [name, *(HostClip(other).fingerprint for other in others)]
    assert len(set(names)) == len(names), names


@case
def clip_names_leave_out_what_checkpoints_leave_out() -> None:
    """Checkpoints of SD have no projection for CLIP-L, and what ComfyUI has there is other memory at each load."""
    for family, part, is_read in (("sd2", "clip_h", False), ("sdxl", "clip_l", False), ("sdxl", "clip_g", True)):
        clip = make_clip(family)
        name, states = HostClip(clip).fingerprint, HostClip(clip).encode("a cat")[0]
        getattr(clip.cond_stage_model, part).transformer.text_projection.weight.data += 1
        assert (HostClip(clip).fingerprint != name) == is_read, (family, part)
        changed = HostClip(clip).encode("a cat")[0]
        assert torch.equal(changed[0], states[0])
        if family != "sd2":  # whose pooled output is projected, and read by no model
            assert torch.equal(changed[1]["pooled_output"], states[1]["pooled_output"]) != is_read, (family, part)


@case
def patched_clip_is_refused() -> None:
    """A LoRA on a clone: the clone is refused, and the original keeps its name while the shared weights are patched."""
    clip = make_clip("flux2")
    name = HostClip(clip).fingerprint
    states = HostClip(clip).encode("a cat")[0][0]
    key = next(key for key in clip.get_key_patches() if key.endswith("mlp.up_proj.weight"))
    clone = clip.clone()
    clone.add_patches({key: ("diff", (torch.ones_like(clip.patcher.model.state_dict()[key]),))})
    before = clip.patcher.model.state_dict()[key].clone()
    clone.encode_from_tokens_scheduled(clone.tokenize("a cat"))
    assert not torch.equal(clip.patcher.model.state_dict()[key], before), "the clone has patched the shared weights"
    assert HostClip(clip).fingerprint == name
    assert torch.equal(HostClip(clip).encode("a cat")[0][0], states)
    expect_refusal(lambda: HostClip(clone), "patches")
    clip.tokenize = lambda text: text
    expect_refusal(lambda: HostClip(clip), "tokenize of the encoder's CLIP has been replaced")


@case
def vae_names() -> None:
    vae = make_vae("flux2")
    name = HostVae(vae).fingerprint
    HostVae(vae).encode(torch.rand(1, 32, 32, 3))
    assert HostVae(vae).fingerprint == name == HostVae(make_vae("flux2")).fingerprint
    half = make_vae("flux2")
    half.vae_dtype = torch.bfloat16
    statistics = make_vae("flux2")
    statistics.first_stage_model.bn.running_mean[3] += 1
    seamless = make_vae("flux2")
    seamless.first_stage_model.encoder.conv_in.padding_mode = "circular"
    others = [make_vae("flux2", seed=1), make_vae("flux1"), half, statistics, seamless]
    names = [name, *(HostVae(other).fingerprint for other in others)]
    assert len(set(names)) == len(names), names
    expect_refusal(lambda: HostVae(object()), "not ComfyUI's own VAE")
    vae.first_stage_model.encoder.conv_in.forward = lambda x: x
    expect_refusal(lambda: HostVae(vae), "forward of the encoder's encoder.conv_in has been replaced")
