"""Each family's description against diffusers: its classes, its pipelines, its text settings."""

import contextlib
import fnmatch
import inspect
import itertools
import math

import diffusers
import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.toy import TINY
from torch import nn

EACH_VARIANT = pytest.mark.parametrize(
    ("family", "variant"),
    [pytest.param(family, each, id=each.name) for family in FAMILIES.values() for each in family.variants],
)
# Published sizes in billions of parameters, from the model cards and the checkpoints' own indices.
SIZES = {
    "flux2-dev": 32.22, "flux2-klein-4b": 3.88, "flux2-klein-9b": 9.08, "flux1-dev": 11.90, "flux1-schnell": 11.89,
    "wan2.1-t2v-14b": 14.29, "wan2.1-t2v-1.3b": 1.42, "wan2.2-t2v-a14b-high": 14.29, "wan2.2-t2v-a14b-low": 14.29,
    "wan2.2-ti2v-5b": 5.00, "wan2.2-i2v-a14b-high": 14.29, "wan2.2-i2v-a14b-low": 14.29, "wan2.2-ti2v-5b-i2v": 5.00,
}  # fmt: skip


def _empty_model(family, config):
    with torch.device("meta"):
        return getattr(diffusers, family.transformer_class)(**dict(config))


def _linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _scheduler():
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)


def _flux2_pipeline(tiny, model, vae=None, klein=False):
    pipeline_class = diffusers.Flux2KleinPipeline if klein else diffusers.Flux2Pipeline
    return pipeline_class(scheduler=_scheduler(), vae=vae, text_encoder=None, tokenizer=None, transformer=model)


def _run_flux2(tiny, model, latents, text, vae=None, klein=False, **options):
    pipeline = _flux2_pipeline(tiny, model, vae, klein)
    height, width = (side * 2 * pipeline.vae_scale_factor for side in latents.shape[-2:])
    return pipeline(
        prompt_embeds=text["prompt_embeds"], latents=latents[:, :, 0], guidance_scale=1.0, height=height, width=width,
        return_dict=False, **options,
    )[0]  # fmt: skip


def _unpack_flux2(tokens, latents):
    ids = diffusers.Flux2Pipeline._prepare_latent_ids(latents[:, :, 0])
    return diffusers.Flux2Pipeline._unpack_latents_with_ids(tokens, ids).unsqueeze(2)


def _run_klein(tiny, model, latents, text, **options):
    """This pipeline undoes normalisation and patches for output_type latent too; normalisation is the identity here."""
    vae = tiny.make_vae()
    vae.bn.running_mean.zero_()
    vae.bn.running_var.fill_(1 - vae.config.batch_norm_eps)
    return _run_flux2(tiny, model, latents, text, vae=vae, klein=True, **options)


def _unpack_klein(latents, _):
    return diffusers.Flux2KleinPipeline._patchify_latents(latents).unsqueeze(2)


def _run_flux1(tiny, model, latents, text, **options):
    pipeline = diffusers.FluxPipeline(
        scheduler=_scheduler(), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
        transformer=model,
    )  # fmt: skip
    batch, channels, _, height, width = latents.shape
    packed = diffusers.FluxPipeline._pack_latents(latents[:, :, 0], batch, channels, height, width)
    scale = pipeline.vae_scale_factor
    return pipeline(
        prompt_embeds=text["prompt_embeds"], pooled_prompt_embeds=text["pooled_prompt_embeds"], latents=packed,
        guidance_scale=1.0, height=height * scale, width=width * scale, return_dict=False, **options,
    )[0]  # fmt: skip


def _unpack_flux1(tokens, latents):
    height, width = latents.shape[-2:]
    return diffusers.FluxPipeline._unpack_latents(tokens, height * 8, width * 8, 8).unsqueeze(2)


def _run_wan(tiny, model, latents, text, **options):
    pipeline = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=_scheduler(), transformer=model
    )
    return pipeline(
        prompt_embeds=text["prompt_embeds"], latents=latents, guidance_scale=1.0, height=32, width=32,
        return_dict=False, **options,
    )[0]  # fmt: skip


def _unpack_wan(latents, _):
    return latents


