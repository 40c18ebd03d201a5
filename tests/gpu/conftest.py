"""The GPUs that tests need, and what tests on them decide in the place of a clock."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from devicebridge.parallel.local.graph_recorder import GraphRecorder

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CARDS = [torch.device("cuda", index) for index in range(2)]
NEEDS_TWO = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs; torch sees {NUM_GPUS} here")
NEEDS_CUDA = pytest.mark.skipif(
    not NUM_GPUS or torch.version.hip is not None, reason="needs a CUDA GPU; torch sees none"
)


@pytest.fixture
def cards_wait() -> Iterator[None]:
    """Cards count as waiting for the host, so blocks are recorded; a host that falls behind would decide otherwise."""
    with mock.patch.object(GraphRecorder, "mark", lambda recorder: lambda: True):
        yield


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    """Attention's fastest backward adds up in no fixed order, on one GPU as on two."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
