"""Jobs on folders of sounds, and of clips with sounds, train what ComfyUI's own nodes make of them."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("sounds_worker.py")
