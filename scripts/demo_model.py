"""The demo's model: a small but real FLUX.2 pipeline folder, made offline in about a minute on two CPU cores.

    python scripts/demo_model.py FOLDER

Every part is of the class and in the layout of the published model (klein variant), only small: transformer, VAE,
text encoder, tokenizer, model_index.json. The VAE and the transformer are trained on photographs that scikit-image
ships, without the demo's subject; the text encoder keeps random weights, which still tell captions apart.

The VAE would need long to learn colours by itself, because group normalisation hides them. So it starts as a linear
codec (principal components of 4x4 pixels) that the convolutions can express, and only its decoder is trained.

The transformer reads captions cut to a few tokens for most of its training, since 512 tokens of padding would take most
of the time; it gets used to the full length at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_data import CAPTION, load_photo
from devicebridge.cli.main import set_up_logging
from devicebridge.config.job import ObjectiveConfig
from devicebridge.encoding.text_encoder import load_text_encoder, prepare_text
from devicebridge.families.flux import FLUX2
from devicebridge.training.objective import add_noise, draw_quantiles, make_noise_schedule, prediction_loss
from torch import nn

# Free to use: NASA, CC0 by Rachel Michetti, SpaceX (public domain), NASA, CC0.
PHOTOS = {
    "astronaut.png": "a photo of an astronaut",
    "coffee.png": "a photo of a cup of coffee",
    "rocket.jpg": "a photo of a rocket at night",
    "hubble_deep_field.jpg": "a photo of distant galaxies",
    "brick.png": "a photo of a brick floor",
}
MORE_PHOTOS = ("retina.jpg", "grass.png", "gravel.png")  # CC0; for the VAE only

VARIANT = FLUX2.variant("flux2-klein-4b")
SIDE = 64  # pixels
LATENT_CHANNELS = 8
TEXT_WIDTH = 32
SHORT_TEXT = 32  # tokens
SEED = 0


# --- photographs -----------------------------------------------------------------------------------------------------


def read_photo(name: str, short_side: int) -> torch.Tensor:
    """A photograph in -1..1, resized so that its shorter side has this many pixels. [3, H, W]"""
    import numpy as np
    from PIL import Image

    photo = load_photo(name)
    scale = short_side / min(photo.size)
    photo = photo.resize([round(length * scale) for length in photo.size], Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 127.5 - 1


def random_crops(photos: Sequence[torch.Tensor], number: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """Square crops at random places of random photos. [number, 3, side, side]"""

    def below(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    crops = []
    for _ in range(number):
        photo = photos[below(len(photos))]
        top, left = below(photo.shape[1] - side + 1), below(photo.shape[2] - side + 1)
        crops.append(photo[:, top : top + side, left : left + side])
    return torch.stack(crops)


# --- VAE -------------------------------------------------------------------------------------------------------------


def make_vae(photos: Sequence[torch.Tensor], steps: int) -> nn.Module:
    """A VAE with 4x4 pixels per latent (8x8 per token of the transformer), fitted to the photos."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 48, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
        sample_size=SIDE,
    )
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        start_as_linear_codec(vae, random_crops(photos, 64, 48, generator), generator)
    train_decoder(vae, photos, steps, generator)
    with torch.no_grad():
        moments = vae.encode(random_crops(photos, 64, SIDE, generator)).latent_dist.mode()
        packed = F.pixel_unshuffle(moments, 2)
        vae.bn.running_mean.copy_(packed.mean((0, 2, 3)))
        vae.bn.running_var.copy_(packed.var((0, 2, 3)))
    return vae.requires_grad_(False).eval()


