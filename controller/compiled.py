"""Numba set-up: how kernels are compiled, and where the compiled code is kept.

Kernels are plain Python functions over arrays. Numba compiles them on first use and keeps the
result in a ``__pycache__``. Its cache looks only at the file of the kernel itself, so a change in a
function that a kernel calls would go unseen; here the cache folder's name carries a hash of all
sources that kernels are made of, so a change anywhere compiles anew.

No other module of the controller needs Numba: this one and ``compiled_decision`` are imported only
where it is wanted.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
from numba.extending import register_jitable

from controller import acceptance, features, memory

# Read when the first parallel kernel starts its threads: spinning ones make a step a hundred times
# slower as soon as the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

HERE = Path(__file__).parent
KEEP_OTHER_S = 24 * 3600.0
"""Age from which compiled code of other versions of the sources is removed."""


def cache_folder(folder: Path, sources: Sequence[Path]) -> Path | None:
    """Return where to keep machine code that is made of some folders' sources.

    Args:
        folder: Its ``__pycache__`` holds the code.
        sources: Folders of Python files.

    Returns:
        The folder, made if it was not there; None if it cannot be written.
    """
    digest = hashlib.sha256()
    for path in sorted(path for source in sources for path in source.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    cache = folder / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for other in cache.parent.glob("kernels-*"):
            if other != cache and time.time() - other.stat().st_mtime > KEEP_OTHER_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return None
    return cache if os.access(cache, os.W_OK) else None


def compile_kernel(
    function: Callable[..., Any], cache: Path | None, *, parallel: bool = False
) -> Any:
    """Compile a function with Numba, keeping the machine code in ``cache`` unless that is None."""
    if cache is None:
        return numba.njit(parallel=parallel, error_model="numpy")(function)
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(cache)
    try:
        return numba.njit(parallel=parallel, error_model="numpy", cache=True)(function)
    finally:
        settings.CACHE_DIR = before


# The controller's arithmetic is free of Numba; here it becomes callable from kernels.
for _function in (
    acceptance.observe_round,
    acceptance.observe_join,
    acceptance.estimate_accept_len,
    memory.reset_memory,
    memory.record_join,
    memory.record_turnover,
    memory.completion_rate,
    memory.record_launch,
    memory.record_result,
    features.digest_evidence,
    features.fill_digested,
    features.fill_observation,
):
    register_jitable(_function)
