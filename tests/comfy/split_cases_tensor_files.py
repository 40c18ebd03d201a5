"""8-bit files divided among cards, as their files hold them and as the loader node's weight types make them.

Slices have the very numbers of the file. What may differ from one card:

- Outputs are partial sums, added in another order. An activation that lies between two 8-bit numbers may then be
  rounded to the other one.
- int8 products scale every row of activations by the largest of its features. A row-parallel layer has some of the
  features on each card, so rows are rounded by scales of their own: otherwise than on one card, and no worse.
- A LoRA is added to the numbers, and the result rounded again at random, by a scale of the slice.

So where activations or patched weights are rounded, claims are about errors: both runs are compared with the same
numbers in float32, and the divided one may be no further away. Everything else is as near as sums in another order.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor
from devicebridge.nodes.host.split.model import load_split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.parallel.local.shards import JoinedSlices
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, in_long_runs, long_case
from devicebridge.tests.comfy.split_cases_formats import quantised_checkpoint, scaled_checkpoint
from devicebridge.tests.comfy.split_cases_tensor import near, tensor
from devicebridge.tests.comfy.split_classes import EIGHT_BITS
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host, pinning
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, small_sizes
from devicebridge.tests.emulated import on_cpu
from safetensors.torch import save_file

FILES: dict[str, Callable[[Host, str], Path]] = {
    "fp8": lambda host, name: quantised_checkpoint(host, "float8_e4m3fn", name), "scaled_fp8": scaled_checkpoint,
    "int8": lambda host, name: quantised_checkpoint(host, "int8_tensorwise", name),
    "int8_rows": lambda host, name: quantised_checkpoint(host, "int8_tensorwise", name, per_channel=True),
}  # fmt: skip
ORDER = 1e-5  # of sums in another order, after two steps
NO_WORSE = 2.0  # times the error of one card: each is one sample of a random one


def _load(path: Path, name: str, **options: Any) -> Any:
    with small_sizes(FAMILIES[name]):
        return comfy.sd.load_diffusion_model(str(path), model_options=options)


def load_divided(path: Path, name: str, *cards: torch.device, weight_dtype: str = "default") -> Any:
    with small_sizes(FAMILIES[name]):
        return load_split_model(path, weight_dtype, SplitRequest(devices=cards or (HOME, OTHER), way="tensor"))


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return on_cpu(plain).float()


def _exact(host: Host, path: Path, name: str) -> Any:
    found = host.folder / f"{path.stem}-exact.safetensors"
    if not found.exists():
        parameters = _load(path, name, load_device=CPU).model.diffusion_model.named_parameters()
        save_file({key: _numbers(each.data).contiguous() for key, each in parameters}, found)
    return _load(found, name, load_device=CPU)


def _distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output - reference).norm() / reference.norm())


def no_worse(case: Case, claim: str, found: torch.Tensor, one: torch.Tensor, exact: torch.Tensor) -> None:
    mine, its, between = _distance(found, exact), _distance(one, exact), _distance(found, one)
    case.check(claim, mine < NO_WORSE * its + ORDER, f"{mine:.3g} off, one card {its:.3g}; {between:.3g} between them")


def _file(kind: str, name: str, case: Case) -> None:
    """A file by both nodes, on three cards, in long runs on two; a LoRA before and behind the split; also streamed."""
    host, heads = case.host, 2 if name == "qwen_image" else 4
    path = FILES[kind](host, name)
    one, exact = _load(path, name), _exact(host, path, name)
    plain, with_lora = host.sample(one, name), host.sample(host.lora(one, name), name)
    right, right_with_lora = host.sample(exact, name), host.sample(host.lora(exact, name), name)
    case.differs("8 bits do something", right, host.reference(name))
    host.unload_all()
    most = ((HOME, OTHER), (HOME, OTHER, THIRD))[: heads - 1]
    for cards in in_long_runs(*most) or most[-1:]:
        what, given = f"{len(cards)} cards", _load(path, name)
        divided = tensor(given, *cards)
        _check_planned_bytes(case, what, given, divided)
        output = host.sample(divided, name)
        no_worse(case, what, output, plain, right)
        case.check(f"{what}: each holds 8-bit weights", min(map(len, _eight_bit(divided).values())) > 5)
        case.equal(f"{what}: again", host.sample(divided, name), output)
        found = host.sample(host.lora(divided, name), name)
        no_worse(case, f"{what}: with a LoRA", found, with_lora, right_with_lora)
        exact_with_lora = host.lora(exact, name)
        host.sample(exact_with_lora, name, steps=1)  # leaves it patched
        _check_patched_slices(case, what, divided, exact_with_lora)
        host.unload_all()
        case.equal(f"{what}: after it was unloaded", host.sample(divided, name), output)
        host.unload_all()
        case.equal(f"{what}: loaded divided", host.sample(load_divided(path, name, *cards), name), output)
        host.unload_all()
    before = tensor(host.lora(_load(path, name), name), *cards)
    case.equal("a LoRA before the split", host.sample(before, name), found)
    host.unload_all()
    size = sum(parameter.nbytes for parameter in divided.companions[0].model.parameters())
    with host.machine.room_for(size // 2, OTHER):
        case.equal("streamed on one card", host.sample(divided, name), output)
        streamed = host.sample(host.lora(divided, name), name)
        no_worse(case, "streamed with a LoRA", streamed, with_lora, right_with_lora)


def _check_planned_bytes(case: Case, what: str, given: Any, divided: Any) -> None:
    """What was planned from the whole weights is what the slices take."""
    tree = tree_of(divided.model)
    planned = tree.plan.bytes_on(given.model.diffusion_model)
    modules = {tree.plan.main_device: divided.model.diffusion_model, **tree.shards}
    held = {device: int(comfy.model_management.module_size(module)) for device, module in modules.items()}
    apart = max(abs(planned[device] / size - 1) for device, size in held.items())
    case.check(f"{what}: bytes are as planned", apart < 0.02, (planned, held))


def _eight_bit(divided: Any) -> dict[torch.device, dict[str, QuantizedTensor]]:
    return {
        patcher.load_device: {
            key: parameter
            for key, parameter in patcher.model.named_parameters()
            if isinstance(parameter, QuantizedTensor) and parameter.device == patcher.load_device
        }
        for patcher in (divided, *divided.companions)
    }


def _check_patched_slices(case: Case, what: str, divided: Any, exact: Any) -> None:
    """Every divided weight that a card holds is the slice of the patched whole, each number one 8-bit step off at most,
    for it is rounded up or down at random. ComfyUI's fp8 is off by two right below a power of two, on one card, too."""
    blocks, worst, count = tree_of(divided.model).executor, 0.0, 0
    allowed = 1.01
    wholes = dict(exact.model.named_parameters())
    for device, weights in _eight_bit(divided).items():
        for key, weight in weights.items():
            found = blocks._find(device, key)
            if found is None:
                continue
            shard, name = found
            expected = shard.slices[name].copied(wholes[key].data.float())
            steps = (_numbers(weight) - expected).abs() / _step(weight, expected)
            allowed = 1.01 if weight._qdata.dtype == torch.int8 else 2.01
            worst, count = max(worst, float(steps.max())), count + 1
    claim = f"{what}: patched slices are the whole's, rounded"
    case.check(claim, worst < allowed and count > 10, f"{worst:.3f} steps off, {count} weights")


