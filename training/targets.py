"""The targets of the project, each with what a run of the protocol found.

Differences are paired: a cell's value is the mean over its seeds of the log ratio of two
controllers on the same requests, acceptance and noise. "Not behind" allows what luck explains: the
difference plus half its 95% interval must reach zero.

The oracle looks ahead in expectation and is no optimum. A controller can be ahead of it in a cell:
in mixtures of requests by up to 1% on every seed (perhaps since what a tier does to who is left in
the batch is beyond its horizon), and by luck where an open load is near capacity, which
magnifies small differences. It therefore counts as at least as good as the best controller.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.statistics import half_width, stratified_half_width

POLICY, ORACLE, BOUND, NATIVE_SERVER = "policy", "oracle", "bound", "native always"
THRESHOLD, LADDER = "tuned threshold", "sglang ladder"
NOTHING_TO_GAIN = 0.005
"""Oracle gains below this say nothing about the share that is recovered."""

System = Mapping[str, Any]
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One target on one system, or on all of them.

    Attributes:
        name: What is asked for.
        system: Where; ``"all"`` over every system that it applies to.
        value: What was found, as text.
        hit: Whether it was reached; None where there is nothing to judge.
        where: The cell that decided, if one did.
    """

    name: str
    system: str
    value: str
    hit: bool | None
    where: str = ""


def objective(cell: Cell, name: str) -> NDArray[np.float64]:
    """Return ``(num_seeds,)`` objectives of a controller in a cell."""
    return np.array(cell["controllers"][name]["objective"])


def mean_objective(cell: Cell, name: str) -> float:
    """Return the mean objective over seeds."""
    return float(objective(cell, name).mean())


def log_ratio(cell: Cell, name: str, other: str) -> NDArray[np.float64]:
    """Return ``(num_seeds,)`` paired log ratios of two controllers' objectives."""
    ratios: NDArray[np.float64] = np.log(objective(cell, name) / objective(cell, other))
    return ratios


def rivals(cell: Cell) -> list[str]:
    """Return the names of all controllers that one could run."""
    return [name for name in cell["controllers"] if name not in (ORACLE, BOUND)]


def best_of(cell: Cell, names: Iterable[str]) -> float:
    """Return the best mean objective among controllers."""
    return max(mean_objective(cell, name) for name in names)


def fixed_names(cell: Cell, native_server: bool) -> list[str]:
    """Return the fixed choices: every tier held, and the server started without speculation."""
    names = [name for name in cell["controllers"] if name.startswith(("always ", "fixed "))]
    if native_server and NATIVE_SERVER in cell["controllers"]:
        names.append(NATIVE_SERVER)
    return names


def share_of_oracle(cell: Cell, name: str = POLICY, governed: bool = False) -> float:
    """Return the share of the oracle, which counts as at least as good as the best controller.

    Args:
        cell: The cell.
        name: The controller.
        governed: Whether to leave out the server started without speculation, whose prefill is
            cheaper than any governed server's.
    """
    names = [n for n in (*rivals(cell), ORACLE) if not (governed and n == NATIVE_SERVER)]
    return mean_objective(cell, name) / best_of(cell, names)


def share_of_bound(cells: Sequence[Cell], name: str = POLICY) -> float:
    """Return the mean share of the bound over cells."""
    return float(np.mean([mean_objective(c, name) / mean_objective(c, BOUND) for c in cells]))


def _percent(value: float) -> str:
    return f"{100 * value:+.2f}%"


def _worst(cells: Sequence[Cell], value: Callable[[Cell], float]) -> tuple[float, str]:
    values = [value(cell) for cell in cells]
    at = int(np.argmin(values))
    return values[at], str(cells[at]["cell"])


def shares(system: System) -> list[Target]:
    """Share of the oracle: mean at least 0.98, worst cell at least 0.94; the bound beside it."""
    cells, name = system["cells"], system["system"]
    rows = []
    for governed in (False, True):
        what = "share of the oracle" + (", governed servers only" if governed else "")
        mean = float(np.mean([share_of_oracle(c, governed=governed) for c in cells]))
        worst, where = _worst(cells, lambda c: share_of_oracle(c, governed=governed))  # noqa: B023
        rows.append(Target(f"{what}, mean >= 0.98", name, f"{mean:.4f}", mean >= 0.98))
        rows.append(
            Target(f"{what}, worst cell >= 0.94", name, f"{worst:.4f}", worst >= 0.94, where)
        )
    bound = share_of_bound(cells)
    rows.append(Target("share of the bound (printed beside it)", name, f"{bound:.4f}", None))
    return rows


