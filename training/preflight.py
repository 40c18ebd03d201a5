"""Before the first step: whether compiled blocks compute what uncompiled ones do."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from ..events import first_line
from ..parallel.devices import release_cached_memory, reset_peaks
from ..parallel.ranks.group import RankLost
from ..patches.attention import sound_attention
from ..patches.compile_blocks import remove_compiled
from .gradient_check import BlockCheck, BlockDifference
from .loop import Trainer

_log = logging.getLogger(__name__)


def check_compiled(trainer: Trainer) -> list[BlockDifference]:
    """Go on uncompiled where compiled blocks compute something else than uncompiled ones, or the compiler fails.

    The next microbatch of every copy of the model goes through the compiled blocks, each of which is compared on the
    way with what it is uncompiled (gradient_check.py). Nothing is changed by that but peaks of memory, which start
    anew. With dropout, which draws other numbers in compiled blocks, nothing is compared, and without the memory for
    both not all; a line in the log says so. Other shapes of batches are not looked at.

    Returns: a comparison of every block and call that could be told apart from rounding.
    """
    count = trainer.runner.num_replicas
    with trainer.trial():
        for microbatch in trainer.microbatches(count):
            microbatch.prepare()  # what is wrong with the data is not the compiler's fault
    check = BlockCheck(*(trainer.runner.replica_for(index)[0] for index in range(count)))
    fault = _fault(trainer, check)
    if fault:
        _log.warning("blocks are no longer compiled: %s", fault)
        for each in trainer.graphs:
            each.remove()  # they are of compiled blocks
        remove_compiled(trainer.compiled)
        trainer.graphs = trainer.compiled = ()
    elif check.found and not check.gave_up:
        _log.info("compiled blocks compute what uncompiled ones do; %s", check.worst)
    release_cached_memory()
    reset_peaks(trainer.devices)
    return check.found


def _fault(trainer: Trainer, check: BlockCheck) -> str:
    """What is wrong with compiled blocks; "" for nothing."""
    by = f"torch {torch.__version__}"
    try:
        with trainer.trial(), sound_attention(), ExitStack() as stack:
            if trainer.job.lora.dropout:
                _log.warning("compiled blocks are not compared with uncompiled ones: dropout draws other numbers")
            else:
                for each in trainer.compiled:
                    stack.enter_context(each.watched(check))
            trainer.accumulate(trainer.runner.num_replicas)
    except (torch.cuda.OutOfMemoryError, RankLost):
        raise
    except Exception as error:  # whatever a compiler raises; what is not its own comes again without it
        _log.debug("compiled blocks failed", exc_info=True)
        return f"{by} fails: {first_line(error)}"
    if check.gave_up:
        _log.warning("not all compiled blocks are compared with uncompiled ones: %s", check.gave_up)
    worst = check.worst
    return f"as {by} compiles them they are wrong: {worst}" if worst is not None and worst.excess > 1 else ""
