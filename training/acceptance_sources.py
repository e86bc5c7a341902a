"""The acceptance block of a calibration, from whichever source has it."""

from collections import defaultdict

from controller.acceptance_profile import AcceptanceProfile, DepthAcceptance
from training.acceptance_fit import Observation, Series, fit_depth, profile, trace_series
from training.sources import Sources

ORDER = ("trace", "log", "benchmark", "table", "trace with simulated acceptance")
"""For each depth the first of these that has it counts."""


def acceptance_of(sources: Sources) -> AcceptanceProfile | None:
    """Return what the sources say of acceptance, or None if they say nothing."""
    found: dict[str, dict[int, DepthAcceptance]] = defaultdict(dict)
    for real, name in ((True, ORDER[0]), (False, ORDER[4])):
        series: dict[int, Series] = defaultdict(Series)
        traces = [trace for trace in sources.traces if (trace.header.acceptance == "real") == real]
        for index, trace in enumerate(traces):
            for steps, part in trace_series(trace.rows).items():
                series[steps].absorb(part, str(index))
        found[name] = {steps: fit_depth(steps, item) for steps, item in series.items()}
    logs: dict[int, Series] = defaultdict(Series)
    for index, log in enumerate(sources.logs):
        if log.series.count and log.tier.isdecimal():
            logs[int(log.tier)].absorb(log.series, str(index))
    found["log"] = {steps: fit_depth(steps, item) for steps, item in logs.items()}
    bench: dict[int, Series] = defaultdict(Series)
    for source in sources.benches:
        for point in source.points:
            if point.tier.isdecimal():
                item = Observation("", None, point.batch_size, 1, point.accept_len, steady=False)
                bench[int(point.tier)].add(item)
    found["benchmark"] = {steps: fit_depth(steps, item) for steps, item in bench.items()}
    by_position: tuple[float, ...] = ()
    for table in sources.tables:
        for depth in table.depths:
            found["table"].setdefault(depth.num_steps, depth)
        by_position = max(by_position, table.accept_by_position, key=len)
    chosen: dict[int, DepthAcceptance] = {}
    used = []
    for name in ORDER:
        new = {steps: item for steps, item in found[name].items() if steps not in chosen}
        if new:
            used.append(name)
        chosen |= new
    if not chosen:
        return None
    return profile(
        "+".join(used),
        used == [ORDER[4]],
        list(chosen.values()),
        by_position if "table" in used else (),
    )
