"""One process with ComfyUI's Python: what conditions a model beside its caption, compared with ComfyUI's own functions.

Takes ComfyUI's folder and a folder for files. Prints one line of JSON:

{"given": {model: "" or how what it is given differs from sampling}, "made": {way: "" or how an entry differs from what
the nodes make in a graph}, "trained": {way: [losses of a job on folders, losses of one on what the nodes made]},
"refused": {what: message}}.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sampler_helpers
import comfy.samplers
import folder_paths
import torch
from comfy_extras import nodes_edit_model, nodes_flux, nodes_post_processing, nodes_qwen, nodes_wan
from comfy_extras.nodes_zimage import TextEncodeZImageOmni
from devicebridge.config.data import DataConfig, FolderConfig
from devicebridge.config.job import make_job
from devicebridge.data.folders import scan_folders
from devicebridge.encoding.comfy_data import read_conditioning, read_pairs, save_encoded
from devicebridge.encoding.comfy_sources import ComfyConditions
from devicebridge.encoding.encode import fill
from devicebridge.encoding.store import CacheStore
from devicebridge.events import EventLog
from devicebridge.families.spec import LatentSpec
from devicebridge.jobs.build import build_trainer
from devicebridge.jobs.comfy_entries import ComfyEncoders
from devicebridge.jobs.encode_job import cache_job
from devicebridge.jobs.job import check_job
from devicebridge.nodes.host.native.conditions import HostConditioner
from devicebridge.nodes.host.native.model import _conditions, native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.tests.clips import plain_frames, save_sequence
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.tiny_checkpoints import small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained, small_adapter
from PIL import Image

import nodes

FOLDER = sys.argv[2]

ROOT = Path(FOLDER)
SIDES = (32, 48)
WIDE = (32, 64)  # the latents of Wan 2.2's 5B stand for 16 pixels each, and it takes them by two
GIVEN = ("FLUX.2 with references", "Qwen-Image-Edit", "Z-Image Omni", "Wan VACE", "Wan 2.2 Fun Control", "Wan 2.2 S2V")


def given(name: str) -> str:
    """A CONDITIONING through the cache's form, beside the sampler's own way of it."""
    family = TRAINED[name]
    with small_adapter(), small_sizes(family):
        info = read_native(save_trained(name, ROOT / f"{name}.safetensors"), "float32")
    base = info.family.host._make_base(torch.device("meta"))  # type: ignore[union-attr]
    condition = family.condition(5)
    x = torch.zeros(1, *family.latent)
    (_, text), *_ = read_pairs([{"samples": x}], [condition])
    ours = _conditions(base, x, [x.shape], {key: each[None] for key, each in text.items()}, None)
    conds = {"positive": comfy.sampler_helpers.convert_cond(condition)}
    (theirs,) = comfy.samplers.process_conds(base, x, conds, x.device, x)["positive"]
    made = {key: each.process_cond(batch_size=1, area=None) for key, each in theirs["model_conds"].items()}
    return differing(ours, comfy.samplers.cond_cat([made]))


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if ours.keys() != theirs.keys():
        return f"{sorted(ours)} in the place of {sorted(theirs)}"
    wrong = [name for name in theirs if not same(ours[name], theirs[name])]
    return ", ".join(wrong)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


class Clip:
    """States that tell what was tokenized, pictures included."""

    def tokenize(self, text: str, images: Any = (), llama_template: str = "", **more: Any) -> Any:
        return text, list(images), llama_template

    def encode_from_tokens_scheduled(self, tokens: Any) -> Any:
        text, images, template = tokens
        numbers = [float(len(text)), float(len(template or "")), *(float(each.sum()) for each in images)]
        return [[torch.tensor(numbers).view(1, -1, 1), {"pooled_output": torch.ones(1, 2)}]]


class Vae:
    """Means of squares of pixels, of a video every fourth frame."""

    def __init__(self, *, is_video: bool, side: int = 8, channels: int = 16) -> None:
        self.is_video, self.side, self.latent_channels = is_video, side, channels

    def spacial_compression_encode(self) -> int:
        return self.side

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        means = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), self.side)
        means = means.repeat(1, self.latent_channels, 1, 1)[:, : self.latent_channels]
        return means[::4].movedim(0, 1)[None] if self.is_video else means


class Vision:
    """As a CLIP vision model: what it sees, and how it was asked."""

    def encode_image(self, image: torch.Tensor, crop: bool = True) -> Any:
        states = image.mean(dim=(1, 2)).view(1, 1, 3) + float(crop)
        return SimpleNamespace(
            penultimate_hidden_states=states, last_hidden_state=states + 1, image_sizes=[(3, 16, 16)]
        )


def loaded(path: str) -> torch.Tensor:
    return nodes.LoadImage().load_image(path)[0]


def save_files() -> None:
    """after/0.png with before/0.png and before/0_1.png; clips/1 with depth/1, and wide/1, five frames of noise each."""
    generator = torch.Generator().manual_seed(3)

    def noise(height: int, width: int) -> Any:
        return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy()

    for place, size in (("after/0", SIDES), ("before/0", (40, 56)), ("before/0_1", (64, 32)), ("refs/1", (24, 40))):
        (ROOT / place).parent.mkdir(exist_ok=True)
        Image.fromarray(noise(*size)).save(ROOT / f"{place}.png")
    for place, size in (("clips", SIDES), ("depth", SIDES), ("wide", WIDE)):
        (ROOT / place).mkdir()
        save_sequence(ROOT / place / "1", [noise(*size) for _ in plain_frames(5)])
        (ROOT / place / "1.txt").write_text("moves", encoding="utf-8")
    (ROOT / "after" / "0.txt").write_text("make it red", encoding="utf-8")


def entry_of(way: str, vae: Any) -> Any:
    """By the pack, from the folders to the cache."""
    is_clip = way in ("first-frame", "vace", "fun-control", "fun-control-2.2")
    references = (
        () if way in ("first-frame", "vace", "fun-control") else (str(ROOT / ("refs" if is_clip else "before")),)
    )
    control = str(ROOT / "depth") if is_clip and way != "first-frame" else ""
    config = FolderConfig(str(ROOT / ("clips" if is_clip else "after")), references=references, control=control)
    data = DataConfig((config,), resolutions=(40,), condition=way, frames=(5,) if is_clip else ())  # type: ignore
    latent = LatentSpec(channels=16, spatial_stride=8, size_multiple=16, frame_stride=4, fps=16.0 if is_clip else 0.0)
    (sample,) = scan_folders(data, latent)
    assert sample.condition is not None and (not is_clip or sample.bucket == SIDES), sample
    stock = (SimpleNamespace(stock=each, asked=each, fingerprint="") for each in (Clip(), vae, Vision()))
    conditioner = HostConditioner(*stock)  # type: ignore[arg-type]
    store = CacheStore(ROOT / "cache")
    source = ComfyConditions(way, (way,), lambda shapes: "", conditioner=conditioner)
    (key,) = fill([(sample.caption, sample.condition)], source, store).values()
    return store.get(key)


def graph_of(way: str, vae: Any) -> Any:
    pictures = [loaded(str(ROOT / "before" / name)) for name in ("0.png", "0_1.png")]
    plain = Clip().encode_from_tokens_scheduled(Clip().tokenize("moves"))
    video: dict[str, Any] = {"positive": plain, "negative": plain, "vae": vae, "width": SIDES[1], "height": SIDES[0]}
    video |= {"length": 5, "batch_size": 1}
    files = {place: sorted((ROOT / place / "1").iterdir()) for place in ("clips", "depth")}
    frames = {place: torch.cat([loaded(str(file)) for file in found]) for place, found in files.items()}
    vision = Vision().encode_image(frames["clips"][:1], crop=False)
    images = {f"image{number}": each for number, each in enumerate(pictures, start=1)}
    asked = {"clip": Clip(), "prompt": "make it red", "vae": vae}
    graphs: dict[str, Callable[[], Any]] = {
        "reference": lambda: referred(plain, vae, [to_a_megapixel(each) for each in pictures]),
        "kontext": lambda: referred(
            plain, vae, [nodes_flux.FluxKontextImageScale.execute(image=each)[0] for each in pictures]
        ),
        "qwen-image-edit": lambda: nodes_qwen.TextEncodeQwenImageEdit.execute(**asked, image=pictures[0])[0],
        "qwen-image-edit-plus": lambda: nodes_qwen.TextEncodeQwenImageEditPlus.execute(**asked, **images)[0],
        "z-image-omni": lambda: TextEncodeZImageOmni.execute(**asked, image_encoder=Vision(), **images)[0],
        "first-frame": lambda: nodes_wan.WanImageToVideo.execute(
            **video, start_image=frames["clips"][:1], clip_vision_output=vision
        )[0],
        "vace": lambda: nodes_wan.WanVaceToVideo.execute(**video, strength=1.0, control_video=frames["depth"])[0],
        "fun-control": lambda: nodes_wan.WanFunControlToVideo.execute(
            **video, control_video=frames["depth"], clip_vision_output=vision
        )[0],
        "fun-control-2.2": lambda: nodes_wan.Wan22FunControlToVideo.execute(
            **video, ref_image=loaded(str(ROOT / "refs" / "1.png")), control_video=frames["depth"]
        )[0],
    }
    return graphs[way]()


def to_a_megapixel(image: torch.Tensor) -> torch.Tensor:
    scale = nodes_post_processing.ImageScaleToTotalPixels
    found: torch.Tensor = scale.execute(image=image, upscale_method="area", megapixels=1.0, resolution_steps=16)[0]
    return found


def referred(conditioning: Any, vae: Any, pictures: Any) -> Any:
    for each in pictures:
        (latent,) = nodes.VAEEncode().encode(vae, each)
        conditioning = nodes_edit_model.ReferenceLatent.execute(conditioning=conditioning, latent=latent)[0]
    return conditioning


def made(way: str) -> str:
    if way == "qwen-image-edit":
        (ROOT / "before" / "0_1.png").rename(ROOT / "kept.png")
    try:
        vae = Vae(is_video=way not in ("reference", "kontext", "z-image-omni"))
        ours = entry_of(way, vae)
    finally:
        if way == "qwen-image-edit":
            (ROOT / "kept.png").rename(ROOT / "before" / "0_1.png")
    with torch.inference_mode():
        theirs = read_conditioning(graph_of(way, vae), way, keeps_all=True)
    if way in ("reference", "kontext") or "cond" not in ours:
        theirs = {name: each for name, each in theirs.items() if name not in ("cond", "pooled_output")}
    return differing(ours, theirs)


def fault(compare: Callable[[str], str], name: str) -> str:
    try:
        return compare(name)
    except Exception as error:
        return repr(error)


class States(Clip):
    """As wide as Wan's text; with what a job asks of an encoder."""

    fingerprint = f"comfyui 0 CLIP {'a' * 64}"

    def encode(self, text: str) -> Any:
        states = torch.randn(1, 6, 4096, generator=torch.Generator().manual_seed(len(text)))
        return [[states, {}]]

    def release(self) -> None:
        pass


