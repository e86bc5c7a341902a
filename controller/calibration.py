"""A calibration: what a round of each tier costs on one system, and where that is known.

The step time of tier ``k`` at batch size ``b`` and ``c`` context tokens (summed over the batch) is

    step_s(k, b, c) = base_k(pad(b)) + slope_k * c

``pad`` rounds up to the next captured CUDA-graph batch size. ``base_k`` is piecewise linear through
the measured batch sizes and does not decrease; below the first it is constant, above the last it
goes on with the steeper of its last segment and its overall secant. The context term is the time to
read the KV cache, which does not depend on how the tokens are spread over requests: on an H200 the
fitted slopes of one tier agree within 3% between batch sizes 8, 32 and 64.

Fitting is in ``training/``; this module reads, checks and evaluates.
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.acceptance_profile import AcceptanceProfile
from controller.errors import CalibrationError
from controller.jsonfile import canonical_text, sha256_of, write_atomically
from controller.regions import EXTRAPOLATED, Region, trust
from controller.tiers import Tier, tier_of

SCHEMA = "specgovernor.calibration"
SCHEMA_VERSION = 1
MAX_VALUE = 1e9
"""Largest number of seconds or ratio that is taken for real."""


@dataclass(frozen=True)
class TierCost:
    """Round times of one tier.

    Attributes:
        tier: Name of the tier: ``"native"``, ``"cold"``, ``"warm"`` or a number of draft steps.
        batch_sizes: Padded batch sizes of the knots, ascending: the measured ones, and what a fit
            adds between or beyond them.
        base_s: Round time at zero context for each of ``batch_sizes``, in seconds, non-decreasing.
        context_s_per_token: Seconds for each context token of the batch, not negative.
        relative_noise: Standard deviation of a round over its prediction, for each batch size.
        max_context_tokens: Most context tokens of a measured row; beyond is extrapolation.
        num_rows: Rows that the fit used.
        median_error: Median relative error on rows held out from the fit; None if none were.
        p95_error: 95th percentile of the same.
        regions: What was measured, cell by cell; files of before 0.2 have none, and then every one
            of ``batch_sizes`` counts as measured up to ``max_context_tokens``.
    """

    tier: str
    batch_sizes: tuple[int, ...]
    base_s: tuple[float, ...]
    context_s_per_token: float
    relative_noise: tuple[float, ...]
    max_context_tokens: int
    num_rows: int
    median_error: float | None = None
    p95_error: float | None = None
    regions: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        where = f"tier {self.tier!r}"
        object.__setattr__(self, "tier", tier_of(self.tier).name)
        for name in ("batch_sizes", "base_s", "relative_noise", "regions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = len(self.batch_sizes)
        if not sizes or sizes != len(self.base_s) or sizes != len(self.relative_noise):
            raise CalibrationError(
                f"{where}: batch_sizes, base_s and relative_noise must have one length of at least "
                f"1, got {sizes}, {len(self.base_s)} and {len(self.relative_noise)}"
            )
        _require_counts(where, self.batch_sizes, minimum=1)
        _require_counts(where, [self.max_context_tokens, self.num_rows], minimum=0)
        errors = [value for value in (self.median_error, self.p95_error) if value is not None]
        _require_finite(where, errors, minimum=0.0)
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)):
            raise CalibrationError(
                f"{where}: batch_sizes must be ascending, got {self.batch_sizes}"
            )
        _require_finite(where, self.base_s, minimum=0.0)
        _require_finite(where, self.relative_noise, minimum=0.0)
        _require_finite(where, [self.context_s_per_token], minimum=0.0)
        if any(b < a for a, b in zip(self.base_s, self.base_s[1:], strict=False)):
            raise CalibrationError(f"{where}: base_s must not decrease with the batch size")
        if self.base_s[0] <= 0.0:
            raise CalibrationError(f"{where}: base_s must be positive, got {self.base_s[0]}")

    @cached_property
    def measured(self) -> tuple[Region, ...]:
        """The regions, or what stands for them in a file without."""
        low, high = (0, self.max_context_tokens) if self.max_context_tokens else (None, None)
        return self.regions or tuple(Region(size, low, high, 1) for size in self.batch_sizes)

    @cached_property
    def measured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes that were measured, ascending; ``batch_sizes`` may have knots besides."""
        return tuple(sorted({region.batch_size for region in self.measured}))

    @cached_property
    def _last_slope_s(self) -> float:
        """Seconds for each further request above the last measured batch size."""
        b, t = self.batch_sizes, self.base_s
        if len(b) == 1:
            return 0.0
        last = (t[-1] - t[-2]) / (b[-1] - b[-2])
        return max(last, (t[-1] - t[0]) / (b[-1] - b[0]))

    def base_at(self, padded_batch_size: int) -> float:
        """Return the round time at zero context, in seconds."""
        over = padded_batch_size - self.batch_sizes[-1]
        if over > 0:
            return self.base_s[-1] + over * self._last_slope_s
        return float(np.interp(padded_batch_size, self.batch_sizes, self.base_s))

    def noise_at(self, padded_batch_size: int) -> float:
        """Return the relative standard deviation of a round."""
        return float(np.interp(padded_batch_size, self.batch_sizes, self.relative_noise))


