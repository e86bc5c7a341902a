"""How fast the simulator is: ``python -m env.benchmark``.

A decision here is all that a controller costs the simulator: the observation is built, a policy
reads it, one decode round of its tier is run for the whole batch, and the server goes on, through
arrivals, prefill and accounting, to its next decision. The policy is the cheap one of
``env/greedy.py``; a network costs what it costs. Each server has 64 clients in a closed loop whose
accept rates drift one by one, on the calibration of the H200: the dearest acceptance of the
default comparison.

Two ways of driving are measured. Compiled: the policy too is a kernel, and every core has servers
of its own. Lockstep: all servers decide, then all step, one call from Python each, as in training.
The profile is explained in ``env/phase_clock.py``.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numba
import numpy as np
from numpy.typing import NDArray

from controller.calibration import Calibration
from controller.errors import ConfigError, SpecGovernorError
from controller.features import NUM_PER_TIER
from env.deployment import Deployment
from env.greedy import FIRST_SCORE, run_greedy
from env.phase_clock import phase_clock
from env.scenarios import SCENARIOS
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Workload

CALIBRATION = Path("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
RUNNING = 64
SERVERS = 64
WINDOWS = 5
WINDOW_S = 1.0
WARM_UP = 200
"""Rounds before measuring: the first requests, which are cut short, have left."""
PLOT_RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PLOT_SERVERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Speed:
    """What one measurement found, medians of windows but for the last.

    Attributes:
        decisions_per_s: Decisions of all servers a second of wall-clock time.
        decisions_per_cpu_s: The same for a second of CPU time of this process.
        real_time_factor: Simulated seconds of a server for a second of wall-clock time.
        mean_running: Running requests a server, in the mean over decisions.
    """

    decisions_per_s: float
    decisions_per_cpu_s: float
    real_time_factor: float
    mean_running: float


class Driver:
    """Servers under the cheap policy.

    Args:
        calibration: Costs of the simulated system.
        num_servers: Servers side by side.
        running: Clients of each.
    """

    def __init__(self, calibration: Calibration, num_servers: int, running: int) -> None:
        load = ClosedLoop(running, 50_000 * running)
        deployment = Deployment(calibration, max_running_requests=max(running, 256))
        workload = Workload("benchmark", load, SCENARIOS.make("drift-per-request"))
        self.simulator = Simulator([Cell(deployment, workload)] * num_servers)
        self.observations = np.zeros((num_servers, self.simulator.observation_size), np.float32)
        self._scores = self.observations[:, FIRST_SCORE::NUM_PER_TIER]
        self._seed = 0
        self.restart()

    def restart(self) -> None:
        """Start all servers anew under fresh seeds, and warm them up."""
        count = self.simulator.num_servers
        self.simulator.reset(list(range(self._seed, self._seed + count)))
        self._seed += count
        self.compiled(WARM_UP)

    def compiled(self, rounds: int) -> None:
        """Let every server make ``rounds`` decisions, in kernels only."""
        run_greedy(self.simulator.state, self.simulator.costs, rounds)

    def choose(self) -> NDArray[np.int64]:
        """Return ``(num_servers,)`` tiers for the observations at hand."""
        return self._scores.argmax(axis=1)

    def lockstep(self, rounds: int) -> None:
        """Let every server make ``rounds`` decisions, called from Python."""
        for _ in range(rounds):
            self.simulator.observe(self.observations)
            self.simulator.step(self.choose())

    def blind(self, rounds: int) -> None:
        """Run rounds of all tiers in turn, without an observation or a policy."""
        for i in range(rounds):
            tier = i % self.simulator.num_tiers
            self.simulator.step(np.full(self.simulator.num_servers, tier))


def measure(driver: Driver, way: Callable[[int], None], windows: int = WINDOWS) -> Speed:
    """Measure one way of driving in windows of ``WINDOW_S`` seconds or a little more.

    A server whose episode ends makes no further decisions: the driver starts anew between windows.
    """
    server = driver.simulator.state.server
    batch = max(1, 2048 // driver.simulator.num_servers)
    way(batch)  # compiles
    rates, cpu_rates, factors, running = [], [], [], []
    for _ in range(windows):
        driver.restart()
        decisions = -int(server.num_rounds.sum())
        simulated_s = -float(server.now_s.sum())
        start_s, cpu_s = time.perf_counter(), -time.process_time()
        while time.perf_counter() - start_s < WINDOW_S and not driver.simulator.done.any():
            way(batch)
            running.append(float(server.num_running.mean()))
        wall_s, cpu_s = time.perf_counter() - start_s, cpu_s + time.process_time()
        decisions += int(server.num_rounds.sum())
        simulated_s += float(server.now_s.sum())
        rates.append(decisions / wall_s)
        cpu_rates.append(decisions / cpu_s)
        factors.append(simulated_s / len(server) / wall_s)
    medians = (float(np.median(values)) for values in (rates, cpu_rates, factors))
    return Speed(*medians, float(np.mean(running)))


def profile(driver: Driver, rounds: int = 300) -> dict[str, float]:
    """Return the nanoseconds a decision of every phase in lockstep on one thread, longest first."""
    numba.set_num_threads(1)
    clock = phase_clock()
    simulator = driver.simulator
    results = (*simulator.step(driver.choose()), simulator.ideal_tokens, simulator.lost_s)
    clock.step(simulator.state, simulator.costs, driver.choose(), *results)  # compiles
    driver.restart()
    clock.ticks[:] = 0
    observe_s = policy_s = step_s = 0.0
    ticks, start_s = -clock.now(), time.perf_counter()
    for _ in range(rounds):
        before = time.process_time()
        simulator.observe(driver.observations)
        observed = time.process_time()
        tiers = driver.choose()
        chosen = time.process_time()
        clock.step(simulator.state, simulator.costs, tiers, *results)
        step_s += time.process_time() - chosen
        policy_s += chosen - observed
        observe_s += observed - before
    tick_s = (time.perf_counter() - start_s) / (ticks + clock.now())
    each = 1e9 / (rounds * simulator.num_servers)
    phases = {name: each * tick_s * count for name, count in clock.self_ticks().items()}
    phases["step, outside the phases"] = max(each * step_s - sum(phases.values()), 0.0)
    phases |= {"observe": each * observe_s, "policy": each * policy_s}
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def peak_rss_bytes() -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_RSS_UNIT


def run(calibration: Calibration, with_profile: bool = True) -> dict[str, Any]:
    """Measure everything that :func:`show` prints."""
    cores = numba.config.NUMBA_NUM_THREADS
    driver = Driver(calibration, SERVERS, RUNNING)
    numba.set_num_threads(1)
    one_thread = measure(driver, driver.compiled)
    lockstep = measure(driver, driver.lockstep)
    blind = measure(driver, driver.blind)
    numba.set_num_threads(cores)
    compiled = measure(driver, driver.compiled)
    numba.set_num_threads(1)
    alone = Driver(calibration, 1, RUNNING)
    single = measure(alone, alone.compiled)
    single_lockstep = measure(alone, alone.lockstep)
    found = {
        "decisions_per_s": compiled.decisions_per_s,
        "real_time_factor": single.real_time_factor,
        "peak_rss_bytes": peak_rss_bytes(),
        "mean_running": compiled.mean_running,
        "num_servers": SERVERS,
        "threads": cores,
        "cores": os.cpu_count(),
        "one_thread_decisions_per_s": one_thread.decisions_per_s,
        "one_thread_decisions_per_cpu_s": one_thread.decisions_per_cpu_s,
        "lockstep_decisions_per_s": lockstep.decisions_per_s,
        "lockstep_decisions_per_cpu_s": lockstep.decisions_per_cpu_s,
        "blind_decisions_per_s": blind.decisions_per_s,
        "single_server_decisions_per_s": single.decisions_per_s,
        "lockstep_real_time_factor": single_lockstep.real_time_factor,
        "calibration": calibration.name,
    }
    if with_profile:
        try:
            found["profile_ns"] = profile(driver)
        except ConfigError as error:
            found["no_profile"] = str(error)
    return found


def show(found: dict[str, Any]) -> None:
    """Print a report for people."""
    print(
        f"{found['num_servers']} servers, {found['mean_running']:.1f} running requests each in the "
        f"mean; {found['cores']} cores; medians of {WINDOWS} windows\n"
        "decisions a second, with observation and greedy policy\n"
        f"  compiled, {found['threads']} threads     {found['decisions_per_s']:>12,.0f}\n"
        f"  compiled, 1 thread      {found['one_thread_decisions_per_s']:>12,.0f}"
        f"   ({found['one_thread_decisions_per_cpu_s']:,.0f} a second of CPU time)\n"
        f"  lockstep, 1 thread      {found['lockstep_decisions_per_s']:>12,.0f}"
        f"   ({found['lockstep_decisions_per_cpu_s']:,.0f} a second of CPU time)\n"
        f"  without both, lockstep  {found['blind_decisions_per_s']:>12,.0f}\n"
        "one server, times real time\n"
        f"  compiled                {found['real_time_factor']:>12,.0f}"
        f"   ({found['single_server_decisions_per_s']:,.0f} decisions a second)\n"
        f"  lockstep                {found['lockstep_real_time_factor']:>12,.0f}\n"
        f"peak memory               {found['peak_rss_bytes'] / 2**20:>12,.0f} MiB"
    )
    if "profile_ns" in found:
        total = sum(found["profile_ns"].values())
        print(f"where the {total:,.0f} ns of a decision in lockstep go, the first five")
        for name, spent in list(found["profile_ns"].items())[:5]:
            print(f"  {name:<23} {spent:>12,.0f} ns {spent / total:>6.1%}")
    elif "no_profile" in found:
        print(f"no profile: {found['no_profile']}")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = _OneLineParser(prog="python -m env.benchmark", description="Measure the simulator.")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--no-profile", action="store_true", help="leave the profile out")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="only draw how time grows")
    options = parser.parse_args(arguments)
    try:
        calibration = Calibration.load(options.calibration)
        if options.plot is not None:
            from env.benchmark_plot import draw

            draw(calibration, options.plot)
            print(f"written to {options.plot}")
            return 0
        found = run(calibration, not options.no_profile)
    except (SpecGovernorError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    show(found)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
