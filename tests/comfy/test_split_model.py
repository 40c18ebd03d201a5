"""A split MODEL inside the real ComfyUI, on emulated cards: one test per case of split_cases_*.py.

The cases run in one process with ComfyUI's own Python (split_worker.py); each makes its claims there, beside the
reference it compares with, and reports what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import fork_host
from devicebridge.tests.comfy_host import can_import, comfy_python, find_gguf_pack

# fmt: off


pytestmark = pytest.mark.comfy

FAMILIES = [
    "chroma", "cosmos_predict2", "flux1", "flux2", "hidream", "hunyuan_video", "krea2", "ltxv", "lumina2",
    "minimax_h3", "qwen_image", "sd3", "sdxl", "wan", "wan_i2v", "wan_vace", "z_image",
]
DIVIDED = [
    "flux1_heads", "flux2_heads", "chroma_heads", "hunyuan_video_heads", "qwen_image", "wan_heads", "wan_i2v_heads",
    "wan_vace_heads", "ltxv", "lumina2", "z_image", "sd3", "krea2_heads", "cosmos_predict2", "hidream", "minimax_h3",
]
SHARED = ["flux1", "flux2", "chroma", "hunyuan_video", "qwen_image", "wan", "wan_i2v", "wan_vace", "ltxv", "lumina2"]
SHARED += ["z_image", "sd3", "krea2", "cosmos_predict2", "hidream", "hidream_o1", "minimax_h3"]
EIGHT_BIT_FILES = [
    *(f"tensor_{kind}_file_of_flux1_heads" for kind in ("fp8", "scaled_fp8", "int8", "int8_rows")),
    *(f"tensor_{kind}_file_of_wan_heads" for kind in ("fp8", "scaled_fp8", "int8", "int8_rows")),
    "tensor_scaled_fp8_file_of_qwen_image",
]
ALWAYS_FAMILIES = ("flux1", "flux2", "wan", "wan_vace", "sdxl", "z_image", "hidream", "minimax_h3")
LONG = {
    *(f"family_{name}" for name in FAMILIES if name not in ALWAYS_FAMILIES),
    *(f"tensor_{name}" for name in DIVIDED if name not in ("flux2_heads", "wan_heads", "z_image")),
    *(f"tokens_{name}" for name in SHARED if name not in ("flux2", "wan", "hidream_o1")),
    *(f"replayed_{name}" for name in DIVIDED if name not in ("flux2_heads", "qwen_image", "wan_heads")),
    *(each for each in EIGHT_BIT_FILES if each != "tensor_int8_file_of_flux1_heads"), "block_replacements",
    "blocks_left_out", "conditions_of_unequal_length", "dynamic_tensor_loras", "lora_every_family", "nodes_for_flux",
    "nodes_for_unets", "patches_of_the_attention", "plain_and_split_in_turn", "quantised_checkpoints",
    "regions_masks_and_time_ranges", "relay_forced", "replaced_attention", "tensor_files_lie_in_host_memory_once",
    "tensor_merges", "tensor_nodes_for_flux", "tensor_other_patches", "tensor_refuses_code_inside_blocks",
    "tensor_weight_types_of_the_loader", "tokens_every_class", "tokens_many_prompts", "two_plans_in_turn", "wrappers",
}
CASES = [
    *(f"family_{name}" for name in FAMILIES), *(f"tensor_{name}" for name in DIVIDED),
    *(f"tokens_{name}" for name in SHARED), "tokens_three_cards", "tokens_loras", "tokens_controlnets",
    "tokens_another_attention", "tokens_code_in_the_model", "tokens_two_at_once", "tokens_refusals",
    "tokens_code_before_loading", "tokens_an_error_on_one_card", "tokens_exchange",
    "tokens_fewer_rows_than_cards", "tokens_verified", "tokens_every_class",
    "tokens_scaled_fp8_files", "tokens_clones_and_eviction", "tokens_stopped_inside_a_block", "tokens_context_windows",
    "tokens_many_prompts", "wholes_of_every_kind", "wholes_of_regions_and_masks", "wholes_that_are_shared_out",
    "wholes_that_end", "wholes_of_a_changed_model", "wholes_verified", "tokens_shares_by_hand",
    "tokens_scheduled_loras", "tokens_patches_of_comfyui", "patch_points_of_every_class", "dynamic_tokens",
    *(f"replayed_{name}" for name in DIVIDED), "replayed_with_loras_and_evicted", "replayed_under_dynamic_vram",
    "replayed_until_somebody_hooks_a_layer", "replayed_where_weights_lie", *EIGHT_BIT_FILES, "tensor_products_in_fp8",
    "tensor_weight_types_of_the_loader", "tensor_files_lie_in_host_memory_once",
    "tensor_pins_only_slices_that_lie_in_one_piece", "tensor_nodes_for_flux", "tensor_nodes_for_sd3",
    "tensor_context_windows", "tensor_merges", "tensor_stopped_inside_a_block", "tensor_compared_once",
    "tensor_three_cards", "tensor_loras", "tensor_other_patches", "tensor_refuses_code_inside_blocks",
    "tensor_another_attention",
    "tensor_controlnets", "tensor_replaced_blocks", "tensor_refusals", "tensor_an_error_on_one_card",
    "tensor_a_card_too_small_for_its_largest_layer", "tensor_clones_and_eviction", "dynamic_blocks", "dynamic_tensor",
    "dynamic_tensor_with_little_memory", "dynamic_tensor_loras", "dynamic_tensor_refuses_a_scheduled_lora",
    "tensor_is_not_split_again_nor_saved", "tensor_verified_and_not_offloaded", "tensor_loras_that_do_not_fit",
    "tensor_beside_a_bypass_lora", "tensor_out_of_memory_on_the_way", "way_auto_goes_by_link_and_memory",
    "way_auto_leaves_tokens_to_models_that_others_left_alone", "keys_travel_as_was_measured",
    "way_auto_knows_the_exchange",
    "way_auto_has_one_card_compute_what_tokens_refuse",
    "way_auto_has_one_card_compute_what_is_refused_inside_a_forward",
    "way_auto_leaves_tokens_to_cards_and_modules_that_are_alike",
    "doctor_measures_blocks_with_random_weights",
    "way_auto_asks_for_a_gain_with_cfg_too", "way_auto_takes_blocks_where_others_would_be_refused", "three_cards",
    "what_a_model_remembers_from_step_to_step", "balances", "lora_before_split", "lora_after_split",
    "lora_before_and_after_split", "lora_every_family", "back_to_clean", "clones_of_a_split_with_different_loras",
    "plain_and_split_in_turn", "split_after_plain_has_run", "split_of_a_model_with_a_lora_that_has_run",
    "split_outlives_its_source", "clone_of_a_split", "deep_copies_are_refused", "scheduled_lora",
    "scheduled_lora_over_a_lora", "different_scheduled_loras_for_cond_and_uncond", "all_keys_are_seen", "saving",
    "merging_models", "eviction_of_one_card", "eviction_with_a_lora", "another_model_takes_the_other_card",
    "partial_unload_of_one_card", "low_memory_on_the_other_card", "low_memory_on_the_other_card_with_a_lora",
    "low_memory_at_home", "low_memory_at_home_with_a_lora", "low_memory_on_both_with_a_lora", "two_plans_in_turn",
    "the_same_graph_twice", "unload_all_and_again", "forgetting_a_split_frees_both_cards",
    "limits_refused_before_loading", "limits_kept", "a_card_too_small_is_refused",
    "free_memory_is_that_of_the_fullest_card", "accounting_per_card", "batches", "conditions_of_unequal_length",
    "regions_masks_and_time_ranges", "forwards_in_flight", "an_error_while_overlapping", "controlnet_residuals",
    "a_real_controlnet", "block_replacements", "blocks_left_out", "patches_between_blocks", "patches_of_the_attention",
    "replaced_attention", "patches_of_a_unet", "layers_run_by_a_patch", "rope_options", "function_wrapper", "wrappers",
    "injections_and_callbacks", "previews", "relay_forced", "stream_refused_where_it_is_wrong", "an_unknown_class",
    "a_class_without_blocks", "compiling_the_whole_is_refused", "compiling_block_by_block", "an_error_inside_a_block",
    "a_mask_on_the_latent", "reference_latents", "nodes_for_flux", "nodes_for_unets", "nodes_for_sd3",
    "context_windows", "loaded_split", "loaded_split_with_loras", "half_precision", "fp8_weights",
    "fp8_scaled_checkpoint", "a_prefixed_file", "a_patcher_class_of_a_pack", "cards_stream_as_the_file_lies",
    "a_card_full_while_loading", "low_memory_with_a_scheduled_lora", "nothing_is_left_on_the_modules",
    "object_patches_inside_blocks", "options_are_not_written_to", "quantised_checkpoints",
    "split_of_a_model_for_another_card", "split_of_a_split", "two_split_models_in_turn",
    "unloaded_and_loaded_in_the_middle", "unloaded_in_the_middle_of_a_scheduled_lora",
    "unloading_a_model_and_its_clones", "weight_wrappers", "weights_exist_once_in_host_memory",
    "with_cfg_a_copy_per_card_is_named_where_it_is_faster", "without_inference_mode", "a_replaced_block_is_put_back",
    "whole_lists_cannot_be_replaced", "a_stand_in_keeps_the_original_weights", "merging_out_of_a_loaded_split",
    "bypass_lora", "what_holds_on_to_the_given_model_is_refused", "cancel_inside_a_block_of_another_card",
    "a_large_estimate_is_a_warning", "cuts_by_hand_are_checked_against_the_limits",
    "moving_a_split_to_another_device_is_refused", "gradients_and_other_wrappers_turn_overlap_off",
    "what_keeps_state_turns_overlap_off", "what_keeps_no_state_leaves_overlap_on", "writes_into_what_every_block_gets",
    "writes_into_what_an_attention_patch_gets", "a_forward_run_twice", "writes_by_layers_of_a_pack",
    "a_controlnet_that_takes_entries_out", "a_replaced_method", "a_block_list_exchanged_by_a_wrapper",
    "a_layer_with_weights_of_its_own", "an_injection_over_an_object_patch", "attention_that_brings_tensors",
    "control_lora", "writers_before_blocks_of_flux", "writers_before_blocks_of_hunyuan_video",
    "writers_before_blocks_of_wan", "writers_before_blocks_of_qwen_image", "writers_before_blocks_of_chroma",
    "writers_between_two_calls_of_a_block", "writers_of_tables_inside_the_attention",
    "writers_inside_an_attention_override", "writers_that_a_wrapper_attaches", "writers_after_blocks_were_recorded",
    "verify_passes_what_is_right", "verify_stops_what_is_wrong", "verify_knows_state_when_it_meets_it",
    "beside_the_compiler", "without_its_guard_the_compiler_fails", "overlap_beside_the_compiler",
    "a_graph_around_a_split", "an_interrupt_brings_the_compiler_back",
    "an_interrupt_outside_the_sampler_brings_the_compiler_back_at_once", "errors_of_the_compiler_name_its_switch",
    "a_host_that_cannot_be_switched_off_is_refused", "a_class_that_was_read_is_verified_once",
]

GGUF_CASES = [
    "gguf_files", "gguf_with_loras", "gguf_clones_with_different_loras", "gguf_eviction_and_return",
    "gguf_low_memory_after_a_return", "gguf_scheduled_lora", "gguf_overlap_and_verify",
    "gguf_choices_of_the_advanced_loader",
]


# fmt: on


class Worker:
    """The process; started once, asked by name."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.log = folder / "worker.log"
        self._host = fork_host(checkout)
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        with self.log.open("w", encoding="utf-8") as log:
            streams = its_input, its_output, log.fileno()
            self._pid = self._host.start("split_worker.py", checkout, folder, streams=streams)
        os.close(its_input)
        os.close(its_output)
        self._questions, self._answers = os.fdopen(to_it, "w", encoding="utf-8"), os.fdopen(from_it, encoding="utf-8")

    def ask(self, case: str) -> dict[str, Any]:
        self._questions.write(json.dumps({"case": case}) + "\n")
        self._questions.flush()
        answer = self._answers.readline()
        assert answer, f"the worker ended:\n{self.log.read_text(encoding='utf-8')[-3000:]}"
        return json.loads(answer)

    def stop(self) -> None:
        self._questions.close()
        self._host.wait(self._pid, timeout=60)
        self._answers.close()


