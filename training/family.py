"""The servers and loads that the policy trains on, drawn at random around a measured system.

What differs from one to the next is what differs between deployments, so that one policy reads the
next system's calibration instead of knowing one by heart: the costs of speculation (see
:func:`perturbed`) and of prefill, the largest batch, the schedule, what an off stretch costs,
the lengths of requests, the load, and how the acceptance moves.
"""

from dataclasses import replace

import numpy as np

from controller.calibration import Calibration, PrefillCost, TierCost
from env.acceptance_process import Acceptance, DraftRecovery
from env.deployment import Deployment
from env.lengths import Lengths
from env.simulator import Cell
from env.workload import ClosedLoop, OpenLoop, Workload
from training.suite import closed_loop, open_loop

CLOSED_SHARE = 0.75
"""Share of the loads that are closed loops; the others swing in an open loop."""


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def training_cells(
    deployment: Deployment, count: int, randomised_share: float, rng: np.random.Generator
) -> list[Cell]:
    """Draw cells that contain and surround the default comparison's.

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
    limit = deployment.max_running_requests
    return replace(
        deployment,
        calibration=replace(
            calibration, prefill_speculative=PrefillCost(fixed_s, prefill.s_per_token)
        ),
        max_running_requests=limit
        if rng.random() < 0.5
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
    prompts = Lengths(log_uniform(rng, 64.0, 3000.0), float(rng.uniform(0.3, 1.0)), 16, 6144)
    outputs = Lengths(log_uniform(rng, 64.0, 1200.0), float(rng.uniform(0.3, 1.0)), 8, 4096)
    load: ClosedLoop | OpenLoop
    if rng.random() < CLOSED_SHARE:
        clients = max(1, round((1.5 * server.max_running_requests) ** float(rng.uniform())))
        load = closed_loop(server, clients, float(rng.uniform(10.0, 40.0)))
    else:
        low, high = float(rng.uniform(0.03, 0.3)), float(rng.uniform(0.4, 1.1))
        load = open_loop(server, low, high, 300, prompts, outputs)
    return Workload(name, load, draw_acceptance(rng), prompts, outputs)


def draw_acceptance(rng: np.random.Generator) -> Acceptance:
    """Return an acceptance process of any kind, over any range."""
    low = float(rng.uniform(0.0, 0.6))
    high = float(rng.uniform(low, 0.95))
    kind = str(rng.choice(["shared", "per-request", "mixture", "phases", "collapse", "still"]))
    if kind == "still":
        return Acceptance("shared", high, high)
    if kind == "mixture":
        return Acceptance("mixture", low, high, share=float(rng.uniform(0.1, 0.9)))
    period = {
        "shared": log_uniform(rng, 1.5, 20.0),
        "per-request": log_uniform(rng, 50.0, 1000.0),
        "phases": round(log_uniform(rng, 20.0, 300.0)),
        "collapse": log_uniform(rng, 1.5, 20.0),
    }[kind]
    return Acceptance(kind, low, high, float(period))


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
