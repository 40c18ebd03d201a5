"""ComfyUI on emulated cards: what stands in for a machine with several GPUs, and what a user does with a model.

Three questions ComfyUI asks of the machine (which cards, how large, how much is free) are answered from the emulation;
its model management, loader, patcher, nodes and samplers are its own.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.hooks
import comfy.model_management
import comfy.sample
import comfy.sd
import torch
from comfy.nested_tensor import NestedTensor
from comfy.utils import pack_latents
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, TinyFamily, lora_weights, save_checkpoint, small_sizes
from devicebridge.tests.emulated import (
    CARDS,
    Copy,
    EmulatedCards,
    emulated_cards,
    factories_on_cards,
    live_bytes,
    on_cpu,
)

NUM_CARDS = 4
CAPACITY_BYTES = 24 << 30
HOME, OTHER, THIRD, _ = CARDS[:NUM_CARDS]
_CPU = torch.device("cpu")
_REFERENCES: dict[tuple[Any, ...], torch.Tensor] = {}
_management = comfy.model_management


@dataclass
class Machine:
    cards: EmulatedCards
    capacity_bytes: dict[torch.device, int] = field(default_factory=dict)

    def free_memory(self, device: torch.device | None = None, torch_free_too: bool = False) -> Any:
        device = device or HOME
        free = self.capacity_bytes.get(device, CAPACITY_BYTES) - live_bytes(device)
        return (free, 0) if torch_free_too else free

    def total_memory(self, device: torch.device | None = None, torch_total_too: bool = False) -> Any:
        total = self.capacity_bytes.get(device or HOME, CAPACITY_BYTES)
        return (total, total) if torch_total_too else total

    @contextlib.contextmanager
    def room_for(self, weight_bytes: int, device: torch.device) -> Iterator[None]:
        """While active this card has room for so many bytes of weights besides what ComfyUI keeps for computing."""
        self.capacity_bytes[device] = int(_management.minimum_inference_memory()) + weight_bytes + live_bytes(device)
        try:
            yield
        finally:
            del self.capacity_bytes[device]


@contextlib.contextmanager
def emulated_machine() -> Iterator[Machine]:
    with emulated_cards(NUM_CARDS) as cards, factories_on_cards():
        machine = Machine(cards)
        with mock.patch.multiple(
            _management,
            get_torch_device=lambda: HOME,
            get_all_torch_devices=_list_cards,
            get_free_memory=machine.free_memory,
            get_total_memory=machine.total_memory,
            unet_offload_device=lambda: _CPU,
            vram_state=_management.VRAMState.NORMAL_VRAM,
        ):
            yield machine


@contextlib.contextmanager
def real_gpus() -> Iterator[Any]:
    """ComfyUI on the GPUs there are; sums in the same order at every run."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    yield None