@pytest.fixture(scope="module")
def worker(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(comfyui, tmp_path_factory.mktemp("split"))
    yield worker
    worker.stop()


def _check(answer: dict[str, Any]) -> None:
    assert "error" not in answer, answer["error"]
    assert answer["claims"]
    broken = [f"{claim}: {found}" for claim, holds, found in answer["claims"] if not holds]
    assert not broken, "\n".join(broken)


def test_every_case_is_listed(worker: Worker) -> None:
    assert sorted(CASES + GGUF_CASES) == worker.ask("names")["names"]


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in CASES])
def test_case(worker: Worker, case: str) -> None:
    _check(worker.ask(case))


@pytest.fixture(scope="module")
def gguf_pack(comfyui: Path) -> None:
    """The real ComfyUI-GGUF and the package it reads files with."""
    if find_gguf_pack(comfyui) is None:
        pytest.skip("needs ComfyUI-GGUF: set COMFYUI_GGUF_PATH to its folder, or put it among ComfyUI's custom nodes")
    python = comfy_python(comfyui)
    if python is None or not can_import(python, "gguf"):
        pytest.skip("needs the gguf package in ComfyUI's environment; a folder of its own may be named in PYTHONPATH")


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_case(gguf_pack: None, worker: Worker, case: str) -> None:
    _check(worker.ask(case))