class Latents(Vae):
    fingerprint = f"comfyui 0 VAE {'b' * 64}"
    takes_clips = True

    def release(self) -> None:
        pass


MASKED = "first-frame, by a noise mask"
MODELS = {"first-frame": "Wan 2.2 I2V 14B", "vace": "Wan VACE", MASKED: "Wan 2.2 TI2V 5B"}


def trained(what: str) -> list[list[float]]:
    """One step of a job on folders, and of one on the CONDITIONING and LATENT of a graph; and the loss of both where
    the same samples are held out."""
    name, way = MODELS[what], what.split(",")[0]
    place, sides = ("wide", WIDE) if what == MASKED else ("clips", SIDES)
    vae = Latents(is_video=True, **({"side": 16, "channels": 48} if what == MASKED else {}))
    path = ROOT / f"{what}.safetensors"
    info = read_native(save_trained(name, path), "float32")
    folders = {"path": str(ROOT / place)} | ({"control": str(ROOT / "depth")} if way == "vace" else {})
    side = round((sides[0] * sides[1]) ** 0.5)
    data = {"resolutions": [side], "frames": [5], "fps": "source", "condition": way, "folders": [folders]}
    cache = {
        "folder": str(ROOT / "trained" / what),
        "text_source": States.fingerprint,
        "latent_source": Latents.fingerprint,
    }
    conditioner = HostConditioner(None, SimpleNamespace(stock=vae), None)  # type: ignore[arg-type]
    clip = torch.cat([loaded(str(file)) for file in sorted((ROOT / place / "1").iterdir())])
    latent, options = {"samples": vae.encode(clip)}, {}
    if what == MASKED:
        latent["noise_mask"] = nodes_wan.Wan22ImageToVideoLatent.execute(vae, *sides[::-1], 5, 1, clip[:1])[0][
            "noise_mask"
        ]
    else:
        ((_, options),) = graph_of(way, vae)
    pair = read_pairs([latent], [[[States().encode("moves")[0][0], options]]])
    encoded = save_encoded(pair, CacheStore(ROOT / "graph"))
    given = {"folders": ({"data": data, "cache": cache}, ComfyEncoders(States(), vae, conditioner))}
    given["folders"][0]["evaluation"] = {"folder": folders["path"], "control": folders.get("control", "")}
    given["graph"] = ({"data": {"encoded": str(encoded)}}, ComfyEncoders())
    losses = []
    for kind, (sections, encoders) in given.items():
        job = make_job(
            {
                **sections,
                "model": {"path": str(path), "family": "comfyui", "dtype": "float32"},
                "split": {"devices": ["cpu"]},
                "lora": {"rank": 2},
                "train": {"steps": 1, "seed": 3},
                "output": {"folder": str(ROOT / what / kind), "tensorboard": False},
            }
        )
        with native_training(), endless_memory(), ExitStack() as cleanup:
            plan = check_job(job, info=info)
            events = cleanup.enter_context(EventLog(Path(job.output.folder)))
            trainer = build_trainer(plan, {}, cache_job(plan, events, encoders=encoders), events, cleanup)
            trainer.eval_data = trainer.eval_data or trainer.train_data
            losses.append([*(float(each) for each in trainer.accumulate(1)), trainer.evaluate()])
    return losses


