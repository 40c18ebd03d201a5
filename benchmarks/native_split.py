"""What splitting a native MODEL over two cards costs and gains in a real ComfyUI, against one card and core's own.

    python benchmarks/native_split.py --comfyui ~/ComfyUI --case flux2 --case wan_cfg [--dynamic-vram] [--out out.json]

Random weights of the published sizes; no checkpoint is needed. ComfyUI is started as its main.py does, as far as models
need it (no server, no custom nodes), and every number comes from its stock sampler: euler through CFGGuider. Rivals
take turns in one process, so that clocks and neighbours affect all alike; the first turn of each is thrown away. A step
is timed from one sampler callback to the next with all cards synchronised, so loading is not in it.

`--against FOLDER` names another checkout of this pack; in the cases `against_...` the splits of both take turns, and
their latents are compared bit for bit.

`--compiler off` starts ComfyUI with its compiler switched off; "on" is what it starts with, where it has one. Every
rival's report says how many allocation graphs were recorded and replayed and how many blocks were captured. The cases
`compiler_...` let the split with the compiler on and off take turns with one card, and `prompts_...` sample with the
split `--prompts` times, with one card before and after. `--unguarded` takes out what keeps splits outside the compiler.

In the cases `tensor_...` the rival `tensor_launched` is `tensor` without CUDA graphs, every kernel launched by Python.
Both are the same split over the same weights, so their latents must be the same bits. ComfyUI makes no batch of
Qwen-Image's prompts if one is longer, as in `tensor_qwen_cfg_uneven`: they are two forwards, one after the other.
`--rivals` names those that take turns; one_gpu must be among them.

`--card-gb 24` makes cards small: another process takes the rest of each card's memory, so that ComfyUI, torch and
comfy-aimdo all meet the wall a real card has. `--dynamic-vram` starts comfy-aimdo; that cannot be changed within a
process. `--tiny` runs the same code with toy shapes on emulated cards on the CPU. Results are written after each case.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI"))
    parser.add_argument("--case", action="append", required=True, help="name of a case; may be repeated")
    parser.add_argument("--dynamic-vram", action="store_true", help="with comfy-aimdo, as ComfyUI starts by default")
    parser.add_argument("--compiler", choices=("on", "off"), default="on", help="ComfyUI's own, where it has one")
    parser.add_argument("--unguarded", action="store_true", help="compile splits, too; may end the process")
    parser.add_argument("--torch-allocator", action="store_true", help="not the driver's, which ComfyUI chooses")
    parser.add_argument("--prompts", type=int, default=50, help="samplings of the cases prompts_...")
    parser.add_argument("--cards", type=int, default=2, help="that a split uses")
    parser.add_argument("--card-gb", type=float, help="GiB that each card is cut down to")
    parser.add_argument("--against", type=Path, help="another checkout of the pack, for the cases against_...")
    parser.add_argument("--rivals", nargs="+", default=[], help="of the cases tensor_...; all of them if left out")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each rival")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on emulated cards")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def start_comfyui(options: argparse.Namespace) -> None:
    """What ComfyUI's main.py does before models can be loaded, in its order; torch comes after the allocator choice."""
    sys.path.insert(0, str(Path(options.comfyui).expanduser()))
    sys.argv = ["main.py", *(["--cpu"] if options.tiny else [])]
    sys.argv += [] if options.dynamic_vram else ["--disable-dynamic-vram"]
    sys.argv += ["--disable-cuda-malloc"] if options.torch_allocator else []
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy_aimdo.control
    import cuda_malloc  # noqa: F401
    from comfy.cli_args import args

    if options.compiler == "off" and hasattr(args, "disable_comfy_compiler"):
        args.disable_comfy_compiler = True
    if options.dynamic_vram:
        comfy_aimdo.control.init(nvml_pressure=not args.disable_nvml_pressure)
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    if options.dynamic_vram:
        devices = comfy.model_management.get_all_torch_devices()
        if not comfy_aimdo.control.init_devices((device.index, 0) for device in devices):
            raise RuntimeError("--dynamic-vram: comfy-aimdo did not initialise on this machine")
        comfy_aimdo.control.set_log_warning()
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


OPTIONS = parse()
start_comfyui(OPTIONS)

import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from dataclasses import asdict, dataclass, field, replace  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import comfy.memory_management  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.model_prefetch  # noqa: E402
import comfy.multigpu  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.quant_ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfyui_version  # noqa: E402
import torch  # noqa: E402
from comfy.cli_args import args as comfy_args  # noqa: E402
from devicebridge.tests.emulated import emulated_cards, on_cpu  # noqa: E402
from provenance import describe_run, write_json  # noqa: E402

KIND = "lazy" if OPTIONS.tiny else "cuda"
CARDS = tuple(torch.device(KIND, index) for index in range(OPTIONS.cards))
CPU = torch.device("cpu")
SEED = 20
FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0


# ---- models: shapes, random weights, loading


@dataclass(frozen=True)
class Shape:
    """A published architecture as ComfyUI's class takes it, and what its sampler is given.

    Args:
        latent: shape without the batch. text: tokens and width of the text states. quantized: prefixes of fqns whose
        linears a quantised file stores in low precision; the rest stays bfloat16.
    """

    name: str
    module: str
    class_name: str
    kwargs: Mapping[str, Any]
    tiny: Mapping[str, Any]
    latent: tuple[int, ...]
    tiny_latent: tuple[int, ...]
    text: tuple[int, int]
    quantized: tuple[str, ...]
    precision: str = "bf16"  # of its unquantised files that core computes in without casting

    def build(self) -> torch.nn.Module:
        cls = getattr(importlib.import_module(self.module), self.class_name)
        kwargs = {**self.kwargs, **(self.tiny if OPTIONS.tiny else {})}
        # With aimdo ComfyUI's linears have no weight before they are loaded.
        with mock.patch.object(comfy.memory_management, "aimdo_enabled", False):
            return cls(**kwargs, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)


