"""The cells that controllers are compared on, and the wider ones that the policy trains on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from controller.calibration import Calibration, TierCost
from controller.errors import ConfigError
from env.acceptance_process import Acceptance
from env.deployment import Deployment
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


def open_loop(deployment: Deployment, low: float, high: float, requests: int) -> OpenLoop:
    """Return a swinging load between two shares of the off-only capacity."""
    capacity = capacity_rps(deployment, PROMPTS, OUTPUTS)
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


def training_cells(
    deployment: Deployment, count: int, randomised_share: float, rng: np.random.Generator
) -> list[Cell]:
    """Draw cells that contain and surround the default ones.

    Three in four are closed loops with log-uniform concurrency, the rest swing in an open loop.
    Acceptance is shared or per request, over random ranges and periods. A share of the servers has
    a perturbed calibration, so that the policy learns from the costs that it sees and not one
    system by heart.
    """
    cells = []
    limit = deployment.max_running_requests
    for index in range(count):
        server = deployment
        if index < randomised_share * count:
            server = replace(deployment, calibration=perturbed(deployment.calibration, rng))
        low = float(rng.uniform(0.1, 0.6)) if rng.random() < 0.5 else 0.3
        high = float(rng.uniform(low, 0.95)) if rng.random() < 0.5 else max(0.9, low)
        if rng.random() < 0.5:
            acceptance = Acceptance("shared", low, high, float(np.exp(rng.uniform(0.5, 3.0))))
        else:
            acceptance = Acceptance("per-request", low, high, float(np.exp(rng.uniform(4.0, 7.0))))
        if rng.random() < 0.75:
            concurrency = max(1, round(limit ** float(rng.uniform(0.0, 1.0))))
            episode_s = float(rng.uniform(10.0, 40.0))
            load: ClosedLoop | OpenLoop = closed_loop(server, concurrency, episode_s)
        else:
            load = open_loop(
                server, float(rng.uniform(0.03, 0.3)), float(rng.uniform(0.4, 1.1)), 300
            )
        cells.append(Cell(server, Workload(f"training {index}", load, acceptance)))
    return cells


def perturbed(calibration: Calibration, rng: np.random.Generator) -> Calibration:
    """Return a calibration whose speculative tiers cost up to 3 times more, or a little less.

    The extra cost over off is scaled by one factor for all depths and one that grows with the
    batch, so that the crossover moves and in some systems speculation never pays.
    """
    level = float(np.exp(rng.normal(0.3, 0.6)))
    tilt = float(rng.normal(0.0, 0.5))
    fixed = float(abs(rng.normal(0.0, 0.5)))
    off = calibration.cost(
        next(n for n in ("native", "cold", "warm") if n in calibration.tier_names)
    )
    costs = []
    for cost in calibration.costs:
        if not cost.tier.isdecimal():
            costs.append(cost)
            continue
        base = []
        for b, t in zip(cost.batch_sizes, cost.base_s, strict=True):
            reference = off.base_at(b)
            extra = max(t / reference - 1.0, 0.02)
            share = np.log(b) / np.log(max(cost.batch_sizes[-1], 2))
            base.append(reference * (1.0 + fixed + extra * level * np.exp(tilt * share)))
        costs.append(
            TierCost(
                cost.tier,
                cost.batch_sizes,
                tuple(float(x) for x in np.maximum.accumulate(base)),
                cost.context_s_per_token,
                cost.relative_noise,
                cost.max_context_tokens,
                cost.num_rows,
            )
        )
    return replace(calibration, name=f"{calibration.name}, perturbed", costs=tuple(costs))
