"""Where the stand-in ops are listed, and what SGLang gets when it asks for one that is not."""

from collections.abc import Callable
from typing import TypeVar

import torch

Op = TypeVar("Op", bound=Callable[..., object])

OPS: dict[str, Callable[..., object]] = {}

# Model files that are not used look these up when they are imported, and never call them.
LOOKED_UP_AT_IMPORT = {"flash_attn_varlen_func"}


def op(function: Op) -> Op:
    """List a function as the op of its name."""
    OPS[function.__name__] = function
    return function


def missing(name: str) -> Callable[..., object]:
    """Return a function that raises NotImplementedError, with the op's name and arguments."""

    def call(*args: object, **kwargs: object) -> object:
        def describe(value: object) -> str:
            if isinstance(value, torch.Tensor):
                return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            return repr(value)

        given = [describe(value) for value in args]
        given += [f"{key}={describe(value)}" for key, value in kwargs.items()]
        raise NotImplementedError(
            f"the stand-in for sgl_kernel has no op {name!r}, called with ({', '.join(given)}); "
            "add it to tests/engine/cpu_kernels/sgl_kernel"
        )

    call.__name__ = name
    return call


def unsupported(op_name: str, what: str) -> NotImplementedError:
    """Return the error for a call of a known op that asks for something left out here."""
    return NotImplementedError(f"the stand-in for sgl_kernel.{op_name} does not support {what}")


class Namespace:
    """What stands at `torch.ops.sgl_kernel`.

    SGLang takes `hasattr(torch.ops.sgl_kernel, "convert_weight_packed")` for a CPU with AMX, and
    needs that. Names that end in `_cpu` always exist, because model files look them up at import.
    """

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name in OPS:
            return OPS[name]
        if name.endswith("_cpu") or name in LOOKED_UP_AT_IMPORT:
            return missing(name)
        raise AttributeError(f"the stand-in for sgl_kernel has no op {name!r}")


def install() -> None:
    """Put the ops at `torch.ops.sgl_kernel`."""
    torch.ops.sgl_kernel = Namespace()
