"""The parts of the full comparison: what is tuned on, what is tested on, fixed before tuning.

| | training | tuning | test |
| --- | --- | --- | --- |
| calibrations | H200, perturbed and drawn ones | each its own | H200, and ``HELD_OUT`` |
| acceptance | drawn levels and periods | ``TUNING_SCENARIOS`` | ``TEST_SCENARIOS`` |
| request lengths | default | default, Azure code | default, Azure conversation |
| seeds | below 700,000 | 800,001 on | 700,001 on |

The learned policy is never tuned: on a held-out calibration it runs zero-shot. The constants of its
starting rule (``training.starting_rule``) were chosen on the H200 and on systems drawn around it,
never on a held-out one nor on ``SURFACES``. Baselines are tuned on each calibration's tuning part,
as its operator would. Nothing above changes after a look at the test results.

Loads. With ``M`` running requests at most, closed loops have two numbers of clients in each band:
light (``M/256`` and ``M/32``), crossover (``M/8`` and ``3M/8``), saturated (``M`` and ``3M/2``,
where a third waits). Open loads run at 0.7, 0.9 and 1.1 of the capacity of the server without
speculation. Periods of acceptance are in rounds of that server at the cell's load, so that fast and
slow systems see alike many changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from controller.calibration import Calibration
from controller.errors import ConfigError
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.scale import capacity_rps
from env.scenarios import SCENARIOS
from env.simulator import Cell
from env.workload import ClosedLoop, Workload
from env.workloads import make_workload, named_lengths
from training.family import perturbed
from training.suite import native_of, off_step_s

FOLDER = Path(__file__).parents[1] / "checkpoints" / "calibrations"
TRAINED_ON = "h200-llama3-8b-eagle3-fa3"
HELD_OUT = (
    "kimi-k2.5-8gpu-table",
    "qwen3-235b-table",
    "glm-4.7-fp8-table",
    "qwen3.8-flash-next-table",
)
"""Measured systems that no policy is trained on."""
MAX_RUNNING = {
    "qwen3-235b-table": 64,
    "glm-4.7-fp8-table": 64,
    "qwen3.8-flash-next-table": 64,
}
"""Largest batch where it is not 256: the largest one that the source measured."""
SURFACES = ("surface-1", "surface-2")
"""Systems drawn at random around the H200's, by seeds of the test: all tiers, other crossovers."""
SURFACE_SEED = 0x7E57

BANDS = {"light": (1 / 256, 1 / 32), "crossover": (1 / 8, 3 / 8), "saturated": (1.0, 1.5)}
"""Clients of the closed loops, as shares of the largest batch."""
OPEN_RATES = (0.7, 0.9, 1.1)
"""Arrival rates, as shares of the capacity of the server without speculation."""

TUNING_SEED = 800_001
TEST_SEED = 700_001
CELL_STRIDE = 100
"""Distance of the seeds of neighbouring cells: each has luck of its own, so that luck averages out
over cells, and the same for every controller."""
SHIFT_ROUNDS = 1000
"""Rounds without speculation between two phase shifts of the cells that measure regret."""
SHIFT_PHASES = (6, 4, 3)
"""Length of those cells in such phases, by load: drafts that are accepted use up tokens faster."""


@dataclass(frozen=True)
class Scenario:
    """An acceptance scenario whose period may be in rounds of the server without speculation.

    Attributes:
        name: Name in ``env.scenarios``.
        settings: Its settings; ``period_s`` is in rounds.
    """

    name: str
    settings: tuple[tuple[str, float | int | str], ...]

    def make(self, step_s: float) -> Acceptance:
        """Return the acceptance process of a server with such round times, in seconds."""
        settings = dict(self.settings)
        if "period_s" in settings:
            settings["period_s"] = float(settings["period_s"]) * step_s
        return SCENARIOS.make(self.name, **settings)


def _scenario(name: str, **settings: float | int | str) -> Scenario:
    return Scenario(name, tuple(settings.items()))


TUNING_SCENARIOS = (
    _scenario("stationary", rate=0.65),
    _scenario("drift", low=0.3, high=0.9, period_s=800),
    _scenario("drift-per-request", low=0.3, high=0.9, period_tokens=256.0),
    _scenario("mixture", low=0.35, high=0.85, share=0.5),
    _scenario("phase-shift", chat=0.45, code=0.8, requests=60),
    _scenario("collapse", high=0.75, low=0.1, period_s=500),
)
TEST_SCENARIOS = (
    _scenario("golden", preset="kimi-k2.5-eagle3"),
    _scenario("drift", low=0.2, high=0.95, period_s=500),
    _scenario("drift-per-request", low=0.45, high=0.95, period_tokens=96.0),
    _scenario("mixture", low=0.25, high=0.92, share=0.3),
    _scenario("phase-shift", chat=0.55, code=0.9, requests=100),
    _scenario("collapse", high=0.85, low=0.03, period_s=350),
)
OPEN_TUNING = (("poisson", "default", 1), ("gamma-burst", "azure-2023-code", 3))
OPEN_TEST = (
    ("poisson", "default", 1),
    ("poisson", "default", 3),
    ("replay", "azure-2023-conv", 2),
    ("replay", "azure-2023-conv", 5),
)
"""Arrivals, lengths, and which of the part's scenarios."""


@dataclass(frozen=True)
class Size:
    """How much of the protocol is run.

    Attributes:
        seeds: Episodes of each test cell.
        rounds: Length of a closed loop, in tokens of each running request.
        requests: Requests of an open loop.
        scenarios: Test scenarios of closed loops, by index; all open cells need their own.
        calibrations: Systems.
        shift_seeds: Episodes of each cell with a phase shift.
        tuning_rounds: Length of a closed loop of the tuning part.
        tuning_requests: Requests of an open loop of the tuning part.
    """

    seeds: int
    rounds: int
    requests: int
    scenarios: tuple[int, ...]
    calibrations: tuple[str, ...]
    shift_seeds: int
    tuning_rounds: int
    tuning_requests: int