# One row per kind of model: family, whether it is the kind without guidance, how its pipeline runs.
PIPELINES = {
    "flux2": ("flux2", False, _run_flux2, _unpack_flux2), "flux2-klein": ("flux2", True, _run_klein, _unpack_klein),
    "flux1-dev": ("flux1", False, _run_flux1, _unpack_flux1),
    "flux1-schnell": ("flux1", True, _run_flux1, _unpack_flux1), "wan": ("wan", False, _run_wan, _unpack_wan),
}  # fmt: skip


@contextlib.contextmanager
def _recording(model):
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize("kind", PIPELINES)
def test_inputs_and_predictions_are_those_of_the_pipeline(kind):
    name, is_without_guidance, run, unpack = PIPELINES[kind]
    tiny, family = TINY[name], FAMILIES[name]
    model = tiny.make_model(**(tiny.without_guidance if is_without_guidance else {}))
    guidance = None if is_without_guidance else tiny.guidance
    latents, text = tiny.make_latents(), tiny.make_text()
    sigmas = [0.7]
    options = {} if kind == "wan" else {"sigmas": sigmas}
    with _recording(model) as seen:
        final = run(tiny, model, latents, text, num_inference_steps=1, output_type="latent", **options)
    theirs = dict(seen[0])
    sigma = theirs["timestep"] / 1000 if kind == "wan" else theirs["timestep"]
    assert kind == "wan" or torch.allclose(sigma, torch.tensor(sigmas))
    ours = family.make_inputs(latents, sigma, text, guidance)
    for argument, value in ours.items():
        other = theirs.pop(argument)
        if value is None:
            assert other is None, argument
        else:
            assert value.shape == other.shape, argument
            assert torch.allclose(value.double(), other.double(), rtol=1e-6), argument
    assert not {k: v for k, v in theirs.items() if k != "return_dict" and v not in (None, {})}
    with torch.no_grad():
        prediction = family.read_prediction(model(**ours, return_dict=False)[0], latents)
    assert prediction.shape == latents.shape
    # One Euler step from sigma to 0 ends at x_t - sigma * velocity: layout, sign and scale of the prediction at once.
    step = sigma.view(-1, 1, 1, 1, 1) * prediction
    assert torch.allclose(latents - step, unpack(final, latents), atol=1e-5)


def _pixels(name):
    frames = 5 if name == "wan" else 1
    return torch.rand(2, 3, frames, 16, 24, generator=torch.Generator().manual_seed(5)) * 2 - 1


def _encode_flux2(vae, pixels):
    return _flux2_pipeline(TINY["flux2"], None, vae)._encode_vae_image(pixels[:, :, 0], None).unsqueeze(2)


def _encode_flux1(vae, pixels):
    pipeline = diffusers.FluxKontextPipeline(
        scheduler=_scheduler(), vae=vae, text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
        transformer=None,
    )  # fmt: skip
    return pipeline._encode_vae_image(pixels[:, :, 0], None).unsqueeze(2)


def _encode_wan(vae, pixels):
    """The video-to-video pipeline adds noise; at sigma 0 it adds none."""
    scheduler = _scheduler()
    scheduler.timesteps, scheduler.sigmas = torch.tensor([0.0]), torch.tensor([0.0])
    pipeline = diffusers.WanVideoToVideoPipeline(
        tokenizer=None, text_encoder=None, transformer=TINY["wan"].make_model(), vae=vae, scheduler=scheduler
    )
    return pipeline.prepare_latents(
        video=pixels, batch_size=2, num_channels_latents=4, height=16, width=24, dtype=torch.float32,
        timestep=torch.tensor([0.0]),
    )  # fmt: skip


ENCODE = {"flux2": _encode_flux2, "flux1": _encode_flux1, "wan": _encode_wan}


@pytest.mark.parametrize("name", sorted(FAMILIES))
@torch.no_grad()
def test_latents_are_encoded_as_in_the_pipeline_and_decoded_by_the_inverse(name):
    vae, pixels = TINY[name].make_vae(), _pixels(name)
    ours = FAMILIES[name].encode_latents(vae, pixels)
    theirs = ENCODE[name](vae, pixels)
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    own = vae.encode(pixels if name == "wan" else pixels[:, :, 0]).latent_dist.mode()  # as the VAE itself has them
    decoded = FAMILIES[name].decode_latents(vae, ours)
    assert torch.allclose(decoded, vae.decode(own).sample.view(decoded.shape), atol=1e-5)
    half = FAMILIES[name].encode_latents(vae.to(torch.bfloat16), pixels)
    assert half.dtype == torch.float32 and torch.allclose(half, ours, atol=0.1 * ours.abs().max().item())


