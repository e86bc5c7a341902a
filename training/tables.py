"""Costs from a table of closed-loop throughput, for systems that no step trace exists of.

With a fixed number of requests in flight every round advances ``batch`` requests by the accept
length, so ``step_s = accept_len * batch / throughput``. Only accept length over round time is
identified: where the table gives no accept length one is assumed and recorded. A table has no
context axis and its throughput includes prefill, so the fitted context slope, prefill cost and
noise are zero.

CSV columns, in any order, others ignored:

``num_steps``
    ``off`` (no speculation), ``on`` (speculation of a depth that the table does not say), a number
    of draft steps, or ``warm`` / ``cold`` for SGLang's two kinds of zero-step tier.
``concurrency``
    Requests in flight, at least 1.
``throughput_tok_s``
    Output tokens a second of the whole server.
``accept_len`` (optional, may be empty)
    Accept length, bonus token included.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.calibration import TierCost
from controller.errors import CalibrationError, TierError
from controller.tiers import NATIVE, tier_of
from training.batch_curve import curve, knots
from training.fit import tier_order
from training.isotonic import pool_adjacent_violators, project_monotone

COLUMNS = ("num_steps", "concurrency", "throughput_tok_s")
DEFAULT_NUM_STEPS = 3
DEFAULT_ACCEPT_RATE = 0.7
SPECULATIVE_MAX_RUNNING = 48
"""Running requests that SGLang allows with speculation unless told otherwise."""

MIN_STEP_S = 1e-4
MAX_STEP_S = 10.0
"""Rounds outside these are taken for a table in other units or with swapped columns."""


@dataclass(frozen=True)
class TableRow:
    """One usable row.

    Attributes:
        line: Its line in the file.
        tier: Tier name.
        concurrency: Requests in flight.
        batch_size: Requests that run at once.
        throughput: Output tokens a second.
        accept_len: Accept length, bonus included.
        assumed: Whether the accept length is assumed.
    """

    line: int
    tier: str
    concurrency: int
    batch_size: int
    throughput: float
    accept_len: float
    assumed: bool

    @property
    def step_s(self) -> float:
        """Seconds a round by the closed-loop identity."""
        return self.accept_len * self.batch_size / self.throughput


@dataclass(frozen=True)
class Table:
    """A table's rows and what its optional columns say of the system.

    Attributes:
        path: The file.
        rows: Every row.
        hardware: From a ``hardware`` column; None if absent or mixed.
        model: The same from ``model``.
    """

    path: Path
    rows: tuple[TableRow, ...]
    hardware: str | None
    model: str | None


@dataclass(frozen=True)
class TableOptions:
    """What a table does not say.

    Attributes:
        num_steps: Depth of rows whose ``num_steps`` is ``on``.
        accept_len: Accept length of speculative rows that give none; None for independent
            acceptance of ``DEFAULT_ACCEPT_RATE`` a draft token.
        speculative_max_running: Most running requests with speculation.
    """

    num_steps: int = DEFAULT_NUM_STEPS
    accept_len: float | None = None
    speculative_max_running: int = SPECULATIVE_MAX_RUNNING


def expected_accept_len(num_steps: int, accept_rate: float = DEFAULT_ACCEPT_RATE) -> float:
    """Return ``1 + p + ... + p**num_steps``, the accept length of a chain of drafts.

    Example:
        >>> round(expected_accept_len(3), 3)
        2.533
    """
    return sum(accept_rate**i for i in range(num_steps + 1))


def read_table(path: Path, options: TableOptions | None = None) -> Table:
    """Read a throughput table.

    Raises:
        CalibrationError: If columns are missing or a value makes no sense; names the line.
    """
    options = options or TableOptions()
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            columns = [str(name) for name in reader.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in columns]
            if missing:
                raise CalibrationError(
                    f"{path}: expected a CSV with columns {', '.join(COLUMNS)}, got "
                    f"{', '.join(columns)[:120] or 'an empty file'}; add {', '.join(missing)}"
                )
            numbered = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror}); give a CSV file"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path}: expected a CSV in UTF-8, got {error}") from error
    if not numbered:
        raise CalibrationError(f"{path}: expected rows below the column names, got none")
    rows = tuple(_row(path, line, row, options) for line, row in numbered)
    return Table(
        path,
        rows,
        _single(row.get("hardware") for _, row in numbered),
        _single(row.get("model") for _, row in numbered),
    )


def _single(values: Iterable[str | None]) -> str | None:
    found = {value for value in values if value}
    return found.pop() if len(found) == 1 else None


def fit_table(table: Table) -> tuple[TierCost, ...]:
    """Return the cost of every tier of a table; rows at one batch size are averaged."""
    names = sorted({row.tier for row in table.rows}, key=tier_order)
    sizes = sorted({row.batch_size for row in table.rows})
    values = np.full((len(names), len(sizes)), np.nan)
    for i, name in enumerate(names):
        for j, size in enumerate(sizes):
            steps = [r.step_s for r in table.rows if r.tier == name and r.batch_size == size]
            if steps:
                values[i, j] = np.mean(steps)
    weights = np.nan_to_num(values, nan=1.0) ** -2.0
    ordered = [i for i, name in enumerate(names) if name != NATIVE]
    if ordered:
        values[ordered] = project_monotone(values[ordered], weights[ordered])
    if NATIVE in names:
        native = names.index(NATIVE)
        here = ~np.isnan(values[native])
        values[native, here] = pool_adjacent_violators(values[native, here], weights[native, here])
    costs = []
    for i, name in enumerate(names):
        here = ~np.isnan(values[i])
        measured = np.array(sizes, np.float64)[here]
        at = knots(measured)
        base_s = curve(measured, values[i, here], at.astype(np.float64))
        costs.append(
            TierCost(
                tier=name,
                batch_sizes=tuple(at.tolist()),
                base_s=tuple(float(f"{value:.7g}") for value in base_s),
                context_s_per_token=0.0,
                relative_noise=(0.0,) * len(at),
                max_context_tokens=0,
                num_rows=sum(row.tier == name for row in table.rows),
            )
        )
    return tuple(costs)


def assumed_accept_len(table: Table) -> dict[str, float]:
    """Return the assumed accept length by tier name.

    Raises:
        CalibrationError: If a tier has rows both with and without an accept length.
    """
    result = {}
    for name in sorted({row.tier for row in table.rows if row.assumed}, key=tier_order):
        rows = [row for row in table.rows if row.tier == name]
        if not all(row.assumed for row in rows):
            line = next(row.line for row in rows if row.assumed)
            raise CalibrationError(
                f"{table.path}:{line}: expected an accept_len as in the other rows of tier {name}, "
                "got none; fill it in, or empty the whole column"
            )
        result[name] = rows[0].accept_len
    return result


def _row(path: Path, line: int, row: Mapping[str, str | None], options: TableOptions) -> TableRow:
    where = f"{path}:{line}"
    tier = _tier(where, row.get("num_steps") or "", options)
    concurrency = _positive(where, "concurrency", row.get("concurrency"))
    if concurrency != int(concurrency):
        raise CalibrationError(
            f"{where}: column concurrency: expected an integer, got {concurrency}; check that the "
            "columns are not swapped"
        )
    throughput = _positive(where, "throughput_tok_s", row.get("throughput_tok_s"))
    given = (row.get("accept_len") or "").strip()
    num_steps = tier_of(tier).num_steps
    if given:
        accept_len = _positive(where, "accept_len", given)
    elif not num_steps:
        accept_len = 1.0
    else:
        accept_len = (
            expected_accept_len(num_steps) if options.accept_len is None else options.accept_len
        )
    if not 1.0 <= accept_len <= num_steps + 1:
        raise CalibrationError(
            f"{where}: accept length: expected 1 to {num_steps + 1} for tier {tier} (bonus token "
            f"included), got {accept_len:g}; correct the table or --accept-len"
        )
    limit = math.inf if tier == NATIVE else options.speculative_max_running
    result = TableRow(
        line=line,
        tier=tier,
        concurrency=int(concurrency),
        batch_size=int(min(concurrency, limit)),
        throughput=throughput,
        accept_len=accept_len,
        assumed=bool(num_steps) and not given,
    )
    if not MIN_STEP_S <= result.step_s <= MAX_STEP_S:
        raise CalibrationError(
            f"{where}: expected rounds of {MIN_STEP_S} to {MAX_STEP_S:g} seconds, but concurrency "
            f"{concurrency:g} at {throughput:g} tokens/s gives {result.step_s:g}; check that the "
            "columns are not swapped"
        )
    return result


def _tier(where: str, text: str, options: TableOptions) -> str:
    text = text.strip().lower()
    name = {"off": NATIVE, "on": str(options.num_steps)}.get(text, text)
    try:
        return tier_of(name).name
    except TierError as error:
        raise CalibrationError(
            f"{where}: column num_steps: expected off, on, a number of draft steps from 1 to 7, "
            f"warm or cold, got {text[:40]!r}; remove the row or correct it"
        ) from error


def _positive(where: str, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1e12:
        raise CalibrationError(
            f"{where}: column {column}: expected a finite number above 0, got "
            f"{(text or 'nothing')[:40]!r}; check that the columns are not swapped"
        )
    return value
