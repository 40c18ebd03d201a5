"""The devices of this machine: which exist, what memory they have, their random state. Nothing is asked at import."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")
_ORDINAL = re.compile(r"(?:gpu:)?([0-9]{1,3})")
ONE_GPU_ON_WINDOWS = "on Windows ComfyUI shows its nodes one NVIDIA GPU, unless it is started with --cuda-device all"


def device_module(device: torch.device) -> ModuleType | None:
    """torch.cuda, torch.xpu, ... for a device; None for the CPU and for tensors without memory."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)


def available_devices() -> list[torch.device]:
    """Every accelerator torch can use here, in torch's order; [] on a machine without one."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def find_devices(names: Sequence[str]) -> list[torch.device]:
    """The devices a user named, in that order; () stands for every accelerator, or the CPU where there is none. Raises:
    ValueError for a name that is no device, does not exist here or is given twice; it lists what exists."""
    if not names:
        return available_devices() or [CPU]
    devices = [find_device(name) for name in names]
    if len(set(devices)) != len(devices):
        raise ValueError(f"devices {', '.join(names)} name one device twice; name each once")
    return devices


def find_device(name: str) -> torch.device:
    """One device by name; "cuda" alone means its first. "1", and "gpu:1" of ComfyUI's own nodes, mean the second GPU.
    Raises: ValueError as find_devices."""
    found, accelerators = _ORDINAL.fullmatch(name.strip()), available_devices()
    existing = ", ".join(map(str, (CPU, *accelerators)))
    try:
        kind = accelerators[0].type if accelerators else "cuda"
        device = torch.device(name if found is None else f"{kind}:{found[1]}")
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device name; found here: {existing}") from error
    if device.type == "cpu":
        if device.index:
            raise ValueError(f"device {name!r} does not exist: torch has one CPU device, {CPU}; use that name")
        return CPU
    index = device.index or 0
    module: Any = getattr(torch, device.type, None)
    if index >= (module.device_count() if hasattr(module, "device_count") and module.is_available() else 0):
        raise ValueError(f"device {name!r} does not exist on this machine; found here: {existing}{hidden_gpus()}")
    return torch.device(device.type, index)


def device_title(device: torch.device) -> str:
    """What the card is called, such as "NVIDIA GeForce RTX 4090"; "" where torch does not tell."""
    module: Any = device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return str(getattr(properties, "name", ""))


# As ComfyUI lists them (comfy/model_management.py, 0.33.0): cards of AMD without bfloat16 (RDNA 2 and older), and cards
# of the GTX 16 kind, whose float16 gives NaN.
_AMD_WITHOUT_BF16 = ("gfx1030", "gfx1031", "gfx1035", "gfx1010", "gfx1011", "gfx1012", "gfx906", "gfx900", "gfx803")
_WITHOUT_FP16 = ("1660", "1650", "1630", "T500", "T550", "T600", "MX550", "MX450", "30HX", "T2000", "T1000", "T1200")


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 itself; what torch emulates there is as slow as float32."""
    module: Any = device_module(device)
    if device.type == "cuda":
        properties = module.get_device_properties(device)
        if torch.version.hip is not None:
            return not any(arch in properties.gcnArchName for arch in _AMD_WITHOUT_BF16)
        return int(properties.major) >= 8
    return bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else True


