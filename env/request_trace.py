"""Recorded arrivals, in the formats that they are published in.

``azure``
    CSV of the Azure LLM inference traces: ``TIMESTAMP`` (a date and time), ``ContextTokens``,
    ``GeneratedTokens``.
``mooncake``
    JSON Lines of Mooncake: ``timestamp`` in milliseconds, ``input_length``, ``output_length``. The
    ``hash_ids`` of prefix blocks are not used: the simulator has no prefix cache.
``burstgpt``
    CSV of BurstGPT: ``Timestamp`` in seconds, ``Model``, ``Request tokens``, ``Response tokens``,
    ``Total tokens``, ``Log Type``; in later releases also ``Session ID`` and ``Elapsed time``. Rows
    without response tokens are failed requests and left out.

A file may be compressed with gzip. Rows are in order of arrival; the first arrives at 0 s.
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from controller.errors import TraceError

MAX_TOKENS = 10_000_000
"""No request is longer: a larger count is a broken file."""

Row = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, output tokens."""


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Requests that were recorded, in order of arrival.

    Attributes:
        name: Shown in tables.
        arrival_s: ``(num_requests,)`` from 0, never falling.
        prompt_tokens: ``(num_requests,)``, at least 1.
        output_tokens: ``(num_requests,)``, at least 1.
        num_failed: Requests of the file that were left out, since they failed.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    num_failed: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def mean_rate(self) -> float:
        """Requests a second, over the time from the first to the last arrival."""
        span_s = float(self.arrival_s[-1])
        return (len(self) - 1) / span_s if span_s > 0.0 else math.inf


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    # The files name no zone; any fixed one gives the same differences, free of summer time.
    return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def _tokens(value: object) -> int:
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or not 0 <= number <= MAX_TOKENS:
        raise ValueError(value)
    return number


def _csv_rows(
    file: TextIO, path: Path, names: tuple[str, str, str], clock: Callable[[str], float]
) -> Iterator[tuple[int, Row]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in names if name not in header]
    if missing:
        raise TraceError(
            f"{path}: expected the columns {', '.join(names)}, got {', '.join(header)[:80]!r}; "
            f"{', '.join(missing)} is missing: is this another format?"
        )
    when, prompt, output = (header.index(name) for name in names)
    for row in reader:
        if row:
            if len(row) != len(header):
                raise TraceError(
                    f"{path}, line {reader.line_num}: expected {len(header)} fields, got "
                    f"{len(row)}; is the file cut off?"
                )
            yield (
                reader.line_num,
                _row(path, reader.line_num, row[when], clock, row, prompt, output),
            )


def _row(
    path: Path,
    line: int,
    when: str,
    clock: Callable[[str], float],
    row: list[str],
    prompt: int,
    output: int,
) -> Row:
    try:
        return clock(when), _tokens(row[prompt]), _tokens(row[output])
    except ValueError as error:
        raise TraceError(
            f"{path}, line {line}: expected a time and whole numbers of tokens up to {MAX_TOKENS}, "
            f"got {when!r}, {row[prompt]!r}, {row[output]!r}; repair or remove the line"
        ) from error


def _azure(file: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    return _csv_rows(file, path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _moment)


def _burstgpt(file: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    return _csv_rows(file, path, ("Timestamp", "Request tokens", "Response tokens"), _number)


def _mooncake(file: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            arrival = _number(str(entry["timestamp"])) / 1000.0
            row = arrival, _tokens(entry["input_length"]), _tokens(entry["output_length"])
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}, line {line}: expected a JSON object with timestamp (milliseconds), "
                f"input_length and output_length, got {text.strip()[:60]!r}; repair or remove the "
                "line, or name another format"
            ) from error
        yield line, row


FORMATS = {"azure": _azure, "mooncake": _mooncake, "burstgpt": _burstgpt}
FAILED_REQUESTS = {"burstgpt"}
"""Formats that record failed requests, by 0 response tokens."""


def read_trace(path: Path | str, kind: str) -> RequestTrace:
    """Read a file of recorded requests.

    Args:
        path: The file; compressed if its name ends in ``.gz``.
        kind: Its format, a key of ``FORMATS``.

    Raises:
        TraceError: If the file cannot be read, or a line breaks the format.
    """
    path = Path(path)
    if kind not in FORMATS:
        raise TraceError(f"trace format {kind!r}: expected one of {list(FORMATS)}")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            return _collect(path, FORMATS[kind](file, path), kind in FAILED_REQUESTS)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(
            f"{path}: expected a readable {kind} trace, got {error or type(error).__name__}; check "
            "the path and the file"
        ) from error


def _collect(path: Path, rows: Iterable[tuple[int, Row]], may_fail: bool) -> RequestTrace:
    arrivals: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    failed = 0
    before = -math.inf
    for line, (arrival, prompt, output) in rows:
        if arrival < before:
            raise TraceError(
                f"{path}, line {line}: expected arrivals in order, got {arrival:g} s after "
                f"{before:g} s; sort the file by time"
            )
        before = arrival
        if may_fail and output == 0:
            failed += 1
            continue
        if prompt < 1 or output < 1:
            raise TraceError(
                f"{path}, line {line}: expected at least one prompt and one output token, got "
                f"{prompt} and {output}; remove the line"
            )
        arrivals.append(arrival)
        prompts.append(prompt)
        outputs.append(output)
    if len(arrivals) < 2:
        raise TraceError(f"{path}: expected at least two requests, got {len(arrivals)}")
    times = np.array(arrivals)
    return RequestTrace(
        path.name.removesuffix(".gz"),
        times - times[0],
        np.array(prompts, np.int32),
        np.array(outputs, np.int32),
        failed,
    )
