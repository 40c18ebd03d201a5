"""Every described native class: a split forward is bit for bit the unsplit one, with the transport its row says."""

from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.tests.comfy.native_cases import CASES, COUNTED, NEWER
from devicebridge.tests.comfy.workers import case_tests

_NAMES = (*(case.name for case in (*CASES, *NEWER)), *(f"counted {case.name}" for case in COUNTED))
test_case = case_tests("native_forwards.py", long=_NAMES, timeout=1800)


def test_every_row_has_a_case() -> None:
    built = {f"{case.module}.{case.class_name}" for case in CASES}
    rows = {row.path for row in NATIVE_MODELS if row.evidence == "run" and not row.refusal}
    # A class that only serves others as a base: its forward is the derived one's.
    assert rows - built == {"comfy.ldm.modules.diffusionmodules.mmdit.MMDiT"}