def against_threshold(system: System) -> list[Target]:
    """Most of the oracle's gain over the tuned threshold, and no cell worse by more than 1%."""
    cells, name = system["cells"], system["system"]
    gains = [mean_objective(c, POLICY) / mean_objective(c, THRESHOLD) - 1.0 for c in cells]
    best = [mean_objective(c, ORACLE) / mean_objective(c, THRESHOLD) - 1.0 for c in cells]
    gain, room = float(np.mean(gains)), float(np.mean(best))
    what = "of the oracle's gain over the tuned threshold >= 80%"
    if room > NOTHING_TO_GAIN:
        share = gain / room
        rows = [
            Target(what, name, f"{share:.1%} ({_percent(gain)} of {_percent(room)})", share >= 0.8)
        ]
    else:
        rows = [Target(what, name, f"nothing to gain ({_percent(room)})", None)]
    at = int(np.argmin(gains))
    what = "against the tuned threshold, no cell worse by more than 1%"
    rows.append(Target(what, name, _percent(gains[at]), gains[at] >= -0.01, cells[at]["cell"]))
    return rows


def against_hindsight(system: System) -> list[Target]:
    """Against the best fixed choice of each cell: no cell worse by more than 1.5%."""
    rows = []
    for native_server in (True, False):
        worst, where = _worst(
            system["cells"],
            lambda c: (
                mean_objective(c, POLICY) / best_of(c, fixed_names(c, native_server))  # noqa: B023
                - 1.0
            ),
        )
        kind = "fixed choice" if native_server else "fixed tier of the same server"
        what = f"against the best {kind} in hindsight, no cell worse by more than 1.5%"
        rows.append(Target(what, system["system"], _percent(worst), worst >= -0.015, where))
    return rows


def against_ladder(system: System) -> list[Target]:
    """Against SGLang's default ladder: +20% in the mean, where it leaves that much."""
    cells = system["cells"]
    gain = float(np.mean([mean_objective(c, POLICY) / mean_objective(c, LADDER) for c in cells]))
    room = float(np.mean([mean_objective(c, ORACLE) / mean_objective(c, LADDER) for c in cells]))
    leaves = room - 1.0 >= 0.2
    value = f"{_percent(gain - 1.0)} (oracle {_percent(room - 1.0)})"
    what = "against SGLang's default ladder, mean >= +20% where it leaves that much"
    return [Target(what, system["system"], value, gain - 1.0 >= 0.2 if leaves else None)]


def by_scenario(system: System) -> dict[str, list[Cell]]:
    """Return the cells of each acceptance scenario, closed and open ones together."""
    groups: dict[str, list[Cell]] = {}
    for cell in system["cells"]:
        groups.setdefault(cell["scenario"], []).append(cell)
    return groups


def mean_difference(cells: Sequence[Cell], name: str, other: str) -> tuple[float, float]:
    """Return the mean over cells of the paired log ratio, and half its 95% interval.

    Each cell has seeds of its own, so the cells are the strata of the sample.
    """
    ratios = [log_ratio(cell, name, other) for cell in cells]
    return float(np.mean(ratios)), stratified_half_width(ratios)


def against_rules(system: System) -> list[Target]:
    """Against greedy and the bandit: behind in no scenario; where greedy leaves 2%, a third."""
    rows, groups, name = [], by_scenario(system), system["system"]
    for other in ("greedy", "tuned greedy", "bandit"):
        found = {key: mean_difference(cells, POLICY, other) for key, cells in groups.items()}
        worst = min(found, key=lambda key: sum(found[key]))
        mean, half = found[worst]
        what = f"against {other}: not behind in any scenario"
        rows.append(
            Target(what, name, f"{_percent(mean)} ± {100 * half:.2f}", mean + half >= 0.0, worst)
        )
    for other in ("greedy", "tuned greedy"):
        recovered = {}
        for key, cells in groups.items():
            left = mean_difference(cells, ORACLE, other)[0]
            if left > 0.02:
                recovered[key] = mean_difference(cells, POLICY, other)[0] / left
        what = f"where {other} leaves more than 2% to the oracle, a third of it is recovered"
        if recovered:
            worst = min(recovered, key=lambda key: recovered[key])
            share = recovered[worst]
            rows.append(Target(what, name, f"{share:.0%}", share >= 1 / 3, worst))
        else:
            rows.append(Target(what, name, "it leaves less in every scenario", None))
    return rows


