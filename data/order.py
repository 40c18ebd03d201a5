"""In which order samples are trained on.

Nothing random is carried along. Whatever is drawn (the order of an epoch, whether a caption is dropped) is a hash of
the seed, the epoch and the position, so where a run stands is two integers, and it continues alike with any version of
any library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .samples import TrainingSample


@dataclass(frozen=True)
class Batch:
    """Indices into the samples, all of one bucket and length, and which are trained with the empty caption. [B] each

    Args:
        size: the same for batches whose latents have one shape; texts may still differ in length.
    """

    indices: tuple[int, ...]
    captions_dropped: tuple[bool, ...]
    size: tuple[int, ...] = field(default=(), compare=False)


class BatchOrder:
    """An endless order of batches: every sample once per epoch, shuffled anew for every epoch.

    A batch is of one bucket and length. Where a bucket's samples do not divide by the batch size, its last batch of the
    epoch is smaller; filling it up would train some samples more often than others.

    Args:
        samples: what the indices count. batch_size: samples of a full batch.
        seed: another seed is another order.
        caption_dropout: probability, per sample and epoch, that its caption is dropped.
    """

    def __init__(
        self, samples: Sequence[TrainingSample], *, batch_size: int, seed: int, caption_dropout: float = 0.0
    ) -> None:
        if not samples:
            raise ValueError("there are no samples to train on; give a dataset with at least one image")
        self._buckets = [(*sample.bucket, sample.num_frames, *sample.alike) for sample in samples]
        self._batch_size = batch_size
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._epoch = 0
        self._index = 0
        self._batches = self.batches_of(0)

    def next(self) -> Batch:
        """The next batch; begins a new epoch where one ends."""
        if self._index == len(self._batches):
            self._epoch, self._index = self._epoch + 1, 0
            self._batches = self.batches_of(self._epoch)
        self._index += 1
        return self._batches[self._index - 1]

    def ahead(self, count: int) -> Batch:
        """The batch that `next` will give after so many others; the position stays."""
        epoch, index, batches = self._epoch, self._index + count, self._batches
        while index >= len(batches):
            index -= len(batches)
            epoch += 1
            batches = self.batches_of(epoch)
        return batches[index]

    def batches_of(self, epoch: int) -> list[Batch]:
        """All batches of an epoch, in order."""
        shuffled = sorted(range(len(self._buckets)), key=lambda i: self._draw("sample", epoch, i))
        by_bucket: dict[tuple[int, ...], list[int]] = {}
        for index in shuffled:
            by_bucket.setdefault(self._buckets[index], []).append(index)
        size = self._batch_size
        groups = [members[i : i + size] for members in by_bucket.values() for i in range(0, len(members), size)]
        groups.sort(key=lambda group: self._draw("batch", epoch, group[0]))
        return [self._batch(epoch, group) for group in groups]

    def _batch(self, epoch: int, group: Sequence[int]) -> Batch:
        dropped = tuple(self._is_dropped(epoch, index) for index in group)
        return Batch(tuple(group), dropped, (len(group), *self._buckets[group[0]]))

    def state_dict(self) -> dict[str, int]:
        """Where the order stands: the epoch, and how many of its batches are done."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind the batches that were done.

        Raises: ValueError for a position that this order does not have.
        """
        epoch, index = int(state["epoch"]), int(state["index"])
        batches = self.batches_of(epoch)
        if epoch < 0 or not 0 <= index <= len(batches):
            raise ValueError(
                f"cannot continue at batch {index} of epoch {epoch}: an epoch has {len(batches)} batches here; "
                "the state is of another dataset or batch size"
            )
        self._epoch, self._index, self._batches = epoch, index, batches

    def _is_dropped(self, epoch: int, index: int) -> bool:
        return self._draw("caption", epoch, index) < self._caption_dropout

    def _draw(self, what: str, epoch: int, index: int) -> float:
        """A number in [0, 1) that depends on the arguments and the seed only, and looks uniform over them."""
        digest = hashlib.sha256(f"{self._seed} {what} {epoch} {index}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48
