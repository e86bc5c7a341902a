"""The tiers of a checkpoint as this server can run them.

SGLang has one way not to draft, its zero-step tier, and an environment flag that it reads every
round says whether that tier extends the draft's KV (``warm``) or not (``cold``). Plain decoding
(``native``) is ``engine_hooks.native``'s; where that cannot run, the nearest is ``cold``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from controller.calibration import Calibration
from controller.tiers import COLD, NATIVE, WARM, Tier
from engine_hooks.native import NativeDecode
from engine_hooks.symbols import SKIP_DRAFT_EXTEND


@dataclass(frozen=True)
class RunnableTiers:
    """What each logit of the policy stands for in this server.

    Attributes:
        tiers: ``(K,)`` what runs, in the order of the logits.
        num_steps: ``(K,)`` SGLang's steps.
        keeps_warm: ``(K,)`` whether the draft's KV is extended.
        kinds: ``(K,)`` the kind of off, or ``"speculate"``.
        notes: What runs otherwise than in training, for the log.
    """

    tiers: tuple[Tier, ...]
    num_steps: tuple[int, ...]
    keeps_warm: tuple[bool, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...]

    def index_of(
        self,
        num_steps: int,
        keeps_warm: bool,
        asked: int | None = None,
        kind: str | None = None,
    ) -> int:
        """Return the tier that a round of these steps counts as: the same, else the nearest.

        Of several that run alike it is the one that was asked for.

        Args:
            num_steps: Draft steps of the round.
            keeps_warm: Whether it extended the draft's KV.
            asked: The tier that was asked for.
            kind: Kind of off that a round without steps was, where that is known.
        """
        if asked is not None and (num_steps, keeps_warm) == (
            self.num_steps[asked],
            self.keeps_warm[asked],
        ):
            if num_steps or kind is None or kind == self.kinds[asked]:
                return asked
        distance = [
            (abs(steps - num_steps), warm != keeps_warm, kind not in (None, own))
            for steps, warm, own in zip(self.num_steps, self.keeps_warm, self.kinds, strict=True)
        ]
        return distance.index(min(distance))


def runnable(
    trained: Sequence[Tier], calibration: Calibration, native: bool = False
) -> RunnableTiers:
    """Map the tiers that a policy was trained on to what SGLang can run.

    Args:
        trained: Tiers in the order of the logits.
        calibration: Where a tier that stands in for another must have a cost, or the other's is
            taken: it is too low or too high by what the two differ.
        native: Whether this server can run native rounds.
    """
    tiers = []
    notes = []
    for tier in trained:
        if tier.kind == NATIVE and not native:
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
        kinds=tuple(tier.kind for tier in tiers),
        notes=tuple(notes),
    )


def costed_tiers(
    trained: Sequence[Tier], runs: Sequence[Tier], calibration: Calibration
) -> tuple[Tier, ...]:
    """Return the tiers whose calibrated costs the policy sees: what runs, if it has a cost."""
    known = calibration.tier_names
    return tuple(new if new.name in known else old for old, new in zip(trained, runs, strict=True))


class OffSwitch:
    """Sets which kind of off zero-step rounds are, and tells which one ran.

    Writing the environment costs a microsecond, so it is written on a change only.

    Attributes:
        native: Runs native rounds where they are available.
    """

    def __init__(self, native: NativeDecode | None = None) -> None:
        self.native = NativeDecode() if native is None else native
        self._original = os.environ.get(SKIP_DRAFT_EXTEND)
        self._current: str | None = None

    @property
    def ran(self) -> str:
        """The kind of off that the last round was, if it had no steps."""
        if self.native.ran:
            return NATIVE
        if self._current is not None:
            return WARM if self._current == WARM else COLD
        skips = (self._original or "").lower() in ("true", "1", "yes", "y")
        return COLD if skips else WARM

    def ask(self, kind: str) -> None:
        """Let zero-step rounds be of a kind; ``native`` runs as ``cold`` where it cannot run."""
        if self._current != kind:
            os.environ[SKIP_DRAFT_EXTEND] = "false" if kind == WARM else "true"
            self.native.wanted = kind == NATIVE
            self._current = kind

    def restore(self) -> None:
        """Go back to what the server was started with."""
        if self._current is None:
            return
        if self._original is None:
            os.environ.pop(SKIP_DRAFT_EXTEND, None)
        else:
            os.environ[SKIP_DRAFT_EXTEND] = self._original
        self.native.wanted = False
        self._current = None
