"""A dataset that arrived encoded: latents and text states as entries of a cache folder, and a list of which belong
together.

The entries are named by their own content, for there is no image and no encoder to ask. The list is a JSON file
<cache folder>/datasets/<hash>.json with the shapes, so that a job can be checked without reading a tensor. It is
written last: a run that was killed finds the entries it has written, and writes the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.fingerprint import settings_fingerprint
from ..system.files import write_atomically
from ..system.json_file import expect, read_json_object
from .comfy_data import shared_in_batch
from .key import content_key
from .sources import Entry, Shapes, shapes_of
from .store import CacheStore, unwritable

_FOLDER = "datasets"
_VERSION = 1
_DIGITS = 32  # of the hash, in the file's name


@dataclass(frozen=True)
class EncodedPair:
    """Latents and text of one sample: keys of their entries, and the shapes of the tensors in these.

    Args:
        same: names what of it samples of one batch must share; "" for nothing, or in an older list.
    """

    latents: str
    text: str
    latents_shapes: Shapes
    text_shapes: Shapes
    same: str = ""


def save_encoded(
    pairs: Iterable[tuple[Entry, Entry]],
    store: CacheStore,
    on_saved: Callable[[int], None] = lambda count: None,
) -> Path:
    """Keep the entries (latents, text) that the store has not, and list them; returns the list's file.

    Args:
        on_saved: told after each how many samples are saved; raises to stop.
    Raises: ValueError for no pairs; OSError naming the file if the store cannot be written. What was written stays.
    """
    listed = []
    for latents, text in pairs:
        keys = [_keep(entry, store) for entry in (latents, text)]
        listed.append(EncodedPair(keys[0], keys[1], shapes_of(latents), shapes_of(text), _same(latents, text)))
        on_saved(len(listed))
    if not listed:
        raise ValueError("the dataset has no samples; give lists of at least one latent and conditioning")
    samples = [{name: value for name, value in vars(pair).items() if value or name != "same"} for pair in listed]
    content = {"version": _VERSION, "samples": samples}
    path = store.folder / _FOLDER / f"{settings_fingerprint(content)[:_DIGITS]}.json"
    data = json.dumps(content).encode("ascii")
    try:
        if not path.is_file() or path.read_bytes() != data:  # a complete folder may be read-only
            write_atomically(path, data)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _same(latents: Entry, text: Entry) -> str:
    shared = shared_in_batch(latents, text)
    return content_key(shared) if shared else ""


def _keep(entry: Entry, store: CacheStore) -> str:
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in entry.items()}
    key = content_key(plain)
    if key not in store:
        store.put(key, plain)
    return key


def load_encoded(path: str | Path) -> list[EncodedPair]:
    """The samples that save_encoded listed.

    Raises: ValueError naming the file if it is missing or no such list.
    """
    path = Path(path)
    try:
        content = read_json_object(path)
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}, this pack reads {_VERSION}")
        return [_read_pair(sample) for sample in content["samples"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"data.encoded: {path} is no list of encoded samples ({error}); run the Dataset from Latents and "
            "Conditioning node again"
        ) from error


def _read_pair(sample: Mapping[str, Any]) -> EncodedPair:
    latents, text = (expect(sample[name], str, f"{name} of a sample") for name in ("latents", "text"))
    same = expect(sample.get("same", ""), str, "same of a sample")
    return EncodedPair(latents, text, _read_shapes(sample["latents_shapes"]), _read_shapes(sample["text_shapes"]), same)


def _read_shapes(shapes: Mapping[str, Sequence[int]]) -> Shapes:
    found = expect(shapes, dict, "shapes").items()
    return {name: tuple(expect(side, int, f"a side of {name}") for side in shape) for name, shape in found}


def store_of_encoded(path: str | Path) -> CacheStore:
    """Where the entries of a list are: the list lies among them."""
    return CacheStore(Path(path).parent.parent)
