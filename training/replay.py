"""Whether the blocks of a job may be replayed as CUDA graphs; asked by plans and by runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..patches.cuda_graphs import cuda_graphs_fault
from .config import JobConfig


def why_no_graphs(job: JobConfig, num_sizes: int, devices: Iterable[torch.device]) -> str:
    """Everything that keeps the blocks of a job from being replayed; "" if nothing does.

    Args:
        num_sizes: of the samples that are trained on, in pixels and frames.
        devices: of the job; () where they are elsewhere and taken for able.
    """
    faults = [cuda_graphs_fault(devices)]
    if job.lora.dropout:
        faults.append("lora.dropout draws random numbers")
    if job.train.batch_size > 1:
        faults.append(f"the last of the batches may be smaller (train.batch_size is {job.train.batch_size}, 1 works)")
    if num_sizes > 1:
        faults.append(f"samples come in {num_sizes} sizes")
    return ", ".join(filter(None, faults))
