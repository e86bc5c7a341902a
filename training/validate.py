"""Measure how far the simulator's numbers can be believed, from shipped measurements alone.

Usage:
    python -m training.validate [--calibration FILE.json] [--data FOLDER] [-o FILE.json]

Five parts, each a module of ``training/validation``:

- step time of every measured (tier, batch size, context) cell, predicted from the other cells;
- step time of other runs of the same system, predicted by the calibration;
- throughput tables, each half of the concurrencies predicted from the other;
- server logs, calibrated alone, against the step trace of the same run;
- decode throughput of the simulator against the trace's, from end to end.

The bounds are in ``training/validation/bounds.py``. The exit code is 1 if one is missed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from controller.calibration import Calibration
from controller.errors import CalibrationError, SpecGovernorError
from controller.jsonfile import canonical_text, sha256_of, write_atomically
from controller.trace import Trace, read_trace
from training.cli import OneLineParser, check_output, print_error
from training.samples import collect
from training.validation.cells import hold_out_cells
from training.validation.closed_loop import simulate_cells
from training.validation.halves import judge_tables
from training.validation.logs import compare_log, find_pairs
from training.validation.other_run import find_other_runs, judge_other_runs
from training.validation.report import SCHEMA, Validation, print_validation

DEFAULT_CALIBRATION = Path("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
DEFAULT_DATA = Path(__file__).parent / "data"
WIDTH = 120
"""Columns of the output where there is no terminal."""


def validate(calibration: Calibration, data: Path) -> Validation:
    """Run every part.

    Args:
        calibration: One that was made from traces which lie in ``data/traces``.
        data: Folder with ``traces``, ``tables`` and ``logs``.

    Raises:
        CalibrationError: If a file is missing, changed or cannot be used.
        TraceError: If a trace breaks the schema.
    """
    traces = read_sources_of(calibration, data / "traces")
    pairs = [(trace.header, trace.rows) for trace in traces]
    samples, _ = collect(pairs, calibration.padded)
    return Validation(
        calibration=calibration,
        cells=hold_out_cells(samples),
        other_runs=judge_other_runs(calibration, find_other_runs(data / "traces", traces)),
        tables=judge_tables(data / "tables"),
        logs=tuple(compare_log(log, trace) for log, trace in find_pairs(data)),
        closed_loop=simulate_cells(calibration, pairs, samples),
    )


def read_sources_of(calibration: Calibration, folder: Path) -> list[Trace]:
    """Read the traces that a calibration was made from.

    Raises:
        CalibrationError: If it names none, or one is missing or has changed since.
        TraceError: If a trace breaks the schema.
    """
    traces = []
    for name, sha256 in _source_files(calibration):
        path = folder / name
        if path.suffix == ".csv":
            continue
        try:
            found = sha256_of(path.read_bytes())
        except OSError as error:
            raise CalibrationError(
                f"{path}: expected a trace that calibration {calibration.name!r} was made from, "
                f"but it cannot be read ({error.strerror}); put it there"
            ) from error
        if found != sha256:
            raise CalibrationError(
                f"{path}: expected the trace with SHA-256 {sha256[:12]}..., got "
                f"{found[:12]}...; calibrate again with `make calibrations`"
            )
        traces.append(read_trace(path))
    if not traces:
        raise CalibrationError(
            f"calibration {calibration.name!r}: expected one that was made from step traces, got "
            "one without; give another with --calibration"
        )
    return traces


def _source_files(calibration: Calibration) -> list[tuple[str, str]]:
    """Return name and SHA-256 of every file that a calibration says it was made from."""
    files = calibration.source.get("files", [])
    if not isinstance(files, list):
        raise _bad_files(calibration, files)
    found = []
    for file in files:
        pair = (file.get("name"), file.get("sha256")) if isinstance(file, dict) else (None, None)
        name, sha256 = pair
        if not isinstance(name, str) or not isinstance(sha256, str):
            raise _bad_files(calibration, file)
        if not name or Path(name).name != name or "\0" in name:
            raise _bad_files(calibration, file)
        found.append((name, sha256))
    return found


def _bad_files(calibration: Calibration, found: object) -> CalibrationError:
    return CalibrationError(
        f"calibration {calibration.name!r}: source.files: expected a list of objects with a bare "
        f"file name and its sha256, got {found!r:.60}; calibrate again"
    )


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m training.validate",
        description="Measure how far the simulator's numbers can be believed.",
    )
    add = parser.add_argument
    add(
        "--calibration",
        type=Path,
        default=DEFAULT_CALIBRATION,
        metavar="FILE",
        help="calibration whose traces are used (%(default)s)",
    )
    add(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="FOLDER",
        help="folder with traces, tables and logs (the shipped one)",
    )
    add("-o", "--output", type=Path, default=None, metavar="FILE", help="JSON to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        args = _parser().parse_args(argv)
        if args.output is not None:
            check_output(
                args.output,
                [args.calibration],
                lambda value: isinstance(value, dict) and value.get("schema") == SCHEMA,
            )
        result = validate(Calibration.load(args.calibration), args.data)
        print_validation(result, Console(width=None if sys.stdout.isatty() else WIDTH))
        if args.output is not None:
            write_atomically(args.output, canonical_text(result.to_json()))
            print(f"wrote {args.output}")
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
