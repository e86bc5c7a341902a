"""Round times and acceptance from an SGLang server log.

A ``Decode batch`` line gives the throughput since the scheduler's previous such line, so

    round time = batch size * accept length / throughput

holds where the whole gap was decode at one batch size: between two consecutive lines of a scheduler
with the same batch size and no prefill line between. The lines that do not qualify are counted by
reason. The context of a round is the mean of the two lines' tokens.

One depth a log. A log tells its depth by its arguments line, or the reader is told. It is refused
where the depth moved: the adaptive worker says so (``Switch adaptive runtime state``), and
otherwise the figures do. At a fixed depth the printed accept rate is a function of the printed
accept length,
``L / n`` or ``(L - 1) / (n - 1)`` by era, with ``n`` draft tokens the same in every line. So if no
era and ``n`` explain the lines to their two decimals, the depth (or the engine) changed between
them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.errors import CalibrationError
from controller.tiers import MAX_NUM_STEPS, NATIVE
from training.acceptance_fit import Observation, Series
from training.points import MAX_STEP_S, MIN_STEP_S, Point
from training.prefill import Burst
from training.samples import STALL_FACTOR, context_cells
from training.server_log import (
    ArgumentsLine,
    BrokenLine,
    CapacityLine,
    DecodeLine,
    LogLine,
    PrefillLine,
    SwitchLine,
    parse_log,
)
from training.textfile import TextFile

DEFAULT_LOG_INTERVAL = 40
"""Decode rounds a line, unless the server's arguments say otherwise."""
MAX_POINTS_PER_BATCH = 256
MAX_BURSTS = 4096
MAX_DRAFT_TOKENS = 128
ROUNDING = 0.005 + 1e-9
"""Half of the last printed digit of an accept length or rate."""
PAGE_SLACK_TOKENS = 128
"""Tokens a request by which the pool may grow in steps: the largest page in use."""
BURST_GAP_S = 2.0

ERAS = {"A": "no accept rate", "B": "bonus token counted", "C": "bonus token not counted"}


@dataclass(frozen=True)
class LogSource:
    """What a log gives.

    Attributes:
        path: The file.
        sha256: Hash of its decompressed content.
        tier: Its tier.
        era: ``"A"``, ``"B"`` or ``"C"`` of :mod:`training.server_log`; None without speculation or
            if the lines do not tell.
        points: Round times.
        series: Accept lengths over time; empty without speculation.
        bursts: Prefill batches in a row.
        num_decode: Decode lines.
        unusable: Decode lines without a round time, by reason.
        num_broken: Lines that were cut or made no sense.
        arguments: The server's arguments that matter, as far as known.
        kv_tokens: Tokens of its KV cache; None if the log does not say.
        chunk_tokens: Most new tokens of a prefill batch; None likewise.
        truncated: Whether the file ends inside a gzip stream.
    """

    path: Path
    sha256: str
    tier: str
    era: str | None
    points: tuple[Point, ...]
    series: Series
    bursts: tuple[Burst, ...]
    num_decode: int
    unusable: Mapping[str, int]
    num_broken: int
    arguments: Mapping[str, Any]
    kv_tokens: int | None
    chunk_tokens: int | None
    truncated: bool


def read_log(path: Path, num_steps: int | None = None) -> LogSource:
    """Read a server log.

    Args:
        path: The log, plain or gzip.
        num_steps: Its depth where it has no arguments line; 0 for no speculation.

    Raises:
        CalibrationError: If it has no decode line, no usable one, or more than one depth.
    """
    file = TextFile(path)
    reader = _Reader(path)
    for line in parse_log(file.lines()):
        reader.take(line)
    if not reader.num_decode:
        raise CalibrationError(
            f"{path}: expected 'Decode batch' lines of an SGLang server, got none in the log; give "
            "the scheduler's log at level info, from a time with decode load"
        )
    tier, era = reader.depth(num_steps)
    points = tuple(
        point for kept in reader.points.values() for point in _without_stalls(kept.finish(tier))
    )
    stalls = sum(len(kept.items) for kept in reader.points.values()) - len(points)
    if stalls:
        reader.unusable["with a stall"] += stalls
    return LogSource(
        path=path,
        sha256=str(file.sha256),
        tier=tier,
        era=era,
        points=points,
        series=reader.series,
        bursts=tuple(reader.bursts[:MAX_BURSTS]),
        num_decode=reader.num_decode,
        unusable=dict(reader.unusable),
        num_broken=reader.num_broken,
        arguments=reader.arguments or {},
        kv_tokens=reader.kv_tokens,
        chunk_tokens=reader.chunk_tokens,
        truncated=file.truncated,
    )


