"""The acceptance block of a calibration, from whichever source has it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from controller.acceptance_profile import AcceptanceProfile, DepthAcceptance
from training.acceptance_fit import Observation, Series, fit_depth, profile, trace_series
from training.sources import Sources

SIMULATED = "trace with simulated acceptance"


def acceptance_of(sources: Sources) -> AcceptanceProfile | None:
    """Return what the sources say of acceptance, or None if they say nothing.

    For each depth the first kind of source that has it counts: traces of real acceptance, logs,
    benchmarks, tables, and last traces of simulated acceptance.
    """
    found = {
        "trace": _of_traces(sources, "real"),
        "log": _fit((int(log.tier), log.series) for log in sources.logs if log.tier.isdecimal()),
        "benchmark": _of_benchmarks(sources),
        "table": {
            depth.num_steps: depth for table in reversed(sources.tables) for depth in table.depths
        },
        SIMULATED: _of_traces(sources, "simulated"),
    }
    chosen: dict[int, DepthAcceptance] = {}
    used = []
    for name, depths in found.items():
        if set(depths) - set(chosen):
            used.append(name)
        chosen = {**depths, **chosen}
    if not chosen:
        return None
    positions = [table.accept_by_position for table in sources.tables if "table" in used]
    return profile(
        "+".join(used),
        used == [SIMULATED],
        list(chosen.values()),
        max(positions, key=len, default=()),
    )


def _of_traces(sources: Sources, kind: str) -> Mapping[int, DepthAcceptance]:
    traces = [trace for trace in sources.traces if trace.header.acceptance == kind]
    return _fit(item for trace in traces for item in trace_series(trace.rows).items())


def _of_benchmarks(sources: Sources) -> Mapping[int, DepthAcceptance]:
    points = [point for source in sources.benches for point in source.points]
    return _fit(
        (
            int(point.tier),
            Series([Observation("", None, point.batch_size, 1, point.accept_len, steady=False)]),
        )
        for point in points
        if point.tier.isdecimal()
    )


def _fit(parts: Iterable[tuple[int, Series]]) -> Mapping[int, DepthAcceptance]:
    """Join the series of each depth, keeping the stretches of different files apart, and fit."""
    joined: dict[int, Series] = defaultdict(Series)
    for index, (num_steps, part) in enumerate(parts):
        joined[num_steps].absorb(part, str(index))
    return {steps: fit_depth(steps, item) for steps, item in joined.items() if item.count}
