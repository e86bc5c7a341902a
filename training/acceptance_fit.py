"""Fit the acceptance of a draft from accept lengths over time, by depth.

Mean
    The accept lengths ``L_k`` of the measured depths give the chance that each draft token is
    accepted, given those before it: ``L_b - L_a`` is the sum of the chances that positions after
    ``a`` up to ``b`` are reached and accepted; between two measured depths one rate is taken.

Spread between requests
    Method of moments of a one-way random-effects analysis of variance (Searle, Casella, McCulloch,
    *Variance Components*, 1992). The groups are stretches in which the same ``B``
    requests run: their mean scatters by ``spread**2 / B`` beyond chance. Stated only if that
    scatter is significant.

Drift
    Within a stretch the requests stay the same, so the variogram of the accept length, half the
    mean squared difference at a lag ``h``, shows what moves in time: ``noise + spread**2 * (1 -
    exp(-h / time))``, the variogram of a first-order autoregression under white noise. Stated only
    if it beats a constant significantly.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.acceptance_profile import AcceptanceProfile, DepthAcceptance
from controller.trace import TraceRow
from training.isotonic import pool_adjacent_violators
from training.samples import usable_rounds

MAX_OBSERVATIONS = 8192
MIN_STRETCHES = 6
MIN_PAIRS = 50
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SIGNIFICANCE = 3.0
"""Standard deviations from chance at which a spread counts as found."""
MIN_REACHED = 0.005
"""Chance to be reached below which a position's rate says nothing: half of an accept length's last
printed digit."""
MIN_CHI2_GAIN = 13.8
"""Gain of the drift model's two further parameters that chance gives once in a thousand."""


@dataclass(frozen=True)
class Observation:
    """A mean accept length over some rounds of one batch.

    Attributes:
        stretch: Names the time in which the batch held the same requests.
        time_s: When; None if unknown.
        batch_size: Requests of the batch.
        rounds: Rounds that the mean is over.
        accept_len: Accept length, bonus included.
        steady: Whether all rounds belong to the stretch; only the mean uses the others.
    """

    stretch: str
    time_s: float | None
    batch_size: int
    rounds: int
    accept_len: float
    steady: bool = True


