"""What is read off ComfyUI's own models before training, against what their forwards do."""

from devicebridge.tests.comfy.workers import case_tests

test_case = case_tests("native_reading_worker.py")
