"""Workloads: who sends what when, and how well its drafts are accepted."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.errors import ConfigError
from env.acceptance_process import Acceptance
from env.arrivals import GammaBurst, OnOff, OpenLoad, OpenLoop, Poisson, Ramp, Replay
from env.lengths import Lengths, LengthSource, TraceLengths, draw_lengths, lengths_of

__all__ = [
    "OUTPUTS",
    "PROMPTS",
    "ClosedLoop",
    "GammaBurst",
    "Lengths",
    "OnOff",
    "OpenLoop",
    "Poisson",
    "Ramp",
    "Replay",
    "RequestTable",
    "TraceLengths",
    "Workload",
    "lengths_of",
]

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


Load: TypeAlias = ClosedLoop | OpenLoad


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
        prompts: Prompt lengths; those of the trace in a replay.
        outputs: Output lengths, likewise.
        shifted: Prompt and output lengths of every second block of ``phases`` acceptance, so that
            what is asked for changes together with how well it is drafted.
    """

    name: str
    load: Load
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompts: LengthSource = PROMPTS
    outputs: LengthSource = OUTPUTS
    shifted: tuple[LengthSource, LengthSource] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.shifted is not None and self.acceptance.kind != "phases":
            raise ConfigError(
                f"shifted lengths with {self.acceptance.kind!r} acceptance: expected 'phases', "
                "whose blocks say which requests have them"
            )
        if isinstance(self.load, Replay):
            for lengths in (self.prompts, self.outputs):
                own = isinstance(lengths, TraceLengths) and lengths.trace is self.load.trace
                if not own or self.shifted is not None:
                    raise ConfigError(
                        f"workload {self.name!r} replays {self.load.trace.name}: expected its own "
                        "lengths; give prompts and outputs as lengths_of(trace) returns them"
                    )

    @property
    def is_closed(self) -> bool:
        """Whether the load is a closed loop."""
        return isinstance(self.load, ClosedLoop)

    def _all_lengths(self) -> list[tuple[LengthSource, LengthSource]]:
        return [(self.prompts, self.outputs), *([self.shifted] if self.shifted else [])]

    @property
    def max_new_tokens(self) -> int:
        """Longest output."""
        return max(outputs.high for _, outputs in self._all_lengths())

    @property
    def max_tokens(self) -> int:
        """Most tokens that a request can have, prompt and output."""
        return max(prompts.high for prompts, _ in self._all_lengths()) + self.max_new_tokens

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length, both kinds of blocks counted alike."""
        means = [outputs.mean() for _, outputs in self._all_lengths()]
        return sum(means) / len(means)

    def max_requests(self) -> int:
        """Return an upper bound of the requests of an episode.

        A closed loop ends by tokens, so its list must be long enough for any draw: the tokens of
        the shortest outputs would be absurdly many, so the list is sized for the mean with a wide
        margin, and :meth:`sample` lengthens outputs if a draw falls short.
        """
        if not isinstance(self.load, ClosedLoop):
            return self.load.num_requests
        expected = self.load.tokens / min(outputs.mean() for _, outputs in self._all_lengths())
        return int(self.load.concurrency + 1.2 * expected + 4.0 * expected**0.5 + 8)

    def sample(self, seed: int) -> RequestTable:
        """Draw the requests of an episode; the same for every controller on one seed."""
        rng = np.random.default_rng([seed, 0x5EC])
        if isinstance(self.load, Replay):
            rows = self.load.rows(rng)
            trace = self.load.trace
            return RequestTable(
                self.load.arrivals_of(rows),
                trace.prompt_tokens[rows],
                trace.output_tokens[rows],
                self.max_new_tokens,
            )
        count = self.max_requests()
        prompts, outputs = draw_lengths(self.prompts, self.outputs, rng, count)
        if self.shifted is not None:
            other = draw_lengths(*self.shifted, rng, count)
            odd = (np.arange(count) / self.acceptance.period).astype(np.int64) % 2 == 1
            prompts = np.where(odd, other[0], prompts)
            outputs = np.where(odd, other[1], outputs)
        if isinstance(self.load, ClosedLoop):
            arrivals = np.zeros(count)
            if self.load.think_s > 0.0:
                begin = rng.uniform(0.0, self.load.think_s, min(self.load.concurrency, count))
                arrivals[: len(begin)] = np.sort(begin)
            # Clients start together; cut the first outputs so that they do not end together.
            first = min(self.load.concurrency, count)
            outputs[:first] = np.ceil(outputs[:first] * rng.uniform(0.05, 1.0, first))
            # Whatever is drawn, all but the unfinished last requests must cover the target.
            spare = count - self.load.concurrency
            if outputs[:spare].sum() < self.load.tokens:
                outputs = np.maximum(outputs, -(-self.load.tokens // max(spare, 1)))
        else:
            arrivals = self.load.arrivals(rng)
        return RequestTable(arrivals, prompts, outputs.astype(np.int32), self.max_new_tokens)
