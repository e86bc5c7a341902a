"""Threads of a rank, and sums and gathers between tensor-parallel ranks.

The real ops go through shared memory. These go through torch.distributed's default group, which is
the tensor-parallel group here: there is no other kind of parallelism in these tests.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .registry import op, unsupported

SUM = int(dist.ReduceOp.SUM)


@op
def init_cpu_threads_env(cpu_ids: object) -> str:
    """Bind the rank's OpenMP threads to cores; here OMP_NUM_THREADS bounds them instead."""
    return f"not bound to {cpu_ids}"


@op
def initialize(world_size: int, rank: int) -> None:
    """Set up the shared memory of the collectives; nothing to do here."""


@op
def shm_allreduce(x: Tensor, reduce_op: int) -> Tensor:
    """Sum x over the ranks, in place."""
    if int(reduce_op) != SUM:
        raise unsupported("shm_allreduce", f"reduction {reduce_op}, only a sum")
    dist.all_reduce(x)
    return x


@op
def shm_allgather(x: Tensor, dim: int) -> Tensor:
    """Return every rank's x, one after the other along a dimension."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)
