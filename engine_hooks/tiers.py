"""The tiers of a checkpoint as this server can run them.

SGLang has one way not to draft, its zero-step tier, and an environment flag that it reads every
round says whether that tier extends the draft's KV (``warm``) or not (``cold``). Plain decoding
(``native``) is not to be had in a server with adaptive speculation; the nearest is ``cold``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from controller.calibration import Calibration
from controller.tiers import COLD, NATIVE, Tier
from engine_hooks.symbols import SKIP_DRAFT_EXTEND


@dataclass(frozen=True)
class RunnableTiers:
    """What each logit of the policy stands for in this server.

    Attributes:
        tiers: ``(K,)`` what runs, in the order of the logits.
        num_steps: ``(K,)`` SGLang's steps.
        keeps_warm: ``(K,)`` whether the draft's KV is extended.
        notes: What runs otherwise than in training, for the log.
    """

    tiers: tuple[Tier, ...]
    num_steps: tuple[int, ...]
    keeps_warm: tuple[bool, ...]
    notes: tuple[str, ...]

    def index_of(self, num_steps: int, keeps_warm: bool, asked: int | None = None) -> int:
        """Return the tier that a round of these steps counts as: the same, else the nearest.

        Of several that run alike it is the one that was asked for.
        """
        if asked is not None and (num_steps, keeps_warm) == (
            self.num_steps[asked],
            self.keeps_warm[asked],
        ):
            return asked
        distance = [
            (abs(steps - num_steps), warm != keeps_warm)
            for steps, warm in zip(self.num_steps, self.keeps_warm, strict=True)
        ]
        return distance.index(min(distance))


def runnable(trained: Sequence[Tier], calibration: Calibration) -> RunnableTiers:
    """Map the tiers that a policy was trained on to what SGLang can run.

    Args:
        trained: Tiers in the order of the logits.
        calibration: Where a tier that stands in for another must have a cost, or the other's is
            taken: it is too low or too high by what the two differ.
    """
    tiers = []
    notes = []
    for tier in trained:
        if tier.kind == NATIVE:
            costed = COLD in calibration.tier_names
            tier = Tier(0, COLD)
            notes.append(
                "'native' runs as 'cold', the cheapest off of SGLang"
                + ("" if costed else ", at the calibrated cost of 'native'")
            )
        tiers.append(tier)
    return RunnableTiers(
        tiers=tuple(tiers),
        num_steps=tuple(tier.num_steps for tier in tiers),
        keeps_warm=tuple(tier.keeps_draft_warm for tier in tiers),
        notes=tuple(notes),
    )


def costed_tiers(
    trained: Sequence[Tier], runs: Sequence[Tier], calibration: Calibration
) -> tuple[Tier, ...]:
    """Return the tiers whose calibrated costs the policy sees: what runs, if it has a cost."""
    known = calibration.tier_names
    return tuple(new if new.name in known else old for old, new in zip(trained, runs, strict=True))


class DraftExtendSwitch:
    """Sets the flag that turns the zero-step tier from warm to cold and back.

    Writing the environment costs a microsecond, so it is written on a change only.
    """

    def __init__(self) -> None:
        self._original = os.environ.get(SKIP_DRAFT_EXTEND)
        self._current: bool | None = None

    @property
    def keeps_warm(self) -> bool:
        """Whether a zero-step round extends the draft's KV as things stand."""
        if self._current is not None:
            return self._current
        return (self._original or "").lower() not in ("true", "1", "yes", "y")

    def keep_warm(self, keeps_warm: bool) -> None:
        """Let zero-step rounds extend the draft's KV, or not."""
        if self._current is not keeps_warm:
            os.environ[SKIP_DRAFT_EXTEND] = "false" if keeps_warm else "true"
            self._current = keeps_warm

    def restore(self) -> None:
        """Go back to what the server was started with."""
        if self._current is None:
            return
        if self._original is None:
            os.environ.pop(SKIP_DRAFT_EXTEND, None)
        else:
            os.environ[SKIP_DRAFT_EXTEND] = self._original
        self._current = None
