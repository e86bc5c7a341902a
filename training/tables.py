"""Costs and acceptance from a table of closed-loop throughput.

With a fixed number of requests in flight every round advances ``batch`` requests by the accept
length, so ``step_s = accept_len * batch / throughput``; where a row gives no throughput but a time
per output token, ``step_s = accept_len * tpot``. Only accept length over round time is identified:
where the table gives no accept length one is assumed and recorded. Throughput includes prefill, so
the fitted prefill cost and noise are zero.

CSV columns, in any order, others ignored; :mod:`training.columns` knows their other names:

``num_steps``
    ``off`` (no speculation), ``on`` (speculation of a depth that the table does not say), a number
    of draft steps, or ``warm`` / ``cold`` for SGLang's two kinds of zero-step tier. ``0`` may mean
    any of the three kinds of off: it is told, or read as ``off`` where ``config`` says so. Rows of
    a depth that changes (``adaptive``) are left out.
``concurrency``
    Requests in flight, at least 1; rows without give their accept length only.
``throughput_tok_s``, ``per_request_tok_s``, ``tpot_ms`` or ``tpot_s``
    Output tokens a second of the whole server, or of one request; time per output token.
``accept_len`` (optional, may be empty)
    Accept length, bonus token included.
``accept_by_position`` (optional)
    Chances that each draft token is reached and accepted, separated by spaces.
``context_tokens`` (optional)
    Mean context of a request.
``hardware``, ``model``, ``config`` (optional)
    The system: one value a table, one ``config`` a tier.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.acceptance_profile import DepthAcceptance
from controller.errors import CalibrationError, TierError
from controller.tiers import MAX_NUM_STEPS, NATIVE, OFF, tier_of
from training.columns import map_columns
from training.options import (
    DEFAULT_ACCEPT_RATE,
    DEFAULT_NUM_STEPS,
    SPECULATIVE_MAX_RUNNING,
    TableOptions,
    expected_accept_len,
)
from training.points import Point, check_concurrency, check_step
from training.textfile import TextFile

__all__ = [
    "DEFAULT_ACCEPT_RATE",
    "DEFAULT_NUM_STEPS",
    "SPECULATIVE_MAX_RUNNING",
    "Table",
    "TableOptions",
    "expected_accept_len",
    "read_table",
]

CHANGING = ("adaptive", "auto", "autospec", "dynamic", "threshold")
NO_SPECULATION = re.compile(r"\b(no[ _-]?spec\w*|without spec\w*|baseline|vanilla|off)\b", re.I)
DECODING_SHARE = (0.05, 1.5)
"""Plausible ``throughput * TPOT / concurrency``: the share of requests that are decoding."""


@dataclass(frozen=True)
class Table:
    """A table's round times and acceptance, and what it says of the system.

    Attributes:
        path: The file.
        sha256: Hash of its decompressed content.
        points: Round times.
        depths: Acceptance by depth, where the table gives it.
        accept_by_position: Chance that each draft token is reached and accepted; may be empty.
        left_out: Rows without a round time, by reason.
        hardware: From a ``hardware`` column; None if absent.
        model: The same from ``model``.
    """

    path: Path
    sha256: str
    points: tuple[Point, ...]
    depths: tuple[DepthAcceptance, ...]
    accept_by_position: tuple[float, ...]
    left_out: Mapping[str, int]
    hardware: str | None
    model: str | None


def read_table(path: Path, options: TableOptions | None = None) -> Table:
    """Read a throughput table.

    Raises:
        CalibrationError: If columns are missing or a value makes no sense; names the line.
    """
    options = options or TableOptions()
    file = TextFile(path)
    reader = _Rows(path, options)
    try:
        rows = csv.DictReader(_texts(file), strict=True)
        mapping = map_columns(path, [str(name) for name in rows.fieldnames or ()], options.columns)
        reader.check_filters(rows.fieldnames or ())
        count = 0
        for row in rows:
            count += 1
            if None in row:
                raise CalibrationError(
                    f"{path}:{rows.line_num}: expected {len(rows.fieldnames or ())} fields as in "
                    f"the first line, got {len(row[None]) + len(row) - 1}; quote a field that has "
                    "a comma, and write numbers without one"
                )
            named = {name: (row.get(column) or "").strip() for name, column in mapping.items()}
            if reader.selects(row):
                reader.take(f"{path}:{rows.line_num}", named)
    except csv.Error as error:
        raise CalibrationError(f"{path}: expected a CSV in UTF-8, got {error}") from error
    if not count:
        raise CalibrationError(f"{path}: expected rows below the column names, got none")
    return reader.finish(str(file.sha256))


def _texts(file: TextFile) -> Iterator[str]:
    for number, line in file.lines():
        yield (line.removeprefix("\ufeff") if number == 1 else line) + "\n"


class _Rows:
    def __init__(self, path: Path, options: TableOptions) -> None:
        self.path = path
        self.options = options
        self.points: list[Point] = []
        self.left_out: Counter[str] = Counter()
        self.accept_by_position: tuple[float, ...] = ()
        self._lengths: dict[int, list[float]] = {}
        self._systems: dict[str, dict[str, str]] = {"hardware": {}, "model": {}}
        self._configs: dict[str, dict[str, str]] = {}

    def check_filters(self, columns: object) -> None:
        names = [str(name) for name in columns]  # type: ignore[attr-defined]
        for column, text in self.options.where:
            if column not in names:
                raise CalibrationError(
                    f"{self.path}: --where {column}={text}: expected one of the columns "
                    f"{', '.join(names)[:200]}"
                )

    def selects(self, row: Mapping[str, str | None]) -> bool:
        return all(
            text.lower() in (row.get(column) or "").lower() for column, text in self.options.where
        )

    def take(self, where: str, row: Mapping[str, str]) -> None:
        tier = self._tier(where, row)
        if tier is None:
            return
        for name, seen in self._systems.items():
            if row.get(name):
                seen.setdefault(row[name], where)
        accept_len, assumed = self._accept_len(where, row, tier)
        if not assumed and tier_of(tier).num_steps:
            self._lengths.setdefault(tier_of(tier).num_steps, []).append(accept_len)
        point = self._point(where, row, tier, accept_len, assumed)
        if isinstance(point, Point):
            self.points.append(point)
        else:
            self.left_out[point] += 1
        if row.get("config") and (isinstance(point, Point) or not assumed):
            self._configs.setdefault(tier, {}).setdefault(row["config"], where)

    def finish(self, sha256: str) -> Table:
        for label, seen in [*self._systems.items(), *self._configs.items()]:
            if len(seen) > 1:
                column = label if label in self._systems else "config"
                (a, _), (b, at) = list(seen.items())[:2]
                of = "" if column == label else f" for tier {label}"
                raise CalibrationError(
                    f"{at}: {column} is {b[:60]!r} but {a[:60]!r} before{of}; calibrate each "
                    f"system on "
                    f"its own, with --where {column}=TEXT"
                )
        if not self.points and not self._lengths:
            shown = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            raise CalibrationError(
                f"{self.path}: expected rows with a round time or an accept length, got none "
                f"({shown or 'no row that --where selects'}); correct the table or the options"
            )
        depths = tuple(
            DepthAcceptance(steps, float(f"{sum(found) / len(found):.4g}"), len(found))
            for steps, found in sorted(self._lengths.items())
        )
        systems = {name: next(iter(seen), None) for name, seen in self._systems.items()}
        return Table(
            path=self.path,
            sha256=sha256,
            points=tuple(self.points),
            depths=depths,
            accept_by_position=self.accept_by_position,
            left_out=dict(self.left_out),
            hardware=systems["hardware"],
            model=systems["model"],
        )

    def _tier(self, where: str, row: Mapping[str, str]) -> str | None:
        """Return a row's tier, or None if it is left out."""
        text = row["num_steps"].lower()
        told = self.options.depth(self.path)
        name = text
        if text in CHANGING:
            self.left_out["of a changing depth (column num_steps)"] += 1
            return None
        if text == OFF or (text in ("", "on") and told == 0):
            name = NATIVE
        elif text == "on" or (text == "" and told):
            name = str(told or DEFAULT_NUM_STEPS)
        elif text == "0":
            kind = self.options.zero_steps
            if kind is None and NO_SPECULATION.search(row.get("config", "")):
                kind = NATIVE
            if kind is None:
                raise CalibrationError(
                    f"{where}: column num_steps: expected off, warm or cold, got '0', which may "
                    f"mean "
                    "any of them; give --zero-steps"
                )
            name = kind
        elif text.isdecimal() and int(text) > MAX_NUM_STEPS:
            self.left_out[f"deeper than {MAX_NUM_STEPS} (column num_steps)"] += 1
            return None
        try:
            return tier_of(name).name
        except TierError as error:
            raise CalibrationError(
                f"{where}: column num_steps: expected off, on, a number of draft steps from 1 to "
                f"{MAX_NUM_STEPS}, warm or cold, got {text[:40] or 'nothing'!r}; remove the row, "
                "correct it, or give --num-steps"
            ) from error

    def _accept_len(self, where: str, row: Mapping[str, str], tier: str) -> tuple[float, bool]:
        """Return the accept length of a row, and whether it is assumed."""
        num_steps = tier_of(tier).num_steps
        given = row.get("accept_len", "")
        positions = row.get("accept_by_position", "").split()
        if positions and num_steps:
            shares = tuple(_positive(where, "accept_by_position", text) for text in positions)
            falling = all(a >= b for a, b in zip((1.0, *shares), shares, strict=False))
            if len(shares) != num_steps or not falling:
                raise CalibrationError(
                    f"{where}: column accept_by_position: expected {num_steps} falling chances up "
                    f"to 1, got {' '.join(positions)[:60]}"
                )
            if len(shares) > len(self.accept_by_position):
                self.accept_by_position = shares
            given = given or str(1.0 + sum(shares))
        if given:
            accept_len = _positive(where, "accept_len", given)
        elif not num_steps:
            accept_len = 1.0
        elif self.options.accept_len is None:
            accept_len = expected_accept_len(num_steps)
        else:
            accept_len = self.options.accept_len
        if not 1.0 <= accept_len <= num_steps + 1:
            raise CalibrationError(
                f"{where}: accept length: expected 1 to {num_steps + 1} for tier {tier} (bonus "
                f"token included), got {accept_len:g}; correct the table or --accept-len"
            )
        return accept_len, bool(num_steps) and not given

    def _point(
        self, where: str, row: Mapping[str, str], tier: str, accept_len: float, assumed: bool
    ) -> Point | str:
        """Return a row's round time, or why it has none."""
        if not row["concurrency"]:
            return "without a concurrency"
        concurrency = _positive(where, "concurrency", row["concurrency"])
        check_concurrency(where, concurrency)
        if concurrency != int(concurrency):
            raise CalibrationError(
                f"{where}: column concurrency: expected an integer, got {concurrency}; check that "
                "the columns are not swapped"
            )
        throughput = _optional(where, "throughput_tok_s", row)
        each = _optional(where, "per_request_tok_s", row)
        tpot_ms, tpot_s = _optional(where, "tpot_ms", row), _optional(where, "tpot_s", row)
        if tpot_s is None and tpot_ms is not None:
            tpot_s = tpot_ms / 1000.0
        if throughput is None and each is not None:
            throughput = each * concurrency
        limit = math.inf if tier == NATIVE else self.options.speculative_max_running
        batch_size = int(min(concurrency, limit))
        if throughput is not None:
            what = f"concurrency {concurrency:g} at {throughput:g} tokens/s"
            step_s = accept_len * batch_size / throughput
            _check_share(where, throughput, tpot_s, concurrency)
        elif tpot_s is not None:
            what, step_s = f"a time per output token of {tpot_s:g} s", accept_len * tpot_s
        elif row.get("accept_len") or row.get("accept_by_position"):
            return "with an accept length only"
        else:
            _positive(where, "throughput_tok_s", row.get("throughput_tok_s"))
            raise AssertionError("unreachable: an empty figure is no number")
        context = _optional(where, "context_tokens", row)
        return Point(
            where=where,
            kind="table",
            tier=tier,
            concurrency=int(concurrency),
            batch_size=batch_size,
            context_tokens=None if context is None else round(context * batch_size),
            step_s=check_step(where, step_s, what),
            accept_len=accept_len,
            assumed=assumed,
            throughput=throughput,
        )


def _check_share(where: str, throughput: float, tpot_s: float | None, concurrency: float) -> None:
    if tpot_s is None:
        return
    share = throughput * tpot_s / concurrency
    if not DECODING_SHARE[0] <= share <= DECODING_SHARE[1]:
        raise CalibrationError(
            f"{where}: expected throughput, concurrency and time per output token to agree, but "
            f"{throughput:g} tokens/s times {tpot_s:g} s is {share:.3g} of {concurrency:g} "
            f"requests; "
            "check the units (ms against s) and that the columns are not swapped"
        )


def _optional(where: str, column: str, row: Mapping[str, str]) -> float | None:
    return _positive(where, column, row[column]) if row.get(column) else None


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
