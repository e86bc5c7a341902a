"""When the requests of an open loop arrive.

Each class draws a whole list of arrival times from a generator, so one seed gives one list. Where
the rate changes over time, the process is Poisson and its times come by inversion: the expected
number of arrivals until each time is a sum of unit-mean exponentials.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from controller.errors import ConfigError
from env.request_trace import RequestTrace


class OpenLoad(Protocol):
    """Requests that arrive whatever the server does."""

    @property
    def num_requests(self) -> int:
        """Requests of an episode, which ends when all are served."""

    @property
    def mean_rate(self) -> float:
        """Requests a second."""

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw ``(num_requests,)`` arrival times in seconds, never falling."""


def _check(load: Any, positive: tuple[str, ...], zero_or_more: tuple[str, ...] = ()) -> None:
    for field in fields(load):
        value = getattr(load, field.name)
        if field.name == "num_requests" and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"num_requests {value}: expected a whole number of at least 1")
        if field.name in positive and not 0.0 < value < math.inf:
            raise ConfigError(f"{field.name} {value}: expected a positive number")
        if field.name in zero_or_more and not 0.0 <= value < math.inf:
            raise ConfigError(f"{field.name} {value}: expected a number of at least 0")


def _unit_arrivals(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.cumsum(rng.exponential(size=count))


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals at one rate.

    Attributes:
        rate: Requests a second.
        num_requests: Requests of an episode.
    """

    rate: float
    num_requests: int

    def __post_init__(self) -> None:
        _check(self, ("rate",))

    @property
    def mean_rate(self) -> float:
        """Requests a second."""
        return self.rate

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds."""
        return _unit_arrivals(rng, self.num_requests) / self.rate


@dataclass(frozen=True)
class GammaBurst:
    """Gaps from a gamma distribution: bursts where ``cv`` is above 1, Poisson at 1.

    That is how BurstGPT (arXiv:2401.17644) describes the burstiness of its traffic.

    Attributes:
        rate: Requests a second.
        cv: Coefficient of variation of the gaps: standard deviation over mean.
        num_requests: Requests of an episode.
    """

    rate: float
    cv: float
    num_requests: int

    def __post_init__(self) -> None:
        _check(self, ("rate", "cv"))

    @property
    def mean_rate(self) -> float:
        """Requests a second."""
        return self.rate

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds."""
        shape = self.cv**-2
        return np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate), self.num_requests))


@dataclass(frozen=True)
class Ramp:
    """A rate that moves along a straight line and then stays.

    Attributes:
        start_rate: Requests a second at the start.
        end_rate: Requests a second from the end of the ramp on.
        ramp_s: Length of the ramp in seconds.
        num_requests: Requests of an episode.
    """

    start_rate: float
    end_rate: float
    ramp_s: float
    num_requests: int

    def __post_init__(self) -> None:
        _check(self, ("end_rate", "ramp_s"), ("start_rate",))

    @property
    def mean_rate(self) -> float:
        """Requests a second, over the time in which all are expected."""
        return self.num_requests / float(self._times(np.array([float(self.num_requests)]))[0])

    def _times(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        # Expected arrivals until t: start t + (end - start) t^2 / (2 ramp), linear after the ramp.
        # The root is written so that a rate which hardly changes does not cancel.
        slope = (self.end_rate - self.start_rate) / self.ramp_s
        on_ramp = 0.5 * (self.start_rate + self.end_rate) * self.ramp_s
        inside = np.minimum(expected, on_ramp)
        root = np.sqrt(np.maximum(self.start_rate**2 + 2.0 * slope * inside, 0.0))
        return 2.0 * inside / (self.start_rate + root) + (expected - inside) / self.end_rate

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds."""
        return self._times(_unit_arrivals(rng, self.num_requests))


@dataclass(frozen=True)
class OnOff:
    """A rate that jumps between two levels.

    Attributes:
        on_rate: Requests a second while on; the load starts so.
        off_rate: Requests a second while off; 0 for silence.
        on_s: Length of an on stretch in seconds.
        off_s: Length of an off stretch in seconds.
        num_requests: Requests of an episode.
    """

    on_rate: float
    off_rate: float
    on_s: float
    off_s: float
    num_requests: int

    def __post_init__(self) -> None:
        _check(self, ("on_rate", "on_s", "off_s"), ("off_rate",))

    @property
    def mean_rate(self) -> float:
        """Requests a second, over whole cycles."""
        cycle = self.on_rate * self.on_s + self.off_rate * self.off_s
        return cycle / (self.on_s + self.off_s)

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds."""
        unit = _unit_arrivals(rng, self.num_requests)
        while_on = self.on_rate * self.on_s
        cycles, rest = np.divmod(unit, while_on + self.off_rate * self.off_s)
        late = np.maximum(rest - while_on, 0.0)
        waited = np.where(late > 0.0, late / max(self.off_rate, 1e-300), 0.0)
        within = np.minimum(rest, while_on) / self.on_rate + np.minimum(waited, self.off_s)
        return cycles * (self.on_s + self.off_s) + within


@dataclass(frozen=True)
class OpenLoop:
    """A Poisson process whose rate swings between two levels as a raised cosine.

    Attributes:
        low_rate: Smallest rate, requests a second.
        high_rate: Largest rate, requests a second.
        period_s: Length of a swing, in seconds.
        num_requests: Requests of an episode, which ends when all are served.
    """

    low_rate: float
    high_rate: float
    period_s: float
    num_requests: int

    def __post_init__(self) -> None:
        rates = 0.0 < self.low_rate <= self.high_rate < np.inf
        if not (rates and 0.0 < self.period_s < np.inf and self.num_requests >= 1):
            raise ConfigError(
                f"{self}: expected 0 < low_rate <= high_rate, a positive period_s and at least one "
                "request"
            )

    @property
    def mean_rate(self) -> float:
        """Requests a second, over whole swings."""
        return 0.5 * (self.low_rate + self.high_rate)

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds."""
        unit = _unit_arrivals(rng, self.num_requests)
        mean = self.mean_rate
        half = 0.5 * (self.high_rate - self.low_rate)
        wave = 2.0 * np.pi / self.period_s
        # Expected arrivals until t, starting at the low point: mean t - half sin(wave t) / wave.
        grid = np.linspace(0.0, (unit[-1] / mean) + self.period_s, 64 * self.num_requests + 1)
        return np.interp(unit, mean * grid - half * np.sin(wave * grid) / wave, grid)


@dataclass(frozen=True)
class Replay:
    """The requests of a trace, as they arrived, with their own lengths.

    Attributes:
        trace: What was recorded.
        time_scale: Factor of all arrival times: 0.5 is twice as fast.
        window: Requests of an episode, in a row; the seed chooses the first. None plays the whole
            trace, the same under every seed.
    """

    trace: RequestTrace
    time_scale: float = 1.0
    window: int | None = None

    def __post_init__(self) -> None:
        _check(self, ("time_scale",))
        if self.window is not None and not 1 <= self.window <= len(self.trace):
            raise ConfigError(
                f"window {self.window}: expected 1 to the {len(self.trace)} requests of "
                f"{self.trace.name}, or None"
            )

    @property
    def num_requests(self) -> int:
        """Requests of an episode."""
        return len(self.trace) if self.window is None else self.window

    @property
    def mean_rate(self) -> float:
        """Requests a second, over the whole trace."""
        return self.trace.mean_rate / self.time_scale

    def rows(self, rng: np.random.Generator) -> slice:
        """Draw which requests of the trace an episode has."""
        first = int(rng.integers(0, len(self.trace) - self.num_requests + 1))
        return slice(first, first + self.num_requests)

    def arrivals_of(self, rows: slice) -> NDArray[np.float64]:
        """Return the arrival times of some requests in seconds; the first arrives at 0."""
        arrival_s = self.trace.arrival_s[rows]
        return (arrival_s - arrival_s[0]) * self.time_scale

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw a window and return its arrival times."""
        return self.arrivals_of(self.rows(rng))


def scale_to_rate(trace: RequestTrace, rate: float) -> float:
    """Return the ``time_scale`` at which a trace arrives with ``rate`` requests a second."""
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"rate {rate}: expected a positive number of requests a second")
    if not math.isfinite(trace.mean_rate):
        raise ConfigError(f"{trace.name}: all requests arrive at once; give a time_scale, no rate")
    return trace.mean_rate / rate
