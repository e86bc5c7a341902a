"""The cells that controllers are compared on by default, and cells by name."""

from collections.abc import Sequence
from dataclasses import replace

from controller.errors import ConfigError
from controller.tiers import NATIVE
from env.deployment import Deployment
from env.lengths import LengthSource
from env.scale import capacity_rps
from env.scenarios import SCENARIOS
from env.simulator import Cell
from env.workload import OUTPUTS, PROMPTS, ClosedLoop, OpenLoop, Workload
from env.workloads import LOADS, make_workload, named_lengths

CONCURRENCIES = (1, 8, 32, 64, 128, 256)
ACCEPTANCES = (
    SCENARIOS.make("drift", low=0.3, high=0.9, period_s=5.0),
    SCENARIOS.make("drift-per-request", low=0.3, high=0.9, period_tokens=256.0),
)
EPISODE_S = 40.0
"""Length of a closed-loop episode on an off-only server, in seconds of decoding."""
OPEN_REQUESTS = 600
OPEN_SWING = (0.1, 0.9)
"""Arrival rates of the open loop, as shares of the off-only capacity."""
OPEN_PERIOD_S = 60.0
NAMED_LOAD = 0.6
"""Rate of a named load that says none, as a share of the off-only capacity."""


def closed_loop(deployment: Deployment, concurrency: int, episode_s: float) -> ClosedLoop:
    """Return a closed loop of about ``episode_s`` seconds of off decoding."""
    batch = min(concurrency, deployment.max_running_requests)
    context = int(batch * (PROMPTS.mean() + 0.5 * OUTPUTS.mean()))
    step_s = deployment.calibration.step_s(deployment.resolved_tiers()[0], batch, context)
    return ClosedLoop(concurrency, max(int(batch * episode_s / step_s), 1))


def native_of(deployment: Deployment) -> Deployment:
    """Return the server started without speculation; with the governed tiers if none is known."""
    if NATIVE in deployment.calibration.tier_names:
        return replace(deployment, tiers=NATIVE)
    return deployment


def off_step_s(
    deployment: Deployment,
    running: int,
    prompts: LengthSource = PROMPTS,
    outputs: LengthSource = OUTPUTS,
) -> float:
    """Return the round time without speculation at a batch size and mean lengths, in seconds."""
    batch = min(running, deployment.max_running_requests)
    context = int(batch * (prompts.mean() + 0.5 * outputs.mean()))
    native = native_of(deployment)
    return native.calibration.step_s(native.resolved_tiers()[0], batch, context)


def open_loop(
    deployment: Deployment,
    low: float,
    high: float,
    requests: int,
    prompts: LengthSource = PROMPTS,
    outputs: LengthSource = OUTPUTS,
) -> OpenLoop:
    """Return a swinging load between two shares of the off-only capacity."""
    capacity = capacity_rps(deployment, prompts, outputs)
    return OpenLoop(low * capacity, high * capacity, OPEN_PERIOD_S, requests)


def default_cells(deployment: Deployment) -> list[Cell]:
    """Return the default comparison: closed loops over concurrency, and a swinging open loop.

    Each with an accept rate that drifts between 0.3 and 0.9, shared by all requests or one a
    request.
    """
    cells = []
    for acceptance in ACCEPTANCES:
        for concurrency in CONCURRENCIES:
            load = closed_loop(deployment, concurrency, EPISODE_S)
            name = f"closed {concurrency}, {acceptance.kind}"
            cells.append(Cell(deployment, Workload(name, load, acceptance)))
        load_open = open_loop(deployment, *OPEN_SWING, OPEN_REQUESTS)
        name = f"open, {acceptance.kind}"
        cells.append(Cell(deployment, Workload(name, load_open, acceptance)))
    return cells


def named_cells(
    deployment: Deployment,
    loads: Sequence[str],
    scenarios: Sequence[str],
    lengths: str = "default",
    shifted: str | None = None,
) -> list[Cell]:
    """Return every load under every acceptance scenario, both by name.

    Args:
        deployment: The server.
        loads: Texts such as ``"closed:concurrency=8"``, ``"gamma-burst:cv=4"`` or
            ``"azure-2023:split=code"``; a load that takes a rate and gets none runs at
            ``NAMED_LOAD`` of the off-only capacity, except replays, which keep their own.
        scenarios: Texts such as ``"collapse"`` or ``"mixture:share=0.2"``.
        lengths: See ``env.workloads.named_lengths``; replays have their own.
        shifted: Lengths of every second block of phase shifts; None leaves them alike.

    Raises:
        ConfigError: If a name or a setting is unknown.
    """
    cells = []
    for load in loads:
        name, _, given = load.partition(":")
        takes = LOADS.settings(name)
        replays = "time_scale" in takes
        text = load
        settings = {part.partition("=")[0].strip() for part in given.split(",")}
        if "rate" in takes and not replays and "rate" not in settings:
            rate = NAMED_LOAD * capacity_rps(deployment, *named_lengths(lengths))
            text = f"{name}:{given + ',' if given else ''}rate={rate!r}"
        for scenario in scenarios:
            acceptance = SCENARIOS.parse(scenario)
            shifts = acceptance.kind == "phases" and not replays
            workload = make_workload(
                text,
                acceptance,
                "default" if replays else lengths,
                shifted if shifts else None,
                name=f"{load}, {scenario}",
            )
            cells.append(Cell(deployment, workload))
    if not cells:
        raise ConfigError("named cells: expected at least one load and one scenario, got none")
    return cells