def has_fp16(device: torch.device) -> bool:
    """Whether the device computes in float16 as fast as it can, and right."""
    module: Any = device_module(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return module.get_device_properties(device).major >= 7 and not any(x in device_title(device) for x in _WITHOUT_FP16)


def hidden_gpus() -> str:
    """What may hide GPUs from torch in this process, as the end of a message; "" where nothing does."""
    if os.name == "nt":
        return f"; {ONE_GPU_ON_WINDOWS}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r} and hides all others"


def free_bytes(device: torch.device) -> int | None:
    """Bytes a new allocation could take, this process's cached blocks included; None where torch cannot tell."""
    module = device_module(device)
    if module is None:  # what the system says is available, and no more than the container may still take
        import psutil

        left, available = _cgroup_bytes(Path("/sys/fs/cgroup")), int(psutil.virtual_memory().available)
        return available if left is None else min(available, left)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


def total_bytes(device: torch.device) -> int | None:
    """Memory of the device in bytes; None where torch cannot tell."""
    module: Any = device_module(device)
    return module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else None


def _cgroup_bytes(folder: Path) -> int | None:
    """What is left of a container's limit (cgroup v2), its cache of files taken for free; None without a limit."""
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        rows = (row.split() for row in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = next((int(row[1]) for row in rows if row[0] == "inactive_file"), 0)
        return None if limit == "max" else max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return None


def memory_in_use(devices: Iterable[torch.device]) -> dict[str, dict[str, float]]:
    """Decimal GB per accelerator, peaks since reset_peaks: {"cuda:0": {"allocated": 12.3, "peak": 14.0, "reserved":
    14.5}}; reserved is the allocator's peak. The CPU is left out."""
    modules: dict[torch.device, Any] = {device: device_module(device) for device in devices}
    return {
        str(device): {
            "allocated": module.memory_allocated(device) / 1e9,
            "peak": module.max_memory_allocated(device) / 1e9,
            "reserved": module.max_memory_reserved(device) / 1e9,
        }
        for device, module in modules.items()
        if hasattr(module, "max_memory_allocated")
    }


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Let the peaks of memory_in_use start from what is held now."""
    for device in devices:
        module: Any = device_module(device)
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(device)


def release_cached_memory() -> None:
    """Collect garbage and hand cached blocks back to the accelerator's driver; changes no tensor."""
    gc.collect()
    for device in available_devices()[:1]:  # all are of one kind
        module: Any = device_module(device)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until everything queued on these devices is done; the CPU needs no waiting."""
    for device in devices:
        if (module := device_module(device)) is not None:
            module.synchronize(device)


def random_state(device: torch.device) -> torch.Tensor | None:
    """State of the device's default generator, as a uint8 tensor; None for tensors without memory."""
    if device.type == "meta":
        return None
    module = device_module(device)
    return torch.get_rng_state() if module is None else module.get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Put back what random_state returned."""
    module = device_module(device)
    torch.set_rng_state(state) if module is None else module.set_rng_state(state, device)


def random_states(devices: Iterable[torch.device]) -> dict[str, torch.Tensor]:
    """random_state of the CPU and of every device named."""
    return {str(each): state for each in (CPU, *devices) if (state := random_state(each)) is not None}


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what random_states returned. Raises: ValueError for the state of a device that does not exist here."""
    for name, state in states.items():
        set_random_state(find_device(name), state)


def seed_devices(devices: Sequence[torch.device], seed: int) -> None:
    """Let default generators start from seed: of the CPU, and of each device from another number."""
    torch.default_generator.manual_seed(seed)
    for index, device in enumerate(devices):
        module = device_module(device)
        if module is not None and hasattr(module, "manual_seed"):
            with module.device(device):
                module.manual_seed(seed + index)


@contextmanager
def own_random_states(devices: Sequence[torch.device], seed: int | None = None) -> Iterator[None]:
    """Inside, as behind seed_devices, or without a seed as before; outside, nothing has happened."""
    before = random_states(devices)
    try:
        if seed is not None:
            seed_devices(devices, seed)
        yield
    finally:
        restore_random_states(before)


def has_peer_access(source: torch.device, target: torch.device) -> bool | None:
    """Whether source can read target's memory directly; None where torch cannot tell, as of cards that are not here."""
    module: Any = device_module(source)
    if module is None or source.type != target.type or not hasattr(module, "can_device_access_peer"):
        return None
    if hasattr(module, "device_count") and max(source.index or 0, target.index or 0) >= module.device_count():
        return None
    return source == target or module.can_device_access_peer(source, target)


# ---- what every card, and the host's memory, look like now, as far as the driver tells without being woken


def describe_cards() -> list[dict[str, Any]]:
    """Per card its name, title, bytes in all, used by anybody and by this process, utilisation in percent and degrees
    Celsius; None for what is not told. At the end the host's memory, under the name "host"."""
    import psutil

    cards = []
    for device in available_devices():
        module: Any = device_module(device)
        found: dict[str, Any] = {"name": str(device), "title": "", "total": None, "used": None, "own": None}
        found["utilisation"] = _ask(module, "utilization", device)
        found["temperature"] = _ask(module, "temperature", device)
        if module.is_initialized():
            properties = module.get_device_properties(device)
            own, used = module.memory_reserved(device), _ask(module, "device_memory_used", device)
            if used is None and own > 0:
                free, total = module.mem_get_info(device)
                used = total - free
            found |= {"title": properties.name, "total": properties.total_memory, "own": own, "used": used}
        cards.append(found)
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    used = memory.total - memory.available
    values = {"total": memory.total, "used": used, "own": own, "utilisation": round(psutil.cpu_percent())}
    return [*cards, {"name": "host", "title": "host memory", "temperature": None, **values}]


def _ask(module: Any, name: str, device: torch.device) -> int | None:
    """A question to the driver's library, which may be missing or not know the card."""
    with contextlib.suppress(Exception):
        return int(getattr(module, name)(device))
    return None
