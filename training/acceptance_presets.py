"""Acceptance of public drafts, as named presets: golden accept lengths by depth.

The table is InferenceX's golden accept lengths (``training/data/README.md`` has source and
licence).
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from controller.acceptance_profile import AcceptanceProfile, DepthAcceptance
from controller.errors import CalibrationError
from controller.tiers import MAX_NUM_STEPS
from training.acceptance_fit import profile

GOLDEN = Path(__file__).parent / "data/tables/inferencex_golden_accept_len.csv"


@cache
def presets() -> Mapping[str, AcceptanceProfile]:
    """Return every preset by name, such as ``"kimik2.5_eagle3/thinking_on"``."""
    found: dict[str, list[DepthAcceptance]] = {}
    with open(GOLDEN, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            steps = int(row["num_steps"])
            if steps <= MAX_NUM_STEPS:
                depth = DepthAcceptance(steps, float(row["accept_len"]), 1)
                found.setdefault(row["config"].replace(" ", "/"), []).append(depth)
    return MappingProxyType(
        {name: profile(f"preset {name}", False, depths) for name, depths in sorted(found.items())}
    )


def load_preset(name: str) -> AcceptanceProfile:
    """Return a preset.

    Raises:
        CalibrationError: If there is none of that name; lists the names.
    """
    if name not in presets():
        raise CalibrationError(
            f"acceptance preset {name!r}: expected one of {', '.join(presets())}"
        )
    return presets()[name]
