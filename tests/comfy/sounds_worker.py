"""Jobs on folders of sounds, and of clips with sounds, train what ComfyUI's own nodes make of them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.sd
import comfy.supported_models_base
import comfy.text_encoders.ace15
import torch
import torchaudio
from comfy.ldm.audio.autoencoder import AudioOobleckVAE
from comfy.ldm.lightricks.vae.audio_vae import AudioVAE
from comfy.nested_tensor import NestedTensor
from comfy_extras.nodes_ace import TextEncodeAceStepAudio15
from comfy_extras.nodes_audio import VAEEncodeAudio, load
from devicebridge.data.image import ImageRequest, SoundRequest
from devicebridge.data.sounds import probe_sound, read_sound
from devicebridge.data.video import read_frames
from devicebridge.encoding.comfy_data import read_pairs, save_encoded
from devicebridge.encoding.store import CacheStore
from devicebridge.jobs.encode_job import ComfyEncoders
from devicebridge.nodes.host.comfy_encoders import HostClip, HostVae
from devicebridge.nodes.host.native.files import load_vae
from devicebridge.nodes.host.native.source import read_native
from devicebridge.tests.comfy.cases import FOLDER, case, expect_refusal
from devicebridge.tests.comfy.native_conditions_worker import Latents, States, losses_of
from devicebridge.tests.comfy.stock_encoders import _randomise, make_vae
from devicebridge.tests.comfy.tiny_checkpoints import small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained
from devicebridge.tests.sounds import save_sound, wave
from safetensors.torch import save_file

SONG = {"bpm": 97, "timesignature": "3/4", "keyscale": "D minor", "language": "ja", "lyrics": "[verse]\nla (la)"}


def tiny_clip() -> comfy.sd.CLIP:
    ace = comfy.text_encoders.ace15
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
    options = {"_model_config": {**sizes, "num_key_value_heads": 1}, "dtype": torch.float32}
    target = comfy.supported_models_base.ClipTarget(ace.ACE15Tokenizer, ace.te(lm_model="none"))
    made = comfy.sd.CLIP(target, model_options=options)
    _randomise(made.cond_stage_model, 1)
    return made


def song_vae() -> comfy.sd.VAE:
    """As ComfyUI makes one of a file, but narrow."""
    narrow = functools.partial(AudioOobleckVAE, channels=2)
    model = narrow(strides=[2, 4, 4, 6, 10])
    _randomise(model, 2)
    with mock.patch.object(comfy.sd, "AudioOobleckVAE", narrow):
        return comfy.sd.VAE(sd=model.state_dict(), dtype=torch.float32)


def clip_vae() -> tuple[AudioVAE, dict[str, str]]:
    """LTX-2's, and what its file says of it."""
    sizes = {
        "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 256, "in_channels": 2, "out_ch": 2, "ch": 8,
        "ch_mult": [1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "mid_block_add_attention": False,
        "norm_type": "pixel", "causality_axis": "height",
    }  # fmt: skip
    vocoder = {"upsample_initial_channel": 32, "resblock_kernel_sizes": [3], "upsample_rates": [4, 4]}
    vocoder |= {"upsample_kernel_sizes": [8, 8], "resblock_dilation_sizes": [[1, 3, 5]]}
    said = {"config": json.dumps({"audio_vae": {"model": {"params": {"ddconfig": sizes}}}, "vocoder": vocoder})}
    model = AudioVAE(said)
    _randomise(model, 3)
    return model, said


def _trains_the_same(name: str, given: dict[str, tuple[dict[str, Any], ComfyEncoders]]) -> None:
    info = read_native(save_trained(name, FOLDER / f"{name}.safetensors"), "float32")
    of_folders, of_graph = losses_of(name, info, given)
    assert of_folders == of_graph and len(of_folders) == 3 and min(of_folders) > 0


@case
def song() -> None:
    """Two songs, of which one has its lyrics in a file, against the text encode node and VAE Encode Audio."""
    (folder := FOLDER / "songs").mkdir()
    save_sound(folder / "a.wav", wave(1.03, 44100), 44100)
    save_sound(folder / "b.flac", wave(0.6, 24000, 1), 24000)
    (folder / "a.json").write_text(json.dumps({"caption": "slow (waltz)", **SONG}))
    (folder / "b.txt").write_text("drums")
    (folder / "b.json").write_text(json.dumps({**SONG, "lyrics": "other"}))
    (folder / "b.lyrics.txt").write_text(SONG["lyrics"])
    clip, vae = tiny_clip(), song_vae()
    encoders = ComfyEncoders(HostClip(clip), HostVae(vae))
    names = {"text_source": encoders.clip.fingerprint, "latent_source": encoders.vae.fingerprint}
    latents, texts = [], []
    for file, tags, cells in (("a.wav", "slow (waltz)", 25), ("b.flac", "drums", 15)):
        values, rate = load(str(folder / file))
        kept = values[None, :, : cells * rate // 25]
        torch.manual_seed(0)
        (latent,) = VAEEncodeAudio.execute(vae=vae, audio={"waveform": kept, "sample_rate": rate}).args
        latents.append(latent)
        said = {**SONG, "timesignature": "3", "duration": cells / 25, "generate_audio_codes": False}
        rest = {"seed": 0, "cfg_scale": 2.0, "temperature": 0.85, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
        texts += TextEncodeAceStepAudio15.execute(clip, tags=tags, **said, **rest).args
    encoded = save_encoded(read_pairs(latents, texts), CacheStore(FOLDER / "graph"))
    cache = {"folder": str(FOLDER / "cache"), **names}
    given = {"folders": ({"data": {"folders": [{"path": str(folder)}]}, "cache": cache}, encoders)}
    with small_sizes(TRAINED["ACE-Step 1.5"]):
        _trains_the_same("ACE-Step 1.5", given | {"graph": ({"data": {"encoded": str(encoded)}}, ComfyEncoders())})


class Pictures(Latents):
    """As many latent frames as the model has of a clip."""

    def __init__(self, side: int, channels: int) -> None:
        super().__init__(is_video=True, side=side, channels=channels)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode(pixels)[:, :, :2]


class Columns:
    """A VAE of MiniMax H3's sound: means of 800 samples at 32000 per second."""

    fingerprint = f"comfyui 0 VAE {'c' * 64}"

    def encode_sound(self, waveform: torch.Tensor, rate: int, *, is_padded: bool) -> torch.Tensor:
        assert rate == 32000 and is_padded
        columns = torch.nn.functional.pad(waveform, (0, -waveform.shape[1] % 800)).unflatten(1, (-1, 800)).mean(2)
        return columns.expand(1, 32, *columns.shape)

    def release(self) -> None:
        pass


def samples(values: Any) -> torch.Tensor:
    return torch.from_numpy(values.T / 2.0**15).float()


def beside_a_clip(folder: Path) -> tuple[Any, torch.Tensor]:
    """LTX-2: a file of nine frames' length less some, whose end is silent. The VAE comes out of a whole checkpoint."""
    save_sound(folder / "a.mkv", wave(0.4, 32000, 2, seed=9), 32000, num_frames=9)
    values = wave(0.3, 32000)
    save_sound(folder / "a.wav", values, 32000)
    model, said = clip_vae()
    weights = {name.replace("autoencoder.", "audio_vae."): each for name, each in model.state_dict().items()}
    path = FOLDER / "checkpoint.safetensors"
    save_file({**weights, "vae.decoder.conv_in.weight": torch.zeros(1)}, path, said)
    heard = torch.nn.functional.pad(samples(values), (0, 9 * 1280 - len(values)))
    heard = torchaudio.functional.resample(heard, 32000, 44100)
    with torch.inference_mode():
        sound = model.encode(torch.nn.functional.pad(heard, (0, 4 * 4096 - heard.shape[1]))[None])
    return HostVae(load_vae(str(path), of_clips=True)), sound[:, :, :9]


def track_of_a_clip(folder: Path) -> tuple[Any, torch.Tensor]:
    """MiniMax H3: 5 frames at 24 per second, of whose 8 columns the last goes beyond none."""
    values = wave(0.4, 32000)
    save_sound(folder / "a.mkv", values, 32000, num_frames=5, fps=24)
    columns = torch.stack([samples(values)[:, 800 * column : 800 * column + 800].mean(1) for column in range(8)], dim=1)
    return Columns(), columns.expand(1, 32, 2, 8)


def _clip(
    name: str, frames: int, pictures: Pictures, width: int, make: Callable[[Path], tuple[Any, torch.Tensor]]
) -> None:
    """A clip with sound against Concat AV Latent of what was cut and encoded here."""
    (folder := FOLDER / f"clips of {name}").mkdir()
    host, sound = make(folder)
    states = [[torch.ones(1, 6, width), {}]]
    texts = SimpleNamespace(fingerprint=States.fingerprint, encode=lambda text: states, release=int)
    video = read_frames(ImageRequest(str(folder / "a.mkv"), (64, 64), (0, 0, 64, 64), tuple(range(frames))))
    stream = pictures.encode((((video + 1) * 127.5).round() / 255).permute(1, 2, 3, 0))
    pairs = read_pairs([{"samples": NestedTensor((stream, sound))}], [states])
    encoded = save_encoded(pairs, CacheStore(FOLDER / "graph"))
    cache = {
        "folder": str(FOLDER / f"cache of {name}"),
        "text_source": texts.fingerprint,
        "latent_source": Latents.fingerprint,
    }
    data = {"folders": [{"path": str(folder)}], "resolutions": [64], "frames": [frames]}
    encoders = ComfyEncoders(texts, pictures, audio_vae=host)
    given = {"folders": ({"data": data, "cache": {**cache, "audio_source": host.fingerprint}}, encoders)}
    with small_sizes(TRAINED[name]):
        _trains_the_same(name, given | {"graph": ({"data": {"encoded": str(encoded)}}, ComfyEncoders())})


@case
def clip_with_a_sound_beside_it() -> None:
    _clip("LTX-2", 9, Pictures(32, 128), 24, beside_a_clip)


@case
def clip_with_its_track() -> None:
    _clip("MiniMax H3", 5, Pictures(16, 24), 48, track_of_a_clip)


@case
def files_are_decoded_as_load_audio_does() -> None:
    for suffix in (".wav", ".flac", ".mp3", ".ogg", ".m4a", ".opus"):
        path = save_sound(FOLDER / f"any{suffix}", wave(0.5, 48000), 48000)
        theirs, rate = load(str(path))
        seconds = probe_sound(path)
        assert seconds is not None
        ours, own_rate = read_sound(SoundRequest(str(path), 0.0, seconds, 1), is_alone=True)
        assert own_rate == rate and torch.equal(ours, theirs), suffix


@case
def a_song_without_caption_is_what_workflows_sample_against() -> None:
    (none,) = HostClip(tiny_clip()).encode("")
    assert not none[0].any() and not none[1]["conditioning_lyrics"].any()


@case
def a_vae_of_pictures_is_refused_for_sound() -> None:
    vae, sound = HostVae(make_vae("flux1")), torch.zeros(2, 4000)
    expect_refusal(lambda: vae.encode_sound(sound, 8000), "3 channels")
