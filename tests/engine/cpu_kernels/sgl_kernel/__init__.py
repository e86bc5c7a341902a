"""A stand-in, in PyTorch, for the compiled `sgl_kernel` ops of SGLang 0.5.23's CPU engine.

It covers what a Llama target with an EAGLE-3 chain (topk = 1) calls. SGLang finds the ops in two
places, and so does this package: as attributes of `torch.ops.sgl_kernel` and by import from
`sgl_kernel`. Put the folder above this package first on PYTHONPATH to hide the compiled one.

**A row depends on nothing beside it.** Greedy output must be token for token the same whatever
shares a batch and however many tokens a pass verifies, or tests of it would flake. So every
contraction (linear layers, norms, attention) runs in float64 and is rounded once to the model's
dtype: products of two bfloat16 numbers are exact there, sums of them all but exact, and what is
left of the order of summation is some 2^40 times finer than the rounding that follows. A plain
float32 matrix product is not like that: its sums depend on how many rows it has.

| module | ops |
| --- | --- |
| `dense` | packed linear layers, RMSNorm, SiLU, rotary embedding |
| `attention` | attention over the paged KV cache: decode; prefill, verify and draft-extend |
| `cache` | the KV cache and the table of each request's slots |
| `chain` | the chain's tree, its greedy verification, what it accepted |
| `collective` | threads, and the sums and gathers between tensor-parallel ranks |
"""

from collections.abc import Callable

from . import attention, cache, chain, collective, dense
from .registry import OPS, install, missing

__all__ = [*OPS, "attention", "cache", "chain", "collective", "dense"]

install()


def __getattr__(name: str) -> Callable[..., object]:
    """Return an op; a missing one raises when it is called, since SGLang imports some in vain."""
    if name.startswith("__"):
        raise AttributeError(name)
    return OPS.get(name) or missing(name)
