"""One of ComfyUI's models as families/spec.py's HostModel: built without weights, noised and called as in sampling."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....families.comfy import inputs
from ....families.comfy.native import PASSED_BY, NativeModel
from ....families.comfy.text_sizes import usual_text
from ....families.spec import TEXT_ENCODERS
from ....parallel.block_lists import hooked_modules, placed_blocks
from ....parallel.local.tokens import HERE, RowsError
from ....parallel.offload.recompute import Checkpoint, InPlaceGuard, checkpoint_calls
from ....patches.hooks import parameters_on_meta
from ....patches.lora import is_lora_name
from ..split.shown_inputs import Innermost, ShownInputs, innermost_of
from .drawing import FLOWS, ComfySteps, decoded, time_at
from .lora import map_lora, read_lora
from .text import PARTS, attach_text_encoders, class_of_clip, encoded, recompute_layers

_BASE = "_devicebridge_base"  # of a diffusion model: its BaseModel
_ROW = "_devicebridge_row"  # its NativeModel
_FOR_ADAPTER = (("t5xxl_ids",), ("t5xxl_weights",))  # what Anima's is given beside the text
_LAST_OF_ADAPTER = "llm_adapter.out_proj.weight"
_COUNTED = (("attention_mask",), ("minimax_token_tags",))  # options that models count or list
_LEAST_ADAPTED = 512  # tokens that it makes
_WITH_BACKWARD = tuple(f"attention_{each}" for each in ("pytorch", "basic", "split", "sub_quad", "xformers"))
_KERNELS = ("apply_rope", "rms_rope", "adaln", "rms_adaln")  # of comfy_kitchen, without a backward
_LEAST = 1e-6  # of a share of the way from noise to data; ComfyUI gives the ends other numbers


class ComfyModel:
    """A model of ComfyUI's, of which nothing is loaded; HostModel says what the methods do.
    config: of comfy.model_detection, with the type it computes in. names: of the file's tensors, without data."""

    def __init__(self, config: Any, names: Mapping[str, Tensor], prefix: str, row: NativeModel) -> None:
        self._config, self._names, self._prefix, self._row = config, dict(names), prefix, row
        base = self._make_base(torch.device("meta"))
        self.sampling, self._form = base.model_sampling, base.latent_format
        self._dims = int(self._form.latent_dimensions)  # of a LATENT without batch and channels
        self._kind = kind_of(base)
        self._scheduler = "simple" if self._kind in FLOWS else "normal"  # as ComfyUI's templates take
        base.diffusion_model = None
        self._base = base  # its rules

    def _make_base(self, device: torch.device) -> Any:
        return build(self._config, self._names, self._prefix, device)

    def make(self, *, is_empty: bool) -> nn.Module:
        base = self._make_base(torch.device("meta" if is_empty else "cpu"))
        model: nn.Module = base.diffusion_model
        # The last that apply_model does; in its place, what the network itself said.
        base.model_sampling.__dict__["calculate_denoised"] = lambda sigma, output, x: output
        model.__dict__[_BASE], model.__dict__[_ROW] = base, self._row
        model.__class__ = _trained_class(type(model))  # type: ignore[arg-type]
        names = {name.removeprefix(self._prefix) for name in self._names}
        for prefix, module in model.named_modules():  # buffers that the file lacks are computed, as ComfyUI leaves them
            absent = (leaf for leaf in module._buffers if (f"{prefix}.{leaf}" if prefix else leaf) not in names)
            module._non_persistent_buffers_set.update(absent)
        held = itertools.chain(model.named_parameters(), model.named_buffers())
        in_float32: Any = [name for name, each in held if each.dtype is torch.float32]
        model._keep_in_fp32_modules = in_float32
        for each in model.buffers():  # PixArt makes one as a Parameter, and what is moved to meta then has a history
            each.requires_grad_(False)
        for module in (*_called(model, self._row), *map(model.get_submodule, self._row.in_place)):
            module.forward = InPlaceGuard(module, PASSED_BY, has_out=self._row.has_out)
        return model.to("meta") if is_empty else model

    @torch.no_grad()
    def add_noise(
        self, latents: Tensor, noise: Tensor, times: Tensor, given: Mapping[str, Tensor] = {}
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Noise by the model's own rule. target = (data - D(0)) / (D(1) - D(0)) of calculate_denoised, which is affine:
        noise - data for flow, noise for eps, and v for v. A noise mask changes what is noisy, not the target."""
        steps = (min(max(1 - float(time), _LEAST), 1 - _LEAST) for time in times)
        sigmas = torch.tensor([float(self.sampling.percent_to_sigma(step)) for step in steps])
        wide, clean, noise_mask = sigmas.double(), latents.double(), given.get(inputs.NOISE_MASK)
        sizes = [math.prod(shape) for shape in inputs.stream_shapes(given)] or [clean.shape[-1]]
        parts = noise.double().split(sizes, -1), clean.split(sizes, -1)
        made = list(map(self._noised, self._levels(wide, len(sizes)), *parts))
        noisy, target = (torch.cat(each, dim=-1) for each in zip(*made, strict=True))
        if noise_mask is not None:
            own = {"noise": noise.double(), "latent_image": clean, "denoise_mask": noise_mask}
            kept = self._base.scale_latent_inpaint(x=noisy, sigma=wide, **own)
            noisy = noisy * noise_mask + kept * (1 - noise_mask)
        return noisy.float(), target.float(), sigmas

    def computing_in(self, dtype: torch.dtype) -> ComfyModel:
        own = _copied(self._config)
        if dtype not in own.supported_inference_dtypes:
            raise ValueError(f"ComfyUI does not compute {type(self._config).__name__} in {dtype}, which it overflows")
        own.set_inference_dtype(dtype, None)
        return ComfyModel(own, self._names, self._prefix, self._row)

    def time_of(self, level: float) -> float:
        if self._kind not in FLOWS:
            return level
        # Cosmos adds noise to the data.
        return time_at(self.sampling, level / (1 - level) if self._kind == "FLOW_COSMOS" else level)

    def _noised(self, sigmas: Tensor, noise: Tensor, clean: Tensor) -> tuple[Tensor, ...]:
        """A stream, noisy, and what the network should say of it."""
        noisy = self.sampling.noise_scaling(sigmas, noise, clean, False)
        denoised = functools.partial(self.sampling.calculate_denoised, sigmas, model_input=noisy)
        at_zero, at_one = (denoised(model_output=torch.full_like(clean, value)) for value in (0.0, 1.0))
        return noisy, (clean - at_zero) / (at_one - at_zero)

    def _levels(self, sigmas: Tensor, num_streams: int) -> list[Tensor]:
        """The noise levels of each stream, [B]: the sound of MiniMax H3 has a shift of its own.
        Its sampler scales the sound onto the video's levels, whose loss would weigh it by the square of that scale."""
        own: Any = getattr(self.sampling, "shift", None)
        of_sound: Any = getattr(self.sampling, "audio_shift", None)
        if num_streams == 1 or of_sound is None:
            return [sigmas] * num_streams
        unshifted = sigmas / (own + (1 - own) * sigmas)
        return [sigmas, of_sound * unshifted / (1 + (of_sound - 1) * unshifted)]

    def predict(
        self, model: nn.Module, noisy: Tensor, sigmas: Tensor, given: Mapping[str, Tensor], guidance: float | None
    ) -> Tensor:
        """Raises: RuntimeError outside of native_training; ValueError for options that one batch cannot have."""
        import comfy.model_management

        if not comfy.model_management.in_training:
            raise RuntimeError("one of ComfyUI's models was called for training outside of native_training")
        for name in self._row.reads_first:
            if len(noisy) > 1 and any(inputs.option_path(each)[:1] == (name,) for each in given):
                raise ValueError(f"{name} is read of the first sample of a batch alone; set train.batch_size to 1")
        base = model.__dict__[_BASE]
        if sigmas.is_meta and self._row.reads_level:
            sigmas = torch.full(sigmas.shape, 0.5)
        if any(map(inputs.is_tokens, given)):
            given = encoded(getattr(model, TEXT_ENCODERS), given, noisy.device)
        base.model_sampling.to(noisy.device)
        shapes = [(len(noisy), *sides) for sides in inputs.stream_shapes(given)]
        # As a model takes them whose LATENT has so many sides: [B, C, H, W], say, or [B, C, T] of audio.
        sides = noisy.shape[5 - self._dims :]
        x = noisy.flatten(1).unsqueeze(1) if shapes else noisy.reshape(*noisy.shape[:2], *sides)
        arguments = _conditions(base, x, shapes or [x.shape], given, guidance)
        options = {"cond_or_uncond": [0], "sigmas": sigmas, "optimized_attention_override": plain_attention}
        if self._row.forgets_if_patched:
            options["patches_replace"] = {"dit": {"of no block": None}}
        output = base.apply_model(x, sigmas, transformer_options=options, **arguments)
        made: Tensor = output.reshape(noisy.shape)
        return made

    @property
    def text_class(self) -> str:
        return class_of_clip(self._config) if self._row.class_name == "UNetModel" else ""

    def attach_text_encoders(
        self, model: nn.Module, files: Sequence[str], kind: str, path: str, fingerprint: str, device: torch.device
    ) -> None:
        attach_text_encoders(model, self.text_class, files, kind, path, fingerprint, device)

    def euler_steps(self, steps: int) -> ComfySteps:
        return ComfySteps(self.sampling, self._scheduler, steps)

    def decode(self, path: Path, drawn: Sequence[Tensor], place_for: Callable[[int], torch.device]) -> Iterator[Tensor]:
        return decoded(path, drawn, place_for, self._form, has_sequence=self._dims == 3)

    def read_lora(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
        return read_lora(self._make_base(torch.device("meta")), tensors, PARTS.get(self.text_class, ()))

    def unread_lora(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return map_lora(self._make_base(torch.device("meta")), tensors)[1]

    def example(self, batch: int, device: torch.device, text: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        model = self._make_base(torch.device("meta")).diffusion_model
        given = usual_text(model) if text is None else text
        tokens = next((each for name, each in given.items() if inputs.option_path(name) == _FOR_ADAPTER[0]), None)
        if device.type == "meta" and tokens is not None and hasattr(model, "llm_adapter"):
            # What Anima's text adapter, which does not run on meta, makes of them.
            width = model.get_parameter(_LAST_OF_ADAPTER).shape[0]
            made = given[inputs.COND].new_empty(max(len(tokens), _LEAST_ADAPTED), width)
            others = {name: each for name, each in given.items() if inputs.option_path(name) not in _FOR_ADAPTER}
            given = others | {inputs.COND: made}
        if not given:
            raise ValueError(f"the size of {self._row.class_name}'s text is not known; encode the captions first")
        found = {}
        for name, each in given.items():
            path = inputs.option_path(name)
            if device.type == "meta" and path[:1] == (inputs.VOICE,):
                continue  # LTX-2 places its reference of sound by numbers that it reads
            stacked = torch.stack([each] * batch)  # each sample its own copy, as a batch is
            # Numbers and strings are read, as some options are; Z-Image counts the tokens of a mask.
            is_counted = _is_read(name, stacked) or path in _COUNTED
            found[name] = stacked if is_counted else stacked.to(device)
        return found


def build(config: Any, names: Mapping[str, Tensor], prefix: str, device: torch.device) -> Any:
    """ComfyUI's model without weights; some classes count with numbers of their own, which are not on meta."""
    own = _copied(config)  # copies of a model share it
    own.custom_operations = plain_operations()
    with parameters_on_meta():
        try:
            return own.get_model(dict(names), prefix, device=device)
        except RuntimeError:
            if device.type != "meta":
                raise
            return own.get_model(dict(names), prefix, device=torch.device("cpu"))


def _copied(config: Any) -> Any:
    """A config of its own, which is not copied with a model: it answers None to every name that copy.deepcopy asks."""
    own: Any = object.__new__(type(config))
    own.__dict__.update({name: dict(each) if type(each) is dict else each for name, each in vars(config).items()})
    own.__dict__["__deepcopy__"] = lambda memo: own
    return own


def _conditions(
    base: Any, x: Tensor, shapes: list[tuple[int, ...]], given: Mapping[str, Tensor], guidance: float | None
) -> Any:
    """What sampling makes of a CONDITIONING: arguments of apply_model, with its gradients. shapes: of x's streams."""
    import comfy.samplers

    said = {name: each for name, each in given.items() if name != inputs.NOISE_MASK}
    cond: dict[str, Any] = {**_options(said), "cross_attn": given[inputs.COND], "model_conds": {}}
    if guidance is not None:
        cond["guidance"] = guidance
    like = torch.zeros_like(x)
    mask = given.get(inputs.NOISE_MASK)
    if mask is not None:  # as samplers hand it to the model: float32, of all channels. Planning has one of another size
        sides = x.shape[2:] if x.ndim == 5 else (1, *x.shape[2:])
        fitted = torch.stack([inputs.fit_mask(each, sides) for each in mask])
        mask = fitted.view(*fitted.shape[:2], *x.shape[2:]).expand(x.shape)
    beside = {"latent_image": like, "denoise_mask": mask, "seed": 0, "latent_shapes": shapes}
    with torch.set_grad_enabled(given[inputs.COND].requires_grad):
        found = comfy.samplers.encode_model_conds(base.extra_conds, [cond], like, x.device, "positive", **beside)
        made = found[0]["model_conds"]
        parts = {name: each.process_cond(batch_size=x.shape[0], area=None) for name, each in made.items()}
        return comfy.samplers.cond_cat([parts])


def _options(given: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a CONDITIONING has beside its states, as it has it."""
    tree: dict[str, Any] = {}
    for name, value in given.items():
        *outer, last = inputs.option_path(name) or (name,)
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        if name != inputs.COND and not name.startswith(inputs.STREAM):
            place[last] = _value(name, value)
    return {name: _joined(each) for name, each in tree.items()}


class _Said(dict[str, Any]):
    """A dict, or an object whose attributes are read."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _check_known(model: nn.Module, row: NativeModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: ValueError for inputs with which what was derived was not proved; RowsError where devices share out rows,
    with those of these inputs."""
    parallel = HERE.parallel if row.derived_rows else None
    if parallel is None and not row.trained_inputs:
        return
    shown = ShownInputs(Innermost(model).arguments(args, kwargs))
    rows = row.derived_rows.get(shown.signature)
    if parallel is not None and rows != parallel.plan:
        found = f"where the tokens of {row.class_name} are was proved for other inputs than this sample has"
        again = "Start a run again whose captions were not encoded when it was planned"
        raise RowsError(f'{found}. {again}; else set parallel.strategy to "auto", or train.batch_size to 1', rows)
    if row.trained_inputs and shown.kind not in row.trained_inputs:
        known = "`devicebridge examine` shows one sample with a text, pooled or masked, and no reference"
        instead = "set train.batch_size to 1, and leave out what else the conditioning has"
        raise ValueError(f"gradients of {row.class_name} were proved for other inputs than this: {known}; {instead}")


def _joined(parts: Any) -> Any:
    """Parts by name or index as one option."""
    if not isinstance(parts, dict):
        return parts
    made = {name: _joined(each) for name, each in parts.items()}
    return [made[name] for name in sorted(made, key=int)] if all(map(str.isdigit, made)) else _Said(made)


def _value(name: str, value: Tensor) -> Any:
    """A tensor; what has no batch, and a number or string where the CONDITIONING had one, must be equal in a batch."""
    is_read, is_whole = _is_read(name, value), name.startswith(inputs.WHOLE)
    if not (is_read or is_whole):
        return value
    if not value.is_meta and any(not torch.equal(each, value[0]) for each in value[1:]):
        raise ValueError(f"{inputs.option_path(name)[0]} differs in one batch; set train.batch_size to 1")
    if is_whole:
        return value[0]
    return bytes(value[0].tolist()).decode() if name.startswith(inputs.WORDS) else value[0].item()


def _is_read(name: str, value: Tensor) -> bool:
    """Whether this is a number or a string of each sample, rather than a tensor that the model computes with."""
    is_number = value.ndim == 1 and value.dtype in (torch.bool, torch.int64, torch.float64)
    return name.startswith(inputs.WORDS) or name.startswith(inputs.OPTION) and is_number


def plain_attention(attention: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Torch's own attention, which has a backward, in the place of whatever ComfyUI was started with."""
    return _named_attention(*args, has_options=True, **kwargs)


def _named_attention(*args: Any, has_options: bool = False, **kwargs: Any) -> Tensor:
    """The same for what classes call by name; where they hand options on, it leads to the one above."""
    from comfy.ldm.modules.attention import attention_pytorch

    parallel = HERE.parallel
    if parallel is None or parallel.plan.passes_options != has_options:
        return attention_pytorch(*args, **kwargs)  # type: ignore[no-any-return]
    return parallel.attend(attention_pytorch, *args, **kwargs)


def _called(model: nn.Module, row: NativeModel) -> list[nn.Module]:
    return [each for name in placed_blocks(model, row) for each in hooked_modules(model.get_submodule(name), row)]


@functools.cache
def _trained_class(cls: type[nn.Module]) -> type[nn.Module]:
    """What training calls a diffusers model by; the base stays in eval mode, since some classes do otherwise there."""

    class Trained(cls):  # type: ignore[valid-type,misc]
        is_gradient_checkpointing = False

        def train(self, mode: bool = True) -> Any:
            for name, module in self.named_modules():
                module.training = mode and is_lora_name(name)
            return self

        def enable_gradient_checkpointing(self, checkpoint: Checkpoint) -> None:
            row = self.__dict__[_ROW]
            checkpoint_calls(_called(self, row), checkpoint, PASSED_BY)
            if TEXT_ENCODERS in self._modules:
                recompute_layers(getattr(self, TEXT_ENCODERS))
            self.is_gradient_checkpointing = True

    name = innermost_of(cls)
    own: Any = getattr(cls, name)

    @functools.wraps(own)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_known(self, self.__dict__[_ROW], args, kwargs)
        return own(self, *args, **kwargs)

    setattr(Trained, name, checked)
    Trained.__name__, Trained.__qualname__, Trained.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Trained


def kind_of(base: Any) -> str:
    return str(base.model_type).rpartition(".")[2]


def _empty_streams(form: Any, frames: int) -> tuple[tuple[int, ...], ...]:
    """Sides of the streams, of which one is the rule, that ComfyUI's sampler makes of an empty latent."""
    fix = getattr(form, "fix_empty_latent", None)
    one = torch.empty(1, form.latent_channels, *(frames, 2, 2)[3 - form.latent_dimensions :])
    made = one if fix is None else fix(one)
    return tuple(tuple(each.shape[1:]) for each in (made.unbind() if getattr(made, "is_nested", False) else (made,)))


def channels_of(form: Any) -> int:
    """Of the first stream of the latents of this format."""
    return _empty_streams(form, 1)[0][0]


def silence_of(form: Any) -> Callable[[int], tuple[int, ...]] | None:
    return (lambda frames: _empty_streams(form, frames)[1]) if len(_empty_streams(form, 1)) > 1 else None


@functools.cache
def plain_operations() -> Any:
    """ComfyUI's layers with torch's own forwards, which no Cancel ends, and torch's own Linear, which LoRA knows."""
    import comfy.ops

    known = comfy.ops.disable_weight_init
    names = ("Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm", "RMSNorm", "ConvTranspose1d", "ConvTranspose2d")
    there = {name: getattr(known, name) for name in names if hasattr(known, name)}
    layers = {name: type(name, (layer,), {"forward": getattr(nn, name).forward}) for name, layer in there.items()}
    return type("PlainOperations", (known,), {**layers, "Linear": nn.Linear})


@contextmanager
def native_training() -> Iterator[None]:
    """Inside, ComfyUI's models compute what has a backward. Raises: ValueError for a start with attention of none."""
    import comfy.model_management as management
    import comfy_kitchen
    from comfy.ldm.modules import attention
    from comfy_kitchen.backends.eager import adaln, rope

    name = getattr(attention.optimized_attention, "__name__", "")
    # Not every class hands its options on, so this one may be called. The last is of a training around this one.
    if name not in (*_WITH_BACKWARD, _named_attention.__name__):
        raise ValueError(f"ComfyUI was started with {name}, whose backward is not known; start it without that option")
    # Plain torch functions in the place of kernels without a backward; torch's own attention, too, for modules that
    # hand no options on, such as ERNIE's. Without a GPU ComfyUI's cuts its work by free memory; a forecast has none.
    kernels = [each for each in dir(comfy_kitchen) if each.startswith(_KERNELS)]
    eager = ((name, getattr(rope if "rope" in name else adaln, name, None)) for name in kernels)
    plain: list[tuple[Any, str, Any]] = [(comfy_kitchen, name, each) for name, each in eager if each is not None]
    names = ("optimized_attention", "optimized_attention_masked")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("comfy.")]
    plain += [(module, name, _named_attention) for module in modules for name in names if name in vars(module)]
    before = [(module, name, getattr(module, name)) for module, name, _ in plain]
    was_training = management.in_training
    try:
        management.in_training = True
        for module, name, function in plain:
            setattr(module, name, function)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        management.in_training = was_training
        for module, name, function in before:
            setattr(module, name, function)
