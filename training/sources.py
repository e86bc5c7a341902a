"""Reading what a calibration is made from: step traces of one system, and a throughput table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.errors import CalibrationError
from controller.jsonfile import sha256_of
from controller.trace import Trace, read_trace
from training.tables import Table, TableOptions, read_table

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


@dataclass(frozen=True)
class Sources:
    """The files of a calibration, read."""

    traces: tuple[Trace, ...]
    table: Table | None


def read_sources(paths: Sequence[Path], options: TableOptions) -> Sources:
    """Read step traces and at most one throughput table, told apart by content.

    Raises:
        CalibrationError: If a file cannot be read, or there is more than one table.
        TraceError: If a trace breaks the schema.
    """
    traces, tables = [], []
    for path in paths:
        if _looks_like_trace(path):
            traces.append(read_trace(path))
        else:
            tables.append(read_table(path, options))
    if len(tables) > 1:
        raise CalibrationError(
            f"expected at most one table, got {len(tables)}: "
            f"{', '.join(str(item.path) for item in tables)}; put the rows into one file"
        )
    hashes = [sha256_of(path.read_bytes()) for path in paths]
    if len(set(hashes)) != len(hashes):
        raise CalibrationError("a source is given twice; name each file once")
    check_mergeable(traces)
    table = tables[0] if tables else None
    if table and traces:
        head = traces[0].header
        for name, value in (("hardware", table.hardware), ("model", table.model)):
            if value is not None and value != getattr(head, name):
                raise CalibrationError(
                    f"{table.path}: {name} is {value!r} but {traces[0].path} has "
                    f"{getattr(head, name)!r}; calibrate each system on its own"
                )
    return Sources(tuple(traces), table)


def _looks_like_trace(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror}); give step traces or a CSV table"
        ) from error
    if not head.strip():
        raise CalibrationError(f"{path}: expected a step trace or a CSV table, got an empty file")
    return head.startswith(b"\x1f\x8b") or head.lstrip().startswith((b"{", b"["))


def check_mergeable(traces: Sequence[Trace]) -> None:
    """Refuse traces of different systems.

    Raises:
        CalibrationError: Naming the field and both files.
    """
    for trace in traces[1:]:
        for name in SAME_FIELDS:
            ours, theirs = getattr(traces[0].header, name), getattr(trace.header, name)
            if ours != theirs:
                raise CalibrationError(
                    f"{trace.path}: {name} is {theirs!r} but {traces[0].path} has {ours!r}; "
                    "calibrate each system on its own"
                )
    drafts = {trace.header.draft: trace.path for trace in traces if trace.header.speculative}
    if len(drafts) > 1:
        shown = ", ".join(f"{path}: {draft!r}" for draft, path in drafts.items())
        raise CalibrationError(f"traces of different drafts ({shown}); calibrate each on its own")


def describe(sources: Sources) -> dict[str, Any]:
    """Return the origin of a calibration: files by name and hash, and the system."""
    paths = [trace.path for trace in sources.traces]
    paths += [sources.table.path] if sources.table else []
    files = [{"name": p.name, "sha256": sha256_of(p.read_bytes())} for p in paths]
    out: dict[str, Any] = {"files": files}
    if sources.traces:
        head = sources.traces[0].header
        out |= {key: getattr(head, key) for key in SAME_FIELDS if key != "cuda_graph_batch_sizes"}
        drafts = [t.header.draft for t in sources.traces if t.header.draft]
        out["draft"] = drafts[0] if drafts else None
    elif sources.table:
        out |= {"hardware": sources.table.hardware, "model": sources.table.model}
    return out
