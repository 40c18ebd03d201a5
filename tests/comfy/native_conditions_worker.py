"""What a model of ComfyUI's is given beside its caption, and what ComfyUI's sampler and nodes make of the same."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sampler_helpers
import comfy.samplers
import folder_paths
import torch
from comfy_extras import nodes_edit_model, nodes_flux, nodes_qwen, nodes_wan
from comfy_extras.nodes_zimage import TextEncodeZImageOmni
from devicebridge.config.data import DataConfig, FolderConfig
from devicebridge.data.folders import scan_folders
from devicebridge.encoding.comfy_data import read_conditioning, read_pairs, save_encoded
from devicebridge.encoding.comfy_sources import ComfyConditions
from devicebridge.encoding.sources import fill
from devicebridge.encoding.store import CacheStore
from devicebridge.events import EventLog
from devicebridge.families.comfy.conditions import WAYS
from devicebridge.families.spec import LatentSpec
from devicebridge.jobs.encode_job import ComfyEncoders, cache_job
from devicebridge.jobs.job import build_trainer, check_job
from devicebridge.nodes.host.native.conditions import HostConditioner
from devicebridge.nodes.host.native.model import _conditions, native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.tests.clips import plain_frames, save_sequence
from devicebridge.tests.comfy.cases import FOLDER, expect_refusal, long_case, run_cases
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.tiny_checkpoints import native_job, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained, small_adapter
from PIL import Image

import nodes

SIDES = (32, 48)
WIDE = (32, 64)  # the latents of Wan 2.2's 5B stand for 16 pixels each, and it takes them by two
GIVEN = ("FLUX.2 with references", "Qwen-Image-Edit", "Z-Image Omni", "Wan VACE", "Wan 2.2 Fun Control", "Wan 2.2 S2V")


@long_case
def what_goes_through_the_cache_reaches_the_model_as_the_sampler_gives_it() -> None:
    """Strings, numbers, lists and outputs of CLIP vision; nothing is left out, nothing is another number."""
    for name in GIVEN:
        family = TRAINED[name]
        with small_adapter(), small_sizes(family):
            info = read_native(save_trained(name, FOLDER / f"{name}.safetensors"), "float32")
        base = info.family.host._make_base(torch.device("meta"))  # type: ignore[union-attr]
        condition = family.condition(5)
        x = torch.zeros(1, *family.latent)
        (_, text), *_ = read_pairs([{"samples": x}], [condition])
        ours = _conditions(base, x, [x.shape], {key: each[None] for key, each in text.items()}, None)
        conds = {"positive": comfy.sampler_helpers.convert_cond(condition)}
        (theirs,) = comfy.samplers.process_conds(base, x, conds, x.device, x)["positive"]
        made = {key: each.process_cond(batch_size=1, area=None) for key, each in theirs["model_conds"].items()}
        assert not differing(ours, comfy.samplers.cond_cat([made])), name


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
        return SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states + 1, image_sizes=[(3, 9, 16)])


def loaded(path: str) -> torch.Tensor:
    return nodes.LoadImage().load_image(path)[0]


def save_files() -> None:
    """after/0.png with before/0.png and before/0_1.png; clips/1 with depth/1, and wide/1, five frames of noise each."""
    generator = torch.Generator().manual_seed(3)

    def noise(height: int, width: int) -> Any:
        return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy()

    for place, size in (("after/0", SIDES), ("before/0", (40, 56)), ("before/0_1", (64, 32)), ("refs/1", (24, 40))):
        (FOLDER / place).parent.mkdir(exist_ok=True)
        Image.fromarray(noise(*size)).save(FOLDER / f"{place}.png")
    for place, size in (("clips", SIDES), ("depth", SIDES), ("wide", WIDE)):
        (FOLDER / place).mkdir()
        save_sequence(FOLDER / place / "1", [noise(*size) for _ in plain_frames(5)])
        (FOLDER / place / "1.txt").write_text("moves", encoding="utf-8")
    (FOLDER / "after" / "0.txt").write_text("make it red", encoding="utf-8")


def entry_of(way: str, vae: Any) -> Any:
    """By the pack, from the folders to the cache."""
    is_clip = way in ("first-frame", "vace", "fun-control", "fun-control-2.2")
    has_none = way in ("first-frame", "vace", "fun-control")
    references = () if has_none else (str(FOLDER / ("refs" if is_clip else "before")),)
    control = str(FOLDER / "depth") if is_clip and way != "first-frame" else ""
    config = FolderConfig(str(FOLDER / ("clips" if is_clip else "after")), references=references, control=control)
    data = DataConfig((config,), resolutions=(40,), condition=way, frames=(5,) if is_clip else ())  # type: ignore
    latent = LatentSpec(channels=16, spatial_stride=8, size_multiple=16, frame_stride=4, fps=16.0 if is_clip else 0.0)
    (sample,) = scan_folders(data, latent)
    assert sample.condition is not None and (not is_clip or sample.bucket == SIDES), sample
    stock = (SimpleNamespace(stock=each, given=each, fingerprint="") for each in (Clip(), vae, Vision()))
    conditioner = HostConditioner(*stock)  # type: ignore[arg-type]
    store = CacheStore(FOLDER / "cache")
    source = ComfyConditions(way, (way,), lambda shapes: "", conditioner=conditioner)
    (key,) = fill([(sample.caption, sample.condition)], source, store).values()
    return store.get(key)


def graph_of(way: str, vae: Any) -> Any:
    pictures = [loaded(str(FOLDER / "before" / name)) for name in ("0.png", "0_1.png")]
    plain = Clip().encode_from_tokens_scheduled(Clip().tokenize("moves"))
    video: dict[str, Any] = {"positive": plain, "negative": plain, "vae": vae, "width": SIDES[1], "height": SIDES[0]}
    video |= {"length": 5, "batch_size": 1}
    files = {place: sorted((FOLDER / place / "1").iterdir()) for place in ("clips", "depth")}
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
            **video, ref_image=loaded(str(FOLDER / "refs" / "1.png")), control_video=frames["depth"]
        )[0],
    }
    return graphs[way]()


def to_a_megapixel(image: torch.Tensor) -> torch.Tensor:
    from comfy_extras.nodes_post_processing import ImageScaleToTotalPixels as Scale  # needs kornia, which no other does

    found: torch.Tensor = Scale.execute(image=image, upscale_method="area", megapixels=1.0, resolution_steps=16)[0]
    return found


def referred(conditioning: Any, vae: Any, pictures: Any) -> Any:
    for each in pictures:
        (latent,) = nodes.VAEEncode().encode(vae, each)
        conditioning = nodes_edit_model.ReferenceLatent.execute(conditioning=conditioning, latent=latent)[0]
    return conditioning


@long_case
def what_is_made_of_files_is_what_the_nodes_make() -> None:
    for way in sorted(WAYS):
        if way == "qwen-image-edit":
            (FOLDER / "before" / "0_1.png").rename(FOLDER / "kept.png")
        vae = Vae(is_video=way not in ("reference", "kontext", "z-image-omni"))
        ours = entry_of(way, vae)
        if way == "qwen-image-edit":
            (FOLDER / "kept.png").rename(FOLDER / "before" / "0_1.png")
        with torch.inference_mode():
            theirs = read_conditioning(graph_of(way, vae), way, keeps_all=True)
        if way in ("reference", "kontext") or "cond" not in ours:
            theirs = {name: each for name, each in theirs.items() if name not in ("cond", "pooled_output")}
        assert not differing(ours, theirs), way


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
    release = States.release


def losses_of(name: str, info: Any, given: Mapping[str, tuple[dict[str, Any], ComfyEncoders]]) -> list[list[float]]:
    """Of the first two steps of each of these jobs, and then of what is held out, else of what is trained."""
    found = []
    for kind, (sections, encoders) in given.items():
        job = native_job(info.path, FOLDER / name / kind, sections, steps=2)
        with native_training(), endless_memory(), ExitStack() as cleanup:
            plan = check_job(job, info=info)
            events = cleanup.enter_context(EventLog(Path(job.output.folder)))
            trainer = build_trainer(plan, {}, cache_job(plan, events, encoders=encoders), events, cleanup)
            trainer.eval_data = trainer.eval_data or trainer.train_data
            found.append([float(each) for _ in range(2) for each in trainer.accumulate(1)] + [trainer.evaluate()])
    return found


MASKED = "first-frame, by a noise mask"
MODELS = {"first-frame": "Wan 2.2 I2V 14B", "vace": "Wan VACE", MASKED: "Wan 2.2 TI2V 5B"}


@long_case
def a_job_on_folders_trains_what_the_graph_trains() -> None:
    """Of a step, and where the same files are held out."""
    for what in MODELS:
        of_folders, of_graph = trained(what)
        assert of_folders == of_graph and min(of_folders) > 0, what


def trained(what: str) -> list[list[float]]:
    name, way = MODELS[what], what.split(",")[0]
    place, sides = ("wide", WIDE) if what == MASKED else ("clips", SIDES)
    vae = Latents(is_video=True, **({"side": 16, "channels": 48} if what == MASKED else {}))
    info = read_native(save_trained(name, FOLDER / f"{what}.safetensors"), "float32")
    folders = {"path": str(FOLDER / place)} | ({"control": str(FOLDER / "depth")} if way == "vace" else {})
    side = round((sides[0] * sides[1]) ** 0.5)
    data = {"resolutions": [side], "frames": [5], "fps": "source", "condition": way, "folders": [folders]}
    sources = {"text_source": States.fingerprint, "latent_source": Latents.fingerprint}
    conditioner = HostConditioner(None, SimpleNamespace(stock=vae), None)  # type: ignore[arg-type]
    clip = torch.cat([loaded(str(file)) for file in sorted((FOLDER / place / "1").iterdir())])
    latent, options = {"samples": vae.encode(clip)}, {}
    if what == MASKED:
        masked = nodes_wan.Wan22ImageToVideoLatent.execute(vae, *sides[::-1], 5, 1, clip[:1])[0]
        latent |= {"noise_mask": masked["noise_mask"]}
    else:
        ((_, options),) = graph_of(way, vae)
    pair = read_pairs([latent], [[[States().encode("moves")[0][0], options]]])
    encoded = save_encoded(pair, CacheStore(FOLDER / "graph"))
    sections: dict[str, Any] = {"data": data, "cache": {"folder": str(FOLDER / "trained" / what), **sources}}
    sections["evaluation"] = {"folder": folders["path"], "control": folders.get("control", "")}
    of_graph = {"data": {"encoded": str(encoded)}}, ComfyEncoders()
    return losses_of(what, info, {"folders": (sections, ComfyEncoders(States(), vae, conditioner)), "graph": of_graph})


@long_case
def a_job_is_told_what_its_model_takes_and_that_it_draws_no_pictures() -> None:
    clips, depth = {"path": str(FOLDER / "clips")}, {"control": str(FOLDER / "depth")}
    sources = {"text_source": States.fingerprint, "latent_source": Latents.fingerprint}
    blind = "image embedder, which reads CLIP vision"
    asked: tuple[tuple[str, str, dict[str, str], dict[str, Any], tuple[str, ...]], ...] = (
        ("Wan VACE", "first-frame", clips, {}, ('data.condition = "first-frame" is for a WanModel', "it takes vace")),
        (
            "Wan VACE", "vace", clips | depth, {"samples": {"prompts": ["moves"]}},
            ("ComfyUI's VaceWanModel is given vace_frames beside a prompt",),
        ),
        ("Wan 2.1 I2V", "first-frame", clips, {}, (blind,)),
        ("Wan 2.1 Fun Control", "fun-control", clips | depth, {}, (blind,)),
    )  # fmt: skip
    for name, way, folder, more, words in asked:
        info = read_native(save_trained(name, FOLDER / "refused.safetensors"), "float32")
        data = {"resolutions": [40], "frames": [5], "folders": [folder], "condition": way}
        job = native_job(info.path, FOLDER / "refused", {"cache": sources, "data": data, **more}, steps=1)
        with native_training(), endless_memory():
            expect_refusal(lambda: check_job(job, info=info), *words)  # noqa: B023


if __name__ == "__main__":
    save_files()
    folder_paths.get_annotated_filepath = lambda name, *rest: name  # files lie where they lie
    run_cases()
