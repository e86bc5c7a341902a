"""The servers and loads that the policy trains on, drawn at random around a measured system.

What differs from one to the next is what differs between deployments, so that one policy reads the
next system's calibration instead of knowing one by heart: the costs of speculation (see
:func:`perturbed`) and of prefill, the largest batch, the schedule, what an off stretch costs,
the lengths of requests, the load, and how the acceptance moves.

Loads cover all that a server meets: closed loops from one client to twice the largest batch, open
ones around the capacity of the server without speculation. Acceptance that moves with time has a
period in rounds of that server at the load: what a controller can follow depends on how many rounds
it has, and slow and fast systems would see unlike many changes in a period in seconds.
"""

from dataclasses import replace

import numpy as np

from controller.calibration import Calibration, PrefillCost, TierCost
from env.acceptance_process import Acceptance, DraftRecovery
from env.deployment import Deployment
from env.lengths import Lengths
from env.scale import capacity_rps
from env.simulator import Cell
from env.workload import OUTPUTS, PROMPTS, ClosedLoop, GammaBurst, Load, OpenLoop, Poisson, Workload
from training.suite import native_of, off_step_s

CLOSED_SHARE = 0.7
"""Share of the loads that are closed loops."""
BAND_EDGES = (1.0 / 256.0, 1.0 / 16.0, 0.5, 2.0)
"""Clients of closed loops, as shares of the largest batch: a third of the loops in each band."""
OPEN_RATE = (0.5, 1.25)
"""Mean arrival rate of open loops, as a share of the capacity without speculation."""
ROUNDS = (500.0, 2500.0)
"""Length of a closed loop, in rounds without speculation."""
PERIOD_ROUNDS = (100.0, 4000.0)
"""Period of acceptance that moves with time, in rounds without speculation."""


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def training_cells(
    deployment: Deployment, count: int, randomised_share: float, rng: np.random.Generator
) -> list[Cell]:
    """Draw loads on a measured server and on servers drawn around it.

    Args:
        deployment: The measured server, which the first cells have as it is.
        count: Number of cells.
        randomised_share: Share of the cells with a drawn server.
        rng: Draws everything.
    """
    cells = []
    for index in range(count):
        drawn = index >= (1.0 - randomised_share) * count
        server = draw_deployment(deployment, rng) if drawn else deployment
        cells.append(Cell(server, draw_workload(server, f"training {index}", rng)))
    return cells


def draw_deployment(deployment: Deployment, rng: np.random.Generator) -> Deployment:
    """Return a server like a measured one, but for what differs between deployments."""
    calibration = perturbed(deployment.calibration, rng)
    prefill = calibration.prefill_speculative
    fixed_s = prefill.base_s * float(np.exp(rng.normal(-0.3, 0.8)))
    if rng.random() < 0.2:  # As in calibrations from throughput tables.
        fixed_s = 0.0
    limit = deployment.max_running_requests
    return replace(
        deployment,
        calibration=replace(
            calibration, prefill_speculative=PrefillCost(fixed_s, prefill.s_per_token)
        ),
        max_running_requests=limit
        if rng.random() < 0.3
        else round(log_uniform(rng, min(16, limit), limit)),
        overlap=bool(rng.random() < 0.8),
        recovery=DraftRecovery(
            cold_start_share=float(rng.uniform(0.0, 0.5)),
            worst_loss=float(rng.uniform(0.0, 0.7)),
            gap_scale_tokens=log_uniform(rng, 8.0, 128.0),
            recovery_tokens=log_uniform(rng, 4.0, 32.0),
        ),
    )


def draw_workload(server: Deployment, name: str, rng: np.random.Generator) -> Workload:
    """Return a load with an acceptance process for a server."""
    prompts, outputs = PROMPTS, OUTPUTS
    if rng.random() < 0.6:
        prompts = Lengths(log_uniform(rng, 64.0, 3000.0), float(rng.uniform(0.3, 1.0)), 16, 6144)
        outputs = Lengths(log_uniform(rng, 32.0, 1500.0), float(rng.uniform(0.3, 1.0)), 8, 4096)
    load: Load
    limit = server.max_running_requests
    if rng.random() < CLOSED_SHARE:
        band = int(rng.integers(len(BAND_EDGES) - 1))
        share = log_uniform(rng, BAND_EDGES[band], BAND_EDGES[band + 1])
        clients = max(1, round(share * limit))
        running = min(clients, limit)
        load = ClosedLoop(clients, round(running * log_uniform(rng, *ROUNDS)))
    else:
        running = max(limit // 2, 1)
        capacity = capacity_rps(native_of(server), prompts, outputs)
        load = draw_open_load(float(rng.uniform(*OPEN_RATE)) * capacity, rng)
    acceptance = draw_acceptance(off_step_s(server, running, prompts, outputs), rng)
    return Workload(name, load, acceptance, prompts, outputs)


def draw_open_load(rate: float, rng: np.random.Generator) -> Load:
    """Return an open loop with a mean rate in requests/s: even, in bursts, or swinging."""
    requests = int(rng.integers(150, 400))
    kind = str(rng.choice(["even", "bursts", "swing"]))
    if kind == "even":
        return Poisson(rate, requests)
    if kind == "bursts":
        return GammaBurst(rate, float(rng.uniform(1.5, 4.0)), requests)
    low = float(rng.uniform(0.1, 0.8)) * rate
    return OpenLoop(low, 2.0 * rate - low, log_uniform(rng, 0.1, 1.0) * requests / rate, requests)


def draw_acceptance(step_s: float, rng: np.random.Generator) -> Acceptance:
    """Return an acceptance process of any kind, over any range.

    Args:
        step_s: Round time without speculation at the load, in seconds.
        rng: Draws everything.
    """
    low = float(rng.uniform(0.0, 0.6))
    high = float(rng.uniform(max(low, 0.5), 0.97))
    shape = (1.0,) if rng.random() < 0.5 else (1.0, float(rng.uniform(0.7, 1.0)))
    kind = str(rng.choice(["shared", "per-request", "mixture", "phases", "collapse", "still"]))
    if kind == "still":
        level = float(rng.uniform(0.1, 0.95))
        return Acceptance("shared", level, level, shape=shape)
    if kind == "mixture":
        share = float(rng.uniform(0.1, 0.9))
        return Acceptance("mixture", low, high, share=share, shape=shape)
    period = {
        "shared": step_s * log_uniform(rng, *PERIOD_ROUNDS),
        "per-request": log_uniform(rng, 50.0, 1000.0),
        "phases": round(log_uniform(rng, 20.0, 300.0)),
        "collapse": step_s * log_uniform(rng, *PERIOD_ROUNDS),
    }[kind]
    return Acceptance(kind, low, high, float(period), shape=shape)


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
