"""A picture that is a workflow: dropped on ComfyUI's page it opens the template that it shows.

`python scripts/workflow_picture.py` writes docs/images/NAME.png from example_workflows/NAME.jpg and NAME.json, which
becomes the text "workflow" inside, as ComfyUI's own pictures have it. To be run when that template has changed.
"""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parent.parent
NAME = "sample_FLUX.2_over_two_GPUs"
PICTURE = ROOT / "docs" / "images" / f"{NAME}.png"


def main() -> None:
    template = ROOT / "example_workflows" / f"{NAME}.json"
    info = PngInfo()
    info.add_text("workflow", json.dumps(json.loads(template.read_text(encoding="utf-8"))))
    with Image.open(template.with_name(f"{NAME}.jpg")) as picture:  # few colours: it is shown small
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(PICTURE, pnginfo=info, optimize=True)


if __name__ == "__main__":
    main()