def test_no_function_of_comfyui_was_replaced(worker: Worker) -> None:
    """After all of the above the functions, classes and methods of ComfyUI's core are those it came with."""
    _check(worker.ask("core"))


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 16))])
def test_random_history(worker: Worker, seed: int) -> None:
    """Some of what scripts/fuzz_split.py plays by the thousand."""
    history = worker.ask(f"history {seed}")
    assert not history["verdict"].startswith("different"), "\n".join([history["verdict"], *history["steps"]])


# Each guard, and a history on two cards that differs without it.
GUARDS = {
    "copies are forgotten behind other people's code": 143,
    "what blocks write is written back": 158,
    "what patches write is carried back": 20,
    "views are borrowed with their strides": 50,
    "overlap looks at what is attached": 35,
    "replaced methods go by relay": 294,
    "exchanged lists go by relay": 21,
    "what runs unseen is looked for": 4,
    "an override with tensors runs at home": 15,
    "other layers are loaded anew": 93,
    "object patches lie under injections": 770,
    "adapters go where their layer is": 10,
}


# Each guard against what is written in place, and the cases that do not hold without it.
FORGETS = "copies are forgotten behind other people's code"
BROKEN = [
    *(
        (f"writers_before_blocks_of_{name}", FORGETS)
        for name in ("flux", "hunyuan_video", "wan", "qwen_image", "chroma")
    ),
    ("writers_between_two_calls_of_a_block", FORGETS),
    ("writers_after_blocks_were_recorded", "what is attached is seen"),
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "guard"), BROKEN)
def test_a_case_does_not_hold_without_its_guard(worker: Worker, case: str, guard: str) -> None:
    answer = worker.ask(f"{case} without {guard}")
    assert not all(holds for _, holds, _ in answer.get("claims", [["an error", False, ""]]))


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 16))])
def test_random_writers(worker: Worker, seed: int) -> None:
    """Some of what scripts/fuzz_split.py --writers plays by the thousand."""
    history = worker.ask(f"writers {seed}")
    assert not history["verdict"].startswith("different"), "\n".join([history["verdict"], *history["steps"]])


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))])
def test_random_tokens(worker: Worker, seed: int) -> None:
    """Some of what scripts/fuzz_split.py --tokens plays by the thousand."""
    history = worker.ask(f"tokens {seed}")
    assert not history["verdict"].startswith("different"), "\n".join([history["verdict"], *history["steps"]])


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_a_history_differs_without_its_guard(worker: Worker, guard: str) -> None:
    seed = GUARDS[guard]
    assert worker.ask(f"history {seed}/2")["verdict"] == "equal"
    assert worker.ask(f"history {seed}/2 {guard}")["verdict"].startswith("different")
