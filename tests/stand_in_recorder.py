"""What stands for the recorder of CUDA graphs where there are none."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from devicebridge.parallel.local.graphs import Addresses, Graphs, Run, Work
from devicebridge.parallel.local.tensor_parallel import TensorParallel


class StandIn:
    """Computes anew what it was given to record, and leaves its inputs as they were. `launched` has each replay."""

    def __init__(self, owner: list[Graphs]) -> None:
        self.owner, self.num_recorded, self.cards_wait = owner, 0, True
        self.launched: list[str] = []

    def record(self, run: Run, work: Sequence[Work]) -> Callable[[], None]:
        staged = self.owner[0]._staged
        before = {key: tensor.clone() for key, tensor in staged.items()}
        run(work)
        for key, tensor in before.items():
            staged[key].data.copy_(tensor)
        self.num_recorded += 1
        return lambda: self.launch(run, work)

    def launch(self, run: Run, work: Sequence[Work]) -> None:
        self.launched.append("replay")
        run(work)

    def mark(self) -> Callable[[], bool]:
        return lambda: self.cards_wait


def replaying(parallel: TensorParallel, addresses: Addresses) -> tuple[Graphs, StandIn]:
    """Have the blocks replayed, as TensorParallel.replay does on cards."""
    owner: list[Graphs] = []
    recorder = StandIn(owner)
    module: Any = sys.modules[type(parallel).__module__]  # ComfyUI loads the pack under a name of its own
    owner.append(module.Graphs(parallel.devices, lambda: recorder, addresses))
    parallel.graphs = owner[0]
    return owner[0], recorder
