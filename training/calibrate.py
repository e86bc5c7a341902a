"""Fit a calibration from what there is: traces, server logs, benchmark outputs, throughput tables.

Usage:
    python -m training.calibrate SOURCE... -o FILE.json [--name NAME] [options]

What a source is shows in its content. Prints how well the fit predicts rounds that were held out
from it and what the other sources measured, where it is noisy, and how far it can be trusted; then
writes the fit of all rounds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from controller.calibration import SCHEMA as CALIBRATION_SCHEMA
from controller.calibration import Calibration
from controller.errors import SpecGovernorError, TierError
from controller.tiers import DEFAULT_TIERS, MAX_NUM_STEPS, OFF, OFF_KINDS, resolve_tiers
from training.acceptance_presets import load_preset
from training.cli import (
    OneLineParser,
    check_output,
    one_line_warnings,
    print_error,
    print_warning,
)
from training.fit import MIN_ROWS
from training.fitting import calibrate
from training.log_depth import ERAS
from training.plot import check_plot, plot
from training.report import off_tier, print_report
from training.sources import Sources, read_sources
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


def _depth(text: str) -> tuple[str | None, int]:
    """Parse ``N``, ``off``, ``FILE=N`` or ``FILE=off``."""
    name, _, value = text.rpartition("=")
    steps = 0 if value == OFF else int(value) if value.isdecimal() else -1
    if not 0 <= steps <= MAX_NUM_STEPS or (steps == 0 and value != OFF):
        raise argparse.ArgumentTypeError(
            f"expected 1 to {MAX_NUM_STEPS} or {OFF}, or FILE=N for one source, got {text!r}"
        )
    return name or None, steps


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m training.calibrate",
        description="Fit a calibration from step traces, SGLang server logs, outputs of SGLang's "
        "benchmarks and CSV tables of throughput, in any mix.",
    )
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SOURCE", help="files of one system")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="calibration to write")
    add("--name", default=None, help="name of the calibration (default: the output's stem)")
    add("--plot", type=Path, default=None, metavar="FILE.png", help="also draw the fit")
    add("--kv-capacity-tokens", type=_positive, default=None, help="tokens of the KV cache")
    add("--chunk-tokens", type=_positive, default=None, help="most new tokens of a prefill batch")
    add("--notes", default="", help="kept in the calibration's source")
    add("--min-rows", type=_positive, default=MIN_ROWS, help="fewest rounds a tier (%(default)s)")
    add("--acceptance", metavar="PRESET", help="acceptance of a public draft, not of the sources")
    add(
        "--costs-only",
        action="store_true",
        help="write no acceptance and no measured regions",
    )
    told = parser.add_argument_group("what the sources do not say")
    told.add_argument(
        "--num-steps",
        type=_depth,
        action="append",
        default=[],
        metavar="[FILE=]N",
        help="draft steps of logs, benchmarks and table rows that do not say theirs, or off; may "
        f"be given for each file (table rows that say 'on': {DEFAULT_NUM_STEPS})",
    )
    told.add_argument(
        "--simulated-acceptance",
        action="store_true",
        help="the engine simulated acceptance (SGLANG_SIMULATE_ACC_LEN), which no log says",
    )
    told.add_argument(
        "--accept-len",
        type=_accept_len,
        default=None,
        help="accept length, bonus included, where a table has none (default: that of "
        f"independent acceptance of {DEFAULT_ACCEPT_RATE} a draft token)",
    )
    told.add_argument(
        "--speculative-max-running-requests",
        type=_positive,
        default=SPECULATIVE_MAX_RUNNING,
        metavar="N",
        help="most running requests with speculation, for tables (%(default)s, as in SGLang)",
    )
    told.add_argument(
        "--zero-steps", choices=OFF_KINDS, help="what a num_steps of 0 in a table means"
    )
    told.add_argument(
        "--column",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="which column of a table is NAME (num_steps, concurrency, throughput_tok_s, ...)",
    )
    told.add_argument(
        "--where",
        type=_pair,
        action="append",
        default=[],
        metavar="COLUMN=TEXT",
        help="use only rows of a table whose COLUMN contains TEXT",
    )
    return parser


def _options(args: argparse.Namespace) -> TableOptions:
    return TableOptions(
        num_steps=next((steps for name, steps in reversed(args.num_steps) if not name), None),
        num_steps_of={Path(name).name: steps for name, steps in args.num_steps if name},
        accept_len=args.accept_len,
        speculative_max_running=args.speculative_max_running_requests,
        zero_steps=args.zero_steps,
        columns=dict(args.column),
        where=tuple(args.where),
    )


def _warn(sources: Sources) -> None:
    """Say what was left out of each file, and which era a log is of."""
    for log in sources.logs:
        era = f", era {log.era} ({ERAS[log.era]})" if log.era else ""
        print(
            f"{log.path}: tier {log.tier}{era}; {log.num_decode - sum(log.unusable.values())} of "
            f"{log.num_decode} decode lines give a round time"
        )
        if log.unusable:
            shown = ", ".join(f"{count} {why}" for why, count in log.unusable.items())
            print_warning(f"{log.path}: decode lines left out: {shown}")
        if log.num_broken:
            print_warning(f"{log.path}: {log.num_broken} broken lines left out")
    for bench in sources.benches:
        if bench.left_out:
            shown = ", ".join(f"{count} {why}" for why, count in bench.left_out.items())
            print_warning(f"{bench.path}: records left out: {shown}")
    for table in sources.tables:
        if table.left_out:
            shown = ", ".join(f"{count} {why}" for why, count in table.left_out.items())
            print_warning(f"{table.path}: rows without a round time: {shown}")
    for source in (*sources.logs, *sources.benches):
        if source.truncated:
            print_warning(f"{source.path}: the gzip stream is cut; what came before is used")


def _warn_of_training(calibration: Calibration) -> None:
    """Say what keeps a calibration from being trained on with the default tiers."""
    try:
        resolve_tiers(DEFAULT_TIERS, calibration.tier_names)
    except TierError:
        depths = [name for name in calibration.tier_names if name.isdecimal()]
        off = off_tier(calibration)
        needed = [name for name in DEFAULT_TIERS.split(",") if name != OFF and name not in depths]
        add = [] if off else ["a log or trace of the server without speculation (for off)"]
        if needed:
            add.append(f"a source at draft steps {', '.join(needed)}")
        found = [*([OFF] if off else []), *depths]
        tiers = f", or train with --tiers {','.join(found)}" if len(found) > 1 else ""
        print_warning(
            f"calibration {calibration.name!r} cannot be trained on with the default tiers "
            f"{DEFAULT_TIERS}: add {' and '.join(add)}{tiers}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        args = _parser().parse_args(argv)
        options = _options(args)
        check_output(
            args.output,
            args.sources,
            lambda value: isinstance(value, dict) and value.get("schema") == CALIBRATION_SCHEMA,
        )
        if args.plot:
            check_plot(args.plot, [*args.sources, args.output])
        preset = load_preset(args.acceptance) if args.acceptance else None
        with one_line_warnings():
            sources = read_sources(args.sources, options)
        _warn(sources)
        origin: dict[str, object] = {"notes": args.notes}
        if sources.tables:
            origin["speculative_max_running_requests"] = options.speculative_max_running
        fitted = calibrate(
            sources,
            args.name or args.output.stem,
            min_rows=args.min_rows,
            kv_capacity_tokens=args.kv_capacity_tokens,
            chunk_tokens=args.chunk_tokens,
            source=origin,
            acceptance=preset,
            simulated_acceptance=args.simulated_acceptance,
            costs_only=args.costs_only,
        )
        print_report(fitted, Console())
        fitted.calibration.save(args.output)
        if args.plot:
            plot(fitted, args.plot)
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    _warn_of_training(fitted.calibration)
    print(f"wrote {args.output}{f' and {args.plot}' if args.plot else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
