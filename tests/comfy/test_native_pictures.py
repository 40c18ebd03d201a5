"""Pictures that models of ComfyUI's own classes draw while they train, beside those of a stock KSampler."""

from devicebridge.tests.comfy.workers import case_tests

# In short: test_training_of_native_jobs.py has a job with pictures, tests/unit/nodes/test_native_drawing.py the steps.
EACH = ("SDXL", "Wan 2.1 T2V, 2.2 T2V 14B", "FLUX.1", "FLUX.2", "SD 1.5", "SDXL v-prediction", "Cosmos-Predict2")
test_case = case_tests("native_pictures_worker.py", long=(*EACH, "HunyuanVideo", "LTX-2 without sound"))