FLUX2 = Shape(
    name="FLUX.2-dev, 8 double + 48 single blocks",
    module="comfy.ldm.flux.model",
    class_name="Flux",
    kwargs={
        "in_channels": 128,
        "out_channels": 128,
        "vec_in_dim": None,
        "context_in_dim": 15360,
        "hidden_size": 6144,
        "mlp_ratio": 3.0,
        "num_heads": 48,
        "depth": 8,
        "depth_single_blocks": 48,
        "axes_dim": [32, 32, 32, 32],
        "theta": 2000,
        "patch_size": 1,
        "qkv_bias": False,
        "guidance_embed": True,
        "txt_ids_dims": [3],
        "global_modulation": True,
        "mlp_silu_act": True,
        "ops_bias": False,
    },
    tiny={"hidden_size": 512, "num_heads": 4, "depth": 2, "depth_single_blocks": 4},
    latent=(128, 64, 64),  # 1024 x 1024 pixels
    tiny_latent=(128, 4, 4),
    text=(512, 15360),
    quantized=("double_blocks.", "single_blocks."),
)
FLUX2_SMALL = replace(
    FLUX2,
    name="FLUX.2-dev at full width, 4 double + 24 single blocks",
    kwargs={**FLUX2.kwargs, "depth": 4, "depth_single_blocks": 24},
)
FLUX1 = replace(
    FLUX2,
    name="FLUX.1-dev, 19 double + 38 single blocks",
    kwargs={
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 19,
        "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    },
    latent=(16, 128, 128),  # 1024 x 1024 pixels
    tiny_latent=(16, 8, 8),
    text=(512, 4096),
)
WAN_14B = Shape(
    name="Wan 2.1/2.2 14B text to video, 40 blocks",
    module="comfy.ldm.wan.model",
    class_name="WanModel",
    kwargs={"model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
    tiny={"dim": 512, "ffn_dim": 512, "num_heads": 4, "num_layers": 4},
    latent=(16, 9, 60, 104),  # 832 x 480, 33 frames
    tiny_latent=(16, 1, 4, 4),
    text=(512, 4096),
    quantized=("blocks.",),
    precision="fp16",
)
WAN_14B_SHORT = replace(WAN_14B, latent=(16, 5, 60, 104))  # 17 frames
QWEN_IMAGE = Shape(
    name="Qwen-Image, 60 blocks",
    module="comfy.ldm.qwen_image.model",
    class_name="QwenImageTransformer2DModel",
    kwargs={"num_layers": 60},
    tiny={"num_layers": 2},
    latent=(16, 1, 128, 128),  # 1024 x 1024 pixels
    tiny_latent=(16, 1, 4, 4),
    text=(256, 3584),
    quantized=("transformer_blocks.",),
)


def random_weights(shape: Shape, precision: str, device: torch.device) -> dict[str, torch.Tensor]:
    """A state dict as a file of this precision holds it: bf16, fp16, fp8, fp8_scaled or nvfp4. Always the same."""
    weights: dict[str, torch.Tensor] = {}
    draw_on = CPU if OPTIONS.tiny else device if device.type == KIND else CARDS[0]
    for index, (name, like) in enumerate(shape.build().state_dict().items()):
        generator = torch.Generator(draw_on).manual_seed(1000 + index)
        tensor = torch.empty(like.shape, dtype=torch.bfloat16, device=draw_on).normal_(0, 0.02, generator=generator)
        if like.ndim == 1 and "norm" in name and name.endswith(("weight", "scale")):
            tensor += 1
        is_linear = like.ndim == 2 and name.startswith(shape.quantized) and name.endswith(".weight")
        if is_linear and precision in _FORMATS:
            with torch.cuda.device(draw_on) if KIND == "cuda" else contextlib.nullcontext():
                stored = _quantized(name.removesuffix(".weight"), tensor, precision)
        else:  # what a class keeps in float32 whatever the file's type (Wan's patch embedding) stays so
            stored = {
                name: tensor.to(like.dtype if like.dtype == torch.float32 else _DTYPES.get(precision, like.dtype))
            }
        for key, value in stored.items():
            weights[key] = value.cpu() if key.endswith("comfy_quant") else _placed(value, device)
    return weights


_DTYPES = {"fp16": torch.float16, "fp8": FP8}
_FORMATS = {"fp8_scaled": "float8_e4m3fn", "nvfp4": "nvfp4"}


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; to the host by way of pinned memory, which is many times faster than pageable."""
    if tensor.device == device or tensor.device.type == "cpu" or not tensor.ndim:
        return tensor.to(device)
    stage = _stage()[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(stage.copy_(tensor))


@functools.cache
def _stage() -> torch.Tensor:
    return torch.empty(2**30, dtype=torch.uint8, pin_memory=True)  # the largest weight has 0.7 GB


def _quantized(layer: str, weight: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    if precision == "fp8_scaled":
        scale = weight.abs().amax().float() / E4M3_MAX
        stored = {"weight": (weight.float() / scale).to(FP8), "weight_scale": scale}
    else:
        packed, params = comfy.quant_ops.TensorCoreNVFP4Layout.quantize(weight)
        stored = {"weight": packed, "weight_scale": params.block_scale, "weight_scale_2": params.scale}
    kind = json.dumps({"format": _FORMATS[precision]})
    stored["comfy_quant"] = torch.tensor(list(kind.encode()), dtype=torch.uint8)
    return {f"{layer}.{key}": value for key, value in stored.items()}


def load(shape: Shape, precision: str = "", on: torch.device = CPU) -> Any:
    """A stock MODEL of this shape, as a core loader returns it, its weights on this device.

    The classic loader copies every weight into memory of its own; here the random tensors become the weights, as they
    do under DynamicVRAM. Weights may start on a card: moving them through host memory would only cost lease time.
    """
    precision = precision or shape.precision
    weights = random_weights(shape, precision, on)
    with mock.patch.object(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: True):
        patcher = comfy.sd.load_diffusion_model_state_dict(weights)
    if patcher is None:
        raise RuntimeError(f"ComfyUI did not recognise the random {shape.name}")
    if precision not in _FORMATS and not OPTIONS.dynamic_vram:
        _cast(patcher.model.diffusion_model, patcher.model.get_dtype())
    patcher.cached_patcher_init = (load, (shape, precision, on))  # what core's MultiGPU CFG Split replicates from
    return patcher


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """What copying into the model's own memory would have done; nothing if the file has the type core computes in."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype not in (dtype, torch.float32):
                setattr(module, name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))


def split(model: Any, **settings: Any) -> Any:
    from devicebridge.nodes.host.split import patcher, tree
    from devicebridge.nodes.host.split.model import split_model
    from devicebridge.nodes.host.split.plan import SplitRequest

    if OPTIONS.unguarded:
        tree.outside = patcher.outside = lambda devices: contextlib.nullcontext()  # type: ignore[assignment]
    return split_model(model, SplitRequest(devices=CARDS, **settings))


def split_by_the_other(model: Any) -> Any:
    """As split, by the checkout that --against names."""
    name = "devicebridge_other"
    if OPTIONS.against is None:
        raise ValueError("the cases against_... need --against: a folder with another checkout of the pack")
    if name not in sys.modules:
        root = OPTIONS.against.resolve()
        spec = importlib.util.spec_from_file_location(
            name, root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    has_room = (OPTIONS.against / "nodes" / "host" / "split").is_dir()  # before 2026-11-23 it was one module
    other = importlib.import_module(f"{name}.nodes.host.{'split.model' if has_room else 'split_model'}")
    return other.split_model(model, other.SplitRequest(devices=CARDS))


# ---- measuring


@dataclass
class Work:
    """What the sampler is given; cfg 1 runs no negative."""

    shape: Shape
    cfg: float = 1.0
    batch: int = 1
    steps: int = OPTIONS.steps
    is_uneven: bool = False  # the negative prompt has a quarter of the tokens
    noise: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.shape.tiny_latent if OPTIONS.tiny else self.shape.latent
        self.noise = torch.randn(self.batch, *size, generator=torch.Generator().manual_seed(SEED))

    def conds(self) -> tuple[list[Any], list[Any]]:
        tokens, width = (8, self.shape.text[1]) if OPTIONS.tiny else self.shape.text
        generator = torch.Generator().manual_seed(SEED + 1)
        lengths = tokens, tokens // 4 if self.is_uneven else tokens
        states = [torch.randn(1, length, width, generator=generator) for length in lengths]
        return [[states[0], {"guidance": 4.0}]], [[states[1], {"guidance": 4.0}]]


@dataclass
class Turn:
    latents: torch.Tensor
    step_s: list[float]
    until_first_step_s: float
    before_gb: list[float]
    peak_gb: list[float]
    resident_gb: list[float]
    card_used_gb: list[float]
    compiled: dict[str, float]


class Compiler:
    """Counts what ComfyUI's compiler does, from its own functions; all stay 0 where it has none."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("graphs", "replays", "captured_blocks"), 0)
        with contextlib.suppress(ImportError):
            import comfy_aimdo.malloc_graph as graphs

            self._count(graphs, "record", "graphs")
            self._count(graphs.MallocGraph, "push", "replays", lambda graph, name=None: name is None)
        if KIND == "cuda":
            self._count(torch.cuda.CUDAGraph, "capture_end", "captured_blocks")

    def _count(self, owner: Any, name: str, what: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._counts[what] += counts(*args, **kwargs)
            return function(*args, **kwargs)

        setattr(owner, name, counted)

    def take(self) -> dict[str, float]:
        """What was counted since the last time, and what the graphs of this thread hold."""
        found: dict[str, float] = dict(self._counts)
        self._counts = dict.fromkeys(self._counts, 0)
        for name in ("MALLOC_GRAPH_BREAKS", "MALLOC_GRAPH_ROGUES"):
            found[name.removeprefix("MALLOC_GRAPH_").lower()] = getattr(comfy.model_prefetch, name, 0)
        graphs = getattr(comfy.model_prefetch, "MALLOC_GRAPHS", {})
        found["graphs_of_other_threads"] = sum(thread != threading.get_ident() for thread in graphs)
        return found | {"graph_gb": sum(graph.physical_bytes for graph in graphs.values()) / 1e9}


COMPILER = Compiler()


def synchronize() -> None:
    if KIND == "cuda":
        for card in CARDS[: torch.cuda.device_count()]:
            torch.cuda.synchronize(card)


def sample(model: Any, work: Work, noise: torch.Tensor | None = None) -> Turn:
    """One call of the stock sampler."""
    marks: list[float] = []
    COMPILER.take()

    def mark(*_: Any) -> None:
        synchronize()
        marks.append(time.perf_counter())

    noise = work.noise if noise is None else noise
    positive, negative = work.conds()
    before = allocated_gb()
    for card in range(len(before)):
        torch.cuda.reset_peak_memory_stats(card)
    mark()
    latents = comfy.sample.sample(
        model, noise, work.steps, work.cfg, "euler", "simple", positive, negative, torch.zeros_like(noise),
        callback=mark, disable_pbar=True, seed=SEED,
    )  # fmt: skip
    synchronize()
    steps = [after - before for before, after in itertools.pairwise(marks)]
    compiled = COMPILER.take()
    turn = Turn(on_cpu(latents), steps[1:], steps[0], before, *_memory(), compiled)
    end_node()
    return turn


def end_node() -> None:
    """What ComfyUI does behind every node under DynamicVRAM (execution.py)."""
    if comfy.memory_management.aimdo_enabled:
        import comfy_aimdo.model_vbar

        comfy.model_prefetch.cleanup_prefetch_queues()
        management.reset_cast_buffers()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


@contextlib.contextmanager
def compiler_off() -> Iterator[None]:
    """ComfyUI's compiler switched off, as by its launch flag, which it reads at every forward."""
    with mock.patch.object(comfy_args, "disable_comfy_compiler", True, create=True):
        yield


@contextlib.contextmanager
def tensor_with(**settings: bool) -> Iterator[None]:
    """Settings of every split with way tensor: whether blocks are replayed as CUDA graphs (replays)."""
    from devicebridge.parallel.local.tensor_parallel import TensorParallel

    with mock.patch.multiple(TensorParallel, **settings):
        yield


def allocated_gb() -> list[float]:
    return [torch.cuda.memory_allocated(card) / 1e9 for card in range(torch.cuda.device_count())]


def _memory() -> tuple[list[float], list[float], list[float]]:
    """Per card in GB: torch's peak, weights that ComfyUI counts as resident, and what the driver says is taken."""
    if KIND != "cuda":
        return [0.0] * len(CARDS), resident_gb(), [0.0] * len(CARDS)
    cards = range(torch.cuda.device_count())
    taken = [torch.cuda.mem_get_info(card) for card in cards]
    return (
        [torch.cuda.max_memory_allocated(card) / 1e9 for card in cards],
        resident_gb(),
        [(total - free) / 1e9 - BALLAST_GB.get(card, 0.0) for card, (free, total) in zip(cards, taken, strict=True)],
    )


def resident_gb() -> list[float]:
    """Weights ComfyUI has on each card, all loaded models together; under DynamicVRAM the pages that are faulted in."""
    sizes = dict.fromkeys(CARDS, 0.0)
    for loaded in management.current_loaded_models:
        if loaded.model is not None and loaded.device in sizes:
            sizes[loaded.device] += loaded.model_loaded_memory() / 1e9
    return [round(size, 3) for size in sizes.values()]


BALLAST_GB: dict[int, float] = {}
_BALLAST = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code: sys.exit(f"cuda error {code}")
check(cuda.cuInit(0))
for index, leave in enumerate(map(int, sys.argv[1:])):
    context, device = ctypes.c_void_p(), ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(device), index))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    free, total, taken = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    if free.value > leave:
        check(cuda.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(free.value - leave)))
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    print(total.value - free.value, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def small_cards(gib: float | None) -> Iterator[None]:
    """Leave so much of each card: another process holds the rest, until the block ends.

    What this process has already taken (its CUDA context) counts as part of what is left, as on a card of that size.
    """
    if gib is None or KIND != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    mine, leave = [], []
    for card in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(card)
        mine.append(total - free)
        leave.append(max(0, int(gib * 2**30) - (total - free)))
    command = [sys.executable, "-c", _BALLAST, *map(str, leave)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        for card, own in enumerate(mine):
            BALLAST_GB[card] = (int(process.stdout.readline()) - own) / 1e9
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(60)
            BALLAST_GB.clear()


def compare(
    rivals: Mapping[str, Any],
    work: Work,
    base: str,
    rounds: int = OPTIONS.rounds,
    around: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
    warm_up: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Turns of all rivals, interleaved: seconds per step of each over those of `base`, and equality of latents.

    A rival samples inside around(its name). Those in warm_up have a first turn of so many steps that does not count;
    None gives each of them a whole one.

    A rival whose name ends in compiler_off samples with ComfyUI's compiler switched off. So does core's replica per
    card: it runs in threads of its own, whose graphs the end of a node does not free. One with _launched in
    its name replays no CUDA graphs of ours.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in rivals}
    for index in range(rounds + 1):
        for name, model in rivals.items():
            steps = work.steps if index or warm_up is None else warm_up.get(name, 0)
            if not steps:
                continue
            is_off = name.endswith("compiler_off") or name.startswith("core_multigpu")
            with (
                compiler_off() if is_off else contextlib.nullcontext(),
                tensor_with(replays="_launched" not in name),
                around(name),
            ):
                turn = sample(model, replace(work, steps=steps))
            what = f"{turn.compiled['graphs']} graphs, {turn.compiled['replays']} replays"
            about = "" if index else f"warm-up, at most {max(turn.step_s):.4f}, "
            say(f"    {name}: {about}{statistics.median(turn.step_s):.4f} s/step; {what}")
            if index:
                turns[name].append(turn)
    medians = {name: statistics.median(s for turn in runs for s in turn.step_s) for name, runs in turns.items()}
    others = [name for name in rivals if name != base]
    report: dict[str, Any] = {f"{name}_over_{base}": medians[name] / medians[base] for name in others}
    report |= {f"speed_up_{name}": medians[base] / medians[name] for name in others}
    pairs = [(name, base) for name in others] + [(f"{name}_launched", name) for name in others]
    report |= {
        f"{name}_equals_{other}": _difference(turns[other][-1].latents, turns[name][-1].latents)
        for name, other in pairs
        if name in turns
    }
    for name, runs in turns.items():
        report[name] = _describe(runs) | {"weights_gb": weights_gb(rivals[name]), "placement": placement(rivals[name])}
    return report


def placement(model: Any) -> str:
    from devicebridge.nodes.host.split.tree import tree_of

    tree = tree_of(model.model)
    return "not split" if tree is None else tree.plan.describe()


def weights_gb(model: Any) -> dict[str, list[float]]:
    """Resident and all weights of one MODEL's patchers, by card."""
    patchers = [model, *model.model_patches_models(), *model.get_additional_models_with_key("multigpu")]
    return {str(p.load_device): [p.loaded_size() / 1e9, p.model_size() / 1e9] for p in patchers}


def _describe(runs: list[Turn]) -> dict[str, Any]:
    seconds = [s for turn in runs for s in turn.step_s]
    return {
        "s_per_step_median": statistics.median(seconds),
        "s_per_step_min_max": [min(seconds), max(seconds)],
        "first_step_with_loading_s": [round(turn.until_first_step_s, 3) for turn in runs],
        "peak_torch_gb": runs[-1].peak_gb,
        "peak_above_what_was_there_gb": [b - a for a, b in zip(runs[-1].before_gb, runs[-1].peak_gb, strict=False)],
        "resident_weights_gb_all_models": runs[-1].resident_gb,
        "card_used_gb": runs[-1].card_used_gb,
        "compiled": runs[-1].compiled,
        "repeats_itself": all(torch.equal(runs[0].latents, turn.latents) for turn in runs),
        "latents_finite": bool(torch.isfinite(runs[-1].latents).all()),
        "latents_std": float(runs[-1].latents.float().std()),
    }


def _difference(a: torch.Tensor, b: torch.Tensor) -> Any:
    """True if bitwise equal, else the relative error, and the largest difference over the standard deviation."""
    if torch.equal(a, b):
        return True
    a, difference = a.double(), a.double() - b.double()
    return {
        "relative_error": float(difference.norm() / a.norm()),
        "largest_over_std": float(difference.abs().max() / a.std()),
    }


def one_after_the_other(model: Any) -> Any:
    """A clone whose conds core runs one by one: it is told that no memory is left for batching them."""
    clone = model.clone()
    clone.get_free_memory = lambda device: 0
    return clone


def batch_by_batch(model: Any, cfg: float = 1.0, **_: Any) -> Any:
    """The MODEL as a split with cfg computes it: cond and uncond in a forward each."""
    return model if cfg == 1.0 else one_after_the_other(model)


def image_by_image(model: Any, work: Work) -> torch.Tensor:
    """The latents of a batch, each image and each cond in a forward of its own on one card."""
    alone = one_after_the_other(model)
    return torch.cat([sample(alone, work, noise=work.noise[i : i + 1]).latents for i in range(work.batch)])


def forget() -> None:
    """Unload everything and give the memory back."""
    gc.collect()
    management.unload_all_models()
    gc.collect()
    management.soft_empty_cache()
    for card in range(torch.cuda.device_count() if KIND == "cuda" else 0):
        with torch.cuda.device(card):
            torch.cuda.empty_cache()


# ---- cases


def one_against_split(shape: Shape, precision: str = "", on: torch.device | None = None, **work: Any) -> dict[str, Any]:
    main_device = roomy() if on is None else on
    one = load(shape, precision, main_device)
    # From weights of its own where cards are large: sharing the other's would hide what the split holds.
    divided = split(one if main_device == CPU else load(shape, precision, CARDS[1]))
    return {"weights": precision or shape.precision} | compare(
        {"one_gpu": one, "split": divided}, Work(shape, **work), "one_gpu"
    )


def roomy() -> torch.device:
    """Where weights start: on the card in the classic way if it is large enough, else in host memory."""
    return CPU if OPTIONS.dynamic_vram or OPTIONS.tiny or OPTIONS.card_gb else CARDS[0]


def cfg(shape: Shape, batch: int) -> dict[str, Any]:
    """Split with two cards at work at a time, against one card and against core's replica per card."""
    work = Work(shape, cfg=5.0, batch=batch)
    one = load(shape, on=roomy())
    overlap = split(one if roomy() == CPU else load(shape, on=CARDS[1]))
    rivals = {"one_gpu": one, "split_overlap": overlap}
    if KIND == "cuda":
        core = comfy.multigpu.create_multigpu_deepclones(one, len(CARDS), reuse_loaded=True)
        rivals["core_multigpu_cfg_split"] = core
    report = compare(rivals, work, "one_gpu")
    short = replace(work, steps=2)
    report["split_overlap_equals_one_after_the_other_on_one_gpu"] = _difference(
        image_by_image(one, short), sample(overlap, short).latents
    )
    say(json.dumps(report))  # what follows may meet a time limit
    report["one_gpu_one_after_the_other"] = _describe([sample(one_after_the_other(one), work)])
    if batch == 1:
        together = split(one if roomy() == CPU else load(shape, on=CARDS[1]), overlap=False)
        report["split_without_overlap"] = _describe([sample(together, work) for _ in range(2)][1:])
    return report


def tensor(shape: Shape, cfg: float = 1.0, *, is_uneven: bool = False, **latent: Any) -> dict[str, Any]:
    """One picture or clip whose blocks both cards compute together, against one card and, where it fits, the split."""
    shape = replace(shape, **latent)
    one = load(shape, on=CPU)
    forecast = forecasts(one, shape)
    divided = split(one, way="tensor")
    rivals = {"one_gpu": one, "tensor": divided, "tensor_launched": divided, "tokens": split(one, way="tokens")}
    if shape.class_name != "Flux":  # beside those its weights would not fit, and loading would take the time
        rivals["blocks"] = split(one, way="blocks")
    work = Work(shape, cfg=cfg, is_uneven=is_uneven)
    report = compare(
        {name: each for name, each in rivals.items() if name in (OPTIONS.rivals or rivals)}, work, "one_gpu"
    )
    if OPTIONS.rivals:
        return report | {"forecasts": forecast}
    first, second = (sample(one, replace(work, batch=batch, steps=2)).latents[:1] for batch in (1, 2))
    report["one_gpu_batch_2_against_batch_1"] = _difference(first, second)
    return report | {"forecasts": forecast}


def plans_of(one: Any) -> dict[str, Any]:
    """How this model would be split over all cards, each way."""
    from devicebridge.nodes.host.split.model import plan_split
    from devicebridge.nodes.host.split.plan import SplitRequest

    return {way: plan_split(one, SplitRequest(CARDS, way=way)) for way in ("blocks", "tensor", "tokens")}


def known_ways(one: Any, shape: Shape) -> tuple[Any, int]:
    """What way auto goes by, and the picture tokens of this size."""
    from devicebridge.nodes.host.split.model import compare_ways

    size = shape.tiny_latent if OPTIONS.tiny else shape.latent
    patch: Any = one.model.diffusion_model.patch_size
    patches = [1] * (len(size) - 3) + [patch] * 2 if isinstance(patch, int) else patch
    tokens = math.prod(math.ceil(dim / each) for dim, each in zip(size[1:], patches, strict=True))
    return compare_ways(one.model.diffusion_model, plans_of(one), tokens), tokens


def forecasts(one: Any, shape: Shape) -> dict[str, Any]:
    """Seconds per step by each way, as way auto forecasts them for this size, for one forward and for two."""
    known, tokens = known_ways(one, shape)
    steps = {f"{count} forwards of {tokens} tokens": known.seconds(count)._asdict() for count in (1, 2)}
    return steps | {"machine": asdict(known.machine)}


def slow_link(shape: Shape, cfg: float = 1.0, **latent: Any) -> dict[str, Any]:
    """Tensor with copies through pinned host memory only, beside direct copies, one card and blocks; and the forecasts
    for each link."""
    from devicebridge.parallel import staged_copies
    from devicebridge.planning import cards

    shape = replace(shape, **latent)
    one = load(shape, on=CPU)
    direct = forecasts(one, shape)
    rivals = {"one_gpu": one, "blocks": split(one, way="blocks"), "tensor_direct": split(one, way="tensor")}
    with contextlib.ExitStack() as stack:  # as cards without access to each other's memory; asked when a split is made
        for module in (staged_copies, cards):
            stack.enter_context(mock.patch.object(module, "has_peer_access", lambda source, target: source == target))
        rivals["tensor_host"] = split(one, way="tensor")
        through_host = forecasts(one, shape)
    report = compare(rivals, Work(shape, cfg=cfg), "one_gpu")
    pieces = {f"{size >> 20} MiB": staged_copies.SideStreams(None, size) for size in (2**20, 2**22, 2**23, 2**25)}
    report["host_gb_per_s_by_piece"] = {
        name: staged_copies.exchange_speed(*CARDS[:2], copies) / 1e9 for name, copies in pieces.items()
    }
    return report | {"forecasts": {"direct": direct, "through the host": through_host}}


def against(shape: Shape, **work: Any) -> dict[str, Any]:
    """This checkout's split and another's, over the same weights."""
    one = load(shape, on=roomy())
    return compare({"other": split_by_the_other(one), "this": split(one)}, Work(shape, **work), "other")


def small(shape: Shape, precision: str) -> dict[str, Any]:
    """One card too small for the weights, with core's own offloading, against two such cards."""
    return one_against_split(shape, precision, on=CPU)


def beside_the_compiler(shape: Shape, **work: Any) -> dict[str, Any]:
    """The split with ComfyUI's compiler on and off, and one card with it on and off, in turn."""
    one = load(shape, on=CPU)
    divided, one = split(one), batch_by_batch(one, **work)
    rivals = {"one_gpu": one, "one_gpu_compiler_off": one, "split_compiler_off": divided, "split": divided}
    report = compare(rivals, Work(shape, **work), "one_gpu")
    medians = {name: report[name]["s_per_step_median"] for name in rivals}
    return report | {"split_over_split_compiler_off": medians["split"] / medians["split_compiler_off"]}


def prompts(shape: Shape, **work: Any) -> dict[str, Any]:
    """Many prompts with a split: memory after each, latents of each, and one card before and after."""
    job = Work(shape, **work)
    one = batch_by_batch(load(shape, on=CPU), **work)
    before = [sample(one, job) for _ in range(2)][-1]
    divided = split(one)
    used, torch_gb, first, all_equal, seconds, graphs = [], [], None, True, [], 0.0
    for index in range(OPTIONS.prompts):
        turn = sample(divided, job)
        first = turn.latents if first is None else first
        all_equal = all_equal and torch.equal(first, turn.latents)
        used.append(_memory()[2])
        torch_gb.append(allocated_gb())
        seconds.append(statistics.median(turn.step_s))
        graphs += turn.compiled["graphs"] + turn.compiled["captured_blocks"]
        if index in (0, 1, 4, 9, 24, OPTIONS.prompts - 1):
            say(f"    prompt {index + 1}: {used[-1]} GB taken, {torch_gb[-1]} GB of torch's, {seconds[-1]:.4f} s/step")
    after = [sample(one, job) for _ in range(2)][-1]
    settled = min(4, len(used) - 1)  # the first prompts load, and torch's caches fill
    return {
        "prompts": len(used),
        "every_prompt_equals_the_first": all_equal,
        "split_equals_one_gpu": _difference(before.latents, first) if first is not None else None,
        "card_used_gb_first_settled_last": [used[0], used[settled], used[-1]],
        "card_used_gb_growth_since_settled": [b - a for a, b in zip(used[settled], used[-1], strict=True)],
        "torch_gb_growth_since_settled": [b - a for a, b in zip(torch_gb[settled], torch_gb[-1], strict=True)],
        "s_per_step_first_settled_last": [seconds[0], seconds[settled], seconds[-1]],
        "recorded_or_captured_by_the_split": graphs,
        "one_gpu_before": before.compiled,
        "one_gpu_after": after.compiled,
        "one_gpu_after_equals_before": _difference(before.latents, after.latents),
    }


def takeover(shape: Shape) -> dict[str, Any]:
    """Evict a shard and let it return; then let the plain MODEL sample and see what card 1 still holds."""
    work = Work(shape, steps=3)
    one = load(shape, on=CPU)
    sample(one, work)
    expected = sample(one, work).latents
    forget()
    before = _memory()
    divided = split(one)
    turn = sample(divided, work)
    report: dict[str, Any] = {"split_equals_one_gpu": _difference(expected, turn.latents)}
    report["before"] = before[1:]
    report["while_split"] = [turn.resident_gb, turn.card_used_gb]
    management.free_memory(1e30, CARDS[1])
    report["card_1_evicted"] = _settled()
    report["after_eviction_equals"] = _difference(expected, sample(divided, work).latents)
    report["returned"] = _settled()
    report["plain_equals"] = _difference(expected, sample(one, work).latents)
    report["plain_after_split"] = _settled()
    del divided
    report["split_dropped"] = _settled()
    return report


def _settled() -> list[Any]:
    """Resident weights and memory taken per card once nothing is pending; torch's own allocations as well."""
    gc.collect()
    management.soft_empty_cache()
    synchronize()
    return [*_memory()[1:], allocated_gb()]


def loader(shape: Shape) -> dict[str, Any]:
    """From a file on disk: core's loader on one card against the pack's own loader node's function."""
    from devicebridge.nodes.host.split.model import load_split_model
    from devicebridge.nodes.host.split.plan import SplitRequest
    from safetensors.torch import save_file

    path = Path(os.environ.get("TMPDIR", "/tmp")) / "native_split.safetensors"
    start = time.perf_counter()
    save_file({name: tensor.contiguous() for name, tensor in random_weights(shape, shape.precision, CPU).items()}, path)
    written = time.perf_counter() - start
    try:
        start = time.perf_counter()
        one = comfy.sd.load_diffusion_model(str(path))
        middle = time.perf_counter()
        divided = load_split_model(path, "default", SplitRequest(devices=CARDS))
        loaded = {"core_s": middle - start, "load_split_model_s": time.perf_counter() - middle}
        report = compare({"one_gpu": one, "split": divided}, Work(shape), "one_gpu")
        return report | {"writing_s": written, "loading": loaded, "file_gb": path.stat().st_size / 1e9}
    finally:
        path.unlink(missing_ok=True)


def probe() -> dict[str, Any]:
    """What this machine is like; needs no split: access between the cards, one-card steps of a small model."""
    report: dict[str, Any] = {"memory": memory_of_host()}
    if KIND == "cuda" and torch.cuda.device_count() > 1:
        report["peer_access"] = [torch.cuda.can_device_access_peer(0, 1), torch.cuda.can_device_access_peer(1, 0)]
        report["allocator"] = torch.cuda.get_allocator_backend()
    shape = replace(
        FLUX2, name="FLUX.2-dev at full width, 1 + 6", kwargs={**FLUX2.kwargs, "depth": 1, "depth_single_blocks": 6}
    )
    for precision in ("bf16", "fp8", "fp8_scaled", "nvfp4"):
        try:
            one = load(shape, precision, roomy())
            runs = [sample(one, Work(shape)) for _ in range(3)]
            report[precision] = _describe(runs[1:]) | {
                "first_equals_second": _difference(runs[0].latents, runs[1].latents)
            }
        except Exception as error:  # what a precision does here is the finding
            report[precision] = f"{type(error).__name__}: {error}"
        one = None
        forget()
    with small_cards(24):
        report["free_on_24_gib_cards"] = (
            [management.get_free_memory(card) / 2**30 for card in CARDS] if KIND == "cuda" else []
        )
    report["memory_after"] = memory_of_host()
    return report


def memory_of_host() -> dict[str, float]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total_gb": memory.total / 1e9, "available_gb": memory.available / 1e9}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "probe": probe,
    "flux2": functools.partial(one_against_split, FLUX2),
    "flux2_small": functools.partial(one_against_split, FLUX2_SMALL),
    "flux2_small_fp8": functools.partial(one_against_split, FLUX2_SMALL, "fp8"),
    "flux2_small_fp8_scaled": functools.partial(one_against_split, FLUX2_SMALL, "fp8_scaled"),
    "flux2_small_nvfp4": functools.partial(one_against_split, FLUX2_SMALL, "nvfp4"),
    "wan": functools.partial(one_against_split, WAN_14B),
    "wan_cfg": functools.partial(cfg, WAN_14B, 1),
    "wan_cfg_short": functools.partial(cfg, WAN_14B_SHORT, 1),
    "wan_cfg_batch4": functools.partial(cfg, WAN_14B_SHORT, 4),
    "qwen_cfg": functools.partial(cfg, QWEN_IMAGE, 1),
    "small_wan": functools.partial(small, WAN_14B, "fp16"),
    "small_flux2": functools.partial(small, FLUX2, "bf16"),
    "small_flux2_fp8": functools.partial(small, FLUX2, "fp8"),
    "against_flux2": functools.partial(against, FLUX2),
    "against_wan_cfg_short": functools.partial(against, WAN_14B_SHORT, cfg=5.0),
    "tensor_flux2": functools.partial(tensor, FLUX2),
    "tensor_flux2_512": functools.partial(tensor, FLUX2, latent=(128, 32, 32)),
    "tensor_wan": functools.partial(tensor, WAN_14B),
    "tensor_wan_cfg": functools.partial(tensor, WAN_14B, cfg=5.0),
    "tensor_qwen_cfg": functools.partial(tensor, QWEN_IMAGE, cfg=4.0),
    "tensor_qwen_cfg_uneven": functools.partial(tensor, QWEN_IMAGE, cfg=4.0, is_uneven=True),
    # Half the blocks: beside one card's, three divided copies would not fit otherwise.
    "tensor_flux2_slow_link": functools.partial(slow_link, FLUX2_SMALL),
    "tensor_flux2_512_slow_link": functools.partial(slow_link, FLUX2_SMALL, latent=(128, 32, 32)),
    "tensor_wan_slow_link": functools.partial(slow_link, WAN_14B),
    "compiler_flux2": functools.partial(beside_the_compiler, FLUX2),
    "compiler_wan": functools.partial(beside_the_compiler, WAN_14B),
    "compiler_wan_cfg": functools.partial(beside_the_compiler, WAN_14B, cfg=5.0),
    "prompts_flux2": functools.partial(prompts, FLUX2, steps=3),
    "prompts_flux2_small": functools.partial(prompts, FLUX2_SMALL, steps=3),
    "prompts_wan_cfg_short": functools.partial(prompts, WAN_14B_SHORT, cfg=5.0, steps=3),
    "takeover": functools.partial(takeover, FLUX2_SMALL),
    "loader": functools.partial(loader, FLUX2_SMALL),
}


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def emulated_host() -> Iterator[None]:
    """ComfyUI on emulated cards: what it asks of the machine is answered for them."""
    free = {card: 64 * 2**30 for card in CARDS}
    answers: dict[str, Any] = {
        "get_torch_device": lambda: CARDS[0],
        "get_all_torch_devices": lambda exclude_current=False: list(CARDS[1:] if exclude_current else CARDS),
        "get_free_memory": lambda dev=None, torch_free_too=False: (
            (free.get(dev, 2**36),) * 2 if torch_free_too else free.get(dev, 2**36)
        ),
        "get_total_memory": lambda dev=None, torch_total_too=False: (2**36, 2**36) if torch_total_too else 2**36,
        "unet_offload_device": lambda: CPU,
        "vram_state": management.VRAMState.NORMAL_VRAM,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(management, name, answer))
        stack.enter_context(emulated_cards(len(CARDS)))
        yield


def setup() -> dict[str, Any]:
    found = describe_run("comfy-aimdo", "comfy-kitchen", "torchsde", "transformers")
    return {
        "card_gib": OPTIONS.card_gb or "all",
        "dynamic_vram": OPTIONS.dynamic_vram,
        "compiler": OPTIONS.compiler if hasattr(comfy_args, "disable_comfy_compiler") else "none",
        "steps": OPTIONS.steps,
        "rounds": OPTIONS.rounds,
        **found,
        "versions": found["versions"] | {"comfyui": comfyui_version.__version__},
    }


def run_case(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        # Emulated tensors know no inference mode, in which ComfyUI runs its nodes.
        with torch.no_grad() if OPTIONS.tiny else torch.inference_mode(), small_cards(OPTIONS.card_gb):
            report = CASES[name]()
    except Exception as error:  # one case that fails must not cost the others
        traceback.print_exc()
        report = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-12:]}
    forget()
    return report | {"case_took_s": time.perf_counter() - start}


def main() -> None:
    logging.getLogger().setLevel(logging.WARNING)
    unknown = set(OPTIONS.case) - set(CASES)
    if unknown:
        raise SystemExit(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    report: dict[str, Any] = {"setup": setup(), "cases": {}}
    with emulated_host() if OPTIONS.tiny else contextlib.nullcontext():
        for name in OPTIONS.case:
            say(f"{name}{' (DynamicVRAM)' if OPTIONS.dynamic_vram else ''}")
            report["cases"][name] = run_case(name)
            say(json.dumps(report["cases"][name], indent=1))
            write_json(report, OPTIONS.out)


if __name__ == "__main__":
    main()
