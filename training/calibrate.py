"""Fit a calibration from step traces, a throughput table, or both.

Usage:
    python -m training.calibrate SOURCE... -o FILE.json [--name NAME] [options]

Prints how well the fit predicts rounds that were held out from it, where it is noisy, and where it
would extrapolate; then writes the fit of all rounds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from controller.calibration import SCHEMA as CALIBRATION_SCHEMA
from controller.errors import SpecGovernorError
from controller.tiers import MAX_NUM_STEPS
from training.cli import OneLineParser, check_output, print_error
from training.fit import MIN_ROWS
from training.fitting import calibrate
from training.report import print_report
from training.sources import read_sources
from training.tables import (
    DEFAULT_ACCEPT_RATE,
    DEFAULT_NUM_STEPS,
    SPECULATIVE_MAX_RUNNING,
    TableOptions,
)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def _accept_len(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= MAX_NUM_STEPS + 1:
        raise argparse.ArgumentTypeError(
            f"expected a number from 1 to {MAX_NUM_STEPS + 1}, bonus token included, got {text!r}"
        )
    return value


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m training.calibrate",
        description="Fit a calibration from step traces, a throughput table, or both.",
    )
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SOURCE", help="step traces, at most one CSV")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="calibration to write")
    add("--name", default=None, help="name of the calibration (default: the output's stem)")
    add("--kv-capacity-tokens", type=_positive, default=None, help="tokens of the KV cache")
    add("--chunk-tokens", type=_positive, default=None, help="most new tokens of a prefill batch")
    add("--notes", default="", help="kept in the calibration's source")
    add("--min-rows", type=_positive, default=MIN_ROWS, help="fewest rounds a tier (%(default)s)")
    table = parser.add_argument_group("what a table does not say")
    table.add_argument(
        "--num-steps",
        type=int,
        choices=range(1, MAX_NUM_STEPS + 1),
        default=DEFAULT_NUM_STEPS,
        metavar="N",
        help="depth of rows whose num_steps is 'on' (%(default)s)",
    )
    table.add_argument(
        "--accept-len",
        type=_accept_len,
        default=None,
        help="accept length, bonus included, where the table has none (default: that of "
        f"independent acceptance of {DEFAULT_ACCEPT_RATE} a draft token)",
    )
    table.add_argument(
        "--speculative-max-running-requests",
        type=_positive,
        default=SPECULATIVE_MAX_RUNNING,
        metavar="N",
        help="most running requests with speculation (%(default)s, as in SGLang)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        args = _parser().parse_args(argv)
        options = TableOptions(
            args.num_steps, args.accept_len, args.speculative_max_running_requests
        )
        check_output(
            args.output,
            args.sources,
            lambda value: isinstance(value, dict) and value.get("schema") == CALIBRATION_SCHEMA,
        )
        sources = read_sources(args.sources, options)
        origin: dict[str, object] = {"notes": args.notes}
        if sources.table:
            origin["speculative_max_running_requests"] = options.speculative_max_running
        fitted = calibrate(
            sources,
            args.name or args.output.stem,
            min_rows=args.min_rows,
            kv_capacity_tokens=args.kv_capacity_tokens,
            chunk_tokens=args.chunk_tokens,
            source=origin,
        )
        print_report(fitted, Console())
        fitted.calibration.save(args.output)
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