@dataclass(frozen=True)
class PrefillCost:
    """Time of a prefill batch: ``base_s + s_per_token * new_tokens`` (both not negative)."""

    base_s: float
    s_per_token: float

    def __post_init__(self) -> None:
        _require_finite("prefill", [self.base_s, self.s_per_token], minimum=0.0)


@dataclass(frozen=True)
class StepTimeTable:
    """Round times of some tiers for every batch size, for look-ups on the decision path.

    Attributes:
        base_s: ``(num_tiers, max_batch_size + 1)`` seconds at zero context, graph padding applied.
        context_s_per_token: ``(num_tiers,)``.
        relative_noise: ``(num_tiers, max_batch_size + 1)``.
    """

    base_s: NDArray[np.float64]
    context_s_per_token: NDArray[np.float64]
    relative_noise: NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Costs of one system (GPU, model, backend, engine version).

    Attributes:
        name: Short name, such as ``h200-llama3-8b-eagle3-fa3``.
        costs: One entry a tier.
        prefill_native: Prefill on a server without speculation.
        prefill_speculative: Prefill on a server that also fills the draft's KV.
        cuda_graph_batch_sizes: Captured decode batch sizes, ascending; None for no padding.
        kv_capacity_tokens: Tokens that the KV cache holds; None if unknown.
        chunk_tokens: Most new tokens of a prefill batch; None if unknown.
        assumed_accept_len: Accept length (bonus included) by tier name, for sources that give only
            throughput: they identify accept length over round time, not both.
        source: What it was made from: files with their hashes, hardware, versions, notes.
        acceptance: How well drafts are accepted there; None if no source says.
    """

    name: str
    costs: tuple[TierCost, ...]
    prefill_native: PrefillCost
    prefill_speculative: PrefillCost
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    kv_capacity_tokens: int | None = None
    chunk_tokens: int | None = None
    assumed_accept_len: Mapping[str, float] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    acceptance: AcceptanceProfile | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise CalibrationError(f"calibration name: expected a text, got {self.name!r:.40}")
        for label in ("assumed_accept_len", "source"):
            if not isinstance(getattr(self, label), Mapping):
                raise CalibrationError(f"calibration {self.name!r}: {label} must be an object")
        _require_finite("assumed_accept_len", list(self.assumed_accept_len.values()), minimum=1.0)
        object.__setattr__(self, "costs", tuple(self.costs))
        names = [cost.tier for cost in self.costs]
        if not names or len(set(names)) != len(names):
            raise CalibrationError(
                f"calibration {self.name!r}: expected one cost a tier, got tiers {names}"
            )
        if self.cuda_graph_batch_sizes is not None:
            _require_counts(f"calibration {self.name!r}", self.cuda_graph_batch_sizes, minimum=1)
            sizes = tuple(sorted(set(self.cuda_graph_batch_sizes)))
            if not sizes:
                raise CalibrationError(
                    f"calibration {self.name!r}: cuda_graph_batch_sizes must not be empty; "
                    "give null for no graphs"
                )
            object.__setattr__(self, "cuda_graph_batch_sizes", sizes)
        for label in ("kv_capacity_tokens", "chunk_tokens"):
            value = getattr(self, label)
            if value is not None:
                _require_counts(f"calibration {self.name!r}: {label}", [value], minimum=1)

    @cached_property
    def _by_name(self) -> dict[str, TierCost]:
        return {cost.tier: cost for cost in self.costs}

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers that have a cost."""
        return tuple(self._by_name)

    def cost(self, tier: Tier | str | int) -> TierCost:
        """Return the cost of a tier.

        Raises:
            CalibrationError: If the calibration does not have it.
        """
        name = tier.name if isinstance(tier, Tier) else str(tier)
        if name not in self._by_name:
            raise CalibrationError(
                f"calibration {self.name!r} has no tier {name!r}, only "
                f"{', '.join(self._by_name)}; record that tier or leave it out"
            )
        return self._by_name[name]

    def padded(self, batch_size: int) -> int:
        """Return the batch size that the engine runs: the next captured one, or the size itself."""
        sizes = self.cuda_graph_batch_sizes
        if sizes is None or batch_size > sizes[-1]:
            return batch_size
        return sizes[bisect.bisect_left(sizes, batch_size)]

    def step_s(self, tier: Tier | str | int, batch_size: int, context_tokens: int) -> float:
        """Return the predicted round time in seconds.

        Args:
            tier: The tier of the round.
            batch_size: Running requests, at least 1.
            context_tokens: Context tokens summed over the batch.
        """
        cost = self.cost(tier)
        return cost.base_at(self.padded(batch_size)) + cost.context_s_per_token * context_tokens

    def trust(self, tier: Tier | str | int, batch_size: int, context_tokens: int) -> str:
        """Grade a prediction: ``"measured"``, ``"interpolated"`` or ``"extrapolated"``.

        See :func:`controller.regions.trust`; a calibration without a context axis, such as one from
        a throughput table, is graded by batch size alone.
        """
        cost = self.cost(tier)
        return trust(
            cost.measured, self.padded(batch_size), context_tokens, cost.max_context_tokens
        )

    def extrapolation(
        self, tier: Tier | str | int, batch_size: int, context_tokens: int
    ) -> str | None:
        """Say why a prediction leaves the measured range, or return None if it does not."""
        if self.trust(tier, batch_size, context_tokens) != EXTRAPOLATED:
            return None
        cost = self.cost(tier)
        padded = self.padded(batch_size)
        sizes = [region.batch_size for region in cost.measured]
        if not min(sizes) <= padded <= max(sizes):
            return (
                f"tier {cost.tier}: batch size {padded} is outside the measured {min(sizes)} to "
                f"{max(sizes)}"
            )
        return (
            f"tier {cost.tier}: {context_tokens} context tokens are more than the measured "
            f"{cost.max_context_tokens}"
        )

    def table(self, tiers: Sequence[Tier], max_batch_size: int) -> StepTimeTable:
        """Tabulate the costs of ``tiers`` for batch sizes 0 (a copy of 1) to ``max_batch_size``."""
        costs = [self.cost(tier) for tier in tiers]
        padded = [self.padded(max(b, 1)) for b in range(max_batch_size + 1)]
        return StepTimeTable(
            base_s=np.array([[cost.base_at(p) for p in padded] for cost in costs]),
            context_s_per_token=np.array([cost.context_s_per_token for cost in costs]),
            relative_noise=np.array([[cost.noise_at(p) for p in padded] for cost in costs]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file's content as plain values."""
        value = _plain(asdict(self))
        # Left out where there is nothing, so that a file of before them keeps its hash.
        if self.acceptance is None:
            del value["acceptance"]
        for cost in value["costs"]:
            if not cost["regions"]:
                del cost["regions"]
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **value}

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical text."""
        return sha256_of(canonical_text(self.to_json()))

    def save(self, path: str | Path) -> None:
        """Write the calibration as canonical JSON."""
        write_atomically(Path(path), canonical_text(self.to_json()))

    @staticmethod
    def from_json(value: Any, where: str = "calibration") -> "Calibration":
        """Build a calibration from parsed JSON.

        Args:
            value: What :meth:`to_json` returns.
            where: Named in errors.

        Raises:
            CalibrationError: On another schema or version, missing or unknown keys, or bad values.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            found = value.get("schema") if isinstance(value, dict) else type(value).__name__
            raise CalibrationError(
                f"{where}: expected schema {SCHEMA!r}, got {found!r}; "
                "make one with `python -m training.calibrate`"
            )
        if value.get("schema_version") != SCHEMA_VERSION:
            raise CalibrationError(
                f"{where}: expected schema_version {SCHEMA_VERSION}, got "
                f"{value.get('schema_version')!r}; calibrate again with this version"
            )
        body = {k: v for k, v in value.items() if k not in ("schema", "schema_version")}
        try:
            body["costs"] = tuple(
                _build_cost(cost, f"{where}: costs[{i}]")
                for i, cost in enumerate(body.get("costs", ()))
            )
            if "acceptance" in body:
                body["acceptance"] = AcceptanceProfile.from_json(
                    body["acceptance"], f"{where}: acceptance"
                )
            for name in ("prefill_native", "prefill_speculative"):
                body[name] = _build(PrefillCost, body.get(name), f"{where}: {name}")
            built: Calibration = _build(Calibration, body, where)
        except CalibrationError as error:
            if where in str(error):
                raise
            raise CalibrationError(f"{where}: {error}") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CalibrationError(
                f"{where}: a value has the wrong type ({error}); calibrate again"
            ) from error
        return built

    @staticmethod
    def load(path: str | Path) -> "Calibration":
        """Read a calibration file.

        Raises:
            CalibrationError: If the file cannot be read or breaks the schema.
        """
        path = Path(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except OSError as error:
            raise CalibrationError(
                f"{path}: cannot be read ({error.strerror}); give a file that "
                "`python -m training.calibrate` wrote"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CalibrationError(
                f"{path}: expected JSON, got something else ({error}); calibrate again"
            ) from error
        return Calibration.from_json(value, str(path))


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not a number")


def _plain(value: Any) -> Any:
    """Turn tuples into lists, so that a value equals what reading its JSON gives."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _build_cost(value: Any, where: str) -> Any:
    if isinstance(value, dict) and "regions" in value:
        regions = value["regions"]
        built = [_build(Region, item, f"{where}: regions[{i}]") for i, item in enumerate(regions)]
        value = {**value, "regions": tuple(built)}
    return _build(TierCost, value, where)


def _build(cls: Any, value: Any, where: str) -> Any:
    """Call a dataclass with the keys of ``value``, naming those that are missing or unknown."""
    if not isinstance(value, dict):
        raise CalibrationError(f"{where}: expected an object, got {type(value).__name__}")
    known = {item.name for item in fields(cls)}
    unknown = sorted(set(value) - known)
    missing = sorted(known - set(value) - {"regions", "acceptance"})
    if unknown or missing:
        raise CalibrationError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; expected {sorted(known)}"
        )
    return cls(**value)


def _require_finite(where: str, values: Sequence[float], minimum: float) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CalibrationError(f"{where}: expected a number, got {value!r}; calibrate again")
        if not minimum <= value <= MAX_VALUE:
            raise CalibrationError(
                f"{where}: expected a number from {minimum} to {MAX_VALUE:g}, got {value!r:.20}; "
                "calibrate again"
            )


def _require_counts(where: str, values: Sequence[int], minimum: int) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise CalibrationError(f"{where}: expected an integer, got {value!r}; calibrate again")
        if not minimum <= value <= 2**53:
            shown = str(value) if abs(value) <= 2**53 else "a larger one"
            raise CalibrationError(
                f"{where}: expected an integer from {minimum} to 2**53, got {shown}; "
                "calibrate again"
            )
