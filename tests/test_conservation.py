"""Nothing is lost or made: requests, tokens, KV slots and time, over random servers and loads."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controller.calibration import Calibration, PrefillCost, TierCost
from env.acceptance_process import KINDS, Acceptance, DraftRecovery
from env.arrivals import GammaBurst, OnOff, OpenLoop, Poisson, Ramp
from env.compiled import kernel
from env.deployment import Deployment
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, Workload

pytestmark = pytest.mark.usefixtures("one_thread")

TIERS = "native,warm,1,4"
NUM_TIERS = 4


def calibration(noise=0.05):
    sizes = (1, 8, 64)
    costs = tuple(
        TierCost(
            name,
            sizes,
            tuple(0.004 * (1 + 0.02 * b + 0.1 * depth) for b in sizes),
            1e-8,
            (noise,) * len(sizes),
            10**9,
            1,
        )
        for name, depth in (("native", 0), ("warm", 1), ("1", 2), ("4", 5))
    )
    return Calibration(
        "toy", costs, PrefillCost(0.002, 2e-5), PrefillCost(0.003, 3e-5), (1, 2, 4, 8, 16, 32, 64)
    )


SYSTEM = calibration()


@st.composite
def cells(draw, kind=None):
    """Draw a small cell, often with a cache that is too small for its load."""
    prompts = Lengths(draw(st.integers(1, 60)), 0.7, 1, 120)
    outputs = Lengths(draw(st.sampled_from([3, 30, 200])), 0.7, 1, draw(st.sampled_from([60, 200])))
    largest = prompts.high + outputs.high + 10
    deployment = Deployment(
        SYSTEM,
        TIERS,
        max_running_requests=draw(st.integers(1, 24)),
        kv_capacity_tokens=largest + draw(st.sampled_from([0, 30, 200, 5000])),
        chunk_tokens=draw(st.sampled_from([1, 16, 100, 8192])),
        overlap=draw(st.booleans()),
        recovery=DraftRecovery(draw(st.floats(0, 1)), draw(st.floats(0, 1))),
    )
    kind = kind or draw(st.sampled_from(["open", "closed"]))
    if kind == "open":
        rate = draw(st.sampled_from([5.0, 50.0, 2000.0]))
        load = OpenLoop(0.3 * rate, rate, 1.0, draw(st.integers(1, 40)))
    else:
        load = ClosedLoop(draw(st.integers(1, 30)), draw(st.integers(1, 800)))
    acceptance = Acceptance(
        draw(st.sampled_from(["shared", "per-request"])),
        draw(st.floats(0, 0.5)),
        draw(st.floats(0.5, 1)),
        draw(st.sampled_from([0.05, 3.0, 100.0])),
    )
    return Cell(deployment, Workload("random", load, acceptance, prompts, outputs))


def waiting_of(state, e):
    server, size = state.server[e], state.waiting.shape[1]
    at = (server.waiting_head + np.arange(server.num_waiting)) % size
    return state.waiting[e, at].tolist()


def recount(simulator, e=0):
    """Check every counter of a server against its requests."""
    state = simulator.state
    server, config = state.server[e], state.config[e]
    requests = state.request[e, : config.num_requests]
    running = state.running[e, : server.num_running].tolist()
    waiting = waiting_of(state, e)
    chunked = [int(server.chunked)] if server.chunked >= 0 else []
    finished = np.flatnonzero(requests.finished_in >= 0).tolist()
    unseen = list(range(server.next_visible, server.num_issued))

    # Every issued request is in exactly one place; rows of finished ones may linger in the batch.
    live = [i for i in running if i not in finished]
    assert len(set(running)) == len(running)
    places = live + waiting + chunked + finished + unseen
    assert sorted(places) == list(range(server.num_issued))
    assert server.num_finished == len(finished)
    issued = requests[: server.num_issued]
    assert server.num_in_system == (issued.arrival_s <= server.now_s).sum() - len(finished)

    # Tokens.
    assert server.output_tokens == requests.generated.sum()
    assert (requests.generated <= requests.output_tokens).all()
    assert (requests.generated[finished] == requests.output_tokens[finished]).all()
    assert 0 <= server.num_correct <= server.num_proposed
    assert server.num_rounds == state.tier_rounds[e].sum()

    # KV slots.
    held = (requests.prompt_tokens + requests.generated)[running]
    assert server.context_tokens == held.sum()
    slots = held.sum() + len(running) * config.reserved_tokens
    for i in chunked:
        slots += requests[i].prefilled + config.reserved_tokens
    assert server.kv_tokens == slots
    assert server.kv_tokens <= config.kv_capacity_tokens or len(running) == 1
    assert len(running) <= config.max_running_requests


def drive(simulator, tiers, check=lambda: None, steps=20_000):
    """Run all servers to the end, tier ``tiers[i]`` in round ``i``; return areas and tokens."""
    areas = np.zeros(simulator.num_servers)
    tokens = np.zeros(simulator.num_servers, np.int64)
    for i in range(steps):
        if simulator.done.all():
            return areas, tokens
        check()
        area, new = simulator.step(np.full(simulator.num_servers, tiers[i % len(tiers)]))
        assert (area >= 0).all()
        areas += area
        tokens += new
    raise AssertionError(f"not done after {steps} rounds")


tier_lists = st.lists(st.integers(0, NUM_TIERS - 1), min_size=1, max_size=12)


@given(cells(), tier_lists, st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_every_counter_equals_its_recount_at_every_decision(cell, tiers, seed):
    simulator = Simulator([cell])
    simulator.reset([seed])
    clock = [0.0]

    def check():
        recount(simulator)
        now_s = simulator.state.server[0].now_s
        assert now_s > clock[-1]
        clock.append(now_s)

    drive(simulator, tiers, check)
    recount(simulator)
    done = simulator.requests_of(0)
    assert (done["arrival_s"] <= done["first_token_s"]).all()
    assert (done["first_token_s"] <= done["finish_s"]).all()
    if not cell.workload.is_closed:
        assert len(done) == simulator.state.config[0].num_requests
        assert simulator.state.server[0].num_in_system == 0


def test_every_counter_equals_its_recount_while_requests_are_retracted():
    """Outputs as long as allowed, of which admission expects 70% at most."""
    deployment = Deployment(SYSTEM, TIERS, kv_capacity_tokens=900, chunk_tokens=16)
    workload = Workload(
        "crowd",
        OpenLoop(500.0, 2000.0, 1.0, 30),
        Acceptance(),
        Lengths(30, 0.7, 1, 120),
        Lengths(200, 0.2, 1, 200),
    )
    simulator = Simulator([Cell(deployment, workload)])
    retracted = 0
    for seed in range(3):
        simulator.reset([seed])
        drive(simulator, [0, 3, 2], lambda: recount(simulator))
        recount(simulator)
        retracted += simulator.state.server[0].num_retracted
    assert retracted > 0


@given(cells("open"), tier_lists, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_areas_of_an_open_loop_add_up_to_the_time_that_requests_spent(cell, tiers, seed):
    simulator = Simulator([cell])
    simulator.reset([seed])
    before = float(simulator.state.server[0].area)  # until the first decision
    areas, tokens = drive(simulator, tiers)
    done = simulator.requests_of(0)
    spent_s = (done["finish_s"] - done["arrival_s"]).sum()
    assert before + areas[0] == pytest.approx(spent_s, rel=1e-9)
    first = simulator.cells[0].workload.sample(seed).output_tokens.sum() - tokens[0]
    assert 0 < first <= simulator.state.config[0].num_requests, "only prefills come before"


@pytest.mark.parametrize("overlap", [False, True])
def test_littles_law_in_the_steady_state_of_a_closed_loop(overlap):
    load = ClosedLoop(8, tokens=60_000)
    workload = Workload(
        "steady", load, Acceptance(), Lengths(50, 0.5, 1, 120), Lengths(20, 0.5, 1, 60)
    )
    simulator = Simulator([Cell(Deployment(SYSTEM, TIERS, overlap=overlap), workload)])
    simulator.reset([3])
    simulator.run_tables(np.full((1, 300), 2))
    server, done = simulator.state.server[0], simulator.requests_of(0)
    mean_s = (done["finish_s"] - done["arrival_s"]).mean()
    assert len(done) / server.now_s * mean_s == pytest.approx(8, rel=0.01)
    assert server.area / server.now_s == pytest.approx(8, rel=1e-9)


# A million rounds


@kernel
def audit_requests(state, e):
    """Return the number of the first law that a request breaks, or 0."""
    server = state.server[e]
    tokens = 0
    finished = 0
    arrived = 0
    for i in range(state.config[e].num_requests):
        request = state.request[e, i]
        tokens += request.generated
        if not 0 <= request.generated <= request.output_tokens:
            return 1  # more tokens than it has
        if request.finished_in >= 0:
            finished += 1
            if request.generated != request.output_tokens:
                return 2  # closed before its last token
            if not request.arrival_s <= request.first_token_s <= request.finish_s <= server.now_s:
                return 3  # times out of order
        if i < server.num_issued and request.arrival_s <= server.now_s:
            arrived += 1
    if tokens != server.output_tokens:
        return 4  # tokens lost or made
    if finished != server.num_finished or arrived - finished != server.num_in_system:
        return 5  # arrivals that are neither inside nor gone
    return 0


@kernel
def audit_places(state, e, places):
    """Return 6 if a request is nowhere, in two places, or not from the list; otherwise 0.

    Args:
        state: The servers.
        e: The server.
        places: ``(num_requests,)`` work space: how often each request was found.
    """
    server = state.server[e]
    places[:] = 0
    for i in range(server.num_running):
        if state.request[e, state.running[e, i]].finished_in < 0:
            places[state.running[e, i]] += 1
    for i in range(server.num_waiting):
        places[state.waiting[e, (server.waiting_head + i) % state.waiting.shape[1]]] += 1
    if server.chunked >= 0:
        places[server.chunked] += 1
    for i in range(server.next_visible, server.num_issued):
        places[i] += 1
    for i in range(state.config[e].num_requests):
        if state.request[e, i].finished_in >= 0:
            places[i] += 1
        if places[i] != (1 if i < server.num_issued else 0):
            return 6
    return 0


@kernel
def audit_slots(state, e):
    """Return the number of the first law that the batch or its KV slots break, or 0."""
    server = state.server[e]
    config = state.config[e]
    held = 0
    lingering = 0
    for i in range(server.num_running):
        request = state.request[e, state.running[e, i]]
        held += request.prompt_tokens + request.generated
        lingering += 1 if request.finished_in >= 0 else 0
    slots = held + server.num_running * config.reserved_tokens
    if server.chunked >= 0:
        slots += state.request[e, server.chunked].prefilled + config.reserved_tokens
    if held != server.context_tokens or slots != server.kv_tokens:
        return 7  # KV slots lost or made
    if server.kv_tokens > config.kv_capacity_tokens and server.num_running > 1:
        return 8  # more KV slots than there are
    if lingering != server.num_lingering or server.num_running > config.max_running_requests:
        return 9  # rows miscounted, or more than allowed
    if not 0 <= server.num_correct <= server.num_proposed:
        return 10  # more drafts correct than proposed
    return 0


@kernel
def audit_all(state, places, out):
    """Fill ``out`` (``(num_servers,)``) with the law that each server breaks, or 0."""
    for e in range(out.shape[0]):
        out[e] = audit_requests(state, e)
        if out[e] == 0:
            out[e] = audit_places(state, e, places)
        if out[e] == 0:
            out[e] = audit_slots(state, e)


def random_cell(rng):
    """Draw a small cell of any load and acceptance, often with a cache that is too small."""
    prompts = Lengths(float(rng.integers(1, 60)), 0.7, 1, 120)
    outputs = Lengths(float(rng.choice([3, 30, 500])), 0.7, 1, int(rng.choice([60, 200])))
    deployment = Deployment(
        SYSTEM,
        TIERS,
        max_running_requests=int(rng.integers(1, 25)),
        kv_capacity_tokens=330 + int(rng.choice([0, 200, 600, 1200, 5000])),
        chunk_tokens=int(rng.choice([1, 16, 100, 8192])),
        overlap=bool(rng.integers(2)),
        recovery=DraftRecovery(float(rng.random()), float(rng.random())),
    )
    rate, count = float(rng.choice([5.0, 50.0, 2000.0])), int(rng.integers(1, 41))
    loads = (
        Poisson(rate, count),
        GammaBurst(rate, float(rng.uniform(0.3, 5.0)), count),
        Ramp(0.1 * rate, rate, 1.0, count),
        OnOff(rate, 0.0, 0.2, 0.5, count),
        OpenLoop(0.3 * rate, rate, 1.0, count),
        ClosedLoop(int(rng.integers(1, 31)), int(rng.integers(1, 800))),
        ClosedLoop(int(rng.integers(1, 31)), int(rng.integers(1, 800)), float(rng.random())),
    )
    kind = str(rng.choice(list(KINDS)))
    low = float(rng.uniform(0.0, 0.5))
    high = float(rng.uniform(0.5, 1.0))
    shape = (1.0, *rng.uniform(0.2, 1.0, 4).tolist())
    acceptance = Acceptance(kind, low, high, float(rng.choice([0.5, 3.0, 50.0])), 0.4, shape)
    return Cell(deployment, Workload("random", rng.choice(loads), acceptance, prompts, outputs))


def test_nothing_is_lost_or_made_in_a_million_rounds():
    rng = np.random.default_rng(20261129)
    cells = [random_cell(rng) for _ in range(250)]
    simulator = Simulator(cells)
    simulator.reset(list(range(250)))
    places = np.zeros(simulator.state.request.shape[1], np.int64)
    found = np.zeros(250, np.int64)
    rounds = episodes = retracted = 0
    seed = 250
    audit_all(simulator.state, places, found)
    while rounds < 1_000_000:
        rounds += int((~simulator.done).sum())
        simulator.step(rng.integers(0, NUM_TIERS, 250))
        audit_all(simulator.state, places, found)
        assert not found.any(), f"server {found.argmax()} breaks law {found.max()}"
        over = np.flatnonzero(simulator.done)
        for e in over:
            server, config = simulator.state.server[e], simulator.state.config[e]
            retracted += int(server.num_retracted)
            if config.concurrency == 0:
                assert server.num_finished == config.num_requests
                assert server.num_in_system == server.num_waiting == 0
            else:
                assert server.output_tokens >= config.token_target
        episodes += len(over)
        if len(over):
            simulator.reset(list(range(seed, seed + len(over))), over.tolist())
            seed += len(over)
    assert episodes > 1000
    assert retracted > 100


# Independence and repeatability


def trajectory(simulator, e):
    """Return everything that server ``e`` is, as bytes and lists."""
    state = simulator.state
    server = state.server[e : e + 1].copy()
    server.waiting_head = 0  # a position in a ring whose length is that of the longest list
    parts = [server.tobytes(), state.request[e, : state.config[e].num_requests].tobytes()]
    parts += [waiting_of(state, e), state.running[e, : server[0].num_running].tolist()]
    for name in ("histogram", "tier_rounds", "memory", "tries", "successes", "recent", "ages"):
        parts.append(getattr(state, name)[e].tobytes())
    return parts


def check_independence(chosen, tiers, seed, steps):
    """Run cells together and each alone, and compare bit for bit."""
    seeds = [seed + 7 * e for e in range(len(chosen))]
    together = Simulator(chosen)
    together.reset(seeds)
    alone = [Simulator([cell]) for cell in chosen]
    for simulator, own in zip(alone, seeds, strict=True):
        simulator.reset([own])
    seen = np.zeros((len(chosen), together.observation_size), np.float32)
    for i in range(steps):
        area, tokens = together.step(np.full(len(chosen), tiers[i % len(tiers)]))
        together.observe(seen)
        for e, simulator in enumerate(alone):
            own_area, own_tokens = simulator.step(np.array([tiers[i % len(tiers)]]))
            assert (own_area[0], own_tokens[0]) == (area[e], tokens[e])
            own_seen = np.zeros((1, together.observation_size), np.float32)
            simulator.observe(own_seen)
            assert own_seen.tobytes() == seen[e].tobytes()
    for e, simulator in enumerate(alone):
        assert trajectory(simulator, 0) == trajectory(together, e)


@given(st.lists(cells(), min_size=2, max_size=5), tier_lists, st.integers(0, 99))
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_a_server_does_not_feel_those_beside_it(chosen, tiers, seed):
    check_independence(chosen, tiers, seed, steps=40)


def test_results_do_not_depend_on_the_number_of_threads():
    workloads = [Workload(f"{n}", ClosedLoop(n, 9000), Acceptance()) for n in range(1, 10)]
    chosen = [Cell(Deployment(SYSTEM, TIERS), workload) for workload in workloads]
    ends = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        simulator = Simulator(chosen)
        simulator.reset(list(range(len(chosen))))
        simulator.run_tables(np.full((len(chosen), 300), 3))
        ends.append([trajectory(simulator, e) for e in range(len(chosen))])
    numba.set_num_threads(1)
    assert ends[0] == ends[1]


@given(cells(), tier_lists, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_a_seed_fixes_the_trajectory_whatever_ran_before(cell, tiers, seed):
    fresh, used = Simulator([cell]), Simulator([cell])
    used.reset([seed + 1])
    drive(used, [1, 3])
    for simulator in (fresh, used):
        simulator.reset([seed])
        drive(simulator, tiers)
    assert trajectory(fresh, 0) == trajectory(used, 0)


def test_other_seeds_give_other_trajectories():
    cell = Cell(Deployment(SYSTEM, TIERS), Workload("any", ClosedLoop(4, 500)))
    ends = []
    for seed in range(10):
        simulator = Simulator([cell])
        simulator.reset([seed])
        drive(simulator, [2])
        ends.append(float(simulator.state.server[0].now_s))
    assert len(set(ends)) == 10


def luck(cell, tiers, seed):
    """Return which drafts were accepted, by request and output position."""
    simulator = Simulator([cell])
    simulator.reset([seed])
    depths = [tier.num_steps for tier in simulator.tiers]
    accepted = {}
    i = 0
    while not simulator.done[0]:
        before = simulator.state.request[0].generated.copy()
        running = simulator.state.running[0, : simulator.state.server[0].num_running].copy()
        joined = simulator.state.server[0].num_finished  # none joins unless one finishes
        tier = tiers[i % len(tiers)]
        simulator.step(np.array([tier]))
        i += 1
        requests = simulator.state.request[0]
        if simulator.state.server[0].num_finished != joined:
            continue
        for r in running:
            correct = requests[r].generated - before[r] - 1
            for position in range(min(correct + 1, depths[tier])):
                accepted[int(r), int(before[r]) + position] = position < correct
    return accepted


@given(st.integers(0, 99), tier_lists, st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_luck_of_a_draft_depends_on_request_and_position_alone(seed, tiers, crowded):
    """Common random numbers: whoever drafts a position, and beside whom, it is accepted or not."""
    server = Deployment(
        SYSTEM, TIERS, overlap=False, recovery=DraftRecovery(1.0, 0.0), max_running_requests=6
    )
    acceptance = Acceptance("shared", 0.7, 0.7)
    workload = Workload(
        "luck", ClosedLoop(6, 600), acceptance, Lengths(9, 0.5, 1, 20), Lengths(60, 0.3, 30, 100)
    )
    other = replace(server, max_running_requests=2) if crowded else server
    first = luck(Cell(server, workload), [2, 3], seed)
    second = luck(Cell(other, workload), [3, *tiers], seed)
    both = first.keys() & second.keys()
    assert len(both) > 20
    assert all(first[key] == second[key] for key in both)
    assert 0.5 < np.mean(list(first.values())) < 0.9
