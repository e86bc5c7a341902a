"""Add the version 1 header to a recording that has rows but no header.

The input is JSON Lines, plain or gzip, one object a batch result, with the fields of a
:class:`controller.trace_schema.TraceRow`. Optional fields that are absent become null; everything
else is checked as a reader would check it, so what this writes can be read.

Usage:
    python -m training.convert_trace IN OUT --hardware "NVIDIA H200" --model NAME \
        --engine-version 0.5.17 --attention-backend fa3 [--zero-step warm] ...
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from controller.errors import SpecGovernorError, TraceError
from controller.trace import SCHEMA, TraceHeader, TraceRow, parse_line, read_lines, write_trace
from training.cli import OneLineParser, check_apart, print_error

OPTIONAL_FIELDS = ("new_tokens", "launch_host_s", "mean_correct_drafts")
"""Fields of a row that a recording may lack; they become null."""


def read_bare_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a recording without a header.

    Raises:
        TraceError: If a line is no row, or the file already has a header.
    """
    number = 0
    for number, line in read_lines(path):
        try:
            value = parse_line(line)
            if isinstance(value, dict):
                if value.get("schema") == SCHEMA:
                    raise TraceError(
                        "expected a recording without a header, got a trace that has one; use it "
                        "as it is"
                    )
                value = {**dict.fromkeys(OPTIONAL_FIELDS), **value}
            yield TraceRow.from_json(value)
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    if not number:
        raise TraceError(
            f"{path}: expected rows, got no whole line (empty or truncated); record again"
        )


def convert(source: Path, target: Path, **header: Any) -> int:
    """Write ``source`` with a header to ``target`` and return the number of rows.

    A recording speculates if any decode row has ``num_steps``; ``header`` holds the other fields of
    :class:`TraceHeader`. ``draft`` and ``zero_step`` are left out where they do not apply.

    Raises:
        TraceError: If a row or a header field breaks the schema; ``target`` is then left alone.
        ConfigError: If ``target`` is ``source``.
    """
    check_apart(target, [source], f"output {target}")
    rows = list(read_bare_rows(source))
    speculative = any(row.num_steps is not None for row in rows)
    if not speculative:
        header["draft"] = None
    if not any(row.num_steps == 0 for row in rows):
        header["zero_step"] = None
    try:
        head = TraceHeader(speculative=speculative, **header)
        write_trace(target, head, rows)
    except TraceError as error:
        raise TraceError(f"{source}: {error}") from error
    return len(rows)


def _sizes(text: str) -> tuple[int, ...] | None:
    if text == "none":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers with commas such as 1,2,4,8 or none, got {text!r}"
        ) from None


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m training.convert_trace",
        description="Add the version 1 header to a recording without a header.",
    )
    parser.add_argument("source", type=Path, metavar="IN", help="recording, .jsonl or .jsonl.gz")
    parser.add_argument("target", type=Path, metavar="OUT", help="trace; gzip if it ends in .gz")
    parser.add_argument("--hardware", required=True, help='such as "NVIDIA H200"')
    parser.add_argument("--model", required=True, help="target model")
    parser.add_argument("--engine-version", required=True, help="SGLang version, such as 0.5.17")
    parser.add_argument("--attention-backend", required=True, help="such as fa3")
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--draft", default=None, help="draft model; ignored without speculation")
    parser.add_argument(
        "--cuda-graph-batch-sizes",
        type=_sizes,
        default=None,
        help="captured decode batch sizes with commas, or none (default)",
    )
    parser.add_argument(
        "--no-overlap-schedule",
        dest="overlap_schedule",
        action="store_false",
        help="the server ran with --disable-overlap-schedule",
    )
    parser.add_argument(
        "--zero-step",
        choices=("warm", "cold"),
        default="warm",
        help="what num_steps 0 is: warm (draft-extend kept, SGLang's default) or cold (skipped)",
    )
    parser.add_argument("--acceptance", choices=("real", "simulated"), default="real")
    parser.add_argument("--recorder", default="in-process recorder")
    parser.add_argument("--notes", default="")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = vars(_parser().parse_args(argv))
        source, target = options.pop("source"), options.pop("target")
        count = convert(source, target, **options)
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    print(f"{target}: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
