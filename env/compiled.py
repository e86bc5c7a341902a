"""Compiles the kernels of the simulator; their machine code is kept in ``env/__pycache__``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.compiled import HERE as CONTROLLER
from controller.compiled import cache_folder, compile_kernel

_HERE = Path(__file__).parent
_CACHE = cache_folder(_HERE, (_HERE, CONTROLLER))


def kernel(function: Callable[..., Any] | None = None, *, parallel: bool = False) -> Any:
    """Compile a function with Numba, keeping the machine code on disk where that is possible."""

    def wrap(function: Callable[..., Any]) -> Any:
        return compile_kernel(function, _CACHE, parallel=parallel)

    return wrap if function is None else wrap(function)
