"""Reference quantities of a cell, which put rewards and horizons of all loads on one scale."""

from controller.errors import ConfigError
from env.deployment import Deployment
from env.lengths import LengthSource
from env.simulator import Cell
from env.workload import ClosedLoop


def request_s(
    deployment: Deployment, prompts: LengthSource, outputs: LengthSource, batch_size: int
) -> float:
    """Return the server's seconds for one request of mean lengths, decoded off in such a batch."""
    tier = deployment.resolved_tiers()[0]
    calibration = deployment.calibration
    context = int(batch_size * (prompts.mean() + 0.5 * outputs.mean()))
    step_s = calibration.step_s(tier, batch_size, context)
    prefill = calibration.prefill_speculative
    prefill_s = prefill.s_per_token * prompts.mean() + prefill.base_s
    return outputs.mean() * step_s / batch_size + prefill_s


def capacity_rps(deployment: Deployment, prompts: LengthSource, outputs: LengthSource) -> float:
    """Return the requests a second that the server sustains off, with a full batch."""
    limit = min(
        deployment.max_running_requests,
        int(deployment.kv_tokens / (prompts.mean() + 0.5 * outputs.mean())),
    )
    if limit < 1:
        raise ConfigError(
            f"the KV cache of {deployment.kv_tokens} tokens holds not even one request of mean "
            "length; raise kv_capacity_tokens or shorten requests"
        )
    return 1.0 / request_s(deployment, prompts, outputs, limit)


def reference_batch(cell: Cell) -> float:
    """Return a typical batch size: the concurrency, or by Little's law that of the mean rate."""
    deployment, workload = cell.deployment, cell.workload
    limit = deployment.max_running_requests
    if isinstance(workload.load, ClosedLoop):
        return float(min(workload.load.concurrency, limit))
    rate = workload.load.mean_rate
    batch = 1
    for candidate in range(1, limit + 1):
        batch = candidate
        if 1.0 / request_s(deployment, workload.prompts, workload.outputs, candidate) >= rate:
            break
    return float(batch)


def reference_step_s(cell: Cell) -> float:
    """Return the first tier's round time at the reference batch and mean context."""
    batch = round(reference_batch(cell))
    workload = cell.workload
    context = int(batch * (workload.prompts.mean() + 0.5 * workload.outputs.mean()))
    tier = cell.deployment.resolved_tiers()[0]
    return cell.deployment.calibration.step_s(tier, batch, context)
