"""LoRA files: whose names they use, and what the real loaders make of them, in diffusers' pipelines and in ComfyUI."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import diffusers
import pytest
import torch
from devicebridge.checkpoints.lora_file import (
    check_lora_layout,
    check_lycoris_layout,
    check_original_layout,
    describe_readers,
    is_of_text,
    lycoris_for_comfyui,
    make_lora_tensors,
    text_lora_for_comfyui,
    what_is_lost,
)
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.lora import resolve_targets
from devicebridge.tests.comfy_host import comfy_python, find_comfyui
from devicebridge.tests.toy import TINY, stack_tensors
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

FAMILY_NAMES = sorted(FAMILIES)
LAYOUTS = ("original", "diffusers", "both")
ASSETS = Path(__file__).resolve().parents[2] / "assets"
RANK, ALPHA = 2, 3.0
# Heads as wide as ComfyUI derives them from a checkpoint.
_ONE_HEAD = {"num_attention_heads": 1, "attention_head_dim": 128}
_CHANGES = {
    "flux1": {"axes_dims_rope": (16, 56, 56), "in_channels": 64},
    "flux2": {"axes_dims_rope": (32, 32, 32, 32), "in_channels": 128, "timestep_guidance_channels": 256},
    "wan": {"freq_dim": 256, "text_dim": 4096},
}


@dataclass(frozen=True)
class Case:
    """One LoRA file. which: "default" targets, "parts" of stacked layers, or "all" linears."""

    name: str
    layout: str
    dora: bool
    which: str
    other: str = ""  # lokr or oft

    def __str__(self) -> str:
        kind = self.other + "dora" * self.dora or "lora"
        return "-".join([self.name, self.layout, kind, self.which])

    @property
    def family(self):
        return FAMILIES[self.name]

    @property
    def targets(self):
        patterns = {"default": self.family.lora_targets, "parts": TINY[self.name].stack_parts, "all": ("*",)}
        return resolve_targets(_model(self.name), patterns[self.which])

    @property
    def is_writable(self):
        try:
            check_lora_layout(self.family, self.targets, self.layout, self.dora)
        except ValueError:
            return False
        return True

    @property
    def lost(self):
        return what_is_lost(self.family, self.targets, self.layout, self.dora)

    def trained(self):
        """Random A, B and, with DoRA, magnitudes near the rows' norms."""
        generator = torch.Generator().manual_seed(7)
        model, tensors = _model(self.name), {}
        for name in self.targets:
            weight = model.get_submodule(name).weight.detach()
            rows, columns = weight.shape
            if self.other == "oft":
                tensors[f"{name}.oft_blocks"] = 0.1 * torch.randn(rows // 4, 4, 4, generator=generator)
            elif self.other:
                tensors[f"{name}.lokr_w1"] = torch.randn(2, 4, generator=generator)
                tensors[f"{name}.lokr_w2_a"] = 0.02 * torch.randn(rows // 2, RANK, generator=generator)
                tensors[f"{name}.lokr_w2_b"] = torch.randn(RANK, columns // 4, generator=generator)
            else:
                tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
                tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(rows, RANK, generator=generator)
            if self.dora:
                noise = torch.rand(weight.shape[0], generator=generator) + 0.5
                tensors[f"{name}.dora_scale"] = weight.norm(dim=1) * noise
        return tensors

    def file(self):
        trained = self.trained()
        if self.other:
            return lycoris_for_comfyui(self.family, self._for_comfyui(trained), ALPHA / RANK)
        return make_lora_tensors(self.family, self.layout, trained, self._for_comfyui(trained), ALPHA, RANK)

    def _for_comfyui(self, trained):
        restated = dict(trained)
        for name in [name for name in trained if name.endswith("dora_scale")]:
            weight, changed = self._weights(name.removesuffix(".dora_scale"), trained)
            restated[name] = trained[name] * weight.norm(dim=1) / changed.norm(dim=1)
        return restated

    def _weights(self, module, trained):
        """The layer's weight, and the same with its LoRA and no magnitude."""
        weight = _model(self.name).get_submodule(module).weight.detach()
        if self.other == "oft":
            skew = (blocks := trained[f"{module}.oft_blocks"]) - blocks.mT
            turned = (torch.eye(4) + skew) @ torch.linalg.inv(torch.eye(4) - skew)
            return weight, torch.einsum("knm,kni->kmi", turned, weight.unflatten(0, (-1, 4))).flatten(0, 1)
        if self.other:
            first, *second = (trained[f"{module}.lokr_{part}"] for part in ("w1", "w2_a", "w2_b"))
            return weight, weight + ALPHA / RANK * torch.kron(first, second[0] @ second[1])
        a, b = trained[f"{module}.lora_A.weight"], trained[f"{module}.lora_B.weight"]
        return weight, weight + ALPHA / RANK * b @ a

    def expected(self):
        trained, result = self.trained(), {}
        for module in self.targets:
            _, changed = self._weights(module, trained)
            if self.dora:
                changed = changed * (trained[f"{module}.dora_scale"] / changed.norm(dim=1))[:, None]
            result[f"{module}.weight"] = changed
        return result

    def base(self):
        return {name: tensor.detach() for name, tensor in _model(self.name).state_dict().items()}


_MODELS = {}


def _make_model(name):
    return TINY[name].make_model(**_ONE_HEAD, **_CHANGES[name])


def _model(name):
    if name not in _MODELS:
        _MODELS[name] = _make_model(name)
    return _MODELS[name]


CASES = [
    Case(name, layout, dora, which)
    for name in FAMILY_NAMES
    for layout in LAYOUTS
    for dora in (False, True)
    for which in ("default", "parts", "all")
]
WRITABLE = [case for case in CASES if case.is_writable]
OTHERS = [
    Case(name, "original", dora, "default", other)
    for name in FAMILY_NAMES
    for other, dora in (("lokr", False), ("lokr", True), ("oft", False))
]


def test_what_cannot_be_written_is_refused_with_what_would_work():
    """DoRA on a part of what the original stacks, and DoRA of Wan for both readers; nothing else."""
    refused = {str(case) for case in CASES if not case.is_writable}
    assert refused == {
        "flux1-original-dora-parts", "flux2-original-dora-parts", "wan-both-dora-default", "wan-both-dora-parts",
        "wan-both-dora-all",
    }  # fmt: skip
    with pytest.raises(ValueError, match='no name of a DoRA magnitude.*choose "original" for ComfyUI or "diffusers"'):
        check_lora_layout(FAMILIES["wan"], ["blocks.0.ffn.net.2"], "both", dora=True)
    with pytest.raises(ValueError, match="without a layer in its blocks"):
        check_lora_layout(FAMILIES["wan"], ["proj_out"], "both", dora=False)
    check_lora_layout(FAMILIES["wan"], ["proj_out", "blocks.0.ffn.net.2"], "both", dora=False)


_MODULATION = "single_stream_modulation.linear"
_TO_Q, _FFN = "transformer_blocks.0.attn.to_q", "blocks.0.ffn.net.2"
_BOTH = 'lora_layout = "both" is read by both'


@pytest.mark.parametrize(
    ("name", "modules", "layout", "dora", "line"),
    [
        ("flux2", [_TO_Q], "both", True, "both layout, for ComfyUI and diffusers"),
        ("flux2", [_TO_Q], "diffusers", False, "diffusers layout, for ComfyUI and diffusers"),
        (
            "flux2",
            [_MODULATION, "x_embedder"],
            "diffusers",
            True,
            "diffusers layout, for diffusers: ComfyUI leaves out DoRA's magnitudes, and leaves out "
            f"{_MODULATION}; {_BOTH}",
        ),
        (
            "flux1",
            [_TO_Q],
            "original",
            False,
            f"original layout, for ComfyUI: diffusers cannot load these names; {_BOTH}",
        ),
        ("wan", [_FFN], "original", False, "original layout, for ComfyUI and diffusers"),
        (
            "wan", [_FFN], "original", True,
            'original layout, for ComfyUI: diffusers refuses DoRA under these names; "diffusers" is the layout for it',
        ),
        ("wan", [_FFN], "diffusers", False, f"diffusers layout, for diffusers: ComfyUI loads nothing of it; {_BOTH}"),
    ],
)  # fmt: skip
def test_it_is_said_who_reads_a_file_and_what_would_be_read_by_both(name, modules, layout, dora, line):
    assert describe_readers(FAMILIES[name], modules, layout, dora) == line


def test_lokr_is_refused_where_comfyui_would_find_no_layer():
    check_lycoris_layout(FAMILIES["flux2"], [_TO_Q, "single_transformer_blocks.0.attn.to_out"], "original", "lokr")
    with pytest.raises(ValueError, match="is of plain LoRA"):
        check_lycoris_layout(FAMILIES["flux2"], [_TO_Q], "diffusers", "loha")


def _differences(found, case):
    """Which weights are not the trained ones; every other weight must be as it was."""
    expected, base, differing = case.expected(), case.base(), []
    assert found.keys() >= expected.keys()
    for name, weight in found.items():
        goal = expected.get(name, base[name])
        if (weight - goal).abs().max() > 1e-6 * (goal - base[name]).abs().max() + 1e-6 * base[name].abs().max():
            differing.append(name)
    return differing


def _load_in_diffusers(case):
    model = _make_model(case.name)
    parts = [folder for encoder in TINY[case.name].encoders for folder in encoder[2:]]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline_class = getattr(diffusers, TINY[case.name].pipeline_class)
    pipeline = pipeline_class(scheduler=scheduler, transformer=model, vae=None, **dict.fromkeys(parts))
    pipeline.load_lora_weights(case.file())
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
            weights[f"{name}.weight"] = module.get_base_layer().weight.detach()
        elif isinstance(module, torch.nn.Linear) and "base_layer" not in name and "lora_" not in name:
            weights[f"{name}.weight"] = module.weight.detach()
    return weights


@pytest.mark.parametrize("case", WRITABLE, ids=str)
def test_diffusers_applies_every_weight_as_trained_or_we_say_that_it_does_not(case):
    if "diffusers" not in case.lost:
        assert _differences(_load_in_diffusers(case), case) == []
    elif "cannot load" in case.lost["diffusers"] and case.name == "flux1":
        assert len(_differences(_load_in_diffusers(case), case)) == len(case.targets)  # without an error
    else:
        with pytest.raises(ValueError, match="Invalid adapter checkpoint|should be empty|Invalid LoRA"):
            _load_in_diffusers(case)


def test_what_is_no_lora_of_the_family_is_not_written():
    other = {f"blocks.0.attn1.to_q.lora_{matrix}.weight": torch.zeros(2, 2) for matrix in "AB"}
    with pytest.raises(ValueError, match="no row of the rename table names blocks.0.attn1.to_q"):
        make_lora_tensors(FAMILIES["flux1"], "original", other, other, ALPHA, RANK)
    for case in CASES:
        if not case.is_writable and case.layout == "original":
            with pytest.raises(ValueError, match="only if all of it is trained"):
                case.file()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_names_and_shapes_are_those_that_were_reviewed(name):
    """lora_keys_<family>.json holds what ComfyUI v0.33.0 was seen to map, at full size: modules and [out, in]."""
    family, ones = FAMILIES[name], {}
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**dict(family.variants[0].transformer_config))
        modules = resolve_targets(model, family.lora_targets)
        for module in modules:
            rows, columns = model.get_submodule(module).weight.shape
            ones |= {f"{module}.lora_A.weight": torch.ones(1, columns), f"{module}.lora_B.weight": torch.ones(rows, 1)}
    check_original_layout(family, modules, dora=True)  # which needs stacks that are whole
    file = make_lora_tensors(family, "original", {}, ones, 1.0, 1)
    found = {
        n.removesuffix(".lora_A.weight"): [file[n.replace("lora_A", "lora_B")].shape[0], file[n].shape[1]]
        for n in file
        if n.endswith(".lora_A.weight")
    }
    reviewed = json.loads((ASSETS / f"lora_keys_{name}.json").read_text(encoding="utf-8"))
    assert found == reviewed["modules"]
    assert sorted(file) == sorted(f"{module}.{end}" for module in found for end in reviewed["suffixes"])


_LAYER = "transformer.text_model.encoder.layers.3.self_attn.q_proj"


def _lora(*parts: str) -> dict[str, torch.Tensor]:
    layers = ["input_blocks.1.0.proj", *(f"text_encoders.{part}.{_LAYER}" for part in parts)]
    return {f"{each}.lora_{kind}.weight": torch.randn(4, 4) for each in layers for kind in "AB"}


@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        (("clip_l",), ("lora_te",)), (("clip_h",), ("lora_te",)), (("clip_g",), ("lora_te",)),
        (("clip_l", "clip_g"), ("lora_te1", "lora_te2")),
    ],
)  # fmt: skip
def test_encoders_are_numbered_where_there_are_two(parts: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    given = _lora(*parts)
    written = text_lora_for_comfyui(given, 0.5)
    assert len(written) == 3 * len(parts)
    for part, prefix in zip(parts, prefixes, strict=True):
        layer = f"{prefix}_text_model_encoder_layers_3_self_attn_q_proj"
        assert torch.equal(written[f"{layer}.lora_down.weight"], given[f"text_encoders.{part}.{_LAYER}.lora_A.weight"])
        assert torch.equal(written[f"{layer}.lora_up.weight"], given[f"text_encoders.{part}.{_LAYER}.lora_B.weight"])
        assert float(written[f"{layer}.alpha"]) == 2.0  # strength 0.5 at rank 4


def test_the_rest_is_that_of_the_diffusion_model() -> None:
    assert {name for name in _lora("clip_l") if not is_of_text(name)} == _lora().keys()
    assert text_lora_for_comfyui(_lora(), 1.0) == {}


# Its own detection builds the native model, its own loader patches it, its own arithmetic applies the patches.
_ASK_COMFYUI = """
import json, logging, pathlib, sys
folder = pathlib.Path(sys.argv[1])
sys.argv = ["ask", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.lora, comfy.model_detection, comfy.model_patcher, comfy.sd, comfy.utils

messages = []
class Handler(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())
logging.getLogger().addHandler(Handler())
cpu, answers = torch.device("cpu"), {}
for name, cases in json.loads((folder / "cases.json").read_text()).items():
    checkpoint = comfy.utils.load_torch_file(str(folder / f"{name}.safetensors"))
    config = comfy.model_detection.model_config_from_unet(checkpoint, "")
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(checkpoint, "", device=cpu)
    model.load_model_weights(dict(checkpoint), "")
    patcher = comfy.model_patcher.ModelPatcher(model, cpu, cpu)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    for case in cases:
        del messages[:]
        lora = comfy.utils.load_torch_file(str(folder / f"{case}.safetensors"))
        patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
        changed = {
            key.removeprefix("diffusion_model."): comfy.lora.calculate_weight(patches, weights[key].clone(), key)
            for key, patches in patched.patches.items()
        }
        comfy.utils.save_torch_file(changed, str(folder / f"{case}.answer.safetensors"))
        answers[case] = {"class": type(model).__name__, "messages": list(messages)}
(folder / "answers.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory):
    """What one ComfyUI answers to all that is asked here: it takes half a minute to start."""
    checkout = find_comfyui()
    python = comfy_python(checkout) if checkout else None
    if python is None:
        pytest.skip("needs ComfyUI: set COMFYUI_PATH to its folder, or install it with comfy-cli")
    folder = tmp_path_factory.mktemp("comfyui")
    cases = {name: [str(case) for case in (*WRITABLE, *OTHERS) if case.name == name] for name in FAMILY_NAMES}
    (folder / "cases.json").write_text(json.dumps(cases))
    for name in FAMILY_NAMES:
        save_file(_stacked(name, _model(name).state_dict()), folder / f"{name}.safetensors")
    for case in (*WRITABLE, *OTHERS):
        save_file(case.file(), folder / f"{case}.safetensors")
    command = [str(python), "-c", _ASK_COMFYUI, str(folder)]
    asked = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300, check=False)
    assert asked.returncode == 0, asked.stderr[-3000:]
    answers = json.loads((folder / "answers.json").read_text())
    files = {case: folder / f"{case}.answer.safetensors" for case in answers}
    return {case: (answer, load_file(files[case]) if files[case].exists() else {}) for case, answer in answers.items()}


def _stacked(name, tensors):
    return {n: t.contiguous() for n, t in stack_tensors(FAMILIES[name], {n: t for n, t in tensors.items()}).items()}


@pytest.mark.comfy
@pytest.mark.parametrize("case", [*WRITABLE, *OTHERS], ids=str)
def test_comfyui_applies_every_weight_as_trained_or_we_say_that_it_does_not(case, comfyui):
    answer, changed = comfyui[str(case)]
    assert answer["class"] == TINY[case.name].comfyui_class
    linears = [n for n, module in _model(case.name).named_modules() if isinstance(module, torch.nn.Linear)]
    base = {name: weight for name, weight in case.base().items() if name.removesuffix(".weight") in linears}
    expected = _stacked(case.name, {**base, **case.expected()})
    original = _stacked(case.name, base)
    differing = [
        name
        for name in expected
        if (changed.get(name, original[name]) - expected[name]).abs().max() > 1e-6 * expected[name].abs().max()
    ]
    if case.other or "ComfyUI" not in case.lost:
        assert differing == [] and not any("ERROR" in message for message in answer["messages"])
        assert not case.other or not any("not loaded" in message for message in answer["messages"])
    else:
        assert differing and any("lora key not loaded" in message for message in answer["messages"])
