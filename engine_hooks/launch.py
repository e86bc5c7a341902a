"""Starts an SGLang server under the governor.

    python -m engine_hooks.launch --policy DIR [--governor on|shadow|off] -- SGLANG ARGUMENTS

Arguments that are not listed here go to SGLang as they are; the ``--`` may be left out.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from controller.decision import REPEAT_ROUNDS
from controller.errors import SpecGovernorError
from engine_hooks import settings, symbols


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into our environment variables and SGLang's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_hooks.launch",
        description="Start an SGLang server whose speculation is governed.",
        epilog="All other arguments go to SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument("--policy", required=True, metavar="DIR", help="checkpoint directory")
    parser.add_argument(
        "--calibration", metavar="FILE", help="of this server, instead of the checkpoint's own"
    )
    parser.add_argument(
        "--governor-tiers", metavar="LIST", help='such as "off,1,3", instead of all that it has'
    )
    parser.add_argument(
        "--governor",
        choices=settings.MODES,
        default=settings.ON,
        help="on (default); shadow: decide and log, change nothing; off",
    )
    parser.add_argument(
        "--governor-strict",
        action="store_true",
        help="refuse to start if the policy or SGLang does not fit, instead of running static",
    )
    parser.add_argument(
        "--governor-guard",
        choices=("on", "off"),
        help="on (default): overrule the policy where another tier measures better",
    )
    parser.add_argument(
        "--governor-repeat",
        metavar="ROUNDS",
        help=f"rounds that a decision stands for with up to 4 requests, 1 to {settings.MAX_REPEAT} "
        f"(default {REPEAT_ROUNDS})",
    )
    parser.add_argument("--governor-trace", metavar="FILE", help="record a step trace")
    parser.add_argument("--governor-decisions", metavar="FILE", help="log every decision")
    ours, theirs = parser.parse_known_args(arguments)
    if theirs and theirs[0] == "--":
        theirs = theirs[1:]
    variables = {
        settings.POLICY: ours.policy,
        settings.CALIBRATION: ours.calibration or "",
        settings.TIERS: ours.governor_tiers or "",
        settings.MODE: ours.governor,
        settings.STRICT: "1" if ours.governor_strict else "",
        settings.GUARD: ours.governor_guard or "",
        settings.REPEAT: ours.governor_repeat or "",
        settings.TRACE: ours.governor_trace or "",
        settings.DECISIONS: ours.governor_decisions or "",
    }
    return {name: value for name, value in variables.items() if value}, theirs


def check(variables: Mapping[str, str]) -> str | None:
    """Return why a server must not be started with these environment variables, or None."""
    strict = settings.STRICT in variables
    faults = symbols.check_symbols()
    if faults and (strict or not symbols.installed_version()):
        return "; ".join(faults)
    if strict:
        try:
            settings.Settings.from_environment(variables).load_policy()
        except SpecGovernorError as error:
            return str(error)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the server; return an exit code when it could not be."""
    variables, theirs = parse(sys.argv[1:] if arguments is None else arguments)
    fault = check(variables)
    if fault is not None:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    os.environ.update(variables)
    sys.argv = ["sglang.launch_server", *theirs]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SpecGovernorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
