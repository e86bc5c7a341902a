"""Small systems and workloads with round numbers, shared by the tests."""

from controller.calibration import Calibration, PrefillCost, TierCost
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.simulator import Cell
from env.workload import ClosedLoop, Lengths, Workload


def calibration(off_s=0.010, deep_s=0.012, depth=3, off="cold"):
    """One kind of off and one depth, at costs that depend on nothing."""
    costs = tuple(
        TierCost(name, (1, 64), (seconds, seconds), 0.0, (0.0, 0.0), 10**6, 100)
        for name, seconds in ((off, off_s), (str(depth), deep_s))
    )
    prefill = PrefillCost(0.001, 0.0)
    return Calibration("synthetic", costs, prefill, prefill, kv_capacity_tokens=10**6)


def even_system(step_s=0.010, prefill_s=0.0, token_s=0.0, row_s=0.0):
    """Every tier at one cost, without noise: ``step_s`` and ``row_s`` a row; and any prefill."""
    names = ("native", *"1234567")
    costs = tuple(
        TierCost(name, (1, 2), (step_s, step_s + row_s), 0.0, (0.0, 0.0), 10**9, 100)
        for name in names
    )
    prefill = PrefillCost(prefill_s, token_s)
    return Calibration("even", costs, prefill, prefill, kv_capacity_tokens=10**7)


def cell(deep_s, rate, concurrency=4, tokens=4000):
    """A closed loop with constant acceptance."""
    deployment = Deployment(calibration(deep_s=deep_s), tiers="off,3", max_running_requests=8)
    workload = Workload(
        "synthetic",
        ClosedLoop(concurrency, tokens),
        Acceptance("shared", rate, rate),
        prompts=Lengths(16, 0.0, 16, 16),
        outputs=Lengths(200, 0.2, 100, 400),
    )
    return Cell(deployment, workload)
