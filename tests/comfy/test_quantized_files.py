"""Weights in ComfyUI's 8-bit formats, written by ComfyUI: we read the numbers that ComfyUI reads."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("quantized_layers.py")
