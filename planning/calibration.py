"""Times of blocks measured on this machine's cards: before a training, once for each kind of job, then from disk.

block_clock.py measures one card, one scheme and one size of batch. The result is a JSON file in the user's cache folder
with everything in it that could change it: card, versions, the pack's own kernels, model, LoRA, batch, tokens. Whatever
differs is measured again, and so is a file that cannot be read. Cards that are alike share one; links are of one card
in one slot.

Measured and estimated times are never mixed in one plan, for they are not on one scale: if a measurement fails, all
times of the plan are estimates, and a line in the log names the reason.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.fingerprint import file_fingerprint
from ..encoding.key import settings_fingerprint
from ..events import first_line
from ..families.spec import Variant
from ..parallel.devices import CPU, release_cached_memory
from ..parallel.stopwatch import link_speed
from ..system.versions import installed_version
from ..version import VERSION
from .block_clock import CardTimes, time_blocks
from .block_times import ASSUMED_LINK_BYTES_PER_S, Timing
from .cards import Card
from .measurements import CalibrationStore, Key, calibration_folder, describe_card, describe_slot
from .plan_training import TrainingPlan, plan_training
from .question import Question
from .short_model import Work, text_shape

_log = logging.getLogger(__name__)

_VERSION = 2  # raise it when block_clock.py measures something else
_PACKAGES = ("diffusers", "peft", "torchao", "triton")
_OWN_CODE = ("patches/attention.py", "patches/lora_linear.py", "patches/lokr_linear.py", "quantization/*.py")
_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


class NotMeasured(RuntimeError):
    """A time was asked for that is not on disk, and nothing may be measured now."""


class CalibrationFailed(RuntimeError):
    """A card could not be measured; the message says why."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LinkSpeed:
    """Bytes per second from one device to another."""

    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CardBench:
    """Measures the blocks of one job on real cards, and links; a source of None is pinned host memory."""

    def __init__(self, info: CheckpointInfo, variant: Variant, work: Callable[[str], Work]) -> None:
        self._info, self._variant, self._work = info, variant, work

    def block_key(self, device: torch.device, scheme: str) -> Key:
        """Everything that blocks' times depend on."""
        work = self._work(scheme)
        return {
            "card": describe_card(device),
            "software": describe_software(),
            "family": self._info.family.name,
            "variant": self._variant.name,
            "config": settings_fingerprint(dict(self._info.config)),
            "scheme": scheme,
            "rotation": work.quantize.rotation if work.quantize is not None else 0,
            "lora": asdict(work.lora)
            | {"start_from": "", "targets": work.lora.targets or self._info.family.lora_targets},
            "kept": self._info.family.keep_full_precision,
            "dtype": str(work.dtype).removeprefix("torch."),
            "batch_size": work.batch_size,
            "latent": list(work.latent_shape),
            "text": {e.output: list(text_shape(e, self._info.config)) for e in self._variant.text_encoders}
            | ({} if work.text is None else work.text.shapes),
        }

    def blocks(self, device: torch.device, scheme: str) -> CardTimes:
        return time_blocks(self._info, self._variant, self._work(scheme), device)

    def link_key(self, source: torch.device | None, target: torch.device) -> Key:
        ends = [describe_slot(device) for device in (source, target) if device is not None]
        return {"machine": platform.node(), "ends": ends, "torch": torch.__version__, "version": _VERSION}

    def link(self, source: torch.device | None, target: torch.device) -> float:
        """Bytes per second."""
        return link_speed(CPU if source is None else source, target)


def describe_software() -> dict[str, Any]:
    """Versions and switches that choose kernels, and a hash of our own."""
    root = Path(__file__).resolve().parent.parent
    own_code = sorted(path for pattern in _OWN_CODE for path in root.glob(pattern))
    return {
        "calibration": _VERSION,
        "devicebridge": VERSION,
        "kernels": settings_fingerprint([file_fingerprint(path) for path in own_code]),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "rocm": torch.version.hip or "",
        "cudnn": torch.backends.cudnn.version() or 0,
        "attention": [is_enabled() for is_enabled in _ATTENTION],
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **{name: installed_version(name) or "" for name in _PACKAGES},
    }


# ---- as the planner asks for them