@contextlib.contextmanager
def pinning() -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Inside, ComfyUI pins memory; bytes by address of what was pinned, and of what is."""
    registered, pinned = dict[int, int](), dict[int, int]()

    def register(address: int, size: int, flags: int) -> int:
        registered[address] = pinned[address] = size
        return 0

    cuda = mock.Mock(cudaHostRegister=register, cudaHostUnregister=lambda address: 0 * pinned.pop(address))
    with (
        mock.patch.object(_management, "MAX_PINNED_MEMORY", 1 << 40),
        mock.patch.object(torch.cuda, "cudart", lambda: cuda),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in pinned),
    ):
        yield registered, pinned


def _list_cards(exclude_current: bool = False) -> list[torch.device]:
    return list(CARDS[1:NUM_CARDS] if exclude_current else CARDS[:NUM_CARDS])


@dataclass
class Host:
    """A user at this machine.

    Args:
        folder: for checkpoints; each is made once.
    """

    machine: Machine
    folder: Path

    def checkpoint(self, name: str, dtype: torch.dtype = torch.float32) -> Path:
        path = self.folder / f"{name}-{str(dtype).rpartition('.')[2]}.safetensors"
        return path if path.exists() else save_checkpoint(FAMILIES[name], path, dtype)

    def load(self, name: str, file_dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        with small_sizes(FAMILIES[name]):
            return comfy.sd.load_diffusion_model(str(self.checkpoint(name, file_dtype)), model_options=options)

    def lora(self, model: Any, name: str, seed: int = 1, strength: float = 1.0) -> Any:
        return comfy.sd.load_lora_for_models(model, None, dict(lora_weights(name, seed)), strength, 0)[0]

    def sample(
        self, model: Any, name: str, *, cfg: float = 1.0, batch: int = 1, steps: int = 2, seed: int = 7,
        positive: Any = None, negative: Any = None, latent: tuple[int, ...] | None = None,
        noise: torch.Tensor | None = None, noise_mask: torch.Tensor | None = None,
        callback: Callable[..., None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """What KSampler does; the samples on the CPU. [batch, *latent], of two streams [batch, 1, values of both]"""
        family = FAMILIES[name]
        samples = torch.zeros(batch, *(latent or family.latent))
        if family.sound:
            samples = NestedTensor((samples, torch.zeros(batch, *family.sound)))
        noise = comfy.sample.prepare_noise(samples, seed) if noise is None else noise
        samples = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", positive or family.condition(1),
            negative or family.condition(2), samples, noise_mask=noise_mask, callback=callback, disable_pbar=True,
            seed=seed,
        )  # fmt: skip
        return on_cpu(pack_latents(samples.unbind())[0] if samples.is_nested else samples).clone()

    def reference(self, name: str, *loras: int, positive: Any = None, **options: Any) -> torch.Tensor:
        """Latents of the whole model on the CPU, with the LoRAs of these seeds. Made once, unless of a condition."""

        def made() -> torch.Tensor:
            whole = self.load(name, load_device=_CPU)
            model = functools.reduce(lambda model, seed: self.lora(model, name, seed), loras, whole)
            return self.sample(model, name, positive=positive, **options)

        if positive is not None:
            return made()
        key = name, *loras, *sorted(options.items())
        if key not in _REFERENCES:
            _REFERENCES[key] = made()
        return _REFERENCES[key].clone()

    def free(self, device: torch.device) -> None:
        _management.free_memory(1e30, device)

    def unload_all(self) -> None:
        _management.unload_all_models()


class _Watched(list[Copy]):
    """A list of copies that looks at the cards' memory after each."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks = dict.fromkeys(CARDS[:NUM_CARDS], 0)

    def append(self, copy: Copy) -> None:
        super().append(copy)
        for device in self.peaks:
            self.peaks[device] = max(self.peaks[device], live_bytes(device))


@contextlib.contextmanager
def peaks_of(machine: Machine) -> Iterator[dict[torch.device, int]]:
    """Most bytes that were on each card whenever something was copied to one: weights and what crosses."""
    watched = _Watched()
    with mock.patch.object(machine.cards, "copies", watched):
        yield watched.peaks


def hooked(name: str, seed: int, lora: int = 1, strengths: Sequence[tuple[float, float]] = ()) -> Any:
    """A condition with a LoRA of its own; strengths: and the shares of all steps behind which they begin."""
    hooks = comfy.hooks.create_hook_lora(dict(lora_weights(name, lora)), 1.0, 1.0)
    schedule = comfy.hooks.HookKeyframeGroup()
    for strength, start in strengths:
        schedule.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    if strengths:
        hooks.set_keyframes_on_hooks(schedule)
    return comfy.hooks.set_hooks_for_conditioning(FAMILIES[name].condition(seed), hooks)


def one_condition_at_a_time(model: Any) -> Any:
    return mock.patch.object(model, "get_free_memory", lambda device: 0)


def weights_on(model: Any, device: torch.device) -> int:
    parameters = model.model.diffusion_model.parameters()
    return sum(parameter.nbytes for parameter in parameters if parameter.device == device)


def block_devices(model: Any, family: TinyFamily) -> dict[str, set[str]]:
    devices: dict[str, set[str]] = {}
    for name, parameter in model.model.diffusion_model.named_parameters():
        if name.startswith(family.block_lists):
            block = ".".join(name.split(".")[:2])
            devices.setdefault(block, set()).add(str(parameter.device))
    return devices


def offloaded_layers(model: Any, device: torch.device) -> list[str]:
    patcher = next(p for p in (model, *model.companions) if p.load_device == device)
    blocks = {id(module) for other in model.companions if other is not patcher for module in other.model.modules()}
    return [
        name
        for name, module in patcher.model.named_modules()
        if id(module) not in blocks and any(p.device.type == "cpu" for p in module.parameters(recurse=False))
    ]


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape or not torch.isfinite(first).all():
        return math.inf
    return float((first.double() - second.double()).abs().max())


def crossings(machine: Machine, pair: Sequence[torch.device]) -> int:
    return sum({copy.source, copy.target} == set(pair) for copy in machine.cards.copies)
