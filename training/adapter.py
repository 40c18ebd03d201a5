"""LoRA on a family's linears: attached with PEFT, named, saved. patches/lora.py answers which weights are LoRA."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.lora_file import DORA, FIRST, LOHA, LOKR, MAGNITUDE, OFT, A, B, is_of_text
from ..checkpoints.lora_start import find_part
from ..config.job import LoraSettings
from ..families.spec import TEXT_ENCODERS, ModelFamily
from ..patches.lora import lora_parameters, matches_any, resolve_targets
from ..patches.lora_linear import add_magnitudes, apply_fused, apply_oft, changed_weight, fit_loha, oft_block_size
from ..quantization.quantize import full_weight

_ADAPTER = "default"
_KINDS = (A, B, DORA, *LOKR, *LOHA, OFT)
_TEXT_TARGETS = (f"{TEXT_ENCODERS}.*.encoder.layers.*",)
_TEXT_PATTERN = rf"{TEXT_ENCODERS}\..*"  # for PEFT
_ATTENTION = re.compile(r"attn|attention")  # in the names of attention's own linears, in diffusers and in ComfyUI


@dataclass(frozen=True)
class LoraHandle:
    """A LoRA attached to a model; made by apply_lora."""

    model: nn.Module
    targets: tuple[str, ...]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by fqn, in the model's order."""
        return lora_parameters(self.model)

    @property
    def num_of_text(self) -> int:
        """How many of the parameters are of text encoders; they are the last."""
        return sum(map(is_of_text, self.parameters()))

    def tensors(self) -> dict[str, Tensor]:
        """The adapter on the CPU: "<linear>.lora_A.weight" [R, in], ".lora_B.weight" [out, R], ".dora_scale" [out]; of
        LoKr ".lokr_w1" [out1, in1], and ".lokr_w2" [out2, in2] or ".lokr_w2_a" [out2, R] and ".lokr_w2_b" [R, in2]; of
        LoHa ".hada_w1_a" and ".hada_w2_a" [out, R], "_b" [R, in]; of OFT ".oft_blocks" [out / b, b, b]."""
        return {name: each.detach().to("cpu", copy=True) for name, each in self._named_as_files().items()}

    def _named_as_files(self) -> dict[str, nn.Parameter]:
        named = {}
        for name, parameter in self.parameters().items():
            part = find_part(name.removesuffix(f".{_ADAPTER}"))  # PEFT's; a file of these kinds has none
            assert part is not None, name
            named[f"{part.layer}.{DORA if part.kind == MAGNITUDE else part.kind}"] = parameter
        return named

    def tensors_for_comfyui(self) -> dict[str, Tensor]:
        """As tensors(), with DoRA's m restated as m |W| / |W + sBA|: DoRA is m (W + sBA) / |W + sBA|, row by row, and
        ComfyUI (0.33) divides by |W| instead. Both are the same at strength 1."""
        tensors = self.tensors()
        for name in [name for name in tensors if name.endswith(f".{DORA}")]:
            layer: Any = self.model.get_submodule(name.removesuffix(f".{DORA}"))
            tensors[name] = tensors[name].float() * _norm_ratio(layer).cpu()
        return tensors

    @torch.no_grad()
    def start_from(self, layers: Mapping[str, Mapping[str, Tensor]], strength: float) -> None:
        """Take over the layers of a LoRA file (checkpoints/lora_start.py); others, and rows of A and columns of B
        beyond its rank, stay fresh. strength: alpha / rank of this adapter, which the file's is divided by. Raises:
        ValueError for LoKr that is cut otherwise, or a layer that is not here."""
        trained = self._named_as_files()
        for name, given in layers.items():
            layer: Any = self._text_layer(name, given) if is_of_text(name) else self.model.get_submodule(name)
            own = {kind: trained[f"{name}.{kind}"] for kind in _KINDS if f"{name}.{kind}" in trained}
            if A in own:
                rank = given[A].shape[0]
                own[A][:rank] = given[A].to(own[A])
                own[B][:, :rank] = (given[B] / strength).to(own[B])
            else:
                shapes = [{k: tuple(t.shape) for k, t in each.items() if k != DORA} for each in (given, own)]
                if shapes[0] != shapes[1]:
                    found = f"lora.start_from cuts {name} into {shapes[0]}, and this job into {shapes[1]}"
                    raise ValueError(f"{found}; set lora.factor and lora.rank to those of the file")
                for kind in shapes[1]:
                    own[kind].copy_(given[kind] / strength if kind in FIRST else given[kind])
            if DORA not in own:
                continue
            if MAGNITUDE in given:
                magnitude = given[MAGNITUDE].reshape(-1)
            elif DORA in given:  # ComfyUI's, see tensors_for_comfyui
                magnitude = given[DORA].reshape(-1) / _norm_ratio(layer).cpu()
            else:  # plain: the length that it gives the rows
                magnitude = changed_weight(layer, _ADAPTER).norm(dim=1)
            own[DORA].copy_(magnitude.to(own[DORA]))

    def _text_layer(self, name: str, given: Mapping[str, Tensor]) -> Any:
        """The layer of this fqn; the sizes of text encoders are not known before they are loaded."""
        layer: Any = self.model.get_submodule(name) if name in self.targets else None
        found = [given[B].shape[0], given[A].shape[1]]
        wanted = None if layer is None else [layer.out_features, layer.in_features]
        if found != wanted:
            sizes = f"its {name} is {found}, and here is {wanted or 'none'}"
            raise ValueError(f"lora.start_from is of another text encoder: {sizes}; give a LoRA of this model")
        return layer

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put saved tensors back, bit for bit. Raises: ValueError naming the first that is not this adapter's."""
        parameters = self._named_as_files()
        if parameters.keys() != tensors.keys():
            differing = sorted(parameters.keys() ^ tensors.keys())
            raise ValueError(f"the saved LoRA is not of this job: {len(differing)} names differ, first {differing[0]}")
        for name, parameter in parameters.items():
            found, wanted = (
                f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (tensors[name], parameter)
            )
            if found != wanted:  # copy_ would spread one row over all, and round
                raise ValueError(f"the saved LoRA is not of this job: {name} is {found}, not {wanted}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name].to(parameter.device))


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Inside, this copy of a model computes as if it had no adapter; nothing of it may be under way elsewhere."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    try:
        for each in layers:
            each._disable_adapters = True  # its own method would also end the parameters' gradients
        yield
    finally:
        for each in layers:
            each._disable_adapters = False


@torch.no_grad()
def _norm_ratio(layer: Any) -> Tensor:
    """|W| / |W + D| of each row of an adapted linear, where D is what a LoRA, LoKr or LoHa adds, float32. [out]"""
    changed = changed_weight(layer, _ADAPTER)
    weight = full_weight(layer.get_base_layer()).to(changed.device).float()
    return weight.norm(dim=1) / changed.norm(dim=1)


def find_targets(model: nn.Module, family: ModelFamily, settings: LoraSettings) -> list[str]:
    """The fqns of the linears that LoRA adapts, in module order, those of text encoders last. Raises: ValueError for
    patterns that match no linear, or a model whose attention nobody can tell by its names."""
    patterns = settings.targets
    if all(pattern.startswith("!") for pattern in patterns):
        usual = (f"{each.name}.*" for each in family.block_lists) if settings.layers else family.lora_targets
        patterns = (*usual, *patterns)
    found = resolve_targets(model, patterns)
    if settings.layers == "attention":
        fused = () if family.native is None else family.native.fused_attention
        found = [name for name in found if _ATTENTION.search(name) or matches_any(name, fused)]
        if not found:
            fault = f"no layer of {family.title} is called so; name them with lora.targets"
            raise ValueError(f'layers = "attention": {fault}')
    if settings.kind == "oft":
        rows: dict[str, Any] = {name: model.get_submodule(name).out_features for name in found}
        if single := [name for name, count in rows.items() if oft_block_size(count, settings.rank) < 2]:
            fault = f"OFT cannot cut the rows of {single[0]} ({len(single)} such layers) into blocks of 2 to"
            helps = "set another lora.rank, or leave it out with lora.targets"
            raise ValueError(f"{fault} {settings.rank}; {helps}")
    of_text = resolve_targets(model, _TEXT_TARGETS) if hasattr(model, TEXT_ENCODERS) else []
    return [name for name in found if not is_of_text(name)] + of_text


def apply_lora(model: nn.Module, family: ModelFamily, settings: LoraSettings, *, seed: int) -> LoraHandle:
    """Attach a fresh LoRA in place, which changes no output yet: A random, B zero (one factor of LoKr and LoHa, all of
    OFT). It is drawn on the CPU from seed alone, however the model is split, in settings.dtype on its layer's device,
    and is all that requires gradients afterwards. Raises: as find_targets."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model

    targets = find_targets(model, family, settings)
    modules, has_text = "|".join(re.escape(name) for name in targets), any(map(is_of_text, targets))
    config: Any = None
    if settings.kind in ("lokr", "loha"):
        of_kind = {"decompose_factor": settings.factor or -1} if settings.kind == "lokr" else {}
        config = {"lokr": LoKrConfig, "loha": LoHaConfig}[settings.kind](
            r=settings.rank,
            alpha=settings.alpha,  # PEFT only divides by the rank; fractions work
            target_modules=modules,
            **of_kind,
        )
    elif settings.kind == "lora":
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            lora_dropout=settings.dropout,
            use_dora=settings.dora,
            target_modules=modules,
            rank_pattern={_TEXT_PATTERN: settings.text_rank} if has_text else {},
            alpha_pattern={_TEXT_PATTERN: settings.strength * settings.text_rank} if has_text else {},
        )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*merge", category=UserWarning)  # none is asked for here
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU of the process
        if config is None:
            apply_oft(model, targets, settings.rank, _ADAPTER)
        else:
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        if settings.kind == "loha":
            fit_loha(map(model.get_submodule, targets), _ADAPTER, settings.rank)
    if settings.dora and settings.kind != "lora":
        add_magnitudes(map(model.get_submodule, targets), _ADAPTER)
    dtype = getattr(torch, settings.dtype)
    for name in lora_parameters(model):
        model.get_submodule(name.rpartition(".")[0]).to(dtype)
    apply_fused(model)
    return LoraHandle(model, tuple(targets))