@EACH_VARIANT
def test_latent_geometry_is_that_of_the_vae_and_the_transformer(family, variant):
    family_name = family.name
    latent = family.latent_of(variant)
    with torch.device("meta"):
        vae = getattr(diffusers, family.vae_class).from_config({k: _listed(v) for k, v in variant.vae_config.items()})
    side = 2 * latent.size_multiple
    packing = 4 if family_name == "flux2" else 1  # the VAE's own channels, before patches become channels
    assert latent.channels == packing * (vae.config.get("latent_channels") or vae.config["z_dim"])
    if family_name == "wan":
        assert vae.config.scale_factor_spatial == latent.spatial_stride
        assert vae.config.scale_factor_temporal == latent.frame_stride
        assert len(vae.config.latents_mean) == len(vae.config.latents_std) == latent.channels
        assert math.prod(variant.transformer_config["patch_size"]) == 1 / latent.num_tokens_per_cell
    else:
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        assert latent.spatial_stride == scale * (2 if family_name == "flux2" else 1)
        cells = side // latent.spatial_stride
        latents = torch.zeros(1, latent.channels, 1, cells, cells)
        text = {"prompt_embeds": torch.zeros(1, 3, 4), "pooled_prompt_embeds": torch.zeros(1, 4)}
        tokens = family.make_inputs(latents, torch.ones(1), text, None)["hidden_states"]
        assert tokens.shape[1] == latent.num_tokens(side, side)
        assert tokens.shape[2] == variant.transformer_config["in_channels"]
    assert family.latent_of(variant).num_tokens(1024, 1024) == (1024 if "5b" in variant.name else 4096)


def _listed(value):
    return list(value) if isinstance(value, tuple) else value


def _given_by_image_to_video(vae, model, pixels, latents, **options):
    """Of the whole pipeline, with an image and a transformer that records what it gets."""
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=_scheduler(), transformer=model, **options
    )
    with _recording(model) as seen:
        pipeline(
            image=pixels[:, :, 0] / 2 + 0.5, prompt_embeds=TINY["wan"].make_text(batch=1)["prompt_embeds"],
            latents=latents, height=32, width=48, num_frames=pixels.shape[2], num_inference_steps=1,
            guidance_scale=1.0, output_type="latent",
        )  # fmt: skip
    return seen[0]