def start_as_linear_codec(vae: nn.Module, pixels: torch.Tensor, generator: torch.Generator) -> None:
    """Set weights so that encode(pixels) are principal components of 4x4 patches and decode inverts it roughly.

    The residual branches add nothing at first, the strided convolutions move each 2x2 pixels into channels, and the
    last normalisation becomes nearly linear: two channels per group hold large constants, which fix its statistics.
    Components are mixed by a rotation, so that all latent channels are equally strong.
    """
    encoder, decoder = vae.encoder, vae.decoder
    for module in vae.modules():
        if type(module).__name__ == "ResnetBlock2D":
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
    _set_path(encoder.conv_in, [(c, c, 1, 1, 1.0) for c in range(3)])
    _set_path(encoder.down_blocks[0].downsamplers[0].conv, _gather(3))
    _set_path(encoder.down_blocks[1].resnets[0].conv_shortcut, [(c, c, 0, 0, 1.0) for c in range(12)])
    _set_path(encoder.down_blocks[1].downsamplers[0].conv, _gather(12))
    free = _hold_constants(encoder.down_blocks[2].resnets[0].conv_shortcut, encoder.conv_norm_out)
    _set_path(encoder.down_blocks[2].resnets[0].conv_shortcut, [(free[c], c, 0, 0, 1.0) for c in range(48)])

    patches = F.pixel_unshuffle(F.pixel_unshuffle(pixels, 2), 2).movedim(1, -1).flatten(0, 2)  # [N, 48]
    mean = patches.mean(0)
    components = torch.linalg.eigh(torch.cov(patches.T))[1].flip(1)[:, :LATENT_CHANNELS]
    rotation = torch.linalg.qr(torch.randn(LATENT_CHANNELS, LATENT_CHANNELS, generator=generator))[0]
    basis = rotation @ components.T
    features = _input_of(encoder.conv_out, lambda: vae.encode(pixels))
    weight, bias = _solve(features.movedim(1, -1).flatten(0, 2), (patches - mean) @ basis.T)
    nn.init.zeros_(encoder.conv_out.weight)
    nn.init.constant_(encoder.conv_out.bias, -8)  # log variance: nearly none
    encoder.conv_out.weight[:LATENT_CHANNELS, :, 1, 1] = weight
    encoder.conv_out.bias[:LATENT_CHANNELS] = bias
    for conv in (vae.quant_conv, vae.post_quant_conv):
        nn.init.dirac_(conv.weight)
        nn.init.zeros_(conv.bias)

    decoder.conv_in.weight[:48] = 0
    decoder.conv_in.weight[:48, :, 1, 1] = basis.T
    decoder.conv_in.bias[:48] = mean
    _set_path(decoder.up_blocks[0].upsamplers[0].conv, _scatter(12))
    _set_path(decoder.up_blocks[1].resnets[0].conv_shortcut, [(c, c, 0, 0, 1.0) for c in range(12)])
    _set_path(decoder.up_blocks[1].upsamplers[0].conv, _scatter(3))
    free = _hold_constants(decoder.up_blocks[2].resnets[0].conv_shortcut, decoder.conv_norm_out)
    _set_path(decoder.up_blocks[2].resnets[0].conv_shortcut, [(free[c], c, 0, 0, 1.0) for c in range(3)])
    features = _input_of(decoder.conv_out, lambda: vae.decode(vae.encode(pixels).latent_dist.mode()))
    windows = F.unfold(features, 3, padding=1).movedim(1, -1).flatten(0, 1)
    weight, bias = _solve(windows, pixels.flatten(2).movedim(1, -1).flatten(0, 1))
    decoder.conv_out.weight.copy_(weight.view_as(decoder.conv_out.weight))
    decoder.conv_out.bias.copy_(bias)


_Taps = list[tuple[int, int, int, int, float]]  # output channel, input channel, row and column of the kernel, weight


def _set_path(conv: nn.Conv2d, taps: _Taps) -> None:
    """Make the named output channels exactly these weighted inputs; the other channels keep their random weights."""
    outputs = sorted({tap[0] for tap in taps})
    conv.weight[outputs] = 0
    conv.bias[outputs] = 0
    for output, source, row, column, value in taps:
        conv.weight[output, source, row, column] += value


def _gather(channels: int) -> _Taps:
    """2x2 pixels into channels, in the order of pixel_unshuffle, for a 3x3 kernel of stride 2."""
    return [(4 * c + 2 * i + j, c, i, j, 1.0) for c in range(channels) for i in (0, 1) for j in (0, 1)]


def _scatter(channels: int) -> _Taps:
    """Channels back to 2x2 pixels, behind nearest-neighbour upsampling, which lets a kernel not tell the four apart:
    each becomes the mean of itself and its neighbour, half a pixel off. The last convolution makes up for that."""
    taps = ((1, 0), (0, 2))  # (half of the 2x2 cell, position in the kernel)
    return [(c, 4 * c + 2 * i + j, row, column, 0.25) for c in range(channels) for i, row in taps for j, column in taps]


def _hold_constants(shortcut: nn.Conv2d, norm: nn.GroupNorm) -> list[int]:
    """Two constant channels per group, and an affine that undoes the known scale; returns the channels left free."""
    size, level = norm.num_channels // norm.num_groups, 8.0
    constants = [group * size + i for group in range(norm.num_groups) for i in (0, 1)]
    shortcut.weight[constants] = 0
    shortcut.bias[constants] = torch.tensor([level, -level] * norm.num_groups)
    norm.weight.fill_(level * (2 / size) ** 0.5)
    norm.bias.fill_(3.0)  # where SiLU is nearly straight
    return [channel for channel in range(norm.num_channels) if channel not in constants]


def _input_of(module: nn.Module, run: Callable[[], object]) -> torch.Tensor:
    """What reaches this module when `run` is called."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen[0]


def _solve(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [out, in] and bias [out] of the linear map from inputs [N, in] nearest to targets [N, out]."""
    rows = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1).double()
    solution = torch.linalg.solve(rows.T @ rows + 1e-3 * torch.eye(rows.shape[1]), rows.T @ targets.double()).float()
    return solution[:-1].T, solution[-1]


