"""What this machine has, and what of the pack will work on it. Runs with any package missing, torch included."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..system.versions import TESTED, installed_version
from ..version import VERSION

_GB = 1e9


def collect() -> dict[str, Any]:
    """Facts as plain values, ready for JSON; what could not be found out is None."""
    versions = {name: _version(name) for name in TESTED}
    facts: dict[str, Any] = {
        "devicebridge": VERSION,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "versions": {name: _describe_version(name, found) for name, found in versions.items()},
        "torch_build": None,
        "devices": [],
        "peer_access": {},
        **_ask_comfyui(),
        "comfy_cli": _find_comfy_cli(),
    }
    if versions["torch"]:
        facts.update(_ask_torch())
    facts["quantization"] = _list_schemes(facts)
    facts["features"] = [_describe_feature(name, judge(facts)) for name, judge in _FEATURES]
    return facts


def report(facts: dict[str, Any]) -> str:
    """The same facts for people."""
    lines = [f"DeviceBridge {facts['devicebridge']} on {facts['system']}, {facts['cpu_count']} CPU cores", ""]
    lines += ["Devices", *(f"  {_device_line(device)}" for device in facts["devices"] or [])]
    if not facts["devices"]:
        lines.append("  unknown: torch cannot be imported")
    lines += _peer_lines(facts["peer_access"])
    lines += ["", "Versions"]
    for name, found in facts["versions"].items():
        lines.append(f"  {name:<13}{found['found'] or 'missing':<16}{_remark(found)}")
    if facts["torch_build"]:
        lines.append(f"  torch build: {facts['torch_build']}")
    lines += [
        "",
        "ComfyUI",
        f"  {facts['comfyui'] or 'not found'}",
        *_pack_lines(facts),
        f"  comfy-cli: {facts['comfy_cli'] or 'not found'}",
    ]
    lines += ["", "What works here"]
    for feature in facts["features"]:
        mark = "yes" if feature["works"] else "no "
        lines.append(f"  {mark} {feature['name']}{': ' + feature['reason'] if feature['reason'] else ''}")
    lines += ["", "How the frozen weights of a training can be held (quantize)"]
    for found in facts["quantization"]:
        mark = "yes" if found["works"] else "no "
        place = f" on {found['device']}" if found["device"] else ""
        lines.append(f"  {mark} {found['scheme']}{place}{': ' + found['reason'] if found['reason'] else ''}")
    return "\n".join(lines)


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    return installed_version(name)


def _describe_version(name: str, found: str | None) -> dict[str, Any]:
    tested = TESTED[name]
    return {
        "found": found,
        "tested": str(tested),
        "is_tested": tested.covers(found) if found else None,
        "needed_for": tested.needed_for,
    }


def _remark(version: dict[str, Any]) -> str:
    if version["found"] is None:
        return f"needed for {version['needed_for']}"
    return "" if version["is_tested"] else f"not tested; tested: {version['tested']}"


def _ask_torch() -> dict[str, Any]:
    """What torch knows; an install that is there but cannot be imported says so in torch_build."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch_build": f"cannot be imported: {error}"}
    from ..parallel.devices import CPU, available_devices

    accelerators = available_devices()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    return {
        "torch_build": build,
        "devices": [_describe_device(device) for device in [*accelerators, CPU]],
        "peer_access": _peer_access(accelerators),
    }


def _describe_device(device: Any) -> dict[str, Any]:
    from ..parallel.devices import device_module, free_bytes, total_bytes

    module = device_module(device)
    properties = getattr(module, "get_device_properties", None)
    capability = getattr(module, "get_device_capability", None) if device.type == "cuda" else None
    free, total = free_bytes(device), total_bytes(device)
    return {
        "name": str(device),
        "title": properties(device).name if properties else platform.processor() or platform.machine(),
        "free_gb": None if free is None else round(free / _GB, 2),
        "total_gb": None if total is None else round(total / _GB, 2),
        "capability": ".".join(map(str, capability(device))) if capability else None,
    }


def _peer_access(devices: list[Any]) -> dict[str, dict[str, bool | None]]:
    from ..parallel.devices import has_peer_access

    if len(devices) < 2:
        return {}
    return {str(source): {str(target): has_peer_access(source, target) for target in devices} for source in devices}


def _device_line(device: dict[str, Any]) -> str:
    free = "?" if device["free_gb"] is None else device["free_gb"]
    total = "" if device["total_gb"] is None else f" of {device['total_gb']}"
    capability = f", compute capability {device['capability']}" if device["capability"] else ""
    return f"{device['name']:<8} {device['title']}: {free}{total} GB free{capability}"


def _peer_lines(access: dict[str, dict[str, bool | None]]) -> list[str]:
    if not access:
        return []
    names = {True: "direct", False: "through the host", None: "unknown"}
    pairs = [
        f"  {source} -> {target}: {names[is_direct]}"
        for source, row in access.items()
        for target, is_direct in row.items()
        if source != target
    ]
    return ["", "Copies between devices", *pairs]


