"""What a model of ComfyUI's is given beside its caption, beside what ComfyUI's sampler and nodes make of the same."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("native_conditions_worker.py")