class MeasuredTimes:
    """Block times of some cards of this machine, each measured when it is first asked for; a BlockTimes.

    Args:
        cards: of this machine; no others may be asked for. names: of all blocks.
        may_measure: False takes only what is on disk.
    Raises: NotMeasured or CalibrationFailed where a time is asked for and there is none.
    """

    def __init__(
        self,
        bench: CardBench,
        cards: Sequence[Card],
        names: Sequence[str],
        store: CalibrationStore,
        *,
        may_measure: bool,
    ) -> None:
        self._bench, self._store, self._may_measure = bench, store, may_measure
        self._cards, self._names = tuple(cards), tuple(names)
        self._found: dict[tuple[torch.device, str], CardTimes] = {}
        self._by_key: dict[Path, CardTimes] = {}  # cards that are alike have one key
        self._links: dict[tuple[torch.device | None, torch.device], float | None] = {}

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        return self.times(card, scheme).of_block[block]

    def ends(self, card: Card, scheme: str) -> tuple[float, float]:
        found = self.times(card, scheme)
        return found.front_s, found.tail_s

    def link(self, card: Card) -> float:
        return self.speed(None, card) or ASSUMED_LINK_BYTES_PER_S

    def between(self, source: Card, target: Card) -> float | None:
        return self.speed(source, target)

    def times(self, card: Card, scheme: str) -> CardTimes:
        """Of one card: known, on disk, or measured now."""
        if (card.device, scheme) not in self._found:
            assert card in self._cards, f"{card.name} is no card of this machine that may be measured"
            key = self._bench.block_key(card.device, scheme)
            path = self._store.path_of(key)
            if path not in self._by_key:
                self._by_key[path] = self._on_disk(key) or self._measure(card, scheme, key)
            self._found[card.device, scheme] = self._by_key[path]
        return self._found[card.device, scheme]

    def _on_disk(self, key: Key) -> CardTimes | None:
        found = self._store.get(key, CardTimes)
        if found is not None and len(found.of_block) != len(self._names):
            _log.warning("%s has another number of blocks; it is measured again", self._store.path_of(key))
            return None
        return found

    def _measure(self, card: Card, scheme: str, key: Key) -> CardTimes:
        if not self._may_measure:
            raise NotMeasured(f"{scheme} on {card.name}")
        reason = ""
        try:
            found = self._bench.blocks(card.device, scheme)
        except Exception as error:  # a missing kernel, compiler or memory: whatever it raises, estimates answer it
            reason = first_line(error)
        if reason:
            release_cached_memory()  # the error is gone, and with it the tensors that its traceback held
            raise CalibrationFailed(f"{scheme} on {card.name}: {reason}")
        _log.info("timed the blocks in %s on %s in %.1f s", scheme, card.name, found.elapsed_s)
        self._store.put(key, found)
        return found

    def speed(self, source: Card | None, target: Card) -> float | None:
        """Bytes per second from a card, or from the host, to a card; None where it cannot be told."""
        ends = None if source is None else source.device, target.device
        if ends not in self._links:
            self._links[ends] = self._speed(*ends)
        return self._links[ends]

    def _speed(self, source: torch.device | None, target: torch.device) -> float | None:
        key = self._bench.link_key(source, target)
        known = self._store.get(key, LinkSpeed)
        if known is None and self._may_measure:
            try:
                known = LinkSpeed(self._bench.link(source, target))
            except (RuntimeError, ValueError) as error:  # memory that cannot be pinned, for one
                _log.info("no speed of the link %s to %s: %s", source or "host", target, first_line(error))
                return None
            self._store.put(key, known)
        return None if known is None else known.bytes_per_s

    def timing(self, plan: TrainingPlan) -> Timing:
        """What a plan's times are."""
        scheme, cards = plan.setting.scheme, plan.cards
        found = [(card, self.times(card, scheme)) for card in cards]
        of_cards = {
            card.name: {
                **asdict(times),
                "card": self._bench.block_key(card.device, scheme)["card"]["name"],
                "host_link_bytes_per_s": self.speed(None, card),
            }
            for card, times in found
        }
        pairs = zip(cards, cards[1:], strict=False)
        links = {f"{one.name} -> {other.name}": self.speed(one, other) for one, other in pairs}
        dates = ", ".join(sorted({times.date for _, times in found}))
        where = ", ".join(f"{name} ({each['card']})" for name, each in of_cards.items())
        eager = "; compiled blocks are faster" if plan.space.is_compiled else ""
        return Timing(f"measured on {where}, {dates}{eager}", {"scheme": scheme, "cards": of_cards, "links": links})


# ---- plans

Measuring = Literal["never", "known", "where it decides", "always"]


def plan_calibrated(
    question: Question, measuring: Measuring, *, bench: CardBench | None = None, store: CalibrationStore | None = None
) -> TrainingPlan:
    """A job's plan with measured times where they can be had, else with estimates.

    Args:
        measuring: "never" only estimates; "known" takes what an earlier job has measured and uses no card; the others
            measure what is missing.
        bench, store: None takes the cards themselves and the user's cache folder.
    Raises: ValueError if no setting fits.
    """
    estimated = plan_training(question)  # what does not fit is refused before anything is measured
    if measuring == "never":
        return estimated
    may_measure = measuring == "always" or (measuring != "known" and _decides(question))
    times = measured_times(question, may_measure=may_measure, bench=bench, store=store)
    try:
        plan = plan_training(replace(question, given_times=times))
        return replace(plan, timing=times.timing(plan))
    except NotMeasured:
        return estimated
    except CalibrationFailed as error:
        _log.warning("blocks could not be timed (%s); times are estimated from operations", error)
        return estimated


def _decides(question: Question) -> bool:
    """Whether times decide anything: where cards are cut, or which of several schemes is taken."""
    has_cut = len(question.cards) > 1 and not question.bounds
    return has_cut or len({setting.scheme for setting in question.settings()}) > 1


def measured_times(
    question: Question, *, may_measure: bool, bench: CardBench | None = None, store: CalibrationStore | None = None
) -> MeasuredTimes:
    """Of a job's blocks on its cards."""
    model = question.model
    bench = bench or CardBench(model.info, model.variant, question.work)
    store = store or CalibrationStore(calibration_folder())
    return MeasuredTimes(bench, question.cards, model.names, store, may_measure=may_measure)
