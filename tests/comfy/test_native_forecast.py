"""Forecasts for ComfyUI's own models against what emulated cards hold while tiny builds of them train."""

from devicebridge.tests.comfy.workers import case_tests

_LONG = ("wan", "flux1", "chroma", "qwen_image", "z_image", "sd3", "ltxv", "hunyuan_video", "ltx2", "voice", "h3")
# What is at home works beside the blocks of the last three.
test_case = case_tests("native_forecast_worker.py", ("flux2_heads",), (*_LONG, "anima", "vace", "dancer"))
