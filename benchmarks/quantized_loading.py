"""What loading into 8 bits takes: time, host memory and GPU memory, from a bf16 checkpoint and from the cache of it.

    python benchmarks/quantized_loading.py --folder /scratch [--scheme fp8-compute] [--out results.json]

Writes a checkpoint of FLUX.2-dev's full size with random weights (64 GB; fewer blocks where the disk lacks the room for
it and for the cache, and the report says so) and loads it over all GPUs, each layer rounded as it arrives: without the
cache of rounded weights, then filling it, then from it, which must give the same bits. The file is in the system's page
cache unless --cold drops it before each load.

Host memory is what the process holds for itself (RssAnon + RssShmem every 10 ms); pages of mapped files are the
system's to take back and are not counted. Bars: at most 8 GB of it, and on each GPU at most two blocks of the
checkpoint above what the loaded weights take. --tiny is the same with a toy model on emulated cards.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import runpy
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.checkpoints.checkpoint import CheckpointInfo, read_checkpoint  # noqa: E402
from devicebridge.checkpoints.load import (  # noqa: E402
    load_through_cache,
    load_transformer,
    make_empty_transformer,
)
from devicebridge.parallel.devices import available_devices, release_cached_memory, synchronize  # noqa: E402
from devicebridge.parallel.placement import Placement, block_names, parameter_bytes, plan_placement  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, stored_bytes  # noqa: E402
from devicebridge.tests.emulated import CARDS, emulated_cards  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_checkpoint import bytes_of, write_diffusers_folder, write_single_file  # noqa: E402
from random_job import (  # noqa: E402
    FAMILY,
    SCHEMES,
    TINY_CONFIG,
    VARIANT,
    base_tensors,
    bytes_per_device,
    checksum,
    make_config,
)

HOST_BAR_GB, GPU_BAR_BLOCKS = 8.0, 2.0
SPARE_BYTES = 4e9  # of disk, left free
NUM_COMPARED = 3  # layers compared bit by bit; of all others a sum of their bytes


# ---- checkpoint


def write_checkpoint(folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The largest model there is room for -> its path, and what was written."""
    start = time.perf_counter()
    if options.tiny:
        path, blocks = folder / "tiny", "toy"
        num_bytes = write_diffusers_folder(path, FAMILY, TINY_CONFIG)
    else:
        layers = tuple(options.layers or choose_layers(shutil.disk_usage(folder).free))
        path, num_bytes = _write_layers(folder, layers)
        blocks = "{} double + {} single".format(*layers) + " of {} + {}".format(*_full_layers())
    seconds = time.perf_counter() - start
    facts = {
        "blocks": blocks,
        "checkpoint_gb": round(num_bytes / 1e9, 3),
        "writing_s": round(seconds, 1),
    }
    say(f"checkpoint written: {facts}")
    return path, facts


def _write_layers(folder: Path, layers: tuple[int, int]) -> tuple[Path, int]:
    if layers == _full_layers():
        path = folder / f"{VARIANT.name}.safetensors"
        return path, write_single_file(path, FAMILY, VARIANT)
    path = folder / "transformer"
    return path, write_diffusers_folder(path, FAMILY, make_config(layers))


def choose_layers(free_bytes: float) -> tuple[int, int]:
    """All blocks if checkpoint and cache fit the disk, else as large a part of both kinds as does."""
    double, single = _full_layers()
    needed = 1.55 * bytes_of(FAMILY, VARIANT.transformer_config)
    share = min(1.0, (free_bytes - SPARE_BYTES) / needed)
    if share < 0.1:
        raise RuntimeError(
            f"the folder has {free_bytes / 1e9:.1f} GB free, and {needed / 1e9:.0f} GB are needed for FLUX.2 and its "
            "cache, or a tenth of it; name another with --folder"
        )
    return (double, single) if share == 1.0 else (max(1, int(double * share)), max(1, int(single * share)))


def _full_layers() -> tuple[int, int]:
    return VARIANT.transformer_config["num_layers"], VARIANT.transformer_config["num_single_layers"]


