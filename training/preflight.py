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

    Several ranks decide together. Where they share the weights, a compiler that fails ends the job: the others wait
    inside a forward for this rank's share, and nothing brings them back.

    The next microbatch of every copy of the model goes through the compiled blocks, each of which is compared on the
    way with what it is uncompiled (gradient_check.py). Nothing is changed by that but peaks of memory, which start
    anew. With dropout, which draws other numbers in compiled blocks, nothing is compared, and without the memory for
    both not all; a line in the log says so. Other shapes of batches are not looked at.

    Returns: a comparison of every block and call that could be told apart from rounding.
    Raises: RuntimeError for weights that ranks share, and blocks that cannot be compiled.
    """
    count = trainer.runner.num_replicas
    with trainer.trial():
        for microbatch in trainer.microbatches(count):
            microbatch.prepare()  # what is wrong with the data is not the compiler's fault
    check = BlockCheck(*(trainer.runner.replica_for(index)[0] for index in range(count)))
    faults = trainer.ranks.gather(_fault(trainer, check))
    fault = next((f"rank {rank}: {text}" if len(faults) > 1 else text for rank, text in enumerate(faults) if text), "")
    if fault:
        _log.warning("blocks are no longer compiled: %s", fault)
        remove_compiled(trainer.compiled)
        trainer.compiled = ()
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
            trainer.rehearse()
    except (torch.cuda.OutOfMemoryError, RankLost):
        raise
    except Exception as error:  # whatever a compiler raises; what is not its own comes again without it
        told = first_line(getattr(error, "inner_exception", error))  # which torch puts on a line of its own
        if trainer.runner.in_lockstep:
            told = f'{by} fails to compile blocks: {told}; set train.compile to "off"'
            raise RuntimeError(told) from error
        _log.debug("compiled blocks failed", exc_info=True)
        return f"{by} fails: {told}"
    if check.gave_up:
        _log.warning("not all compiled blocks are compared with uncompiled ones: %s", check.gave_up)
    worst = check.worst
    return f"as {by} compiles them they are wrong: {worst}" if worst is not None and worst.excess > 1 else ""