def _without_stalls(points: Iterable[Point]) -> list[Point]:
    """Drop the points of one batch size whose rounds took far longer than their cell's median."""
    points = list(points)
    context = np.array([float(point.context_tokens or 0) for point in points])
    cell = context_cells(np.full(len(points), 1), context)
    step_s = np.array([point.step_s for point in points])
    return [
        point
        for index, point in enumerate(points)
        if step_s[index] <= STALL_FACTOR * np.median(step_s[cell == cell[index]])
    ]


@dataclass
class _Kept:
    """Every ``stride``-th point of a batch size, so that memory stays bounded."""

    batch_size: int
    stride: int = 1
    seen: int = 0
    items: list[tuple[str, int, float, float, float]] = field(default_factory=list)

    def add(self, item: tuple[str, int, float, float, float]) -> None:
        if self.seen % self.stride == 0:
            self.items.append(item)
            if len(self.items) >= MAX_POINTS_PER_BATCH:
                self.items = self.items[::2]
                self.stride *= 2
        self.seen += 1

    def finish(self, tier: str) -> Iterable[Point]:
        for where, context, step_s, accept_len, throughput in self.items:
            yield Point(
                where=where,
                kind="log",
                tier=tier,
                concurrency=self.batch_size,
                batch_size=self.batch_size,
                context_tokens=context,
                step_s=step_s,
                accept_len=accept_len,
                assumed=False,
                throughput=throughput,
            )


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[int, _Kept] = {}
        self.series = Series()
        self.bursts: list[Burst] = []
        self.num_decode = 0
        self.num_broken = 0
        self.unusable: Counter[str] = Counter()
        self.arguments: Mapping[str, Any] | None = None
        self.kv_tokens: int | None = None
        self.chunk_tokens: int | None = None
        self._pairs: Counter[tuple[float, float]] = Counter()
        self._with_accept = 0
        self._max_accept_len = 0.0
        self._max_at = 0
        self._last_decode: dict[str, DecodeLine] = {}
        self._last_prefill: dict[str, PrefillLine] = {}
        self._burst: dict[str, list[float]] = {}
        self._stretch: Counter[str] = Counter()

    def take(self, line: LogLine) -> None:
        if isinstance(line, DecodeLine):
            self._decode(line)
        elif isinstance(line, PrefillLine):
            self._prefill(line)
        elif isinstance(line, BrokenLine):
            self.num_broken += 1
            # It may have been a prefill, of any scheduler.
            self._last_decode.clear()
        elif isinstance(line, ArgumentsLine):
            self._last_decode.clear()
            if self.arguments not in (None, line.values):
                raise CalibrationError(
                    f"{self.path}:{line.number}: expected one server, got a second start with "
                    "other arguments; split the log there"
                )
            self.arguments = line.values
        elif isinstance(line, CapacityLine):
            self.kv_tokens, self.chunk_tokens = line.kv_tokens, line.chunk_tokens
        elif isinstance(line, SwitchLine):
            raise CalibrationError(
                f"{self.path}:{line.number}: expected one depth, but the server switches its draft "
                f"steps ({line.old} to {line.new}); record a log at each fixed depth, or a step "
                "trace"
            )

    def _decode(self, line: DecodeLine) -> None:
        self.num_decode += 1
        previous = self._last_decode.get(line.scheduler)
        self._last_decode[line.scheduler] = line
        self._end_burst(line.scheduler)
        if line.accept_len is not None:
            self._with_accept += 1
            if line.accept_rate is not None and len(self._pairs) < 100_000:
                self._pairs[line.accept_len, line.accept_rate] += 1
            if line.accept_len > self._max_accept_len:
                self._max_accept_len, self._max_at = line.accept_len, line.number
        if previous is not None and _same(line, previous):
            self.unusable["printed twice"] += 1
            return
        reason = self._unusable(line, previous)
        if reason:
            self.unusable[reason] += 1
            self._stretch[line.scheduler] += 1
        accept_len = 1.0 if line.accept_len is None else line.accept_len
        if line.accept_len is not None and line.batch_size:
            self.series.add(
                Observation(
                    stretch=f"{line.scheduler}/{self._stretch[line.scheduler]}",
                    time_s=line.time_s,
                    batch_size=line.batch_size,
                    rounds=self._rounds(),
                    accept_len=accept_len,
                    steady=not reason,
                )
            )
        if reason or previous is None:
            return
        step_s = line.batch_size * accept_len / line.throughput
        context = (line.context_tokens + previous.context_tokens) // 2
        kept = self.points.setdefault(line.batch_size, _Kept(line.batch_size))
        kept.add((f"{self.path}:{line.number}", context, step_s, accept_len, line.throughput))

    def _unusable(self, line: DecodeLine, previous: DecodeLine | None) -> str | None:
        """Say why the gap before a line is not decode at one batch size."""
        if "PP" in line.scheduler:
            return "of interleaved pipeline stages"
        if previous is None:
            return "first after a prefill or a start"
        if line.batch_size != previous.batch_size:
            return "where the batch size changed"
        if line.graph != previous.graph:
            return "where graphs went on or off"
        if not line.batch_size or not line.throughput:
            return "without requests or throughput"
        if _requests_changed(line, previous):
            return "where requests came or went"
        accept_len = 1.0 if line.accept_len is None else line.accept_len
        if not MIN_STEP_S <= line.batch_size * accept_len / line.throughput <= MAX_STEP_S:
            return f"with rounds outside {MIN_STEP_S} to {MAX_STEP_S:g} s"
        return None

    def _rounds(self) -> int:
        given = (self.arguments or {}).get("decode_log_interval")
        return given if isinstance(given, int) and given > 0 else DEFAULT_LOG_INTERVAL

    def _prefill(self, line: PrefillLine) -> None:
        self._last_decode.pop(line.scheduler, None)
        previous = self._last_prefill.get(line.scheduler)
        self._last_prefill[line.scheduler] = line
        if not line.throughput or not line.new_tokens:
            self._end_burst(line.scheduler)
            return
        gap_s = line.new_tokens / line.throughput
        # Nothing waited: the gap holds idle time.
        together = (
            previous is not None
            and previous.more
            and previous.time_s is not None
            and line.time_s is not None
            and line.time_s - previous.time_s <= BURST_GAP_S
            and gap_s <= BURST_GAP_S
        )
        if together and line.scheduler in self._burst:
            count, tokens, time_s = self._burst[line.scheduler]
            self._burst[line.scheduler] = [count + 1, tokens + line.new_tokens, time_s + gap_s]
        else:
            # The first line's gap reaches back to the burst before it.
            self._end_burst(line.scheduler)
            self._burst[line.scheduler] = [0, 0, 0.0]

    def _end_burst(self, scheduler: str) -> None:
        count, tokens, time_s = self._burst.pop(scheduler, (0, 0, 0.0))
        if count and len(self.bursts) < MAX_BURSTS:
            self.bursts.append(Burst(int(count), int(tokens), time_s))

    def depth(self, told: int | None) -> tuple[str, str | None]:
        """Return the tier and the era.

        Raises:
            CalibrationError: If there is no single depth, or it is not known.
        """
        arguments = self.arguments or {}
        if self._with_accept not in (0, self.num_decode):
            raise CalibrationError(
                f"{self.path}: expected one server, got {self._with_accept} of {self.num_decode} "
                "decode lines with an accept len; split the log"
            )
        if arguments.get("speculative_adaptive"):
            raise CalibrationError(
                f"{self.path}: expected one depth, but its server ran with --speculative-adaptive; "
                "record a log at each fixed depth, or a step trace"
            )
        if not self._with_accept:
            if arguments.get("speculative_algorithm"):
                raise CalibrationError(
                    f"{self.path}: expected an accept len in its lines for a speculating server, "
                    "got none; give the log of the scheduler itself"
                )
            return NATIVE, None
        if told == 0:
            raise CalibrationError(
                f"{self.path}: expected no accept len without speculation, got one in every line; "
                "correct --num-steps"
            )
        era, draft_tokens = self._era()
        steps = self._steps(told, draft_tokens)
        if self._max_accept_len > steps + 1 + ROUNDING:
            raise CalibrationError(
                f"{self.path}:{self._max_at}: expected an accept len up to {steps + 1} at "
                f"{steps} draft steps, got {self._max_accept_len:g}; correct --num-steps"
            )
        return str(steps), era

    def _steps(self, told: int | None, draft_tokens: list[int]) -> int:
        arguments = self.arguments or {}
        stated = arguments.get("speculative_num_steps")
        if stated and told is not None and told != stated:
            raise CalibrationError(
                f"{self.path}: its server ran {stated} draft steps, but --num-steps says {told}; "
                "leave it out for this log"
            )
        steps = stated or told
        topk = arguments.get("speculative_eagle_topk")
        if isinstance(topk, int) and topk > 1:
            raise CalibrationError(
                f"{self.path}: expected a chain of drafts, got topk {topk}; trees are not "
                f"modelled, "
                "so record with --speculative-eagle-topk 1"
            )
        shown = " or ".join(str(n - 1) for n in draft_tokens[:3])
        hint = f" (the accept rates fit {shown} for a chain of drafts)" if draft_tokens else ""
        if not steps:
            raise CalibrationError(
                f"{self.path}: expected a depth, but the log has no server_args line; give "
                f"--num-steps N{hint}"
            )
        if not 1 <= steps <= MAX_NUM_STEPS:
            raise CalibrationError(
                f"{self.path}: expected 1 to {MAX_NUM_STEPS} draft steps, got {steps}; deeper "
                "drafts are not modelled"
            )
        if draft_tokens and steps + 1 not in draft_tokens:
            raise CalibrationError(
                f"{self.path}: its accept rates do not fit {steps} draft steps{hint}; correct "
                "--num-steps, or record with topk 1"
            )
        return int(steps)

    def _era(self) -> tuple[str | None, list[int]]:
        """Return the era and the numbers of draft tokens that explain every line."""
        if not self._pairs:
            return "A", []
        fitting = {
            era: [n for n in range(2, MAX_DRAFT_TOKENS + 1) if _fits_all(era, n, self._pairs)]
            for era in ("B", "C")
        }
        found = [era for era in ("B", "C") if fitting[era]]
        if not found:
            best = max(
                sum(count for pair, count in self._pairs.items() if _fits(era, n, *pair))
                for era in ("B", "C")
                for n in range(2, MAX_DRAFT_TOKENS + 1)
            )
            raise CalibrationError(
                f"{self.path}: expected one depth, but no number of draft tokens explains the "
                f"accept rate of every line by its accept len (at best {best} of "
                f"{sum(self._pairs.values())} lines): the depth changed between lines; record a "
                "log at each fixed depth, or a step trace"
            )
        both = sorted({n for era in found for n in fitting[era]})
        return (found[0] if len(found) == 1 else None), both