def drop_pages(folder: Path) -> None:
    """Have the system forget what it keeps of these files, so that they are read from the disk."""
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# ---- measuring


class HostMemory:
    """The most bytes of its own this process held while active, sampled every 10 ms."""

    def __init__(self) -> None:
        self.before = own_bytes()
        self.peak = self.before
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            self.peak = max(self.peak, own_bytes())

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.peak = max(self.peak, own_bytes())


def own_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@dataclass(frozen=True)
class Loaded:
    """A loaded model and what loading it took."""

    model: torch.nn.Module
    facts: dict[str, Any]


def load(info: CheckpointInfo, placement: Placement, scheme: str, cache: Path | None, block_bytes: int) -> Loaded:
    """Load once, with clocks and scales running."""
    devices = placement.used_devices
    release_cached_memory()
    synchronize(devices)
    before = {str(device): _allocated(device) for device in devices}
    _reset_peaks(devices)
    start = time.perf_counter()
    with HostMemory() as host:
        if scheme == "bf16":
            model = load_transformer(info, placement.device_of, torch.bfloat16)
        else:
            settings = QuantizeSettings(scheme)  # type: ignore[arg-type]
            model = load_through_cache(cache, info, placement.device_of, torch.bfloat16, settings)
        synchronize(devices)
        seconds = time.perf_counter() - start
    weights = bytes_per_device(base_tensors(model))
    above = {str(d): max(0, _peak(d) - before[str(d)] - weights.get(str(d), 0)) for d in devices}
    facts = {
        "seconds": round(seconds, 2),
        "host_peak_gb": round(host.peak / 1e9, 3),
        "host_peak_above_start_gb": round((host.peak - host.before) / 1e9, 3),
        "host_peak_above_start_in_blocks": round((host.peak - host.before) / block_bytes, 2),
        "weights_gb": {name: round(size / 1e9, 3) for name, size in weights.items()},
        "gpu_peak_above_weights_gb": {name: round(size / 1e9, 3) for name, size in above.items()},
        "gpu_peak_above_weights_in_blocks": {name: round(size / block_bytes, 2) for name, size in above.items()},
        "gpu_reserved_peak_gb": {str(device): round(_reserved_peak(device) / 1e9, 3) for device in devices},
    }
    if "cpu" in weights:  # where both are one memory
        facts["host_peak_above_weights_in_blocks"] = round((host.peak - host.before - weights["cpu"]) / block_bytes, 2)
    facts["is_host_within_bar"] = host.peak <= HOST_BAR_GB * 1e9
    facts["is_gpu_within_bar"] = max(above.values()) <= GPU_BAR_BLOCKS * block_bytes
    return Loaded(model, facts)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _reserved_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _reset_peaks(devices: tuple[torch.device, ...]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def plan(info: CheckpointInfo, scheme: str, devices: list[torch.device]) -> tuple[Placement, int]:
    """As a job plans it: by what will be stored; and the bytes of the largest block in the checkpoint."""
    model = make_empty_transformer(info)
    blocks = block_names(model, FAMILY)
    full, main_device = parameter_bytes(model, blocks, 2)
    sizes = full
    if scheme != "bf16":
        sizes, main_device = stored_bytes(model, FAMILY, blocks, torch.bfloat16, QuantizeSettings(scheme))  # type: ignore[arg-type]
    return plan_placement(blocks, devices, block_cost=sizes, main_cost=main_device), max(full)


# ---- runs


def run_scheme(path: Path, scheme: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Without a cache, into it, from it; the last two against the first, bit by bit."""
    info = read_checkpoint(path)
    placement, block_bytes = plan(info, scheme, options.devices)
    cache = folder / f"cache-{scheme}"
    cache.mkdir()
    found: dict[str, Any] = {"placement": placement.describe(), "largest_block_gb": round(block_bytes / 1e9, 3)}
    ways: dict[str, Path | None] = {"rounding": None, "rounding_and_caching": cache, "from_cache": cache}
    sums: list[int] = []
    kept: dict[str, torch.Tensor] = {}
    for way, where in ways.items():
        if scheme == "bf16" and where is not None:
            break
        if options.cold:
            drop_pages(folder)
        loaded = load(info, placement, scheme, where, block_bytes)
        found[way] = loaded.facts
        say(f"{scheme}, {way}: {loaded.facts}")
        now = checksum(base_tensors(loaded.model))
        if sums:
            found[way]["tensors_with_equal_sums"] = (
                f"{sum(a == b for a, b in zip(now, sums, strict=True))} of {len(now)}"
            )
            found[way]["layers_bitwise_equal"] = _count_equal(kept, pick_tensors(loaded.model))
        else:
            sums, kept = now, {name: tensor.clone() for name, tensor in pick_tensors(loaded.model).items()}
        del loaded
        gc.collect()
    if any(cache.rglob("*.safetensors")):
        found["cache_gb"] = round(sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 1e9, 3)
        found["cache_over_rounding_seconds"] = round(found["from_cache"]["seconds"] / found["rounding"]["seconds"], 3)
    shutil.rmtree(cache)
    return found


def pick_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a few blocks' weights are made of: the first, one in the middle and the last."""
    names = block_names(model, FAMILY)
    chosen = [names[index * (len(names) - 1) // (NUM_COMPARED - 1)] for index in range(NUM_COMPARED)]
    found = {}
    for name in chosen:
        for index, tensor in enumerate(base_tensors(model.get_submodule(name))):
            found[f"{name} {index}"] = tensor
    return found


def _count_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    equal = [a[name].dtype is b[name].dtype and torch.equal(_bits(a[name]), _bits(b[name])) for name in a]
    return f"{sum(equal)} of {len(equal)} tensors of {NUM_COMPARED} blocks"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---- setting


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where there is room for 100 GB")
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["fp8-compute"])
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the system's memory of it")
    parser.add_argument("--budget-s", type=float, default=200.0, help="no scheme is begun after this many seconds")
    parser.add_argument("--layers", type=int, nargs=2, help="double and single blocks; all there is room for")
    parser.add_argument("--on-cpu", action="store_true", help="the CPU is the one device; shows the host's peak only")
    parser.add_argument("--tiny", action="store_true", help="toy model on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = list(CARDS[:2]) if options.tiny else available_devices()
    if options.on_cpu:
        options.devices = [torch.device("cpu")]
    if not options.devices:
        parser.error("this needs a GPU and found none; --tiny runs on the CPU")
    return options


@contextlib.contextmanager
def emulation(*, is_on: bool) -> Iterator[None]:
    with emulated_cards(2) if is_on else contextlib.nullcontext():
        yield


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"schemes": {}, "left_out": [], "setup": describe_run("diffusers", "torchao")}
    report["setup"] |= {"bars": {"host_gb": HOST_BAR_GB, "gpu_blocks": GPU_BAR_BLOCKS}, "is_cold": options.cold}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with emulation(is_on=options.tiny):
            path, report["checkpoint"] = write_checkpoint(folder, options)
            for scheme in options.scheme:
                if elapsed_s() > options.budget_s:
                    report["left_out"].append(scheme)
                    continue
                report["schemes"][scheme] = run_scheme(path, scheme, options, folder)
                write_json(report, options.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["elapsed_s"] = round(elapsed_s(), 1)
    print_or_write(report, options.out)
    print_table(report)


def print_table(report: dict[str, Any]) -> None:
    print(f"checkpoint: {report['checkpoint']}; left out: {report['left_out'] or 'none'}")
    for scheme, found in report["schemes"].items():
        facts = {name: found[name] for name in ("placement", "largest_block_gb", "cache_gb") if name in found}
        print(f"{scheme}: {facts}")
        for way in ("rounding", "rounding_and_caching", "from_cache"):
            if way in found:
                print(f"  {way}: {found[way]}")


if __name__ == "__main__":
    main()
