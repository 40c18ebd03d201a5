"""The demo's images: an ordinary dataset folder of real photographs that scikit-image's wheel ships, made offline.

    python scripts/demo_data.py FOLDER

The subject is Chelsea, a cat (CC0, by Stefan van der Walt). FOLDER/train gets overlapping crops of her face at several
scales, FOLDER/eval crops at other places and scales, each with a caption in a .txt file beside it. All are of one
photo, so the evaluation loss says how well the subject is learned, not how the LoRA would do on another cat.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

CAPTION = "a photo of chelsea the cat"

_CENTRE = (146, 230)  # of her face: row, column
_SIDE = 128  # pixels of a written image
_TRAIN = {"sides": (260, 270, 280, 290), "rows": (-5, 5), "columns": (-7, 7)}  # pixels of the photo
_EVAL = {"sides": (265, 285), "rows": (0,), "columns": (-3, 4)}


def load_photo(name: str) -> PilImage:
    """A photograph from scikit-image's package, in RGB; name as in its data folder."""
    import skimage
    from devicebridge.data.image import open_image

    return open_image(Path(skimage.__file__).parent / "data" / name)


def write_crops(folder: Path, sides: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...]) -> int:
    """One image and caption per combination of side and shift from the centre; returns how many."""
    from PIL import Image

    photo = load_photo("chelsea.png")
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for number, (side, row, column) in enumerate(itertools.product(sides, rows, columns), start=1):
        top = min(max(0, _CENTRE[0] + row - side // 2), photo.height - side)
        left = _CENTRE[1] + column - side // 2
        crop = photo.crop((left, top, left + side, top + side)).resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        crop.save(folder / f"chelsea_{number:02d}.png")
        (folder / f"chelsea_{number:02d}.txt").write_text(CAPTION + "\n", encoding="utf-8")
    return number


def main(folder: Path) -> None:
    num_train = write_crops(folder / "train", **_TRAIN)
    num_eval = write_crops(folder / "eval", **_EVAL)
    print(f"{num_train} images in {folder / 'train'}, {num_eval} held out in {folder / 'eval'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
