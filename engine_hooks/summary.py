"""Sums up in the log what ran, every so many rounds: SGLang's line at each switch is held back."""

import logging

logger = logging.getLogger(__name__)

SUMMARY_ROUNDS = 2000
"""Decode rounds between two lines."""


class Summary:
    """Counts rounds by tier.

    Attributes:
        speaks: Whether this process writes the lines; one of all ranks does.
    """

    def __init__(self) -> None:
        self.speaks = False
        self._rounds: dict[str, int] = {}
        self._num_rounds = 0
        self._switches = 0
        self._as_decided = 0
        self._last: str | None = None

    def add(self, ran: str, as_decided: bool, fallbacks: int) -> None:
        """Count a round, and write the line if it is time.

        Args:
            ran: Tier of the round.
            as_decided: Whether the governor decided on it.
            fallbacks: Errors since the start.
        """
        self._num_rounds += 1
        self._rounds[ran] = self._rounds.get(ran, 0) + 1
        self._switches += self._last is not None and ran != self._last
        self._as_decided += as_decided
        self._last = ran
        if self._num_rounds < SUMMARY_ROUNDS:
            return
        if self.speaks:
            logger.info(
                "specgovernor: last %d rounds by tier: %s; %d switches; %d as decided; "
                "%d fallbacks since the start",
                self._num_rounds,
                ", ".join(f"{name}: {count}" for name, count in self._rounds.items()),
                self._switches,
                self._as_decided,
                fallbacks,
            )
        self._rounds.clear()
        self._num_rounds = self._switches = self._as_decided = 0
