"""What this machine has, and what of the pack will work on it. Runs with any package missing, torch included."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import compat
from ..headless import run as server
from ..system import processes
from ..system.import_faults import try_import
from ..system.versions import TESTED, installed_version
from ..version import VERSION


def collect(python: Path | None = None) -> dict[str, Any]:
    """Facts as plain values, ready for JSON; what could not be found out is None. python: that ComfyUI runs with."""
    versions = {name: installed_version(name) for name in TESTED} | {"python": platform.python_version()}
    facts: dict[str, Any] = {
        "devicebridge": VERSION,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "versions": {
            name: {
                "found": (found := versions[name]),
                "tested": str(tested),
                "is_tested": tested.covers(found) if found else None,
                "needed_for": tested.needed_for,
            }
            for name, tested in TESTED.items()
        },
        "torch_build": None,
        "devices": [],
        "peer_access": {},
        "machine_speed": [],
        **_ask_comfyui(python),
    }
    if versions["torch"]:
        facts.update(_ask_torch())
    tried = {name: target for name, target in _IMPORTED.items() if facts["devices"] and versions[name]}
    facts["import_faults"] = {name: try_import(*target.split(":")) for name, target in tried.items()}
    facts["features"] = [
        {"name": name, "works": None if why and why == facts["python_fault"] else not why, "reason": why}
        for name in _FEATURES
        for why in [why_not(facts, name)]
    ]
    return facts


def report(facts: dict[str, Any]) -> str:
    lines = [f"DeviceBridge {facts['devicebridge']} on {facts['system']}, {facts['cpu_count']} CPU cores", ""]
    lines.append("Devices")
    for device in facts["devices"]:
        free = "?" if device["free_gb"] is None else device["free_gb"]
        total = "" if device["total_gb"] is None else f" of {device['total_gb']}"
        capability = f", compute capability {device['capability']}" if device["capability"] else ""
        lines.append(f"  {device['name']:<8} {device['title']}: {free}{total} GB free{capability}")
    if not facts["devices"]:
        lines.append("  unknown: torch cannot be imported")
    if facts["peer_access"]:
        lines += ["", "Copies between devices"]
    names = {True: "direct", False: "through the host", None: "unknown"}
    for source, row in facts["peer_access"].items():
        lines += [f"  {source} -> {target}: {names[found]}" for target, found in row.items() if source != target]
    lines += [f"  {line}" for line in facts["machine_speed"]]
    lines += ["", "Versions"]
    for name, version in facts["versions"].items():
        remark = "" if version["is_tested"] else f"not tested; tested: {version['tested']}"
        if version["found"] is None:
            remark = f"needed for {version['needed_for']}"
        lines.append(f"  {name:<13}{version['found'] or 'missing':<16}{remark}")
    if facts["torch_build"]:
        lines.append(f"  torch build: {facts['torch_build']}")
    lines += ["", "ComfyUI", f"  {facts['comfyui'] or 'not found'}", *_pack_lines(facts)]
    lines.append(f"  comfy-cli: {facts['comfy_cli'] or 'not found'}")
    lines += ["", "What works here"]
    works = {True: "yes", False: "no ", None: "?  "}
    for each in facts["features"]:
        lines.append(f"  {works[each['works']]} {each['name']}{': ' + each['reason'] if each['reason'] else ''}")
    return "\n".join(lines)


def _ask_torch() -> dict[str, Any]:
    """What torch knows; torch_build says so where it cannot be imported."""
    try:
        import torch
    except Exception as error:  # whatever its own import raises
        return {"torch_build": f"cannot be imported: {error}"}
    from ..parallel.devices import CPU, available_devices, has_peer_access

    cards, cuda, rocm = available_devices(), torch.version.cuda, torch.version.hip
    several = cards if len(cards) > 1 else []
    return {
        "torch_build": f"ROCm {rocm}" if rocm else f"CUDA {cuda}" if cuda else "no CUDA",
        "devices": [_describe_device(device) for device in [*cards, CPU]],
        "peer_access": {str(one): {str(other): has_peer_access(one, other) for other in several} for one in several},
        "machine_speed": _measure(several) if several else [],
    }


# What each package is needed for, imported; of diffusers and transformers the parts that import others.
_IMPORTED = {
    "diffusers": "diffusers:FluxTransformer2DModel",
    "transformers": "transformers:T5EncoderModel",
    "peft": "peft:LoraConfig",
    "safetensors": "safetensors:safe_open",
    "pydantic": "pydantic:TypeAdapter",
    "tomlkit": "tomlkit:parse",
    "av": "av:open",
}


def _measure(accelerators: list[Any]) -> list[str]:
    """What cards and links were measured at, or are now, a line each; what way "auto" of a split goes by."""
    try:
        from ..planning.cards import kept_speed, machine_speed

        found = machine_speed(accelerators)
        speeds = zip(accelerators, found.flops_per_s, strict=True)
        return [
            *(f"{device}: {flops / 1e12:.3g} TFLOP/s in half precision" for device, flops in speeds),
            f"slowest link between two of them: {(found.bytes_per_s or 0) / 1e9:.3g} GB/s each way at once",
            f"measured {found.date}, kept in {kept_speed(accelerators).path}",
        ]
    except (ImportError, RuntimeError) as error:
        return [f"not measured: {error}"]


def _describe_device(device: Any) -> dict[str, Any]:
    from ..parallel.devices import device_module, device_title, free_bytes, total_bytes

    capability = getattr(device_module(device), "get_device_capability", None) if device.type == "cuda" else None
    free, total = (size and round(size / 1e9, 2) for size in (free_bytes(device), total_bytes(device)))
    return {
        "name": str(device),
        "title": device_title(device) or platform.processor() or platform.machine(),
        "free_gb": free,
        "total_gb": total,
        "capability": ".".join(map(str, capability(device))) if capability else None,
    }


def _ask_comfyui(python: Path | None) -> dict[str, Any]:
    """What `devicebridge run` would take: ComfyUI, the folder of this pack among its custom nodes, and comfy-cli."""
    facts: dict[str, Any] = dict.fromkeys(("comfyui", "comfyui_pack", "comfy_cli", "contract"))
    facts["python_fault"] = ""
    with contextlib.suppress(RuntimeError):
        facts["comfy_cli"] = str(server.find_comfy_cli())
    with contextlib.suppress(RuntimeError):
        found = server.find_comfyui(python=python)
        version = Path(found.folder, "comfyui_version.py")
        text = version.read_text(encoding="utf-8") if version.is_file() else ""
        number = text.partition('__version__ = "')[2].partition('"')[0] or "version unknown"
        facts["comfyui"] = f"{found.folder} ({number}, {found.python})"
        pack = server.find_pack(found.base / "custom_nodes")
        facts["comfyui_pack"] = str(pack) if pack else None
        # What it has changed of what the pack relies on, asked in its own Python; takes seconds.
        answer = processes.run([found.python, compat.__file__, found.folder], timeout_s=120)
        facts["contract"] = json.loads((answer or "null").splitlines()[-1])  # a sitecustomize may print, too
        fault = f"{found.python} does not start it"
        facts["python_fault"] = facts["contract"]["import_fault"] if answer else fault
    return facts


def _pack_lines(facts: dict[str, Any]) -> list[str]:
    if facts["comfyui"] is None:
        return []
    place = facts["comfyui_pack"] or "no; its window does not show the nodes (devicebridge run adds them itself)"
    lines, contract = [f"  DeviceBridge in its custom_nodes: {place}"], facts["contract"]
    if facts["python_fault"]:
        lines.append(f"  what the pack relies on in it: not asked; {facts['python_fault']}")
    elif not contract["faults"]:
        lines.append(f"  what the pack relies on in it: all {len(compat.NEEDS)} parts are there")
    else:
        lines += ["  what the pack relies on in it has changed:", *(f"    {each}" for each in contract["faults"])]
        lines.append(f"    so these do not work: {', '.join(contract['refused'])}")
    if facts["system"].startswith("Windows") and len(_accelerators(facts)) > 1:
        from ..parallel.devices import ONE_GPU_ON_WINDOWS

        lines.append(f"  its GPUs: {ONE_GPU_ON_WINDOWS}")
    return lines


_TRAINING = ("torch", "diffusers", "peft", "safetensors", "pydantic", "tomlkit")
# What each needs: packages, a number of GPUs, and of ComfyUI.
_FEATURES: Mapping[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "Split Model Across GPUs (sampling in ComfyUI)": (("torch",), 2, ("comfyui", "contract")),
    "LoRA training": (_TRAINING, 0, ()),
    "LoRA training on a GPU": (_TRAINING, 1, ()),
    "LoRA training split over GPUs": (_TRAINING, 2, ()),
    "LoRA training on videos": ((*_TRAINING, "av"), 0, ()),
    "encoding captions and images": ((*_TRAINING, "transformers"), 0, ()),
    "devicebridge run (ComfyUI workflows without a browser)": ((), 0, ("comfyui", "comfy_cli")),
}


def why_not(facts: dict[str, Any], feature: str) -> str:
    """Why a feature does not work here; "" if it does."""
    packages, num_gpus, needs = _FEATURES[feature]
    if absent := [name for name in packages if facts["versions"][name]["found"] is None]:
        return f"{', '.join(absent)} missing (pip install {' '.join(absent)})"
    if fault := next(filter(None, map(facts.get("import_faults", {}).get, packages)), ""):
        return str(fault)
    if packages and not facts["devices"]:
        return f"torch {facts['torch_build']}"
    if (count := len(_accelerators(facts))) < num_gpus:
        few = f"needs two GPUs or more; torch finds {count}"
        return few if num_gpus > 1 else "torch finds no GPU; training runs on the CPU"
    if needs and not facts["comfyui"]:
        return "no ComfyUI was found; set COMFYUI_PATH to its folder, or run `comfy install`"
    if "comfy_cli" in needs and not facts["comfy_cli"]:
        return "comfy-cli is missing (pip install comfy-cli)"
    refused = (facts.get("contract") or {}).get("refused") or {}
    return facts.get("python_fault") or refused.get("DeviceBridgeSplitModel", "") if "contract" in needs else ""


def _accelerators(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [device for device in facts["devices"] if device["name"] != "cpu"]