class Series:
    """Accept lengths of one depth in bounded memory: of a long one only some stretches stay."""

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self.count = 0
        self._weight = 0.0
        self._sum = 0.0
        self._kept: dict[str, list[Observation]] = {}
        self._num_kept = 0
        self._share = 1
        for item in observations:
            self.add(item)

    def add(self, item: Observation) -> None:
        """Take an observation; those of one stretch must come in order."""
        weight = float(item.batch_size * item.rounds)
        self.count += 1
        self._weight += weight
        self._sum += weight * item.accept_len
        if not item.steady:
            return
        if zlib.crc32(item.stretch.encode()) % self._share:
            return
        self._kept.setdefault(item.stretch, []).append(item)
        self._num_kept += 1
        if self._num_kept > MAX_OBSERVATIONS:
            self._thin(item.stretch)

    def absorb(self, other: "Series", label: str) -> None:
        """Add another series, such as that of another file; ``label`` keeps its stretches apart."""
        self.count += other.count
        self._weight += other._weight
        self._sum += other._sum
        for name, items in other._kept.items():
            self._kept[f"{label}:{name}"] = list(items)
        self._num_kept = sum(map(len, self._kept.values()))

    def _thin(self, newest: str) -> None:
        """Drop about half: stretches by a hash of their name, or the start of the only one."""
        if len(self._kept) > 1:
            self._share *= 2
            self._kept = {
                name: items
                for name, items in self._kept.items()
                if zlib.crc32(name.encode()) % self._share == 0
            }
        else:
            self._kept[newest] = self._kept[newest][-MAX_OBSERVATIONS // 2 :]
        self._num_kept = sum(map(len, self._kept.values()))

    @property
    def mean(self) -> float:
        """Mean accept length, by request and round."""
        return self._sum / self._weight

    @property
    def stretches(self) -> tuple[tuple[Observation, ...], ...]:
        """What was kept of the steady observations, by stretch."""
        return tuple(tuple(items) for items in self._kept.values())


def fit_depth(num_steps: int, series: Series) -> DepthAcceptance:
    """Return the acceptance of one depth; the series must not be empty."""
    drift = drift_of(series.stretches)
    return DepthAcceptance(
        num_steps=num_steps,
        accept_len=_short(min(max(series.mean, 1.0), num_steps + 1.0)),
        count=series.count,
        request_spread=_maybe(request_spread(series.stretches)),
        drift_spread=_maybe(drift[0] if drift else None),
        drift_time_s=_maybe(drift[1] if drift else None),
    )


def profile(
    source: str,
    simulated: bool,
    depths: Sequence[DepthAcceptance],
    accept_by_position: Sequence[float] = (),
) -> AcceptanceProfile:
    """Build the block of a calibration.

    Args:
        source: See :class:`AcceptanceProfile`.
        simulated: Likewise.
        depths: What was measured, one entry a depth.
        accept_by_position: Chance that draft token ``i`` is reached and accepted, where a source
            measured it; else it is worked out from the accept lengths.
    """
    depths = sorted(depths, key=lambda depth: depth.num_steps)
    if simulated:
        # The lengths were set depth by depth: no accept rates lie behind them.
        return AcceptanceProfile(source, True, (), tuple(depths))
    lengths = {depth.num_steps: depth.accept_len for depth in depths}
    total = 1.0
    for position, share in enumerate(accept_by_position, start=1):
        total += share
        if position <= max(lengths):
            lengths[position] = total
    rates = _known_rates(rates_of(lengths))
    return AcceptanceProfile(source, False, tuple(map(_short, rates)), tuple(depths))


def _known_rates(rates: Sequence[float]) -> list[float]:
    """Let no rate rise after a position that is hardly ever reached: rounding alone makes it."""
    known: list[float] = []
    reached = 1.0
    for rate in rates:
        known.append(min(rate, known[-1]) if reached < MIN_REACHED else rate)
        reached *= known[-1]
    return known


def rates_of(accept_len_by_depth: Mapping[int, float]) -> list[float]:
    """Return the conditional accept rate of every position up to the deepest depth.

    A position cannot be reached more often than the one before it; accept lengths that say so by
    chance are smoothed by isotonic regression, which keeps the deepest accept length.

    Example:
        >>> [round(rate, 3) for rate in rates_of({1: 1.8, 3: 2.6})]
        [0.8, 0.618, 0.618]
    """
    depths = [0, *sorted(accept_len_by_depth)]
    lengths = [1.0, *(accept_len_by_depth[depth] for depth in depths[1:])]
    counts = np.diff(depths)
    gains = np.diff(lengths) / counts
    gains = np.clip(-pool_adjacent_violators(-gains, counts.astype(np.float64)), 0.0, 1.0)
    rates: list[float] = []
    reached = 1.0
    for count, gain in zip(counts.tolist(), gains.tolist(), strict=True):
        rate = _common_rate(count, count * gain / reached if reached > 1e-12 else 0.0)
        rates += [rate] * count
        reached *= rate**count
    return rates


def _common_rate(count: int, gain: float) -> float:
    """Solve ``rate + ... + rate**count = gain`` in [0, 1] by bisection."""
    if gain <= 0.0:
        return 0.0
    if gain >= count:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if sum(middle**i for i in range(1, count + 1)) < gain:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def request_spread(stretches: Sequence[Sequence[Observation]]) -> float | None:
    """Return the standard deviation of a request's own accept length; see the module."""
    groups = [group for group in stretches if group]
    within = freedom = 0.0
    means, sizes, rounds = [], [], []
    for group in groups:
        weight = np.array([float(item.rounds) for item in group])
        value = np.array([item.accept_len for item in group])
        mean = float(np.average(value, weights=weight))
        within += group[0].batch_size * float(np.sum(weight * (value - mean) ** 2))
        freedom += len(group) - 1
        means.append(mean)
        sizes.append(float(group[0].batch_size))
        rounds.append(float(np.sum(weight)))
    if len(groups) < MIN_STRETCHES or freedom < MIN_STRETCHES:
        return None
    size = np.array(sizes)
    centre = float(np.average(means, weights=size))
    scatter = size * (np.array(means) - centre) ** 2
    between = float(np.mean(scatter)) * len(groups) / (len(groups) - 1)
    by_chance = float(np.mean(within / freedom / np.array(rounds)))
    margin = SIGNIFICANCE * math.sqrt(2.0 / (len(groups) - 1) + 2.0 / freedom)
    if between <= by_chance * (1.0 + margin):
        return None
    return math.sqrt(between - by_chance)


def drift_of(stretches: Sequence[Sequence[Observation]]) -> tuple[float, float] | None:
    """Return the standard deviation and the time of the drift in seconds; see the module."""
    found = [item for item in (_variogram(stretches, lag) for lag in LAGS) if item]
    if len(found) < 4:
        return None
    lags, values, pairs = np.array(found).T
    weight = pairs / (2.0 * np.maximum(values, 1e-12) ** 2)
    flat = float(np.average(values, weights=weight))
    base = float(np.sum(weight * (values - flat) ** 2))
    fits = [
        _fit_drift(lags, values, weight, float(time_s))
        for time_s in np.geomspace(lags.min() / 2.0, lags.max(), 40)
    ]
    left, variance, time_s = min(fits)
    if variance <= 0.0 or base - left < MIN_CHI2_GAIN:
        return None
    return math.sqrt(variance), time_s


def _variogram(
    stretches: Sequence[Sequence[Observation]], lag: int
) -> tuple[float, float, int] | None:
    """Return mean lag in seconds, half the mean squared difference, and the number of pairs."""
    gaps, squares = [], []
    for group in stretches:
        for a, b in zip(group, group[lag:], strict=False):
            if a.time_s is not None and b.time_s is not None and b.time_s > a.time_s:
                gaps.append(b.time_s - a.time_s)
                squares.append(0.5 * (b.accept_len - a.accept_len) ** 2)
    if len(squares) < MIN_PAIRS:
        return None
    return float(np.mean(gaps)), float(np.mean(squares)), len(squares)


def _fit_drift(
    lags: np.ndarray, values: np.ndarray, weight: np.ndarray, time_s: float
) -> tuple[float, float, float]:
    """Fit noise and drift for a given time; return the misfit, the drift's variance, the time."""
    shape = 1.0 - np.exp(-lags / time_s)
    root = np.sqrt(weight)
    design = np.stack([root, root * shape], axis=1)
    noise, variance = np.linalg.lstsq(design, root * values, rcond=None)[0]
    if noise < 0.0:
        noise = 0.0
        variance = np.sum(weight * shape * values) / np.sum(weight * shape**2)
    variance = max(float(variance), 0.0)
    misfit = float(np.sum(weight * (values - noise - variance * shape) ** 2))
    return misfit, variance, time_s


def trace_series(rows: Sequence[TraceRow]) -> dict[int, Series]:
    """Return the accept lengths of a trace's steady speculative rounds by depth."""
    found: dict[int, Series] = defaultdict(Series)
    clock_s, stretch = 0.0, 0

    def clocked() -> Iterator[TraceRow]:
        nonlocal clock_s, stretch
        batch_size = None
        for row in rows:
            clock_s += row.step_s or 0.0
            stretch += row.phase == "prefill" or row.batch_size != batch_size
            batch_size = row.batch_size
            yield row

    # Each round is taken as soon as it is read, so the clock is its own.
    for row in usable_rounds(clocked(), Counter()):
        if row.num_steps and row.mean_correct_drafts is not None:
            item = Observation(
                str(stretch), clock_s, row.batch_size, 1, 1.0 + row.mean_correct_drafts
            )
            found[row.num_steps].add(item)
    return dict(found)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _maybe(value: float | None) -> float | None:
    return None if value is None else _short(value)
