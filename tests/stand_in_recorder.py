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
        self.run: Run | None = None  # of the call that is replayed: threads of the recorded one may be gone

    def record(self, run: Run, work: Sequence[Work]) -> Callable[[], None]:
        staged = self.owner[0]._staged
        before = {key: tensor.clone() for key, tensor in staged.items()}
        run(work)
        for key, tensor in before.items():
            staged[key].data.copy_(tensor)
        self.num_recorded += 1
        return lambda: self.launch(self.run or run, work)

    def looked_at(self, work: Work, waiting: list[str]) -> Work:
        return work

    def launch(self, run: Run, work: Sequence[Work]) -> None:
        self.launched.append("replay")
        run(work)

    def mark(self) -> Callable[[], bool]:
        return lambda: self.cards_wait


def stand_in(devices: Any, copies: Any, addresses: Addresses, module: Any = None) -> Graphs:
    """As graphs_on. module: that has Graphs; ComfyUI loads the pack under a name of its own."""
    owner: list[Graphs] = []
    recorder = StandIn(owner)
    graphs = (module or sys.modules[Graphs.__module__]).Graphs(devices, lambda: recorder, addresses)
    computes = graphs.outputs

    def outputs(blocks: Any, calls: Any, parts: Any, run: Run, *others: Any) -> Sequence[Any]:
        recorder.run = run
        return computes(blocks, calls, parts, run, *others)  # type: ignore[no-any-return]

    graphs.outputs = outputs
    owner.append(graphs)
    return graphs  # type: ignore[no-any-return]


def replaying(parallel: TensorParallel, addresses: Addresses) -> tuple[Graphs, StandIn]:
    """Have the blocks replayed, as those of a TensorParallel with addresses are on cards."""
    graphs = stand_in(parallel.devices, None, addresses, sys.modules[type(parallel).__module__])
    parallel.graphs = graphs
    return graphs, graphs._make_recorder()  # type: ignore[return-value]
