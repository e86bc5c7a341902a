"""The tiers: what the controller may choose for one decode round.

A tier is either a number of draft steps (``1`` to ``7``) or one kind of off:

``native``
    Plain target decoding, as a server without speculation does it. The draft's KV is not
    extended, so it goes stale.
``cold``
    SGLang's zero-step tier with the draft-extend skipped. The draft's KV goes stale.
``warm``
    SGLang's zero-step tier with the draft-extend. Slower, but the draft's KV stays current.

``off`` is an alias that a calibration resolves to the cheapest kind it has measured among
``cold`` and ``native``, in this order (see :func:`resolve_tiers`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from controller.errors import TierError

MAX_NUM_STEPS = 7
"""Deepest draft that the features, the trace schema and the simulator provide for."""

NATIVE = "native"
COLD = "cold"
WARM = "warm"
OFF = "off"
OFF_KINDS = (NATIVE, COLD, WARM)
DEFAULT_TIERS = "off,1,2,3,5,7"


@dataclass(frozen=True, order=True)
class Tier:
    """One choice for a decode round.

    Attributes:
        num_steps: Draft steps of the round; 0 for every kind of off.
        kind: ``"speculate"``, or the kind of off: ``"native"``, ``"cold"`` or ``"warm"``.
    """

    num_steps: int
    kind: str

    @property
    def name(self) -> str:
        """The tier as users write it: ``"3"``, ``"native"``, ``"cold"``, ``"warm"``."""
        return str(self.num_steps) if self.num_steps else self.kind

    @property
    def is_off(self) -> bool:
        """Whether the round runs without drafting."""
        return self.num_steps == 0

    @property
    def keeps_draft_warm(self) -> bool:
        """Whether the round extends the draft's KV."""
        return self.kind != NATIVE and self.kind != COLD


def tier_of(name: str | int) -> Tier:
    """Return the tier of one name.

    Args:
        name: A number of draft steps (1 to 7, as ``int`` or ``str``) or a kind of off.

    Raises:
        TierError: If the name is none of these.
    """
    text = str(name).strip()
    if text in OFF_KINDS:
        return Tier(0, text)
    if text.isdecimal() and 1 <= int(text) <= MAX_NUM_STEPS:
        return Tier(int(text), "speculate")
    raise TierError(
        f"unknown tier {text!r}: expected a number of draft steps from 1 to {MAX_NUM_STEPS}, "
        f"or one of {', '.join(OFF_KINDS)}; for SGLang's zero-step tier write 'warm' "
        "(with draft-extend) or 'cold' (without)"
    )


def split_tiers(spec: str | Sequence[str | int]) -> tuple[str, ...]:
    """Split a tier list such as ``"off,1,3"`` into names, without resolving ``off``."""
    parts = spec.split(",") if isinstance(spec, str) else [str(part) for part in spec]
    names = tuple(part.strip() for part in parts if part.strip())
    if not names:
        raise TierError(f"empty tier list {spec!r}: expected for example {DEFAULT_TIERS!r}")
    return names


def resolve_tiers(
    spec: str | Sequence[str | int], available: Collection[str], off: str = "auto"
) -> tuple[Tier, ...]:
    """Resolve a tier list against the tiers that a calibration has.

    Args:
        spec: A comma-separated list or a sequence of tier names; ``off`` is allowed.
        available: Names of the tiers that can be costed.
        off: What ``off`` means: ``"native"``, ``"cold"``, ``"warm"``, or ``"auto"`` for the
            first of ``cold`` and ``native`` that is available.

    Returns:
        The tiers in ascending order: off first, then by draft steps.

    Raises:
        TierError: If a name is unknown, doubled, or not available.
    """
    if off not in ("auto", *OFF_KINDS):
        raise TierError(f"unknown kind of off {off!r}: expected auto, {', '.join(OFF_KINDS)}")
    tiers = []
    for name in split_tiers(spec):
        if name == OFF:
            kinds = (COLD, NATIVE) if off == "auto" else (off,)
            found = [kind for kind in kinds if kind in available]
            if not found:
                raise TierError(
                    f"'off' needs a calibrated tier {' or '.join(kinds)}, but the calibration "
                    f"has only {', '.join(sorted(available))}; record that tier, or name "
                    "another kind of off"
                )
            name = found[0]
        tier = tier_of(name)
        if tier.name not in available:
            raise TierError(
                f"tier {tier.name!r} is not in the calibration, which has "
                f"{', '.join(sorted(available))}; leave it out or record it"
            )
        tiers.append(tier)
    if len(set(tiers)) != len(tiers):
        raise TierError(f"tier list {spec!r} names a tier twice; leave one out")
    return tuple(sorted(tiers, key=lambda tier: (tier.num_steps, tier.kind)))
