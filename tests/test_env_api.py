"""What libraries expect of the envs, what the docstrings promise, and how bad settings fail."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils import env_checker
from stable_baselines3.common import env_checker as sb3_env_checker

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import ConfigError, SpecGovernorError
from controller.features import GLOBAL_FEATURES, TIER_FEATURES
from env.acceptance_process import Acceptance, DraftRecovery
from env.deployment import Deployment
from env.gym_env import GovernorEnv
from env.scale import reference_batch, reference_step_s
from env.simulator import Cell, Simulator
from env.vector_env import SEED_STRIDE, GovernorVecEnv
from env.workload import ClosedLoop, Lengths, OpenLoop, Workload

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, OUTPUTS = Lengths(50, 0.5, 1, 120), Lengths(30, 0.5, 1, 90)


def calibration():
    costs = tuple(
        TierCost(name, (1, 64), (fast, slow), 1e-8, (0.02, 0.02), 10**9, 1)
        for name, fast, slow in (
            ("native", 0.004, 0.008),
            ("1", 0.005, 0.012),
            ("3", 0.006, 0.020),
        )
    )
    return Calibration("toy", costs, PrefillCost(0.002, 2e-5), PrefillCost(0.003, 3e-5))


SERVER = Deployment(calibration(), "native,1,3", max_running_requests=32)


def cell(load="closed", tokens=400, **changes):
    """Return a small closed or open cell."""
    loads = {"closed": ClosedLoop(4, tokens), "open": OpenLoop(5.0, 40.0, 2.0, 12)}
    workload = Workload(load, loads[load], Acceptance(), PROMPTS, OUTPUTS)
    return Cell(replace(SERVER, **changes), workload)


# The Gymnasium env


@pytest.mark.parametrize("load", ["closed", "open"])
def test_gymnasium_accepts_the_env(load):
    env_checker.check_env(GovernorEnv(cell(load)), skip_render_check=True)


@pytest.mark.parametrize("load", ["closed", "open"])
def test_stable_baselines_accepts_the_env(load):
    sb3_env_checker.check_env(GovernorEnv(cell(load)), skip_render_check=True)


@pytest.mark.parametrize(("load", "ends"), [("closed", (False, True)), ("open", (True, False))])
def test_a_closed_loop_is_truncated_and_an_open_one_terminates(load, ends):
    env = GovernorEnv(cell(load))
    env.reset(seed=1)
    over = (False, False)
    while over == (False, False):
        observation, reward, *over, info = env.step(1)
        over = tuple(over)
        assert observation in env.observation_space
        assert reward <= 0
        assert info["discount"] == pytest.approx(math.exp(-info["tokens"] / env.horizon))
    assert over == ends


def test_rewards_of_an_open_episode_add_up_to_the_time_in_system():
    env = GovernorEnv(cell("open"))
    env.reset(seed=5)
    total, over = -float(env.simulator.state.server[0].area), False
    while not over:
        _, reward, over, _, _ = env.step(2)
        total += reward
    done = env.simulator.requests_of(0)
    assert -total == pytest.approx((done["finish_s"] - done["arrival_s"]).sum(), rel=1e-9)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_missed_slo_costs_its_weight(weight):
    env = GovernorEnv(cell("open"), slo_weight=weight, slo_ttft_s=0.0)
    free = GovernorEnv(cell("open"))
    totals = []
    for each in (env, free):
        each.reset(seed=5)
        total, over = 0.0, False
        while not over:
            _, reward, over, _, _ = each.step(0)
            total += reward
        totals.append(total)
    assert totals[1] - totals[0] == pytest.approx(12 * weight)


def test_unseeded_episodes_differ_and_seeded_ones_repeat():
    env = GovernorEnv(cell())
    starts = []
    for seed in (3, None, None, 3):
        env.reset(seed=seed)
        starts.append(env.simulator.state.request[0].output_tokens.tolist())
    assert starts[0] == starts[3]
    assert starts[0] != starts[1] != starts[2]


def test_the_docstring_lists_every_feature_with_its_index():
    pattern = r"\| (\d+)(?: \+ (\d+) k)? \| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|"
    rows = re.findall(pattern, GovernorEnv.__doc__)
    features = GLOBAL_FEATURES + TIER_FEATURES
    assert [row[2:] for row in rows] == [
        (f.name, f.unit, f"{f.low:g} to {f.high:g}", f.description) for f in features
    ]
    assert [int(row[0]) for row in rows] == list(range(len(features)))
    strides = [int(row[1] or 0) for row in rows]
    assert strides == [0] * len(GLOBAL_FEATURES) + [len(TIER_FEATURES)] * len(TIER_FEATURES)
    assert GovernorEnv(cell()).observation_space.shape == (len(rows) + 2 * len(TIER_FEATURES),)


# The vector env


def collect(env, tiers):
    """Step through ``tiers``, ``(steps, num_envs)``; return everything, a list for each output."""
    outputs = []
    for actions in tiers:
        observations, rewards, dones, infos = env.step(actions)
        outputs.append((observations, rewards, dones, infos, env.discounts))
    return [list(column) for column in zip(*outputs, strict=True)]


def test_the_vector_env_agrees_with_single_envs_step_by_step():
    cells = [cell("closed"), cell("open"), cell("closed", 700)]
    rng = np.random.default_rng(0)
    tiers = rng.integers(0, 3, (400, len(cells)))
    together = GovernorVecEnv(cells, seed=11, scaled=False)
    first = together.reset()
    observations, rewards, dones, infos, discounts = collect(together, tiers)
    assert np.sum(dones, axis=0).min() >= 2, "every env restarts more than once"
    for e, each in enumerate(cells):
        single = GovernorEnv(each)
        episode = 0
        expected, _ = single.reset(seed=11 + e * SEED_STRIDE)
        assert first[e].tobytes() == expected.tobytes()
        for i, tier in enumerate(tiers[:, e]):
            expected, reward, terminated, truncated, info = single.step(tier)
            assert rewards[i][e] == np.float32(reward)
            assert discounts[i][e] == pytest.approx(info["discount"], rel=1e-12)
            assert dones[i][e] == (terminated or truncated)
            if terminated or truncated:
                assert infos[i][e]["TimeLimit.truncated"] == truncated
                assert infos[i][e]["terminal_observation"].tobytes() == expected.tobytes()
                episode += 1
                expected, _ = single.reset(seed=11 + e * SEED_STRIDE + episode)
            else:
                assert infos[i][e] == {}
            assert observations[i][e].tobytes() == expected.tobytes()


def test_only_closed_loops_are_truncated():
    env = GovernorVecEnv([cell("closed"), cell("open")])
    env.reset()
    _, _, dones, infos, _ = collect(env, np.ones((300, 2), np.int64))
    for e, truncated in ((0, True), (1, False)):
        ended = [i for i, done in enumerate(dones) if done[e]]
        assert {infos[i][e]["TimeLimit.truncated"] for i in ended} == {truncated}


def test_discounts_count_tokens_against_a_horizon_for_each_request_of_the_typical_batch():
    cells = [cell("closed"), cell("open")]
    env = GovernorVecEnv(cells, horizon_tokens=100.0)
    twin = Simulator(cells)
    env.reset()
    twin.reset([0, SEED_STRIDE])
    for _ in range(5):
        env.step(np.array([2, 1]))
        _, tokens = twin.step(np.array([2, 1]))
        horizons = [100.0 * reference_batch(each) for each in cells]
        assert env.discounts == pytest.approx(np.exp(-tokens / horizons))
    assert reference_batch(cells[0]) == 4


def test_without_a_horizon_nothing_is_discounted():
    env = GovernorVecEnv([cell()], horizon_tokens=None)
    env.reset()
    env.step(np.array([1]))
    assert env.discounts.tolist() == [1.0]


def test_scaled_rewards_are_the_unscaled_ones_over_an_off_horizon():
    cells = [cell("closed"), cell("open")]
    tiers = np.ones((50, 2), np.int64)
    outputs = []
    for scaled in (False, True):
        env = GovernorVecEnv(cells, seed=4, horizon_tokens=200.0, scaled=scaled)
        env.reset()
        outputs.append(np.array(collect(env, tiers)[1]))
    scale = [200.0 * reference_batch(each) * reference_step_s(each) for each in cells]
    assert outputs[1] * scale == pytest.approx(outputs[0], rel=1e-5)


@pytest.mark.parametrize("clients", [1, 8, 32])
def test_an_off_only_server_earns_about_minus_one_over_a_horizon(clients):
    load = ClosedLoop(clients, 10**6)
    workload = Workload("off", load, Acceptance(), Lengths(5, 0, 5, 5), Lengths(500, 0, 500, 500))
    env = GovernorVecEnv([Cell(SERVER, workload)], horizon_tokens=256.0)
    env.reset()
    _, rewards, _, _, discounts = collect(env, np.zeros((3000, 1), np.int64))
    weights = np.concatenate([[1.0], np.cumprod(np.ravel(discounts))[:-1]])
    assert (np.ravel(rewards) * weights).sum() == pytest.approx(-1.0, rel=0.1)


def test_seeding_the_vector_env_restarts_its_episodes():
    env = GovernorVecEnv([cell(), cell()], seed=1)
    env.seed(9)
    first = env.reset()
    env.seed(9)
    assert env.reset().tobytes() == first.tobytes()
    assert env.reset().tobytes() != first.tobytes(), "the next episode"


def test_returned_arrays_are_not_written_again():
    env = GovernorVecEnv([cell()])
    first = env.reset()
    kept = first.copy()
    second, rewards, dones, _ = env.step(np.array([1]))
    copies = second.copy(), rewards.copy(), dones.copy(), env.discounts
    kept_discounts = env.discounts.copy()
    env.step(np.array([0]))
    assert first.tobytes() == kept.tobytes()
    assert second.tobytes() == copies[0].tobytes()
    assert (rewards == copies[1]).all()
    assert (dones == copies[2]).all()
    assert (copies[3] == kept_discounts).all()


def test_methods_of_single_envs_are_refused_with_a_reason():
    env = GovernorVecEnv([cell()])
    with pytest.raises(ConfigError, match="simulator"):
        env.env_method("anything")


# Bad settings

BAD = {
    "no running requests": lambda: replace(SERVER, max_running_requests=0),
    "too many running requests": lambda: replace(SERVER, max_running_requests=10_000),
    "no cache": lambda: replace(SERVER, kv_capacity_tokens=0),
    "no chunk": lambda: replace(SERVER, chunk_tokens=-1),
    "unknown acceptance": lambda: Acceptance("global"),
    "rates reversed": lambda: Acceptance("shared", 0.9, 0.3),
    "rate above 1": lambda: Acceptance("shared", 0.5, 1.5),
    "rate not a number": lambda: Acceptance("shared", math.nan, 0.5),
    "no period": lambda: Acceptance("shared", 0.3, 0.9, 0.0),
    "endless period": lambda: Acceptance("shared", 0.3, 0.9, math.inf),
    "share below 0": lambda: DraftRecovery(cold_start_share=-0.1),
    "loss above 1": lambda: DraftRecovery(worst_loss=2.0),
    "no gap scale": lambda: DraftRecovery(gap_scale_tokens=0.0),
    "no recovery": lambda: DraftRecovery(recovery_tokens=-1.0),
    "empty prompts": lambda: Lengths(10, 0.5, 0, 20),
    "lengths reversed": lambda: Lengths(10, 0.5, 30, 20),
    "negative spread": lambda: Lengths(10, -0.5, 1, 20),
    "no median": lambda: Lengths(0, 0.5, 1, 20),
    "no clients": lambda: ClosedLoop(0, 100),
    "no tokens": lambda: ClosedLoop(1, 0),
    "no rate": lambda: OpenLoop(0.0, 1.0, 60.0, 10),
    "swing reversed": lambda: OpenLoop(2.0, 1.0, 60.0, 10),
    "no swing": lambda: OpenLoop(1.0, 2.0, 0.0, 10),
    "no requests": lambda: OpenLoop(1.0, 2.0, 60.0, 0),
    "no servers": lambda: Simulator([]),
    "cache below a request": lambda: Simulator([cell(kv_capacity_tokens=100)]),
    "two tier lists": lambda: Simulator([cell(), cell(tiers="native,1")]),
    "seeds missing": lambda: Simulator([cell(), cell()]).reset([1]),
    "no horizon": lambda: GovernorVecEnv([cell()], horizon_tokens=0.0),
    "horizon not a number": lambda: GovernorVecEnv([cell()], horizon_tokens=math.nan),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_bad_settings_say_what_was_expected(make):
    with pytest.raises(ConfigError, match=r"expected|raise|need"):
        make()


@pytest.mark.parametrize("tiers", ["native,native", "native,9", "warm,1", "", "native,x"])
def test_bad_tier_lists_fail_when_the_deployment_is_made(tiers):
    with pytest.raises(SpecGovernorError, match=r"expected|names a tier twice|not in the"):
        replace(SERVER, tiers=tiers)


def stepped(actions, reset=True):
    simulator = Simulator([cell(), cell()])
    if reset:
        simulator.reset([1, 2])
    return simulator.step(np.array(actions))


MORE_BAD = {
    "gym horizon of 0": lambda: GovernorEnv(cell(), horizon_tokens=0.0),
    "gym horizon below 0": lambda: GovernorEnv(cell(), horizon_tokens=-1.0),
    "gym horizon not a number": lambda: GovernorEnv(cell(), horizon_tokens=math.nan),
    "SLO weight below 0": lambda: Simulator([cell()], slo_weight=-1.0),
    "SLO weight not a number": lambda: Simulator([cell()], slo_weight=math.nan),
    "swing not a number": lambda: OpenLoop(1.0, 2.0, math.nan, 10),
    "endless rate": lambda: OpenLoop(1.0, math.inf, 60.0, 10),
    "endless spread": lambda: Lengths(10, math.inf, 1, 20),
}
UNSAFE = {
    "action too large": lambda: stepped([0, 3]),
    "action below 0": lambda: stepped([-1, 0]),
    "an action missing": lambda: stepped([0]),
    "an action too many": lambda: stepped([0, 0, 0]),
    "step before reset": lambda: stepped([0, 0], reset=False),
    "table too narrow": lambda: Simulator([cell()]).run_tables(np.zeros((1, 2), np.int64)),
    "gym action too large": lambda: GovernorEnv(cell()).step(3),
}


@pytest.mark.parametrize("make", MORE_BAD.values(), ids=MORE_BAD.keys())
def test_more_bad_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("make", UNSAFE.values(), ids=UNSAFE.keys())
def test_calls_that_would_leave_the_arrays(make):
    with pytest.raises(ConfigError):
        make()