def _step(weight: QuantizedTensor, numbers: torch.Tensor) -> torch.Tensor:
    """From one 8-bit number to the next, at these numbers."""
    scale = on_cpu(weight._params.scale)
    if weight._qdata.dtype == torch.int8:
        return scale
    exponent = (numbers.abs() / scale).clamp_min(2.0**-6).log2().floor()
    return scale * 2 ** (exponent - 3)  # three bits behind the first


for _kind, _name in EIGHT_BITS:
    CASES[f"tensor_{_kind}_file_of_{_name}"] = functools.partial(_file, _kind, _name)


@contextmanager
def _products_in_fp8() -> Iterator[None]:
    """While models are loaded: ComfyUI believes that the cards multiply in fp8, as newer ones do."""
    with mock.patch.object(comfy.model_management, "SUPPORT_FP8_OPS", True):
        yield


@case
def tensor_products_in_fp8(case: Case, host: Host) -> None:
    """Activations are rounded by a scale that the file gives, 1 without, so each card rounds as one card does."""
    for name in ("wan_heads", *in_long_runs("flux1_heads")):
        path = FILES["fp8"](host, name)
        with _products_in_fp8():
            one, divided = _load(path, name), tensor(_load(path, name))
        reference, right = host.sample(one, name), host.sample(_exact(host, path, name), name)
        case.check(f"{name}: products round", _distance(reference, right) > 1e-3, _distance(reference, right))
        near(case, f"{name}: as on one card", host.sample(divided, name), reference, ORDER)
        host.unload_all()


