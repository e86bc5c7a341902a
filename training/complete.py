"""Give a calibration the no-speculation tier that its source does not have.

Usage:
    python -m training.complete IN.json -o OUT.json --native-share 0.719 --why TEXT

Some published tables list depths only. A governed server can always turn speculation off, so such
a system cannot be simulated without a price for that. This command adds ``native`` at a share of
the round time of the shallowest depth, the same at every batch size, and writes down that it is
assumed. From two throughputs ``T`` and the accept length ``L`` of that depth the share is

    native_s / depth_s = T_depth / (T_native * L_depth)
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from controller.calibration import SCHEMA, Calibration
from controller.errors import CalibrationError, SpecGovernorError
from controller.tiers import NATIVE
from training.cli import OneLineParser, check_output, print_error


def native_share(depth_tok_s: float, native_tok_s: float, accept_len: float) -> float:
    """Return the round time without speculation over that of a depth.

    Args:
        depth_tok_s: Throughput at the depth.
        native_tok_s: Throughput without speculation, at the same load.
        accept_len: Accept length at the depth, bonus token included.

    >>> round(native_share(594.7, 447.2, 1.85), 3)
    0.719
    """
    return depth_tok_s / (native_tok_s * accept_len)


def with_native(calibration: Calibration, share: float, why: str) -> Calibration:
    """Return the calibration with an assumed ``native`` tier.

    Args:
        calibration: A calibration without any kind of off.
        share: Its round time over that of the shallowest depth, above 0, at most 1.
        why: Where the share comes from; kept in the source.

    Raises:
        CalibrationError: If a kind of off is there already, or the share is out of range.
    """
    depths = sorted((int(name), name) for name in calibration.tier_names if name.isdecimal())
    if len(depths) != len(calibration.tier_names) or not depths:
        raise CalibrationError(
            f"calibration {calibration.name!r} has tiers {', '.join(calibration.tier_names)}: "
            "expected depths only; a measured kind of off needs no assumed one"
        )
    if not 0.0 < share <= 1.0:
        raise CalibrationError(f"native share {share}: expected above 0, at most 1")
    shallowest = calibration.cost(depths[0][1])
    native = replace(
        shallowest,
        tier=NATIVE,
        base_s=tuple(share * seconds for seconds in shallowest.base_s),
        context_s_per_token=share * shallowest.context_s_per_token,
        num_rows=0,
        median_error=None,
        p95_error=None,
        regions=(),
    )
    assumed = {"native_share_of_depth": depths[0][0], "share": share, "why": why}
    return replace(
        calibration,
        costs=(native, *calibration.costs),
        source={**calibration.source, "assumed_native": assumed},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = OneLineParser(
        prog="python -m training.complete",
        description="Add an assumed no-speculation tier to a calibration without one.",
    )
    parser.add_argument("calibration", type=Path, metavar="IN.json")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="OUT.json")
    parser.add_argument("--native-share", required=True, type=float, metavar="SHARE")
    parser.add_argument("--why", required=True, help="where the share comes from")
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        check_output(
            options.output,
            [],
            lambda value: isinstance(value, dict) and value.get("schema") == SCHEMA,
        )
        made = with_native(Calibration.load(options.calibration), options.native_share, options.why)
        made.save(options.output)
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
