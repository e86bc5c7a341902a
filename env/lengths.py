"""Request lengths: drawn from a log-normal distribution, or from the requests of a trace."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.errors import ConfigError
from env.request_trace import RequestTrace


class LengthSource(Protocol):
    """Token counts of prompts or of outputs."""

    @property
    def high(self) -> int:
        """Largest count."""

    def mean(self) -> float:
        """Return the mean count."""

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        """Draw ``count`` token counts."""


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


@dataclass(frozen=True)
class TraceLengths:
    """Token counts as they occur in a trace, each request equally likely.

    Prompts and outputs of one trace belong together: :func:`draw_lengths` draws whole requests.

    Attributes:
        trace: Where the counts are from.
        of_outputs: Whether these are the outputs, not the prompts.
    """

    trace: RequestTrace
    of_outputs: bool

    @property
    def tokens(self) -> NDArray[np.int32]:
        """``(num_requests,)`` all counts, in order of arrival."""
        return self.trace.output_tokens if self.of_outputs else self.trace.prompt_tokens

    @property
    def high(self) -> int:
        """Largest count."""
        return int(self.tokens.max())

    def mean(self) -> float:
        """Return the mean count."""
        return float(self.tokens.mean())

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        """Draw ``count`` token counts with replacement."""
        return self.tokens[rng.integers(0, len(self.tokens), count)]


def lengths_of(trace: RequestTrace) -> tuple[TraceLengths, TraceLengths]:
    """Return the prompt and the output lengths of a trace."""
    return TraceLengths(trace, of_outputs=False), TraceLengths(trace, of_outputs=True)


def draw_lengths(
    prompts: LengthSource, outputs: LengthSource, rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw the prompt and output tokens of ``count`` requests, ``(count,)`` each."""
    if (
        isinstance(prompts, TraceLengths)
        and isinstance(outputs, TraceLengths)
        and prompts.trace is outputs.trace
    ):
        rows = rng.integers(0, len(prompts.tokens), count)
        return prompts.tokens[rows], outputs.tokens[rows]
    return prompts.sample(rng, count), outputs.sample(rng, count)
