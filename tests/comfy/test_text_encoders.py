"""A LoRA on CLIP text encoders beside that on the UNet: tiny SD 1.5, SD 2 and SDXL in a real ComfyUI."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("text_encoders_worker.py", long=("SD 1.5", "SD 2", "SDXL"), timeout=600)
