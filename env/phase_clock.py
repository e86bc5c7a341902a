"""Where the time of a simulated round goes: the real kernels, with clocks around their phases.

A profiler of Python sees one call for a whole kernel. So the kernels that call the phases are
compiled once more from their own source, with every phase replaced by itself between two readings
of the CPU's time-stamp counter. What runs is the code that always runs; a phase's time includes the
reading of the clock, about 10 ns a call, so phases are functions that a round calls once or twice.
"""

import platform
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as nb_types
from numba.extending import intrinsic

from controller.errors import ConfigError
from env import decode, server_loop, simulator

DECODE_PHASES = ("draw_results", "sum_moments", "credit_tokens", "best_rate", "pass_time")
LOOP_PHASES = ("record_launch", "process_result", "drop_finished")
BATCH_PHASES = ("run_decode", "advance")
"""A decode round, which holds the decode phases, and what leads to the next: arrivals, prefill."""
PREEMPTED_TICKS = 200_000
"""Longer calls, some 0.1 ms where a phase takes microseconds, were interrupted: left out."""


@intrinsic
def _ticks(typingctx):  # pragma: no cover  (compiled)
    """Return the time-stamp counter."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(64), [])
        read = cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter")
        return builder.call(read, [])

    return nb_types.int64(), emit


@intrinsic
def _add(typingctx, address, ticks):  # pragma: no cover  (compiled)
    """Add to a number of 64 bits in memory."""

    def emit(context, builder, signature, arguments):
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(builder.add(builder.load(at), arguments[1]), at)
        return context.get_dummy_value()

    return nb_types.void(nb_types.int64, nb_types.int64), emit


def _recompiled(kernel: Any, replaced: dict[str, Any]) -> Any:
    """Compile a kernel's source again with some of the functions that it calls replaced."""
    source = kernel.py_func
    names = {**source.__globals__, **replaced}
    return numba.njit(error_model="numpy")(
        types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    )


@numba.njit
def _now():  # pragma: no cover  (compiled)
    return _ticks()


class PhaseClock:
    """A simulator step on one thread that counts the ticks of its phases.

    Raises:
        ConfigError: On a processor other than x86-64, whose counter may not be readable.
    """

    def __init__(self) -> None:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            raise ConfigError(
                "the profile reads the time-stamp counter of x86-64, this is "
                f"{platform.machine()}; leave the profile out"
            )
        self.names = DECODE_PHASES + LOOP_PHASES + BATCH_PHASES
        self.ticks = np.zeros(len(self.names), np.int64)
        run_decode = _recompiled(decode.run_decode, self._clocked(decode, DECODE_PHASES))
        loop = self._clocked(server_loop, LOOP_PHASES)
        loop["run_decode"] = self._clock("run_decode", run_decode)
        loop["advance"] = self._clock("advance", server_loop.advance)
        step_server = _recompiled(server_loop.step_server, loop)
        self.step = _recompiled(simulator._step, {"step_server": step_server})

    def _clocked(self, module: types.ModuleType, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._clock(name, getattr(module, name)) for name in names}

    def _clock(self, name: str, function: Any) -> Callable[..., Any]:
        address = int(self.ticks[self.names.index(name) :].ctypes.data)
        if not isinstance(function, numba.core.dispatcher.Dispatcher):
            function = numba.njit(error_model="numpy")(function)

        @numba.njit(error_model="numpy")
        def clocked(*arguments):
            start = _ticks()
            result = function(*arguments)
            ticks = _ticks() - start
            if ticks < PREEMPTED_TICKS:
                _add(address, ticks)
            return result

        return clocked

    def now(self) -> int:
        """Return the time-stamp counter."""
        return int(_now())

    def self_ticks(self) -> dict[str, int]:
        """Return the ticks of each phase, those of the phases inside it taken out."""
        own = dict(zip(self.names, self.ticks.tolist(), strict=True))
        own["run_decode"] -= sum(own[name] for name in DECODE_PHASES)
        return own


@cache
def phase_clock() -> PhaseClock:
    """Return the one clock of this process: compiling it takes as long as a first run."""
    return PhaseClock()