def _ask_comfyui() -> dict[str, Any]:
    """Which ComfyUI `devicebridge run` would take, and the folder of this pack among its custom nodes."""
    from ..headless.run import find_comfyui, find_pack

    try:
        found = find_comfyui()
    except RuntimeError:
        return {"comfyui": None, "comfyui_pack": None}
    version = Path(found.folder, "comfyui_version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    _, _, number = text.partition('__version__ = "')
    pack = find_pack(found.base / "custom_nodes")
    return {
        "comfyui": f"{found.folder} ({number.partition(chr(34))[0] or 'version unknown'}, {found.python})",
        "comfyui_pack": str(pack) if pack else None,
    }


def _pack_lines(facts: dict[str, Any]) -> list[str]:
    if facts["comfyui"] is None:
        return []
    if facts["comfyui_pack"]:
        return [f"  DeviceBridge in its custom_nodes: {facts['comfyui_pack']}"]
    return [
        "  DeviceBridge in its custom_nodes: no; its window does not show the nodes (devicebridge run adds them itself)"
    ]


def _find_comfy_cli() -> str | None:
    from ..headless.run import find_comfy_cli

    try:
        return str(find_comfy_cli())
    except RuntimeError:
        return None


# ---- in which schemes the frozen weights can be held ----

_SCHEMES = (
    "fp8",
    "int8",
    "fp8-compute",
    "int8-compute",
)  # quantization/quantize.py's, which cannot be read without torch


def _list_schemes(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Each scheme on each accelerator, on the CPU where there is none; one line without a device if all fail alike."""
    found = []
    for scheme in _SCHEMES:
        reason = _training(facts) or ("" if scheme.endswith("-compute") else _missing(facts, "torchao"))
        devices = [] if reason else [device["name"] for device in _accelerators(facts) or facts["devices"]]
        pairs = [(name, _scheme_fault(scheme, name)) for name in devices] or [("", reason)]
        found += [{"scheme": scheme, "device": name, "works": not why, "reason": why} for name, why in pairs]
    return found


def _scheme_fault(scheme: str, device: str) -> str:
    """Why a device cannot compute in a scheme; needs torch and the packages of a training."""
    import torch

    from ..quantization.quantize import QuantizeSettings, check_packages, refusal

    settings = QuantizeSettings(scheme)  # type: ignore[arg-type]
    try:
        check_packages(settings)
    except (RuntimeError, ImportError, OSError) as error:  # torchao is imported, and may be broken
        return str(error)
    return refusal(settings, [torch.device(device)])


# ---- what works ----

Judge = Callable[[dict[str, Any]], str]  # "" when it works, else why not


def _describe_feature(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "works": not reason, "reason": reason}


def _missing(facts: dict[str, Any], *names: str) -> str:
    absent = [name for name in names if facts["versions"][name]["found"] is None]
    if absent:
        return f"{', '.join(absent)} missing (pip install {' '.join(absent)})"
    return "" if facts["devices"] else f"torch {facts['torch_build']}"


_TRAINING = ("torch", "diffusers", "peft", "safetensors", "accelerate", "pydantic", "tomlkit")


def _accelerators(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [device for device in facts["devices"] if device["name"] != "cpu"]


def _training(facts: dict[str, Any]) -> str:
    return _missing(facts, *_TRAINING)


def _training_on_gpu(facts: dict[str, Any]) -> str:
    return _training(facts) or ("" if _accelerators(facts) else "torch finds no GPU; training runs on the CPU")


def _split(facts: dict[str, Any]) -> str:
    count = len(_accelerators(facts))
    return _training(facts) or ("" if count > 1 else f"needs two GPUs or more; torch finds {count}")


def _split_model(facts: dict[str, Any]) -> str:
    """ComfyUI may run in another environment than this one; the cards are the same."""
    count = len(_accelerators(facts))
    if count < 2:
        return f"needs two GPUs or more; torch finds {count}" if facts["devices"] else _missing(facts, "torch")
    return "" if facts["comfyui"] else "no ComfyUI was found; set COMFYUI_PATH to its folder"


def _clips(facts: dict[str, Any]) -> str:
    return _missing(facts, *_TRAINING, "av")


def _captions(facts: dict[str, Any]) -> str:
    return _missing(facts, "torch", "transformers", "diffusers", "safetensors")


def _workflows(facts: dict[str, Any]) -> str:
    if facts["comfyui"] is None:
        return "no ComfyUI was found; set COMFYUI_PATH to its folder, or run `comfy install`"
    return "" if facts["comfy_cli"] else "comfy-cli is missing (pip install comfy-cli)"


_FEATURES: tuple[tuple[str, Judge], ...] = (
    ("Split Model Across GPUs (sampling in ComfyUI)", _split_model),
    ("LoRA training", _training),
    ("LoRA training on a GPU", _training_on_gpu),
    ("LoRA training split over GPUs", _split),
    ("LoRA training on videos", _clips),
    ("encoding captions and images", _captions),
    ("devicebridge run (ComfyUI workflows without a browser)", _workflows),
)
