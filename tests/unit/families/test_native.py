"""The rows in families/comfy/ as data, and how a class finds its row; no ComfyUI needed."""

import dataclasses
from typing import Any

import pytest
from devicebridge.families.comfy.image import FLUX
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.comfy.registry import NATIVE_MODELS, find_native
from devicebridge.families.comfy.text_sizes import usual_text
from devicebridge.families.comfy.video import COSMOS_1, WAN_CAUSAL, WAN_MODEL
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from torch import nn

_NATIVE = {"flux1": FLUX, "flux2": FLUX, "wan": WAN_MODEL}  # of each family to train, its class in ComfyUI


def _class(name: str, module: str, base: type | tuple[type, ...] = nn.Module, **members: object) -> type[nn.Module]:
    bases = base if isinstance(base, tuple) else (base,)
    made: type[nn.Module] = type(name, bases, {"__module__": module, **members})
    return made


def _flux() -> type[nn.Module]:
    """A class that goes by Flux's name, with methods of Flux's names."""

    def method(self: nn.Module) -> None: ...

    members = {name: method for name in ("forward", "_forward", "forward_orig", "process_img")}
    return _class("Flux", "comfy.ldm.flux.model", **members)


@pytest.mark.parametrize("row", NATIVE_MODELS, ids=[row.path for row in NATIVE_MODELS])
def test_a_row_is_complete(row: NativeModel) -> None:
    assert row.path.startswith("comfy.ldm.")
    assert (
        row.block_lists
        and row.tail
        and (row.note or row.transport == "stream" or row.refusal)
        and NATIVE_MODELS.count(row) == 1
    )
    assert len(set(row.block_lists)) == len(row.block_lists)
    assert not set(row.block_lists) & set(row.tail)
    named = {*row.replace_keys.values(), *row.follows, *row.optional, *(main for main, _ in row.follows.values())}
    assert named <= set(row.block_lists)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_familys_native_lists_and_tail_are_those_of_its_original_names(family: ModelFamily) -> None:
    """In execution order: a list's place is its place in the family's own block_lists, through the renames."""
    pairs = [(name, rename.original) for rename in family.renames for name in rename.diffusers]
    original_of = {name.split(".{}")[0]: original.split(".{}")[0] for name, original in pairs if "{}" in name}
    expected = tuple(original_of[block_list.name] for block_list in family.block_lists)
    assert _NATIVE[family.name].block_lists == expected
    tail = {original.split(".")[0] for name, original in pairs if name.split(".")[0] in family.tail}
    assert set(_NATIVE[family.name].tail) == tail


def test_the_name_alone_is_not_enough() -> None:
    assert find_native(_class("Flux", "some_pack.flux")) is None
    assert find_native(nn.Linear) is None


def test_a_derived_class_keeps_the_row_while_it_replaces_nothing() -> None:
    def method(self: nn.Module) -> None: ...

    derived = _class("MyFlux", "some_pack", _flux(), __init__=method, encode_reference=method, state_dict=method)
    assert find_native(_flux()) is find_native(derived) is FLUX
    assert find_native(_class("Again", "some_pack", derived)) is FLUX


@pytest.mark.parametrize("name", ["forward", "_forward", "forward_orig", "process_img", "__call__"])
def test_a_derived_class_with_behaviour_of_its_own_relays(name: str) -> None:
    def method(self: nn.Module) -> None: ...

    derived = _class("MyFlux", "some_pack", _flux(), **{name: method})
    grandchild = _class("Again", "some_pack", derived)
    for cls in (derived, grandchild):
        row = find_native(cls)
        assert row is not None
        assert (row.class_name, row.transport, row.can_overlap) == (cls.__name__, "relay", False)
        assert row.is_derived and not FLUX.is_derived
        assert row.block_lists == FLUX.block_lists
        assert name in row.note


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property, None])
def test_any_kind_of_method_counts_as_behaviour(wrap: Any) -> None:
    """Also of a mixin before the described class."""
    mixin = type("Mixin", (), {"__module__": "some_pack", "forward_orig": lambda self: None})
    own = {"process_img": wrap(lambda self: None)} if wrap else {}
    row = find_native(_class("MyFlux", "some_pack", _flux() if wrap else (mixin, _flux()), **own))
    assert row is not None and row.transport == "relay"


def test_a_class_derived_from_a_refused_one_is_refused() -> None:
    causal = _class("CausalWanModel", WAN_CAUSAL.path.rpartition(".")[0], forward=lambda self: None)
    row = find_native(_class("Mine", "some_pack", causal, forward=lambda self: None))
    assert row is not None
    assert row.refusal == WAN_CAUSAL.refusal != ""


def test_a_class_that_nobody_ran_may_keep_something_and_a_relayed_one_cannot_overlap() -> None:
    assert FLUX.keeps_nothing and not dataclasses.replace(FLUX, is_derived=True).keeps_nothing
    assert COSMOS_1.transport == "relay" and not COSMOS_1.can_overlap
    assert not dataclasses.replace(WAN_MODEL, is_sequential=True).can_overlap and WAN_MODEL.can_overlap


class UNetModel(nn.Module):
    """Its attention is in another block in each build."""

    def __init__(self, label: int) -> None:
        super().__init__()
        inner: Any = nn.Module()
        inner.attn2 = nn.Module()
        inner.attn2.to_k = nn.Linear(2048, 8)
        self.input_blocks = nn.ModuleList([nn.Conv2d(4, 4, 3), inner])
        if label:
            self.label_emb = nn.Sequential(nn.Sequential(nn.Linear(label, 8)))


def test_a_unet_reads_one_window_of_clip_and_sdxls_a_pooled_text_beside_sizes() -> None:
    shapes = {name: tuple(each.shape) for name, each in usual_text(UNetModel(2816)).items()}
    assert sorted(shapes.values()) == [(77, 2048), (1280,)]
    assert [tuple(each.shape) for each in usual_text(UNetModel(0)).values()] == [(77, 2048)]
    assert usual_text(nn.Linear(2, 2)) == {}
