"""Bases in few bits that train as their files have them: GGUF, int8 with rotation, scaled float8, mixed ones."""

from devicebridge.tests.comfy.workers import case_tests

_LONG = ("GGUF Q8_0", "GGUF of Z-Image", "int8 convrot", "scaled fp8")
test_case = case_tests("native_stored_worker.py", ("GGUF mixed", "mixed"), _LONG, timeout=900)