def _fits_all(era: str, n: int, pairs: Mapping[tuple[float, float], int]) -> bool:
    return all(_fits(era, n, *pair) for pair in pairs)


def _fits(era: str, n: int, accept_len: float, accept_rate: float) -> bool:
    bonus, denominator = (0.0, n) if era == "B" else (1.0, n - 1)
    low = (accept_len - ROUNDING - bonus) / denominator
    high = (accept_len + ROUNDING - bonus) / denominator
    return accept_rate - ROUNDING <= high and low <= accept_rate + ROUNDING


def _same(line: DecodeLine, previous: DecodeLine) -> bool:
    """Tell whether a line repeats the one before: no two rounds agree in all figures by chance."""
    return previous == replace(line, number=previous.number, time_s=previous.time_s)


def _requests_changed(line: DecodeLine, previous: DecodeLine) -> bool:
    """Tell from the pool whether a request joined or left between two lines of one batch size.

    The pool grows by what was generated: the throughput times a gap that whole seconds bound.
    """
    grown = line.context_tokens - previous.context_tokens
    slack = PAGE_SLACK_TOKENS * line.batch_size
    if grown < -slack:
        return True
    if line.time_s is None or previous.time_s is None:
        return False
    gap_s = line.time_s - previous.time_s
    low = line.throughput * max(gap_s - 1.0, 0.0)
    high = line.throughput * max(gap_s + 1.0, 0.0)
    return not math.floor(0.9 * low) - slack <= grown <= math.ceil(1.1 * high) + slack
