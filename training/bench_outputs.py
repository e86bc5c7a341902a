"""Round times and acceptance from the outputs of SGLang's benchmarks, JSON Lines all of them.

``bench_serving`` (``sglang.benchmark.serving``)
    One record a run. Round time is the mean TPOT times the accept length; the batch size is the
    mean number of requests that were decoding, by Little's law ``completed * (E2E - TTFT) /
    duration``. Its TPOT includes the waits for the prefill of others.
``bench_one_batch_server`` (``sglang.benchmark.one_batch_server``)
    One record a batch. After the last first token the batch decodes ``output_len - 1`` tokens each,
    in ``(output_len - 1) / accept length`` rounds. Records without ``last_ttft`` are of old
    versions, have a latency with the prefill in it, and are left out.
``bench_speculative`` (``scripts/playground/bench_speculative.py``)
    One record a configuration, with the round time itself and the depth (0: no speculation).

A record says its depth itself (``bench_speculative``), by the server's arguments in ``server_info``
(``bench_serving``, unless old), by having no accept length, or not at all: then it is to be told.
The accept length that SGLang reports is the mean since its server started.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.errors import CalibrationError
from training.bench_records import ONE_BATCH, READERS, SERVING, SPECULATIVE, LeftOut
from training.points import Point
from training.server_log import pick_arguments
from training.textfile import TextFile

_KEYS = {
    SPECULATIVE: {"batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time"},
    ONE_BATCH: {"run_name", "batch_size", "input_len", "output_len", "latency"},
    SERVING: {"backend", "completed", "output_throughput", "mean_ttft_ms"},
}


@dataclass(frozen=True)
class BenchSource:
    """What a benchmark output gives.

    Attributes:
        path: The file.
        sha256: Hash of its decompressed content.
        kind: Which benchmark wrote it.
        points: One round time a usable record.
        left_out: Records without one, by reason.
        arguments: The server's arguments that matter, as far as known.
        truncated: Whether the file ends inside a gzip stream.
    """

    path: Path
    sha256: str
    kind: str
    points: tuple[Point, ...]
    left_out: Mapping[str, int]
    arguments: Mapping[str, Any]
    truncated: bool


def bench_kind(line: str) -> str | None:
    """Return which benchmark wrote a line, or None if none did."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict):
        for kind, keys in _KEYS.items():
            if keys <= set(record):
                return kind
    return None


def read_bench(path: Path, num_steps: int | None = None) -> BenchSource:
    """Read a benchmark output.

    Args:
        path: JSON Lines, plain or gzip.
        num_steps: Depth of records that do not say theirs; 0 for no speculation.

    Raises:
        CalibrationError: If a record is malformed or contradicts itself, or none is usable.
    """
    file = TextFile(path)
    points: list[Point] = []
    left_out: Counter[str] = Counter()
    arguments: Mapping[str, Any] = {}
    found: set[str] = set()
    broken: int | None = None
    for number, line in file.lines():
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if broken:
            raise CalibrationError(f"{path}:{broken}: expected a JSON object; remove the line")
        kind = bench_kind(line)
        if kind is None:
            broken = number
            continue
        found.add(kind)
        if len(found) > 1:
            raise CalibrationError(
                f"{where}: expected records of {sorted(found - {kind})[0]} as before, got one of "
                f"{kind}; split the file"
            )
        record = json.loads(line)
        info = record.get("server_info")
        mine = pick_arguments(info) if isinstance(info, dict) else {}
        # The depth may differ between records: each is a run of its own.
        same = {name: value for name, value in mine.items() if "speculative" not in name}
        if arguments and same and same != arguments:
            raise CalibrationError(
                f"{where}: expected the server of the records before, got another model, backend "
                "or parallelism; split the file"
            )
        arguments = arguments or same
        try:
            points.append(READERS[kind](where, record, mine, num_steps))
        except LeftOut as reason:
            left_out[str(reason)] += 1
    if broken and not file.truncated and broken != 1:
        left_out["cut at the end of the file"] += 1
    if not points:
        shown = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise CalibrationError(
            f"{path}: expected benchmark records with a round time, got none"
            f"{f' ({shown})' if shown else ''}; run the benchmark again with a newer SGLang"
        )
    return BenchSource(
        path=path,
        sha256=str(file.sha256),
        kind=found.pop(),
        points=tuple(points),
        left_out=dict(left_out),
        arguments=arguments,
        truncated=file.truncated,
    )
