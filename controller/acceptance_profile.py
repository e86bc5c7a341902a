"""How well a draft's tokens are accepted: the ``acceptance`` block of a calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.errors import CalibrationError
from controller.tiers import MAX_NUM_STEPS


@dataclass(frozen=True)
class DepthAcceptance:
    """What was measured at one number of draft steps.

    Attributes:
        num_steps: Draft steps.
        accept_len: Mean accept length, bonus included.
        count: Figures behind it: rounds of a trace, lines of a log, rows of a table.
        request_spread: Standard deviation of a request's own accept length around the mean of all;
            None if the source cannot tell it from chance.
        drift_spread: Standard deviation of the accept length of a batch over time while its
            requests stay the same; None likewise.
        drift_time_s: Time after which that drift is forgotten to 1/e; None likewise.
    """

    num_steps: int
    accept_len: float
    count: int
    request_spread: float | None = None
    drift_spread: float | None = None
    drift_time_s: float | None = None

    def __post_init__(self) -> None:
        where = f"acceptance at num_steps {self.num_steps!r:.20}"
        for name, low, high in (("num_steps", 1, MAX_NUM_STEPS), ("count", 1, 2**53)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise CalibrationError(
                    f"{where}: {name}: expected an integer from {low} to {high}, got {value!r:.20}"
                )
        _require(where, "accept_len", self.accept_len, 1.0, self.num_steps + 1.0)
        for name in ("request_spread", "drift_spread", "drift_time_s"):
            value = getattr(self, name)
            if value is not None:
                _require(where, name, value, 0.0, 1e9)


@dataclass(frozen=True)
class AcceptanceProfile:
    """Acceptance of one draft on one kind of work.

    Attributes:
        source: Where it is from: ``"trace"``, ``"log"``, ``"benchmark"``, ``"table"``, joined by
            ``+``, or ``"preset NAME"``.
        simulated: Whether the engine simulated acceptance; then it says nothing about a real draft.
        accept_rate_by_position: ``(deepest num_steps,)`` probability that draft token ``i`` is
            accepted, given that those before it were. May be empty where acceptance was simulated.
        depths: What was measured, ascending by depth.
    """

    source: str
    simulated: bool
    accept_rate_by_position: tuple[float, ...]
    depths: tuple[DepthAcceptance, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept_rate_by_position", tuple(self.accept_rate_by_position))
        object.__setattr__(self, "depths", tuple(self.depths))
        if not isinstance(self.source, str) or not self.source:
            raise CalibrationError(f"acceptance source: expected a text, got {self.source!r:.20}")
        if not isinstance(self.simulated, bool):
            raise CalibrationError(
                f"acceptance simulated: expected true or false, got {self.simulated!r:.20}"
            )
        steps = [depth.num_steps for depth in self.depths]
        if not steps or steps != sorted(set(steps)):
            raise CalibrationError(f"acceptance depths: expected ascending num_steps, got {steps}")
        unknown = self.simulated and not self.accept_rate_by_position
        if len(self.accept_rate_by_position) != steps[-1] and not unknown:
            raise CalibrationError(
                f"acceptance: expected {steps[-1]} accept rates, one a position, got "
                f"{len(self.accept_rate_by_position)}"
            )
        for value in self.accept_rate_by_position:
            _require("acceptance", "accept_rate_by_position", value, 0.0, 1.0)

    def accept_len(self, num_steps: int) -> float:
        """Return the accept length of a depth, bonus included.

        Beyond the deepest measured position its accept rate is taken to go on.

        Example:
            >>> depth = DepthAcceptance(2, 1.75, 1)
            >>> AcceptanceProfile("table", False, (0.5, 0.5), (depth,)).accept_len(3)
            1.875

        Raises:
            CalibrationError: If the profile has no accept rates, because it was simulated.
        """
        if not self.accept_rate_by_position:
            raise CalibrationError(
                "expected accept rates by position, got a simulated acceptance without; calibrate "
                "from a log or trace of real drafts, or give --acceptance PRESET"
            )
        total = share = 1.0
        for position in range(num_steps):
            rates = self.accept_rate_by_position
            share *= rates[min(position, len(rates) - 1)]
            total += share
        return total

    @staticmethod
    def from_json(value: Any, where: str) -> "AcceptanceProfile":
        """Build a profile from parsed JSON.

        Raises:
            CalibrationError: On missing or unknown keys or bad values.
        """
        depths = _keys(value, AcceptanceProfile, where).get("depths")
        if not isinstance(depths, Sequence) or isinstance(depths, str):
            raise CalibrationError(f"{where}: depths: expected a list, got {depths!r:.20}")
        built = tuple(
            DepthAcceptance(**_keys(depth, DepthAcceptance, f"{where}: depths[{i}]"))
            for i, depth in enumerate(depths)
        )
        return AcceptanceProfile(**{**value, "depths": built})


def _keys(value: Any, cls: Any, where: str) -> dict[str, Any]:
    expected = sorted(cls.__dataclass_fields__)
    if not isinstance(value, Mapping) or sorted(value) != expected:
        found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise CalibrationError(f"{where}: expected keys {expected}, got {found}; calibrate again")
    return dict(value)


def _require(where: str, name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low - 1e-9 <= value <= high + 1e-9:
        raise CalibrationError(
            f"{where}: {name}: expected a number from {low:g} to {high:g}, got {value!r:.20}"
        )
