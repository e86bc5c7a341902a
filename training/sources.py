"""Reading what a calibration is made from: traces, logs, benchmarks and tables of one system.

What a file is shows in its content, not its name.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from controller.errors import CalibrationError
from controller.trace import Trace, read_trace
from training.bench_outputs import BenchSource, bench_kind, read_bench
from training.log_rounds import LogSource, read_log
from training.points import Point
from training.tables import Table, TableOptions, read_table
from training.textfile import content_sha256, read_head

SAME_FIELDS = (
    "engine",
    "engine_version",
    "hardware",
    "model",
    "attention_backend",
    "cuda_graph_batch_sizes",
    "overlap_schedule",
)
"""Header fields in which all traces of one calibration must agree."""
SAME_ARGUMENTS = ("model_path", "attention_backend", "tp_size", "pp_size", "dp_size")
"""Server arguments in which all logs and benchmarks of one calibration must agree."""

_LOG = re.compile(
    r"(Decode|Prefill) batch(?: \[\d+\])?[.,]|server_args=|^\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Sources:
    """The files of a calibration, read."""

    traces: tuple[Trace, ...] = ()
    tables: tuple[Table, ...] = ()
    logs: tuple[LogSource, ...] = ()
    benches: tuple[BenchSource, ...] = ()

    @property
    def points(self) -> tuple[Point, ...]:
        """Round times of everything but the traces."""
        found = (*self.logs, *self.benches, *self.tables)
        return tuple(point for source in found for point in source.points)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        found = (*self.traces, *self.tables, *self.logs, *self.benches)
        return tuple(source.path for source in found)


def read_sources(paths: Sequence[Path], options: TableOptions) -> Sources:
    """Read any mix of step traces, server logs, benchmark outputs and throughput tables.

    Raises:
        CalibrationError: If a file cannot be read, is given twice, or is of another system.
        TraceError: If a trace breaks the schema.
    """
    unknown = sorted(set(options.num_steps_of) - {path.name for path in paths})
    if unknown:
        raise CalibrationError(
            f"--num-steps {unknown[0]}=...: expected the name of a source "
            f"({', '.join(sorted({path.name for path in paths}))}), got none of that name"
        )
    traces, tables, logs, benches = [], [], [], []
    hashes: dict[str, Path] = {}
    for path in paths:
        kind = source_kind(path)
        if kind == "trace":
            traces.append(read_trace(path))
            digest = content_sha256(path)
        elif kind == "log":
            logs.append(read_log(path, options.depth(path), path.name in options.num_steps_of))
            digest = logs[-1].sha256
        elif kind == "benchmark":
            benches.append(read_bench(path, options.depth(path)))
            digest = benches[-1].sha256
        else:
            tables.append(read_table(path, options))
            digest = tables[-1].sha256
        if digest in hashes:
            raise CalibrationError(
                f"{path}: a source is given twice, it holds the same as {hashes[digest]}; name "
                f"each "
                "once"
            )
        hashes[digest] = path
    check_mergeable(traces)
    sources = Sources(tuple(traces), tuple(tables), tuple(logs), tuple(benches))
    _check_same_system(sources)
    return sources


def source_kind(path: Path) -> str:
    """Return ``"trace"``, ``"log"``, ``"benchmark"`` or ``"table"`` by a file's content.

    Raises:
        CalibrationError: If it cannot be read or is empty.
    """
    head = read_head(path)
    if head.lstrip().startswith(("{", "[{", "[\n")):
        first = head.lstrip().split("\n", 1)[0]
        if bench_kind(first) or (len(first) >= 4096 and '"output_throughput"' in head):
            return "benchmark"
        return "trace"
    return "log" if _LOG.search(head) else "table"


def check_mergeable(traces: Sequence[Trace]) -> None:
    """Refuse traces of different systems.

    Raises:
        CalibrationError: Naming the field and both files.
    """
    for trace in traces[1:]:
        for name in SAME_FIELDS:
            ours, theirs = getattr(traces[0].header, name), getattr(trace.header, name)
            if ours != theirs:
                raise _different(trace.path, name, theirs, traces[0].path, ours)
    drafts = {trace.header.draft: trace.path for trace in traces if trace.header.speculative}
    if len(drafts) > 1:
        shown = ", ".join(f"{path}: {draft!r}" for draft, path in drafts.items())
        raise CalibrationError(f"traces of different drafts ({shown}); calibrate each on its own")


def _check_same_system(sources: Sources) -> None:
    """Refuse files that say of themselves that they are of different systems."""
    said = [
        (trace.path, {name: getattr(trace.header, name) for name in SAME_FIELDS})
        for trace in sources.traces[:1]
    ]
    said += [
        (table.path, {"hardware": table.hardware, "model": table.model}) for table in sources.tables
    ]
    said += [
        (source.path, {name: source.arguments.get(name) for name in SAME_ARGUMENTS})
        for source in (*sources.logs, *sources.benches)
    ]
    for (first, ours), (second, theirs) in combinations(said, 2):
        for name in sorted(set(ours) & set(theirs)):
            if None not in (ours[name], theirs[name]) and ours[name] != theirs[name]:
                raise _different(second, name, theirs[name], first, ours[name])


def _different(
    path: Path, name: str, theirs: object, first: Path, ours: object
) -> CalibrationError:
    return CalibrationError(
        f"{path}: {name} is {theirs!r} but {first} has {ours!r}; calibrate each system on its own"
    )


def describe(sources: Sources) -> dict[str, Any]:
    """Return the origin of a calibration: files by name and hash, and the system."""
    files = []
    for path in sources.paths:
        with open(path, "rb") as file:
            files.append(
                {"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            )
    out: dict[str, Any] = {"files": files}
    if sources.traces:
        head = sources.traces[0].header
        out |= {key: getattr(head, key) for key in SAME_FIELDS if key != "cuda_graph_batch_sizes"}
        drafts = [t.header.draft for t in sources.traces if t.header.draft]
        out["draft"] = drafts[0] if drafts else None
        return out
    if sources.tables:
        for name in ("hardware", "model"):
            known = [getattr(table, name) for table in sources.tables]
            out[name] = next((value for value in known if value), None)
    arguments: Mapping[str, Any] = {}
    for source in (*sources.logs, *sources.benches):
        arguments = {**source.arguments, **arguments}
    out |= {name: arguments[name] for name in SAME_ARGUMENTS if arguments.get(name) is not None}
    return out