@long_case
def tensor_weight_types_of_the_loader(case: Case, host: Host) -> None:
    """Every choice of weight_dtype: the numbers that ComfyUI's own loader makes."""
    name = "flux1_heads"
    path, seen = host.checkpoint(name), []
    for weight_dtype, options in (
        ("default", {}), ("fp8_e4m3fn", {"dtype": torch.float8_e4m3fn}),
        ("fp8_e4m3fn_fast", {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}),
        ("fp8_e5m2", {"dtype": torch.float8_e5m2}),
    ):  # fmt: skip
        cards = (HOME, OTHER, THIRD)[: 3 if weight_dtype == "fp8_e4m3fn_fast" else 2]
        with _products_in_fp8():
            one, divided = _load(path, name, **options), load_divided(path, name, *cards, weight_dtype=weight_dtype)
        reference = host.sample(one, name)
        seen.append(reference)
        output = host.sample(divided, name)
        near(case, weight_dtype, output, reference, ORDER)
        host.unload_all()
        case.equal(f"{weight_dtype}: after it was unloaded", host.sample(divided, name), output)
        kinds = {weight.dtype for weight in divided.companions[0].model.parameters() if weight.ndim > 1}
        case.check(f"{weight_dtype}: weights are of this type", kinds == {options.get("dtype", torch.float32)}, kinds)
        host.unload_all()
    apart = [_distance(one, other) for i, one in enumerate(seen) for other in seen[:i]]
    case.check("every choice does something of its own", min(apart) > 1e-3, apart)


@long_case
def tensor_files_lie_in_host_memory_once(case: Case, host: Host) -> None:
    """Slices are of the loaded weights, before a card takes them, while they are streamed, and when they come back. No
    slice is joined in host memory on its way."""
    name = "flux1_heads"
    joined: list[int] = []
    plain = JoinedSlices.joined

    def counted(self: JoinedSlices) -> torch.Tensor:
        joined.append(self.numel() * self.element_size())
        return plain(self)

    for what in ("scaled_fp8", "int8_rows", "float32"):
        path = FILES.get(what, Host.checkpoint)(host, name)
        whole = sum(each.nbytes for weight in _load(path, name).model.parameters() for each in _pieces(weight.data))
        divided = load_divided(path, name)
        with mock.patch.object(JoinedSlices, "joined", counted):
            _check_host_bytes(case, f"{what}, as loaded", divided, whole)
            host.sample(divided, name)
            host.unload_all()
            _check_host_bytes(case, f"{what}, unloaded", divided, whole)
            host.sample(divided, name)
            companion = divided.companions[0]
            companion.partially_unload(CPU, sum(p.nbytes for p in companion.model.parameters()) // 3)
            host.unload_all()
            _check_host_bytes(case, f"{what}, unloaded in two parts", divided, whole)
            with_lora = host.lora(divided, name)
            host.sample(with_lora, name)
            _check_host_bytes(case, f"{what}, with a LoRA", with_lora, whole)
            host.unload_all()
            _check_host_bytes(case, f"{what}, unloaded with a LoRA", divided, whole)
            with host.machine.room_for(sum(p.nbytes for p in companion.model.parameters()) // 2, OTHER):
                host.sample(divided, name)
                _check_host_bytes(case, f"{what}, streamed", divided, whole)
            host.unload_all()
        case.check(f"{what}: nothing was joined in host memory", not joined, joined)
        joined.clear()


@case
def tensor_pins_only_slices_that_lie_in_one_piece(case: Case, host: Host) -> None:
    """ComfyUI pins an 8-bit weight that it streams by its address and size; of columns that is other memory."""
    name = "flux1_heads"
    for what in ("fp8", "int8"):
        divided = load_divided(FILES[what](host, name), name)
        companion = divided.companions[0].model
        room = sum(parameter.nbytes for parameter in companion.parameters()) // 4
        with pinning() as (pinned, _), host.machine.room_for(room, OTHER):
            host.sample(divided, name, steps=1)
            data = [getattr(parameter.data, "_qdata", parameter.data) for parameter in companion.parameters()]
            whole = {each.data_ptr(): each.nbytes for each in data if each.device == CPU and each.is_contiguous()}
            host.unload_all()
        wrong = {address: size for address, size in pinned.items() if whole.get(address) != size}
        case.check(f"{what}: some are pinned, all of them whole", len(pinned) > 8 and not wrong, (len(pinned), wrong))


def _check_host_bytes(case: Case, claim: str, divided: Any, whole: int) -> None:
    """All cards' parts in host memory are of the loaded weights, but for scales of rows."""
    storages = {
        piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes()
        for patcher in (divided, *divided.companions)
        for weight in (*patcher.model.parameters(), *(kept.weight for kept in patcher.backup.values()))
        for piece in _pieces(weight.data)
        if piece.device == CPU
    }
    case.check(claim, sum(storages.values()) < 1.02 * whole, f"{sum(storages.values())} of {whole} bytes")


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(data, QuantizedTensor):
        return [*_pieces(data._qdata), *_pieces(data._params.scale)]
    return list(data.pieces) if isinstance(data, JoinedSlices) else [data]
