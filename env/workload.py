"""Workloads: who sends what when, and how well its drafts are accepted."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.errors import ConfigError
from env.acceptance_process import Acceptance


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal, clipped.

    Attributes:
        median: Median in tokens.
        sigma: Standard deviation of the logarithm; 0 for a constant.
        low: Smallest count.
        high: Largest count.
    """

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        finite = np.isfinite(self.median) and np.isfinite(self.sigma)
        if not (finite and self.median > 0 and self.sigma >= 0 and 1 <= self.low <= self.high):
            raise ConfigError(
                f"lengths {self}: expected median > 0, sigma >= 0 and 1 <= low <= high"
            )

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        """Draw ``count`` token counts."""
        drawn = np.exp(np.log(self.median) + self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int32)

    def mean(self) -> float:
        """Return the mean of the clipped distribution, by 4,001-point quadrature."""
        z = np.linspace(-5.0, 5.0, 4001)
        weight = np.exp(-0.5 * z * z)
        drawn = np.exp(np.log(self.median) + self.sigma * z)
        return float((np.clip(drawn, self.low, self.high) * weight).sum() / weight.sum())


PROMPTS = Lengths(median=448.0, sigma=0.5, low=16, high=6144)
OUTPUTS = Lengths(median=896.0, sigma=0.5, low=8, high=4096)


@dataclass(frozen=True)
class ClosedLoop:
    """A fixed number of clients, each sending its next request when the last one is answered.

    Attributes:
        concurrency: Clients.
        tokens: Output tokens after which the episode ends.
        think_s: Seconds from an answer to the client's next request, the same for all.
    """

    concurrency: int
    tokens: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.tokens < 1 or not 0.0 <= self.think_s < np.inf:
            raise ConfigError(
                f"{self}: expected at least one client and one token, and a think_s of at least 0"
            )


@dataclass(frozen=True)
class OpenLoop:
    """A fixed list of requests whose arrival rate swings between two levels as a raised cosine.

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

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times in seconds: a Poisson process with a swinging rate, by inversion."""
        unit = np.cumsum(rng.exponential(size=self.num_requests))
        mean = 0.5 * (self.low_rate + self.high_rate)
        half = 0.5 * (self.high_rate - self.low_rate)
        wave = 2.0 * np.pi / self.period_s
        # Expected arrivals until t, starting at the low point: mean t - half sin(wave t) / wave.
        grid = np.linspace(0.0, (unit[-1] / mean) + self.period_s, 64 * self.num_requests + 1)
        return np.interp(unit, mean * grid - half * np.sin(wave * grid) / wave, grid)


@dataclass(frozen=True)
class RequestTable:
    """The requests of one episode, in order of arrival.

    Attributes:
        arrival_s: ``(num_requests,)``; in a closed loop only the first ``concurrency`` count.
        prompt_tokens: ``(num_requests,)``.
        output_tokens: ``(num_requests,)`` tokens after which each stops.
        max_new_tokens: Limit that the scheduler reserves for.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    max_new_tokens: int


@dataclass(frozen=True)
class Workload:
    """A load and its acceptance.

    Attributes:
        name: Shown in tables.
        load: Closed or open loop.
        acceptance: How well drafts are accepted.
        prompts: Prompt lengths.
        outputs: Output lengths.
    """

    name: str
    load: ClosedLoop | OpenLoop
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompts: Lengths = PROMPTS
    outputs: Lengths = OUTPUTS

    @property
    def is_closed(self) -> bool:
        """Whether the load is a closed loop."""
        return isinstance(self.load, ClosedLoop)

    def max_requests(self) -> int:
        """Return an upper bound of the requests of an episode.

        A closed loop ends by tokens, so its list must be long enough for any draw: the tokens of
        the shortest outputs would be absurdly many, so the list is sized for the mean with a wide
        margin, and :meth:`sample` lengthens outputs if a draw falls short.
        """
        if isinstance(self.load, OpenLoop):
            return self.load.num_requests
        expected = self.load.tokens / self.outputs.mean()
        return int(self.load.concurrency + 1.2 * expected + 4.0 * expected**0.5 + 8)

    def sample(self, seed: int) -> RequestTable:
        """Draw the requests of an episode; the same for every controller on one seed."""
        rng = np.random.default_rng([seed, 0x5EC])
        count = self.max_requests()
        prompts = self.prompts.sample(rng, count)
        outputs = self.outputs.sample(rng, count)
        if isinstance(self.load, OpenLoop):
            arrivals = self.load.arrivals(rng)
        else:
            arrivals = np.zeros(count)
            # All clients start at once; cut the first outputs so that they do not end together.
            first = min(self.load.concurrency, count)
            outputs[:first] = np.ceil(outputs[:first] * rng.uniform(0.05, 1.0, first))
            # Whatever is drawn, all but the unfinished last requests must cover the target.
            spare = count - self.load.concurrency
            if outputs[:spare].sum() < self.load.tokens:
                outputs = np.maximum(outputs, -(-self.load.tokens // max(spare, 1)))
        return RequestTable(arrivals, prompts, outputs.astype(np.int32), self.outputs.high)
