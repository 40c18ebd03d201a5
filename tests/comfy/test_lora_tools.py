"""ComfyUI's own loader reads every result of `devicebridge lora`, and adds to each weight what was asked for."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("lora_tools_worker.py", ("flux1", "flux2", "wan", "sdxl", "qwen_image"))
