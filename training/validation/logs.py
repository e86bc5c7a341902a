"""Server logs, calibrated alone, against the step trace that was recorded in the same run.

A log and a trace belong together if their names up to the first suffix are equal
(``logs/NAME.log``, ``traces/NAME.jsonl.gz``), or if a line of ``logs/pairs.csv`` (columns ``log``,
``trace``) says so. The trace tells the depth. A log says how long a round takes only where two
consecutive ``Decode batch`` lines have one batch size and no prefill between (see
:mod:`training.log_rounds`); cells of the trace without such lines are listed as unidentifiable.

A trace of several depths makes a mixed log: it must be refused, since nothing in it tells which
round ran which depth.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.errors import CalibrationError
from controller.tiers import tier_of
from controller.trace import read_trace
from training.fit import tier_order
from training.log_rounds import read_log
from training.points import Point, fit_points
from training.samples import LEVEL_GAP, collect
from training.textfile import unreadable
from training.validation.bounds import LOG_WORST, Check
from training.validation.measured import MeasuredCell, measure_cells
from training.validation.traces import traces_by_stem

PAIRS = "pairs.csv"


@dataclass(frozen=True)
class LogCell(MeasuredCell):
    """A cell of the trace, and what the log says of it.

    Attributes:
        lines: Decode lines of the log that tell a round time there.
        from_log: Output tokens a second by the calibration from the log; None if unidentifiable.
    """

    lines: int
    from_log: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the log's figure, with sign; None if unidentifiable."""
        return None if self.from_log is None else self.from_log / self.throughput - 1.0


@dataclass(frozen=True)
class LogResult:
    """A log against its trace.

    Attributes:
        log: File name of the log.
        trace: File name of the trace.
        tiers: Tiers that the trace shows.
        refused: Why the log was not used; None if it was.
        cells: Every cell of the trace; empty if the log was refused.
    """

    log: str
    trace: str
    tiers: tuple[str, ...]
    refused: str | None
    cells: tuple[LogCell, ...]

    @property
    def right(self) -> bool:
        """Whether the log was used exactly if it holds a single depth."""
        return (self.refused is None) == (len(self.tiers) == 1)


def find_pairs(data: Path) -> tuple[tuple[Path, Path], ...]:
    """Return log and trace of every run that has both.

    Raises:
        CalibrationError: If ``pairs.csv`` is no such table, or names a file that is not there.
    """
    logs = {path.name: path for path in sorted((data / "logs").glob("*.log*"))}
    stems = traces_by_stem(data / "traces")
    pairs = {
        path: stems[name.split(".log")[0]]
        for name, path in logs.items()
        if name.split(".log")[0] in stems
    }
    listed = data / "logs" / PAIRS
    if listed.exists():
        for log, trace in _read_pairs(listed):
            path = data / "traces" / trace
            if log not in logs or path.name != trace or "\0" in trace or not path.is_file():
                raise CalibrationError(
                    f"{listed}: expected names of files in logs/ and traces/, got {log!r:.60} and "
                    f"{trace!r:.60}; correct the line or add the file"
                )
            pairs[logs[log]] = path
    return tuple(sorted(pairs.items()))


def _read_pairs(listed: Path) -> list[tuple[str, str]]:
    try:
        with open(listed, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise CalibrationError(f"{listed}: expected a CSV in UTF-8, got {error}") from error
    except OSError as error:
        raise unreadable(listed, error) from error
    rows = [row for row in rows if row]
    header = rows[0] if rows else []
    if sorted(header) != ["log", "trace"]:
        raise CalibrationError(
            f"{listed}: expected the columns log and trace, got {', '.join(header)[:60]!r}"
        )
    wrong = next((row for row in rows if len(row) != len(header)), None)
    if wrong is not None:
        raise CalibrationError(
            f"{listed}: expected a log and a trace a line, got {', '.join(wrong)[:60]!r}"
        )
    at = header.index("log")
    return [(row[at], row[1 - at]) for row in rows[1:]]


def compare_log(log: Path, trace_path: Path) -> LogResult:
    """Calibrate from a log alone and compare with the trace of its run.

    Raises:
        TraceError: If the trace breaks the schema.
        CalibrationError: If the trace has no usable round.
    """
    trace = read_trace(trace_path)
    pairs = [(trace.header, trace.rows)]
    samples, _ = collect(pairs, lambda size: size)
    if not samples:
        raise CalibrationError(f"{trace_path}: expected steady decode, got none; record again")
    tiers = tuple(sorted(samples, key=tier_order))
    depth = tier_of(tiers[0]).num_steps if len(tiers) == 1 else None
    try:
        points = read_log(log, depth).points
        cost = fit_points(points)[0]
    except CalibrationError as error:
        reason = str(error).replace(f"{log.parent}/", "")
        return LogResult(log.name, trace_path.name, tiers, reason, ())
    cells = []
    for cell in measure_cells(pairs, samples):
        here = [point for point in points if _matches(point, cell)]
        from_log = None
        if here:
            accept_len = float(np.mean([point.accept_len for point in here]))
            context = 0.5 * sum(cell.context_tokens)
            step_s = cost.base_at(cell.batch_size) + cost.context_s_per_token * context
            from_log = accept_len * cell.batch_size / step_s
        cells.append(LogCell(**vars(cell), lines=len(here), from_log=from_log))
    return LogResult(log.name, trace_path.name, tiers, None, tuple(cells))


def check_logs(results: Sequence[LogResult]) -> tuple[Check, Check]:
    """Judge the identifiable cells, and which logs were refused."""
    errors = [abs(c.error) for result in results for c in result.cells if c.error is not None]
    worst = max(errors, default=float("nan"))
    wrong = sum(not result.right for result in results)
    return (
        Check("log throughput against the run's own trace, worst error", worst, LOG_WORST),
        Check("share of logs refused or used wrongly", wrong / max(len(results), 1), 0.0),
    )


def _matches(point: Point, cell: MeasuredCell) -> bool:
    """Tell whether a log's figure belongs to a cell: levels are ``LEVEL_GAP`` apart."""
    if point.batch_size != cell.batch_size or point.context_tokens is None:
        return False
    low, high = cell.context_tokens
    return low / LEVEL_GAP**0.5 <= point.context_tokens <= high * LEVEL_GAP**0.5