def train_decoder(vae: nn.Module, photos: Sequence[torch.Tensor], steps: int, generator: torch.Generator) -> None:
    """Sharpen the decoder on crops whose colours are mixed at random, so that it knows colours no photo has."""
    parameters = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 20, 1.5 * (1 - step / steps)))
    for _ in range(steps):
        pixels = random_crops(photos, 4, 48, generator)
        mixed = pixels[:, torch.randperm(3, generator=generator)]
        pixels = torch.lerp(pixels, mixed, torch.rand(4, 1, 1, 1, generator=generator))
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode()
            latents = latents + 0.05 * torch.randn(latents.shape, generator=generator)
        error = vae.decode(latents).sample - pixels
        loss = error.abs().mean() + 0.5 * (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        schedule.step()


# --- text ------------------------------------------------------------------------------------------------------------


def save_text_encoder(folder: Path) -> None:
    """The klein variant's kind: a random Qwen3 of 28 narrow layers and a tokenizer that knows the captions' words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer([*PHOTOS.values(), CAPTION])
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=28,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=TEXT_WIDTH // 4,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    encoder = Qwen3ForCausalLM(config)
    nn.init.normal_(encoder.model.embed_tokens.weight)
    encoder.save_pretrained(folder / "text_encoder")


def make_tokenizer(texts: Sequence[str]) -> object:
    """Byte-level pair encoding with the words of these texts as tokens, and Qwen3's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=1, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, "user", "assistant"], trainer)
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] if message['content'] is string else '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        chat_template=template,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_texts(folder: Path, captions: Sequence[str]) -> torch.Tensor:
    """Text states as the pack makes them. [num captions, S, D]"""
    (spec,) = VARIANT.text_encoders
    encoder = load_text_encoder(spec, folder, "cpu", torch.float32)
    return torch.stack([encoder.encode_batch([prepare_text(caption, spec)])[0] for caption in captions])


# --- transformer -----------------------------------------------------------------------------------------------------


def make_transformer() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=3 * TEXT_WIDTH,
        timestep_guidance_channels=64,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )


def make_latents(vae: nn.Module, per_photo: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of crops that show most of a photo, and the number of the photo each is of. [N, C, 1, H, W], [N]"""
    generator = torch.Generator().manual_seed(SEED + 1)
    latents, numbers = [], []
    for number, name in enumerate(PHOTOS):
        sizes = [read_photo(name, round(SIDE * scale)) for scale in (1.0, 1.06, 1.12, 1.2)]
        crops = random_crops(sizes, per_photo, SIDE, generator)
        with torch.no_grad():
            latents.append(FLUX2.encode_latents(vae, crops[:, :, None]))
        numbers += [number] * per_photo
    return torch.cat(latents), torch.tensor(numbers)


def train_transformer(
    model: nn.Module,
    latents: torch.Tensor,
    numbers: torch.Tensor,
    texts: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> float:
    """Train all parameters with the family's own objective; every eighth caption is the last text, the empty one.

    Returns: mean loss of the last tenth.
    """
    generator = torch.Generator().manual_seed(SEED + texts.shape[1])
    noise_schedule = make_noise_schedule(ObjectiveConfig(), FLUX2, VARIANT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0, betas=(0.9, 0.99))
    factor = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 30 + 0.03, 3.0 * (1 - step / steps))
    )
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(latents), (batch_size,), generator=generator)
        is_dropped = torch.rand(batch_size, generator=generator) < 0.125
        text = texts[torch.where(is_dropped, len(texts) - 1, numbers[chosen])]
        clean = latents[chosen]
        sigmas = noise_schedule.sigmas(draw_quantiles(batch_size, generator), clean[0, 0].numel())
        noise = torch.randn(clean.shape, generator=generator)
        inputs = FLUX2.make_inputs(add_noise(clean, noise, sigmas), sigmas, {"prompt_embeds": text}, None)
        prediction = FLUX2.read_prediction(model(**inputs, return_dict=False)[0], clean)
        loss = prediction_loss(prediction, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        factor.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def write_index(folder: Path) -> None:
    """model_index.json, which says what the sub-folders are."""
    index = {
        "_class_name": "Flux2KleinPipeline",
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", FLUX2.transformer_class],
        "vae": ["diffusers", FLUX2.vae_class],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    torch.manual_seed(SEED)
    start = time.perf_counter()
    photos = [read_photo(name, side) for name in (*PHOTOS, *MORE_PHOTOS) for side in (96, 192)]
    vae = make_vae(photos, steps=200)
    vae.save_pretrained(folder / "vae")
    print(f"VAE ready after {time.perf_counter() - start:.0f} s")
    save_text_encoder(folder)
    texts = encode_texts(folder, [*PHOTOS.values(), ""])
    model = make_transformer()
    latents, numbers = make_latents(vae, per_photo=32)
    options = {"steps": 800, "batch_size": 8, "learning_rate": 3e-3}
    loss = train_transformer(model, latents, numbers, texts[:, :SHORT_TEXT].contiguous(), **options)
    print(f"transformer at loss {loss:.3f} after {time.perf_counter() - start:.0f} s")
    loss = train_transformer(model, latents, numbers, texts, steps=20, batch_size=4, learning_rate=3e-4)
    model.save_pretrained(folder / "transformer")
    write_index(folder)
    print(f"model in {folder}: loss {loss:.3f} at full text length, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    set_up_logging()
    main(Path(sys.argv[1]))
