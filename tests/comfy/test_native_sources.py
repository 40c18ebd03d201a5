"""Files in 8 bits that training of ComfyUI's own models keeps as they are, and what it refuses."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("native_source_worker.py")