def open_load(system: System) -> list[Target]:
    """Open load: goodput and mean time not worse than the best baseline that tuning chose."""
    scores = {name: item["score"] for name, item in system["tuned"].items()}
    chosen = max(scores, key=lambda name: scores[name])
    cells, name = [c for c in system["cells"] if not c["closed"]], system["system"]
    rows = []
    if not cells:
        return rows
    time = [log_ratio(c, POLICY, chosen) for c in cells]
    behind = [float(x.mean() + half_width(x)) for x in time]
    at = int(np.argmin(behind))
    what = "open load, mean time in system not worse than the baseline that tuning chose"
    value = f"worst {_percent(float(time[at].mean()))} against {chosen}"
    rows.append(Target(what, name, value, behind[at] >= 0.0, cells[at]["cell"]))
    room = float(np.mean([log_ratio(c, ORACLE, chosen) for c in cells]))
    mean = float(np.mean(time))
    hit = mean > 0.0 if room > NOTHING_TO_GAIN else None
    value = f"{_percent(mean)} (oracle {_percent(room)})"
    rows.append(Target("open load, mean time better in the mean", name, value, hit))
    goodput = []
    for c in cells:
        mine, theirs = (
            np.array(c["controllers"][who]["slo_goodput_by_seed"]) for who in (POLICY, chosen)
        )
        scale = max(float(theirs.mean()), 1e-9)
        goodput.append((mine - theirs) / scale if theirs.mean() > 0 or mine.mean() > 0 else mine)
    behind = [float(x.mean() + half_width(x)) for x in goodput]
    at = int(np.argmin(behind))
    what = "open load, SLO goodput not worse than the baseline that tuning chose"
    value = f"worst {_percent(float(goodput[at].mean()))} against {chosen}"
    rows.append(Target(what, name, value, behind[at] >= 0.0, cells[at]["cell"]))
    mean = float(np.mean(np.clip(goodput, -10.0, 10.0)))
    hit = mean > 0.0 if room > NOTHING_TO_GAIN else None
    rows.append(Target("open load, goodput better in the mean", name, _percent(mean), hit))
    return rows


def after_shift(system: System) -> list[Target]:
    """After a phase shift: 50 rounds if speculating, 15 native rounds of regret if off."""
    found = system["shifts"].get(POLICY, [])
    name = system["system"]
    speculating = [shift["rounds"] for shift in found if shift["speculating"]]
    off = [shift["excess"] for shift in found if not shift["speculating"]]
    rows = []
    what = "after a phase shift, if speculating: within 2% of the oracle in <= 50 rounds, median"
    if speculating:
        median = float(np.median(speculating))
        value = f"{median:.0f} rounds (of {len(speculating)} shifts)"
        rows.append(Target(what, name, value, median <= 50.0))
    else:
        rows.append(Target(what, name, "it never was speculating", None))
    what = "after a phase shift, if off: excess regret <= 15 native rounds, median"
    if off:
        median = float(np.median(off))
        rows.append(Target(what, name, f"{median:.1f} (of {len(off)} shifts)", median <= 15.0))
    else:
        rows.append(Target(what, name, "it never was off", None))
    return rows


def kimi(system: System) -> list[Target]:
    """Kimi table: at least 0.99 of no speculation at every concurrency."""
    if not system["system"].startswith("kimi"):
        return []
    closed = [c for c in system["cells"] if c["closed"]]
    worst, where = _worst(
        closed, lambda c: mean_objective(c, POLICY) / mean_objective(c, NATIVE_SERVER)
    )
    what = "Kimi table: at least 0.99 of no speculation at every concurrency"
    return [Target(what, system["system"], f"{worst:.4f}", worst >= 0.99, where)]


def precision(system: System) -> list[Target]:
    """Paired seeds: half the 95% interval of the mean difference to the threshold below 0.5%."""
    mean, half = mean_difference(system["cells"], POLICY, THRESHOLD)
    value = f"{_percent(mean)} ± {100 * half:.2f}"
    what = "mean difference to the tuned threshold known to 0.5% (95%)"
    return [Target(what, system["system"], value, half < 0.005)]


JUDGES = (
    precision,
    shares,
    against_threshold,
    against_hindsight,
    against_ladder,
    against_rules,
    open_load,
    after_shift,
    kimi,
)


def judge(report: Mapping[str, Any]) -> list[Target]:
    """Return every target on every system, and the shares over all held-out systems."""
    found = [row for judge_one in JUDGES for s in report["systems"] for row in judge_one(s)]
    held_out = [s for s in report["systems"] if s["held_out"]]
    cells = [{**c, "cell": f"{s['system']}, {c['cell']}"} for s in held_out for c in s["cells"]]
    if cells:
        pooled = {"system": "all held out", "cells": cells}
        found = [*shares(pooled), *against_hindsight(pooled), *found]
    return found
