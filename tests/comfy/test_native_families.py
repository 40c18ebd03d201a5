"""Every described native class: a split forward is bit for bit the unsplit one, with the transport its row says.

The forwards run once, in ComfyUI's own Python (native_forwards.py); each test reads one result.
"""

import json
from pathlib import Path

import pytest
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.tests.comfy.native_cases import CASES, COUNTED, NEWER, REFUSED, Case
from devicebridge.tests.comfy.workers import run_worker

ALL = (*CASES, *NEWER)

# Of classes that the ComfyUI of these tests has.
_ROWS = {(row.module, row.class_name): row for row in NATIVE_MODELS if row.evidence == "run"}
_ANY_ROW = {(row.module, row.class_name): row for row in NATIVE_MODELS}
pytestmark = [pytest.mark.comfy, pytest.mark.long]
_MIXED_DEVICES = "RuntimeError: Expected all tensors to be on the same device"
# The one upstream case where a user's stand-in for a block cannot call the block: Kandinsky5 passes it an argument by a
# name that the block does not have.
_ORIGINAL_BLOCK_FAILS = "TypeError: TransformerDecoderBlock.forward() got an unexpected keyword argument 'x'"


class Results(dict[str, dict[str, str]]):
    def __missing__(self, name: str) -> dict[str, str]:
        pytest.skip(f"the ComfyUI of these tests has no class of {name}")


@pytest.fixture(scope="module")
def results(comfyui: Path) -> Results:
    return Results(run_worker("native_forwards.py", comfyui, timeout=1800)[-1])


def _row(case: Case) -> NativeModel:
    return _ANY_ROW[case.module, case.class_name]


def _named(cases: list[Case] | tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def test_every_row_is_a_class_of_this_comfyui(results: Results) -> None:
    assert {name for name, found in results["rows"].items() if found != "found"} == set()


def test_every_row_has_a_case() -> None:
    built = {(case.module, case.class_name) for case in (*CASES, *REFUSED)}
    # Classes that only serve others as a base: their forward is the derived one's.
    assert {name for name in _ROWS if name not in built} == {("comfy.ldm.modules.diffusionmodules.mmdit", "MMDiT")}


@_named(ALL)
def test_what_hooks_are_put_on_is_called(results: Results, case: Case) -> None:
    assert results[case.name]["called"] == "all"


@_named([case for case in ALL if case.runs_once])
def test_a_row_says_what_the_forward_does(results: Results, case: Case) -> None:
    """Against one unsplit forward that was watched: order, tail, and every key that was asked for."""
    row, facts = _row(case), json.loads(results[case.name]["facts"])
    assert facts["in order"]
    assert set(facts["tail"]) <= set(row.tail) and facts["tail"]
    assert facts["control"] == sorted(row.control_keys)
    assert facts["replace"] == sorted(row.replace_keys)
    assert facts["inside"] == sorted(row.patches_inside)
    # Pairs of a class and a stand-in for its layers, no patch to be called; in relay it sees everything at home.
    assert [name for name in facts["between"] if name != "forward_timestep_embed_patch"] == sorted(row.patches_between)


@_named([case for case in ALL if case.class_name.startswith("Chroma")])
def test_the_tail_brings_the_stream_home_where_the_last_block_is_left_out(results: Results, case: Case) -> None:
    assert results[case.name]["last skipped"] == "equal"
    assert results[case.name]["last skipped, without tail"].startswith(_MIXED_DEVICES)


@_named(ALL)
def test_a_split_changes_no_bit(results: Results, case: Case) -> None:
    assert results[case.name]["split"] == "equal"


@_named([case for case in ALL if _row(case).tensor])
def test_divided_among_cards_it_computes_the_same(results: Results, case: Case) -> None:
    """Two to four cards that are alike, and two and three that are not; the largest relative error. Had any layer other
    features, fifty times as much would be seen."""
    assert float(results[case.name]["tensor"]) < 1e-5
    assert float(results[case.name]["tensor, other slices"]) > 5e-4


@_named([each.case for each in COUNTED])
def test_a_forecast_counts_what_cards_do_that_divide_it(results: Results, case: Case) -> None:
    sent, products = json.loads(results["counted"][case.name])
    assert sent == pytest.approx(1, abs=0.04) and products == pytest.approx(1, abs=0.04)


@_named(ALL)
def test_relay_changes_no_bit(results: Results, case: Case) -> None:
    assert results[case.name]["relay"] == "equal"


@_named([case for case in ALL if _row(case).replace_keys or _row(case).patches_between])
def test_users_patches_between_blocks_change_no_bit(results: Results, case: Case) -> None:
    expected = _ORIGINAL_BLOCK_FAILS if case.class_name == "Kandinsky5" else "equal"
    assert results[case.name]["patched"] == expected


@_named([case for case in ALL if _row(case).can_overlap])
def test_two_forwards_in_flight_change_no_bit(results: Results, case: Case) -> None:
    assert results[case.name]["overlapped"] == "equal"


@_named([case for case in ALL if _row(case).transport == "relay"])
def test_stream_would_be_wrong_where_the_row_says_relay(results: Results, case: Case) -> None:
    assert results[case.name]["stream"].startswith(_MIXED_DEVICES)


@_named([case for case in ALL if _row(case).follows])
def test_a_side_list_placed_like_any_other_would_be_wrong(results: Results, case: Case) -> None:
    assert results[case.name]["followers astray"].startswith(_MIXED_DEVICES)


def test_a_build_that_ends_with_a_side_block_relays(results: Results) -> None:
    assert results["wan_vace"]["transport"] == "stream"
    assert results["wan_vace_to_the_end"]["transport"] == "relay"
    assert results["wan_vace_to_the_end"]["stream"].startswith(_MIXED_DEVICES)


def test_a_refused_class_would_be_wrong_without_an_error(results: Results) -> None:
    """What keys and values its blocks write goes to copies: the second frame does not see the first."""
    assert results["wan_causal"]["refusal"]
    assert results["wan_causal"]["called"] == "all"
    assert results["wan_causal"]["relay"] == "differs"


def test_a_refused_class_does_not_call_its_blocks(results: Results) -> None:
    assert results["wan_animate2"]["refusal"]
    assert results["wan_animate2"]["called"].startswith("RuntimeError: WanAnimate2Model did not call a single block")
    assert results["wan_animate2"]["relay"].startswith(_MIXED_DEVICES)


def test_derived_classes_with_a_forward_of_their_own_relay(results: Results) -> None:
    assert results["derived"] == {"ControlNetFlux": "relay", "QwenImageControlNetModel": "relay"}
