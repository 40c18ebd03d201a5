"""LoRA kinds on ComfyUI's own classes: stock loaders read all in full, and training goes on from any file."""

from devicebridge.tests.comfy.workers import case_tests

_LONG = ("wan", "sdxl", "chroma", "qwen_image", "qwen_image_21", "minimax_h3")
test_case = case_tests("lora_kinds_worker.py", ("flux2",), _LONG)
