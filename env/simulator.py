"""Many servers side by side: the one object that owns state and runs kernels on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import prange
from numpy.typing import NDArray

from controller.errors import ConfigError
from controller.features import SCRATCH_SIZE, observation_size
from controller.tiers import MAX_NUM_STEPS
from env.acceptance_process import KINDS
from env.compiled import kernel
from env.deployment import Deployment, stack_costs
from env.privileged import fill_privileged
from env.server_loop import advance, observe_server, reset_server, step_server
from env.state import REQUEST, State, new_state
from env.workload import ClosedLoop, RequestTable, Workload


@dataclass(frozen=True)
class Cell:
    """A deployment under a workload."""

    deployment: Deployment
    workload: Workload

    @property
    def name(self) -> str:
        """Name for tables."""
        return self.workload.name


@kernel(parallel=True)
def _reset(state, costs, servers):
    for i in prange(servers.shape[0]):
        reset_server(state, servers[i])
        advance(state, costs, servers[i])


@kernel
def _in_range(actions, num_tiers):
    for action in actions:
        if not 0 <= action < num_tiers:
            return False
    return True


@kernel(parallel=True)
def _step(state, costs, actions, area, tokens, ideal, lost):
    for e in prange(actions.shape[0]):
        server = state.server[e]
        if server.done:
            area[e] = 0.0
            tokens[e] = 0
            ideal[e] = 0.0
            lost[e] = 0.0
            continue
        area_before = server.area
        tokens_before = server.output_tokens
        ideal_before = server.ideal_tokens
        lost_before = server.lost_s
        misses_before = server.slo_misses
        step_server(state, costs, e, actions[e])
        missed = server.slo_misses - misses_before
        missed_s = state.config[e].slo_weight * missed
        area[e] = server.area - area_before + missed_s
        lost[e] = server.lost_s - lost_before + missed_s
        tokens[e] = server.output_tokens - tokens_before
        ideal[e] = server.ideal_tokens - ideal_before


@kernel(parallel=True)
def _observe(state, costs, out):
    num_tiers = costs.num_steps.shape[0]
    for e in prange(out.shape[0]):
        step_s = np.empty(num_tiers)
        scratch = np.empty(SCRATCH_SIZE)
        observe_server(state, costs, e, out[e], step_s, scratch)


@kernel(parallel=True)
def _observe_privileged(state, out):
    for e in prange(out.shape[0]):
        fill_privileged(state, e, out[e])


@kernel(parallel=True)
def _run_tables(state, costs, tables):
    for e in prange(tables.shape[0]):
        server = state.server[e]
        while not server.done:
            step_server(state, costs, e, tables[e, server.num_running])


class Simulator:
    """Servers that run in lockstep decisions, each with its own clock.

    Args:
        cells: One deployment and workload for each server; all with one tier list.
        slo_weight: Seconds of request time that one missed SLO costs; 0 leaves SLOs out.
        slo_ttft_s: Time to first token of the SLO.
        slo_tpot_s: Time per output token of the SLO.

    Raises:
        ConfigError: If a request of a workload cannot fit into its server's KV cache.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        slo_weight: float = 0.0,
        slo_ttft_s: float = 2.0,
        slo_tpot_s: float = 0.05,
    ) -> None:
        if not cells:
            raise ConfigError("a simulator needs at least one server, got none")
        for name, value in (("slo_weight", slo_weight), ("slo_ttft_s", slo_ttft_s)):
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{name} {value}: expected a number of at least 0")
        if not 0.0 < slo_tpot_s < float("inf"):
            raise ConfigError(f"slo_tpot_s {slo_tpot_s}: expected a positive number")
        self.cells = tuple(cells)
        deployments = list(dict.fromkeys(id(cell.deployment) for cell in cells))
        by_id = {id(cell.deployment): cell.deployment for cell in cells}
        self.costs = stack_costs([by_id[key] for key in deployments])
        self.tiers = cells[0].deployment.resolved_tiers()
        self.num_servers = len(self.cells)
        self.num_tiers = len(self.tiers)
        self.state: State = new_state(
            self.num_servers,
            max(cell.workload.max_requests() for cell in cells),
            max(cell.deployment.max_running_requests for cell in cells) + 1,
            self.num_tiers,
        )
        config = self.state.config
        config.slo_weight, config.slo_ttft_s, config.slo_tpot_s = slo_weight, slo_ttft_s, slo_tpot_s
        for e, cell in enumerate(self.cells):
            self._configure(e, cell, deployments.index(id(cell.deployment)))
        self._started = np.zeros(self.num_servers, np.bool_)
        self._all_started = False
        self._area = np.zeros(self.num_servers)
        self._tokens = np.zeros(self.num_servers, np.int64)
        self.ideal_tokens = np.zeros(self.num_servers)
        self.lost_s = np.zeros(self.num_servers)

    def _configure(self, e: int, cell: Cell, row: int) -> None:
        deployment, workload = cell.deployment, cell.workload
        largest = workload.max_tokens + deployment.reserved_tokens
        if largest > deployment.kv_tokens:
            raise ConfigError(
                f"workload {workload.name!r}: a request may need {largest} KV tokens, but the "
                f"cache holds {deployment.kv_tokens}; raise kv_capacity_tokens or shorten requests"
            )
        config = self.state.config[e]
        load, recovery, acceptance = workload.load, deployment.recovery, workload.acceptance
        config.cost_row = row
        config.initial_tier = deployment.initial_tier
        config.concurrency = load.concurrency if isinstance(load, ClosedLoop) else 0
        config.think_s = load.think_s if isinstance(load, ClosedLoop) else 0.0
        config.token_target = load.tokens if isinstance(load, ClosedLoop) else 0
        config.num_requests = workload.max_requests()
        config.max_running_requests = deployment.max_running_requests
        config.kv_capacity_tokens = deployment.kv_tokens
        config.reserved_tokens = deployment.reserved_tokens
        config.chunk_tokens = deployment.prefill_chunk
        config.overlap = deployment.overlap
        config.mean_output_tokens = workload.mean_output_tokens
        config.accept_kind = KINDS[acceptance.kind]
        config.accept_low = acceptance.low
        config.accept_high = acceptance.high
        config.accept_period = acceptance.period
        config.accept_share = acceptance.share
        config.accept_shape = acceptance.position_factors()
        config.cold_start_share = recovery.cold_start_share
        config.worst_loss = recovery.worst_loss
        config.gap_scale_tokens = recovery.gap_scale_tokens
        config.recovery_tokens = recovery.recovery_tokens
        config.recovery = [0.5 ** (t / recovery.recovery_tokens) for t in range(MAX_NUM_STEPS + 2)]

    @property
    def observation_size(self) -> int:
        """Length of one observation."""
        return observation_size(self.num_tiers)

    def reset(self, seeds: Sequence[int], servers: Sequence[int] | None = None) -> None:
        """Start an episode on some servers (all by default), one seed each."""
        chosen = np.arange(self.num_servers) if servers is None else np.asarray(servers, np.int64)
        if len(seeds) != len(chosen):
            raise ConfigError(f"expected one seed a server, got {len(seeds)} for {len(chosen)}")
        if any(seed < 0 for seed in seeds):
            raise ConfigError(f"seeds {min(seeds)}: expected whole numbers of at least 0")
        for e, seed in zip(chosen, seeds, strict=True):
            self._load(int(e), int(seed), self.cells[e].workload.sample(int(seed)))
        _reset(self.state, self.costs, chosen)
        self._started[chosen] = True
        self._all_started = bool(self._started.all())

    def _load(self, e: int, seed: int, table: RequestTable) -> None:
        self.state.config[e].seed = seed
        rows = self.state.request[e, : len(table.arrival_s)]
        rows["arrival_s"] = table.arrival_s
        rows["prompt_tokens"] = table.prompt_tokens
        rows["output_tokens"] = table.output_tokens
        rows["max_new_tokens"] = table.max_new_tokens

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Run one decode round on every server that is not done, up to its next decision.

        Args:
            actions: ``(num_servers,)`` tier indices.

        Returns:
            ``(num_servers,)`` integral of the requests in system over the elapsed time, in
            seconds, SLO misses added at their weight; and ``(num_servers,)`` output tokens.
            The arrays are reused by the next call. ``lost_s`` holds the request-seconds that the
            rounds lost against the best tier with a warm draft, SLO misses added, and
            ``ideal_tokens`` the tokens that this tier would have been expected to give.
        """
        self._check(actions, ())
        _step(
            self.state,
            self.costs,
            actions,
            self._area,
            self._tokens,
            self.ideal_tokens,
            self.lost_s,
        )
        return self._area, self._tokens

    def _check(self, tiers: NDArray[np.int64], least: tuple[int, ...]) -> None:
        """Refuse what a kernel, which checks nothing, would read past the end of an array for."""
        if not self._all_started:
            raise ConfigError("the servers hold no episode yet; call reset first")
        fits = tiers.ndim == 1 + len(least) and len(tiers) == self.num_servers
        if not fits or tiers.shape[1:] < least or tiers.dtype.kind not in "iu":
            raise ConfigError(
                f"expected integer tier indices of shape {(self.num_servers, *least)}, got "
                f"{tiers.dtype} of shape {tiers.shape}"
            )
        if not _in_range(tiers.reshape(-1), self.num_tiers):
            raise ConfigError(
                f"expected tier indices from 0 to {self.num_tiers - 1}, got {tiers.min()} to "
                f"{tiers.max()}; they count the tiers {[tier.name for tier in self.tiers]}"
            )

    def observe(self, out: NDArray[np.float32]) -> None:
        """Fill ``out`` (``(num_servers, observation_size)``) with the due decisions."""
        _observe(self.state, self.costs, out)

    def observe_privileged(self, out: NDArray[np.float32]) -> None:
        """Fill ``out`` (``(num_servers, NUM_PRIVILEGED)``), see ``env/privileged.py``."""
        _observe_privileged(self.state, out)

    def run_tables(self, tables: NDArray[np.int64]) -> None:
        """Run all servers to the end under batch-size tables.

        Args:
            tables: ``(num_servers, max_running + 1)`` or wider: tier index by batch size.
        """
        self._check(tables, (self.state.running.shape[1],))
        _run_tables(self.state, self.costs, tables)

    @property
    def done(self) -> NDArray[np.bool_]:
        """``(num_servers,)`` whether each episode is over."""
        done: NDArray[np.bool_] = self.state.server.done
        return done

    def requests_of(self, e: int) -> NDArray[np.void]:
        """Return the finished requests of a server as records of ``env.state.REQUEST``."""
        rows = self.state.request[e, : self.state.config[e].num_requests].view(REQUEST)
        return rows[rows["finished_in"] >= 0]