def refused() -> dict[str, str]:
    info = read_native(ROOT / "vace.safetensors", "float32")
    data = {"resolutions": [40], "frames": [5], "folders": [{"path": str(ROOT / "clips")}]}
    base = {
        "model": {"path": str(ROOT / "vace.safetensors"), "family": "comfyui", "dtype": "float32"},
        "split": {"devices": ["cpu"]}, "train": {"steps": 1},
        "cache": {"text_source": States.fingerprint, "latent_source": Latents.fingerprint},
        "output": {"folder": str(ROOT / "refused"), "tensorboard": False},
    }  # fmt: skip
    asked = {
        "other model": {"data": {**data, "condition": "first-frame"}},
        "pictures": {
            "data": {**data, "condition": "vace", "folders": [{**data["folders"][0], "control": str(ROOT / "depth")}]},
            "samples": {"prompts": ["moves"]},
        },
    }
    infos = dict.fromkeys(asked, info)
    for way, name in {"first-frame": "Wan 2.1 I2V", "fun-control": "Wan 2.1 Fun Control"}.items():
        folders = [{**data["folders"][0], **({"control": str(ROOT / "depth")} if way == "fun-control" else {})}]
        path = save_trained(name, ROOT / f"blind {way}.safetensors")
        what, model = f"{way} without CLIP vision", {**base["model"], "path": str(path)}
        asked[what] = {"data": {**data, "condition": way, "folders": folders}, "model": model}
        infos[what] = read_native(path, "float32")
    told = {}
    for what, sections in asked.items():
        with native_training(), endless_memory():
            try:
                check_job(make_job({**base, **sections}), info=infos[what])
            except ValueError as error:
                told[what] = str(error)
    return told


WAYS = ("reference", "kontext", "qwen-image-edit", "qwen-image-edit-plus", "z-image-omni", "first-frame", "vace")
WAYS += ("fun-control", "fun-control-2.2")

if __name__ == "__main__":
    save_files()
    folder_paths.get_annotated_filepath = lambda name, *rest: name  # files lie where they lie
    answer: dict[str, Any] = {"given": {name: fault(given, name) for name in GIVEN}}
    answer["made"] = {way: fault(made, way) for way in WAYS}
    answer |= {"trained": {way: trained(way) for way in MODELS}, "refused": refused()}
    print(json.dumps(answer), flush=True)
