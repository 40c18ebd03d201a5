"""The ComfyUI at hand has all that the pack uses of it, and one that lacks something is refused by name."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("compat_worker.py")