ALL = tuple(range(len(TEST_SCENARIOS)))
SIZES = {
    "full": Size(4, 1600, 400, ALL, (TRAINED_ON, *HELD_OUT, *SURFACES), 4, 800, 200),
    "smoke": Size(2, 300, 60, (3, 5), (TRAINED_ON, HELD_OUT[0]), 1, 150, 40),
}


def load_system(name: str) -> Calibration:
    """Return a calibration of the protocol by name.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name in SURFACES:
        rng = np.random.default_rng([SURFACE_SEED, SURFACES.index(name)])
        return replace(perturbed(load_system(TRAINED_ON), rng), name=name)
    if name not in (TRAINED_ON, *HELD_OUT):
        names = ", ".join((TRAINED_ON, *HELD_OUT, *SURFACES))
        raise ConfigError(f"system {name!r}: expected one of {names}")
    return Calibration.load(FOLDER / f"{name}.json")


def deployment_of(calibration: Calibration, tiers: Sequence[str] = ()) -> Deployment:
    """Return the server of a system: off, and the depths that it and the list have in common.

    Args:
        calibration: The system.
        tiers: Depths to choose from; empty for all that are measured.
    """
    depths = [
        name for name in calibration.tier_names if name.isdecimal() and (not tiers or name in tiers)
    ]
    if not depths:
        raise ConfigError(
            f"system {calibration.name!r} has none of the depths {', '.join(tiers)}; give others"
        )
    return Deployment(
        calibration,
        tiers=",".join(["off", *depths]),
        max_running_requests=MAX_RUNNING.get(calibration.name, 256),
    )


def cell_seeds(first: int, num_cells: int, num_seeds: int) -> list[list[int]]:
    """Return ``(num_cells, num_seeds)`` seeds of a part."""
    return [[first + CELL_STRIDE * i + j for j in range(num_seeds)] for i in range(num_cells)]


def clients(deployment: Deployment) -> list[tuple[str, int]]:
    """Return the band and the number of clients of every closed loop."""
    limit = deployment.max_running_requests
    return [(band, max(round(share * limit), 1)) for band, pair in BANDS.items() for share in pair]


def closed_cell(
    deployment: Deployment, band: str, running: int, scenario: Scenario, rounds: int
) -> Cell:
    """Return a closed loop of about ``rounds`` rounds without speculation."""
    batch = min(running, deployment.max_running_requests)
    acceptance = scenario.make(off_step_s(deployment, running))
    load = ClosedLoop(running, batch * rounds)
    return Cell(
        deployment, Workload(f"{band}: closed {running}, {scenario.name}", load, acceptance)
    )


def open_cell(
    deployment: Deployment,
    arrivals: str,
    lengths: str,
    share: float,
    scenario: Scenario,
    count: int,
) -> Cell:
    """Return an open loop at a share of the native server's capacity."""
    rate = share * capacity_rps(native_of(deployment), *named_lengths(lengths))
    acceptance = scenario.make(off_step_s(deployment, deployment.max_running_requests // 2))
    name = f"open {share:g}: {arrivals} {lengths}, {scenario.name}"
    if arrivals == "replay":
        _, _, split = lengths.rpartition("-")
        text = f"azure-2023:split={split},rate={rate!r},window={count}"
        return Cell(deployment, make_workload(text, acceptance, name=name))
    text = f"{arrivals}:rate={rate!r},num_requests={count}"
    return Cell(deployment, make_workload(text, acceptance, lengths, name=name))


def tuning_cells(deployment: Deployment, size: Size) -> list[Cell]:
    """Return the tuning part: every load twice, every scenario twice, and six open loads."""
    cells = []
    for i, (band, running) in enumerate(clients(deployment)):
        for scenario in (TUNING_SCENARIOS[i], TUNING_SCENARIOS[(i + 3) % len(TUNING_SCENARIOS)]):
            cells.append(closed_cell(deployment, band, running, scenario, size.tuning_rounds))
    for share in OPEN_RATES:
        for arrivals, lengths, index in OPEN_TUNING:
            scenario = TUNING_SCENARIOS[index]
            cells.append(
                open_cell(deployment, arrivals, lengths, share, scenario, size.tuning_requests)
            )
    return cells


def test_cells(deployment: Deployment, size: Size) -> list[Cell]:
    """Return the test part: every load under every scenario, and the open loads."""
    cells = [
        closed_cell(deployment, band, running, TEST_SCENARIOS[index], size.rounds)
        for band, running in clients(deployment)
        for index in size.scenarios
    ]
    for share in OPEN_RATES:
        for arrivals, lengths, index in OPEN_TEST:
            if index in size.scenarios:
                scenario = TEST_SCENARIOS[index]
                cells.append(
                    open_cell(deployment, arrivals, lengths, share, scenario, size.requests)
                )
    return cells


def shift_cells(deployment: Deployment) -> list[Cell]:
    """Return closed loops whose acceptance changes at once, at three batch sizes."""
    limit = deployment.max_running_requests
    scenario = _scenario("collapse", high=0.85, low=0.05, period_s=SHIFT_ROUNDS)
    return [
        closed_cell(deployment, "shift", running, scenario, phases * SHIFT_ROUNDS)
        for running, phases in zip(
            (max(limit // 32, 1), limit // 4, limit), SHIFT_PHASES, strict=True
        )
    ]