def _clip(num_frames):
    return torch.rand(1, 3, num_frames, 32, 48, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.parametrize("num_frames", [1, 5, 9])
@torch.no_grad()
def test_the_first_frame_is_given_as_by_the_image_to_video_pipeline(num_frames):
    tiny, family = TINY["wan"], FAMILIES["wan"]
    vae, model, text = tiny.make_video_vae(), tiny.make_model(in_channels=4 + 4 + 4), tiny.make_text(batch=1)
    pixels, latents = _clip(num_frames), torch.randn(1, 4, 1 + num_frames // 4, 8, 12)
    theirs = _given_by_image_to_video(vae, model, pixels, latents)
    condition = family.encode_condition(vae, pixels)
    ours = family.make_inputs(latents, theirs["timestep"] / 1000, {**text, "image_condition": condition}, None)
    assert condition.dtype == torch.float32 and ours["hidden_states"].shape == theirs["hidden_states"].shape
    assert torch.allclose(ours["hidden_states"], theirs["hidden_states"], atol=1e-5)
    assert not condition[:, 4:, 1:].eq(0).any()  # grey was encoded
    assert family.read_prediction(model(**ours, return_dict=False)[0], latents).shape == latents.shape


@torch.no_grad()
def test_the_first_latents_are_given_as_by_the_pipeline_of_ti2v_5b():
    tiny, family = TINY["wan"], FAMILIES["wan"]
    vae, pixels, noisy, text = tiny.make_video_vae(), _clip(9), torch.randn(1, 4, 3, 8, 12), tiny.make_text(batch=1)
    theirs = _given_by_image_to_video(vae, tiny.make_model(), pixels, noisy, expand_timesteps=True)
    first = family.encode_latents(vae, pixels)[:, :, :1]  # of the whole clip: the VAE looks back only
    ours = family.make_inputs(noisy, theirs["timestep"].amax(dim=1) / 1000, {**text, "first_latents": first}, None)
    assert ours["timestep"].shape == theirs["timestep"].shape == (1, 3 * 4 * 6)
    assert torch.allclose(ours["timestep"], theirs["timestep"].float(), rtol=1e-6)
    assert torch.allclose(ours["hidden_states"], theirs["hidden_states"], atol=1e-5)
    noisy, first = (each.repeat(2, 1, 1, 1, 1) for each in (noisy, first))
    two = family.make_inputs(noisy, torch.tensor([0.25, 0.5]), {**text, "first_latents": first}, None)
    assert [sorted(set(row.tolist())) for row in two["timestep"]] == [[0, 250], [0, 500]]


@EACH_VARIANT
def test_published_size_and_what_the_description_says_of_its_modules(family, variant):
    model = _empty_model(family, variant.transformer_config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(SIZES[variant.name], abs=0.006)
    modules = dict(model.named_modules())
    assert all(name in modules for name in family.tail)
    linears = _linears(model)
    lists = {block.name for block in family.block_lists}
    in_blocks = {name for name in linears if name.split(".")[0] in lists}
    modulation = {
        f"{block.name}.{index}.{name}"
        for block in family.block_lists
        for index, module in enumerate(getattr(model, block.name))
        for name in _linears(module)
        if _matches(name, block.sample_modules)
    }
    targets = {name for name in linears if _matches(name, family.lora_targets)}
    assert targets == in_blocks - modulation
    kept = {name for name in linears if _is_kept(name, family)}
    assert kept == (linears.keys() - in_blocks) | modulation
    for pattern in family.keep_full_precision + family.lora_targets:
        assert any(_matches(name, (pattern,)) for name in modules), pattern


def _is_kept(name, family):
    """Patterns match a module or one it is inside of."""
    parts = name.split(".")
    return any(_matches(".".join(parts[:length]), family.keep_full_precision) for length in range(1, len(parts) + 1))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_block_lists_run_in_order_and_their_linears_see_the_tokens_described(name):
    tiny, family = TINY[name], FAMILIES[name]
    model, inputs = tiny.make_model(), tiny.make_inputs()
    order, seen = [], {}

    def note_order(key):
        return lambda *_: order.append(key)  # None: a hook that returns something changes the arguments

    def note_shape(key):
        return lambda _, args: seen.update({key: args[0].shape})

    for block in family.block_lists:
        for index, module in enumerate(getattr(model, block.name)):
            module.register_forward_pre_hook(note_order((block.name, index)))
            for fqn, linear in _linears(module).items():
                linear.register_forward_pre_hook(note_shape((block.name, fqn)))
    with torch.no_grad():
        model(**inputs, return_dict=False)
    assert order == [(b.name, i) for b in family.block_lists for i in range(len(getattr(model, b.name)))]
    num_text = tiny.text_shapes["prompt_embeds"][0]
    num_image = tiny.make_latents()[0, 0].numel() // (1 if name == "flux2" else 4)
    for block in family.block_lists:
        for (list_name, fqn), shape in seen.items():
            if list_name != block.name:
                continue
            if _matches(fqn, block.sample_modules):
                assert len(shape) == 2, fqn
                continue
            expected = num_image + num_text if block.is_joint else num_image
            assert shape[1] == (num_text if _matches(fqn, block.text_modules) else expected), fqn


@pytest.mark.parametrize("num_tokens", [256, 1024, 2304, 4096])
def test_resolution_shifts_are_the_pipelines_formulas(num_tokens):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    mu = calculate_shift(num_tokens, 256, 4096, 0.5, 1.15)
    for family in (FAMILIES["flux1"], FAMILIES["flux2"]):
        assert family.timesteps.shift_presets["resolution"].factor(num_tokens) == pytest.approx(math.exp(mu))
    reference = math.exp(compute_empirical_mu(num_tokens, 50))
    preset = FAMILIES["flux2"].timesteps.shift_presets["bfl_inference_50_steps"]
    assert preset.factor(num_tokens) == pytest.approx(reference, rel=1e-4)
    for tokens, steps in itertools.product((num_tokens, 4300, 4301, 9000), (4, 28, 50, 200)):
        sampled = math.exp(compute_empirical_mu(tokens, steps))
        assert FAMILIES["flux2"].sampling.shift(tokens, steps) == pytest.approx(sampled, rel=1e-12)


def test_defaults_that_trainers_agree_on():
    flux2, flux1, wan = (FAMILIES[name] for name in ("flux2", "flux1", "wan"))
    assert flux2.timesteps.shift_presets["diffsynth_2.23"].value == pytest.approx(math.exp(0.8), abs=1e-4)
    for family in FAMILIES.values():
        for variant in family.variants:
            has_guidance = bool(variant.transformer_config.get("guidance_embeds"))
            assert variant.training_guidance == (1.0 if has_guidance else None)
    assert flux2.variant("flux2-klein-4b").caution and flux1.variant("flux1-schnell").caution
    for kind, boundary, channels in (("t2v", 0.875, 16), ("i2v", 0.9, 2 * 16 + 4)):  # latents, condition and its mask
        high, low = (wan.variant(f"wan2.2-{kind}-a14b-{part}") for part in ("high", "low"))
        assert (low.sigma_range, high.sigma_range) == ((0.0, boundary), (boundary, 1.0))
        assert low.transformer_folder == "transformer_2" and low.encodes_condition == (kind == "i2v")
        assert all(each.transformer_config["in_channels"] == channels for each in (high, low))
    assert {each.name for family in FAMILIES.values() for each in family.variants} == SIZES.keys()


def _default(function, name):
    return inspect.signature(function).parameters[name].default


def test_text_settings_are_the_pipelines_defaults():
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    mistral = FAMILIES["flux2"].variant("flux2-dev").text_encoders[0]
    assert mistral.system_prompt == SYSTEM_MESSAGE and "object\nattribution" in SYSTEM_MESSAGE
    assert mistral.layers == _default(diffusers.Flux2Pipeline.encode_prompt, "text_encoder_out_layers")
    assert mistral.max_length == _default(diffusers.Flux2Pipeline.encode_prompt, "max_sequence_length")
    qwen = FAMILIES["flux2"].variant("flux2-klein-9b").text_encoders[0]
    assert qwen.layers == _default(diffusers.Flux2KleinPipeline.encode_prompt, "text_encoder_out_layers")
    assert qwen.max_length == _default(diffusers.Flux2KleinPipeline.encode_prompt, "max_sequence_length")
    clip, t5 = FAMILIES["flux1"].variant("flux1-dev").text_encoders
    assert t5.max_length == _default(diffusers.FluxPipeline.__call__, "max_sequence_length")
    umt5 = FAMILIES["wan"].variants[0].text_encoders[0]
    assert umt5.max_length == _default(diffusers.WanPipeline.__call__, "max_sequence_length") and umt5.zero_padding
    assert [(e.folder, e.tokenizer_folder) for e in (clip, t5)] == [
        ("text_encoder", "tokenizer"),
        ("text_encoder_2", "tokenizer_2"),
    ]


def test_klein_and_dev_prompts_are_rendered_as_their_pipelines_render_them():
    """What the pipelines hand to apply_chat_template, against what the specs say."""

    class Stop(Exception):
        pass

    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            self.messages, self.options = messages, options
            raise Stop

    for variant_name, run in (
        ("flux2-dev", diffusers.Flux2Pipeline._get_mistral_3_small_prompt_embeds),
        ("flux2-klein-4b", diffusers.Flux2KleinPipeline._get_qwen3_prompt_embeds),
    ):
        spec, tokenizer = FAMILIES["flux2"].variant(variant_name).text_encoders[0], Tokenizer()
        with pytest.raises(Stop):
            run(nn.Linear(1, 1), tokenizer, "a fox", dtype=torch.float32, device="cpu")
        for option, value in spec.template_options.items():
            assert tokenizer.options[option] == value
        chat = tokenizer.messages[0] if isinstance(tokenizer.messages[0], list) else tokenizer.messages
        roles = [message["role"] for message in chat]
        assert roles == (["user"] if spec.system_prompt is None else ["system", "user"])
