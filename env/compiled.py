"""Numba set-up: how kernels are compiled, and where the compiled code is kept.

Kernels are plain Python functions over arrays. Numba compiles them on first use and keeps the
result in ``env/__pycache__``. Its cache looks only at the file of the kernel itself, so a change in
a function that a kernel calls would go unseen; here the cache folder's name carries a hash of all
sources that kernels are made of, so a change anywhere compiles anew.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import config as numba_config
from numba.extending import register_jitable

from controller import acceptance as controller_acceptance
from controller import features as controller_features
from controller import memory as controller_memory

# Read when the first parallel kernel starts its threads: spinning ones make a step a hundred times
# slower as soon as the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

KEEP_OTHER_S = 24 * 3600.0
"""Age from which compiled code of other versions of the sources is removed."""


def _cache_folder() -> Path | None:
    here = Path(__file__).parent
    controller = Path(controller_features.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *controller.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = here / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.glob("kernels-*"):
            if other != folder and time.time() - other.stat().st_mtime > KEEP_OTHER_S:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_CACHE = _cache_folder()


def kernel(function: Callable[..., Any] | None = None, *, parallel: bool = False) -> Any:
    """Compile a function with Numba, keeping the machine code on disk where that is possible."""

    def wrap(function: Callable[..., Any]) -> Any:
        if _CACHE is None:
            return numba.njit(parallel=parallel, error_model="numpy")(function)
        before = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = str(_CACHE)
        try:
            return numba.njit(parallel=parallel, error_model="numpy", cache=True)(function)
        finally:
            numba_config.CACHE_DIR = before

    return wrap if function is None else wrap(function)


# The controller is free of Numba; here its arithmetic becomes callable from kernels.
for _function in (
    controller_acceptance.observe_round,
    controller_acceptance.observe_join,
    controller_acceptance.estimate_accept_len,
    controller_memory.reset_memory,
    controller_memory.record_join,
    controller_memory.record_launch,
    controller_memory.record_result,
    controller_features.digest_evidence,
    controller_features.fill_digested,
    controller_features.fill_observation,
):
    register_jitable(_function)
