"""Workloads by name: synthetic arrivals, closed loops, and replays of recorded traffic.

:data:`LOADS` makes the load; :func:`make_workload` adds acceptance and lengths. Rates are requests
a second, times seconds. Excerpts of the Azure and Mooncake traces are in ``env/data/workloads``
(sources and licences in its README); of all formats a file of one's own can be given by ``path``.
"""

from functools import lru_cache
from pathlib import Path

from controller.errors import ConfigError
from env.acceptance_process import Acceptance
from env.arrivals import GammaBurst, OnOff, OpenLoop, Poisson, Ramp, Replay, scale_to_rate
from env.lengths import LengthSource, lengths_of
from env.registry import Registry
from env.request_trace import RequestTrace, read_trace
from env.workload import OUTPUTS, PROMPTS, ClosedLoop, Load, Workload

DATA = Path(__file__).parent / "data" / "workloads"
SHIPPED = {
    "azure-2023-code": ("azure", DATA / "azure-2023-code.csv.gz"),
    "azure-2023-conv": ("azure", DATA / "azure-2023-conv_first-30-min.csv.gz"),
    "mooncake": ("mooncake", DATA / "mooncake-conversation_first-5-min.jsonl.gz"),
}
"""Format and file by name."""

LOADS: Registry[Load] = Registry("workload")


@lru_cache(maxsize=8)
def _read(path: Path, kind: str) -> RequestTrace:
    return read_trace(path, kind)


def load_trace(name: str, path: str | Path | None = None) -> RequestTrace:
    """Return a shipped trace by name, or a file of one's own by format and path.

    Args:
        name: A key of :data:`SHIPPED`; with a path a key of ``request_trace.FORMATS``.
        path: The file; None takes the shipped one.

    Raises:
        ConfigError: If nothing of this name is shipped.
        TraceError: If the file breaks its format.
    """
    if path is not None:
        return _read(Path(path), name)
    if name not in SHIPPED:
        raise ConfigError(
            f"trace {name!r}: expected one of {', '.join(SHIPPED)}, or a format with the path of "
            "a file"
        )
    kind, file = SHIPPED[name]
    return _read(file, kind)


def _replay(
    trace: RequestTrace, time_scale: float | None, rate: float | None, window: int | None
) -> Replay:
    if time_scale is not None and rate is not None:
        raise ConfigError(
            f"time_scale {time_scale} and rate {rate}: expected one of the two, since each fixes "
            "the other"
        )
    if rate is not None:
        time_scale = scale_to_rate(trace, rate)
    return Replay(trace, 1.0 if time_scale is None else time_scale, window)


@LOADS.register("closed")
def closed(concurrency: int = 64, tokens: int = 200_000, think_s: float = 0.0) -> ClosedLoop:
    """A fixed number of clients, each waiting for its answer."""
    return ClosedLoop(concurrency, tokens, think_s)


@LOADS.register("poisson")
def poisson(rate: float, num_requests: int = 600) -> Poisson:
    """Independent arrivals at one rate."""
    return Poisson(rate, num_requests)


@LOADS.register("gamma-burst")
def gamma_burst(rate: float, cv: float = 3.0, num_requests: int = 600) -> GammaBurst:
    """Bursts: gaps from a gamma distribution."""
    return GammaBurst(rate, cv, num_requests)


@LOADS.register("ramp")
def ramp(rate: float, start: float = 0.1, ramp_s: float = 60.0, num_requests: int = 600) -> Ramp:
    """A rate that climbs from a share ``start`` of ``rate`` to ``rate``, then stays."""
    return Ramp(start * rate, rate, ramp_s, num_requests)


@LOADS.register("on-off")
def on_off(
    rate: float,
    off: float = 0.0,
    on_s: float = 10.0,
    off_s: float = 10.0,
    num_requests: int = 600,
) -> OnOff:
    """A rate that jumps between ``rate`` and a share ``off`` of it."""
    return OnOff(rate, off * rate, on_s, off_s, num_requests)


@LOADS.register("swing")
def swing(
    rate: float, low: float = 0.1, period_s: float = 60.0, num_requests: int = 600
) -> OpenLoop:
    """A rate that swings between a share ``low`` of ``rate`` and ``rate``."""
    return OpenLoop(low * rate, rate, period_s, num_requests)


@LOADS.register("azure-2023")
def azure_2023(
    split: str = "conv",
    path: str | None = None,
    time_scale: float | None = None,
    rate: float | None = None,
    window: int | None = None,
) -> Replay:
    """Replay of the Azure LLM inference trace of 2023: ``conv`` or ``code``, or a file."""
    if path is None and split not in ("conv", "code"):
        raise ConfigError(f"split {split!r}: expected 'conv' or 'code'")
    trace = load_trace("azure", path) if path else load_trace(f"azure-2023-{split}")
    return _replay(trace, time_scale, rate, window)


@LOADS.register("mooncake")
def mooncake(
    path: str | None = None,
    time_scale: float | None = None,
    rate: float | None = None,
    window: int | None = None,
) -> Replay:
    """Replay of a Mooncake trace; without a path the start of its conversation trace."""
    return _replay(load_trace("mooncake", path), time_scale, rate, window)


@LOADS.register("burstgpt")
def burstgpt(
    path: str,
    time_scale: float | None = None,
    rate: float | None = None,
    window: int | None = None,
) -> Replay:
    """Replay of a BurstGPT file, failed requests left out."""
    return _replay(load_trace("burstgpt", path), time_scale, rate, window)


def named_lengths(name: str) -> tuple[LengthSource, LengthSource]:
    """Return prompt and output lengths: ``"default"``, those of a shipped trace, or of a file.

    Args:
        name: ``"default"``, a key of :data:`SHIPPED`, or ``FORMAT=PATH``.
    """
    if name == "default":
        return PROMPTS, OUTPUTS
    kind, equals, path = name.partition("=")
    return lengths_of(load_trace(kind, path if equals else None))


def make_workload(
    load: Load | str,
    acceptance: Acceptance,
    lengths: str | tuple[LengthSource, LengthSource] = "default",
    shifted: str | tuple[LengthSource, LengthSource] | None = None,
    name: str | None = None,
) -> Workload:
    """Put a workload together. A replay has the lengths of its own trace.

    Args:
        load: A load, or text for ``LOADS.parse`` such as ``"poisson:rate=4"``.
        acceptance: How well drafts are accepted.
        lengths: Prompt and output lengths, or a name for :func:`named_lengths`.
        shifted: Lengths of every second block of a phase shift, likewise.
        name: Shown in tables; None takes the text of the load.

    Raises:
        ConfigError: If something does not exist or does not fit together.
    """
    made = LOADS.parse(load) if isinstance(load, str) else load
    if isinstance(made, Replay):
        if lengths != "default":
            raise ConfigError("a replay has the lengths of its own trace; leave lengths out")
        lengths = lengths_of(made.trace)
    prompts, outputs = named_lengths(lengths) if isinstance(lengths, str) else lengths
    other = named_lengths(shifted) if isinstance(shifted, str) else shifted
    shown = name or (load if isinstance(load, str) else type(made).__name__)
    return Workload(shown, made, acceptance, prompts, outputs, shifted=other)
