"""Arrivals, lengths and the registry of workloads: rates, spread, seeds, and bad settings."""

import doctest

import numpy as np
import pytest

from controller.errors import ConfigError
from env import acceptance_process, registry
from env.acceptance_process import Acceptance
from env.arrivals import GammaBurst, OnOff, OpenLoop, Poisson, Ramp, Replay, scale_to_rate
from env.lengths import Lengths, TraceLengths, draw_lengths, lengths_of
from env.registry import Registry
from env.scenarios import SCENARIOS
from env.workload import ClosedLoop, Workload
from env.workloads import LOADS, SHIPPED, load_trace, make_workload, named_lengths

STATIONARY = SCENARIOS.make("stationary")
COUNT = 40_000
LOAD_TEXTS = (
    "closed:concurrency=4,tokens=5000",
    "closed:concurrency=4,tokens=5000,think_s=2.5",
    "poisson:rate=4",
    "gamma-burst:rate=4,cv=3",
    "ramp:rate=4,ramp_s=20",
    "on-off:rate=8,off=0.25",
    "swing:rate=6",
    "azure-2023:window=300",
    "azure-2023:split=code,rate=2.0,window=300",
    "mooncake:time_scale=0.5,window=300",
)


def times(load, seed=0):
    return load.arrivals(np.random.default_rng(seed))


@pytest.mark.parametrize("text", LOAD_TEXTS)
def test_a_seed_fixes_a_workload_and_another_gives_another(text):
    workload = make_workload(text, STATIONARY)
    first, again, other = (workload.sample(seed) for seed in (7, 7, 8))
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert (getattr(first, name) == getattr(again, name)).all()
    assert (first.output_tokens != other.output_tokens).any()
    assert len(first.arrival_s) == workload.max_requests()
    # In a closed loop only the first requests of the clients have arrivals of their own.
    told = first.arrival_s[: workload.load.concurrency if workload.is_closed else None]
    assert (np.diff(told) >= 0).all()
    assert told[0] >= 0
    assert first.prompt_tokens.min() >= 1
    assert first.output_tokens.min() >= 1
    assert first.output_tokens.max() <= first.max_new_tokens


def test_every_load_of_the_registry_is_tried_here():
    named = {text.partition(":")[0] for text in LOAD_TEXTS} | {"burstgpt"}
    assert named == set(LOADS.names())
    assert all(LOADS.describe(name).endswith(".") for name in LOADS.names())


# Arrivals


@pytest.mark.parametrize(
    "load",
    [
        Poisson(5.0, COUNT),
        GammaBurst(5.0, 3.0, COUNT),
        GammaBurst(5.0, 0.5, COUNT),
        OnOff(9.0, 1.0, 10.0, 10.0, COUNT),
        OnOff(8.0, 0.0, 5.0, 3.0, COUNT),
        OpenLoop(1.0, 9.0, 60.0, COUNT),
        Ramp(1.0, 9.0, 8000.0, COUNT),
    ],
    ids=lambda load: type(load).__name__,
)
def test_loads_arrive_at_the_rate_that_they_claim(load):
    arrivals = times(load)
    assert (np.diff(arrivals) >= 0).all()
    # The count's standard error is 0.5% for a Poisson process, and cv times that for bursts.
    tolerance = 0.02 * max(getattr(load, "cv", 1.0), 1.0)
    assert len(arrivals) / arrivals[-1] == pytest.approx(load.mean_rate, rel=tolerance)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_of_a_burst_have_the_coefficient_of_variation(cv):
    gaps = np.diff(times(GammaBurst(5.0, cv, COUNT)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("start", "end"), [(0.0, 8.0), (8.0, 2.0), (4.0, 4.0)])
def test_a_ramp_climbs_along_a_line_and_stays(start, end):
    arrivals = times(Ramp(start, end, 2000.0, COUNT))
    assert arrivals[-1] > 3000.0
    seen = np.histogram(arrivals, bins=6, range=(0, 3000))[0] / 500.0
    middle = np.array([250.0, 750.0, 1250.0, 1750.0])
    expected = [*(start + (end - start) * middle / 2000.0), end, end]
    assert seen == pytest.approx(np.array(expected), abs=0.35)


def test_an_on_off_load_is_silent_while_off():
    load = OnOff(8.0, 0.0, 5.0, 3.0, COUNT)
    phase = times(load) % 8.0
    assert ((phase < 5.0 + 1e-6) | (phase > 8.0 - 1e-6)).all()
    half = OnOff(8.0, 2.0, 5.0, 3.0, COUNT)
    phase = times(half) % 8.0
    assert (phase < 5.0).mean() == pytest.approx(40.0 / 46.0, abs=0.01)


def test_a_replay_keeps_arrivals_and_lengths_together():
    trace = load_trace("azure-2023-code")
    load = LOADS.make("azure-2023", split="code", time_scale=0.5, window=200)
    table = Workload("replay", load, STATIONARY, *lengths_of(trace)).sample(11)
    starts = np.flatnonzero(trace.prompt_tokens == table.prompt_tokens[0])
    first = next(
        i for i in starts if (trace.prompt_tokens[i : i + 200] == table.prompt_tokens).all()
    )
    rows = slice(first, first + 200)
    assert (trace.output_tokens[rows] == table.output_tokens).all()
    expected = (trace.arrival_s[rows] - trace.arrival_s[first]) * 0.5
    assert table.arrival_s == pytest.approx(expected)


def test_a_replay_of_a_whole_trace_is_the_same_under_every_seed():
    load = LOADS.make("mooncake")
    workload = make_workload(load, STATIONARY, name="all")
    assert (workload.sample(1).arrival_s == workload.sample(2).arrival_s).all()
    assert workload.max_requests() == len(load.trace) == 918


def test_a_replay_scaled_to_a_rate_has_it():
    trace = load_trace("azure-2023-conv")
    load = Replay(trace, scale_to_rate(trace, 20.0))
    assert load.mean_rate == pytest.approx(20.0)
    assert len(trace) / times(load)[-1] == pytest.approx(20.0, rel=1e-3)


# Lengths


@pytest.mark.parametrize("name", SHIPPED)
def test_lengths_drawn_from_a_trace_are_those_of_its_requests(name):
    trace = load_trace(name)
    prompts, outputs = named_lengths(name)
    drawn = draw_lengths(prompts, outputs, np.random.default_rng(1), 20_000)
    pairs = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    assert set(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)) <= pairs
    assert prompts.high == trace.prompt_tokens.max()
    for source, tokens in zip((prompts, outputs), drawn, strict=True):
        error = tokens.std() / len(tokens) ** 0.5
        assert tokens.mean() == pytest.approx(source.mean(), abs=4 * error)


def test_lengths_of_two_traces_are_drawn_apart():
    prompts, _ = named_lengths("azure-2023-code")
    _, outputs = named_lengths("azure-2023-conv")
    drawn = draw_lengths(prompts, outputs, np.random.default_rng(1), 5_000)
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.05
    assert outputs.sample(np.random.default_rng(2), 3).dtype == np.int32


def test_a_phase_shift_changes_lengths_with_the_blocks():
    workload = make_workload(
        "poisson:rate=5,num_requests=400",
        SCENARIOS.make("phase-shift", requests=100),
        "azure-2023-conv",
        shifted="azure-2023-code",
    )
    outputs = workload.sample(3).output_tokens.reshape(4, 100).mean(axis=1)
    chat, code = outputs[[0, 2]], outputs[[1, 3]]
    assert chat.min() > 3 * code.max(), "the coding service answers with few tokens"
    assert workload.max_new_tokens == 1899
    means = [named_lengths(name)[1].mean() for name in ("azure-2023-conv", "azure-2023-code")]
    assert workload.mean_output_tokens == pytest.approx(np.mean(means))


def test_clients_that_think_start_spread_out():
    arrivals = make_workload("closed:concurrency=50,think_s=4.0", STATIONARY).sample(1).arrival_s
    assert (np.diff(arrivals[:50]) >= 0).all()
    assert 3.0 < arrivals[49] < 4.0
    assert make_workload("closed:concurrency=50", STATIONARY).sample(1).arrival_s.max() == 0.0


# What is refused

BAD_TEXTS = {
    "poison:rate=4": "expected one of closed, poisson",
    "poisson": "missing a required argument: 'rate'",
    "poisson:rate=fast": "expected the types",
    "poisson:rate=-1": "rate -1: expected a positive number",
    "poisson:rate=4,rates=3": "unexpected keyword argument 'rates'",
    "poisson:4": "name:setting=value",
    "poisson:rate=4,num_requests=0": "num_requests 0: expected a whole number",
    "poisson:rate=4,num_requests=2.5": "num_requests 2.5: expected a whole number",
    "gamma-burst:rate=4,cv=0": "cv 0: expected a positive number",
    "ramp:rate=4,start=-1": "start_rate -4: expected a number of at least 0",
    "on-off:rate=4,on_s=0": "on_s 0: expected a positive number",
    "closed:concurrency=0": "expected at least one client",
    "closed:think_s=-1.0": "think_s of at least 0",
    "azure-2023:split=chat": "expected 'conv' or 'code'",
    "azure-2023:window=0": "window 0: expected 1 to the 10108 requests",
    "azure-2023:time_scale=0": "time_scale 0: expected a positive number",
    "azure-2023:time_scale=1,rate=3": "expected one of the two",
    "azure-2023:rate=0": "rate 0: expected a positive number",
    "burstgpt": "missing a required argument: 'path'",
}


@pytest.mark.parametrize(("text", "reason"), BAD_TEXTS.items())
def test_bad_loads_say_what_was_expected_in_one_line(text, reason):
    with pytest.raises(ConfigError) as caught:
        make_workload(text, STATIONARY)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_together_is_refused():
    replay = LOADS.make("mooncake")
    code = named_lengths("azure-2023-code")
    with pytest.raises(ConfigError, match="lengths of its own trace"):
        make_workload(replay, STATIONARY, "azure-2023-code")
    with pytest.raises(ConfigError, match="expected its own lengths"):
        Workload("replay", replay, STATIONARY)
    with pytest.raises(ConfigError, match="expected 'phases'"):
        Workload("shifted", ClosedLoop(1, 1), STATIONARY, shifted=code)
    with pytest.raises(ConfigError, match="expected one of azure-2023-code"):
        named_lengths("azure")
    with pytest.raises(ConfigError, match="is there already"):
        LOADS.register("poisson")(lambda: ClosedLoop(1, 1))


def test_a_registry_lists_settings_and_names():
    things: Registry[Acceptance] = Registry("thing")
    things.register("one")(lambda low=0.1: Acceptance(low=low))
    assert things.names() == ["one"]
    assert things.settings("one") == ["low"]
    assert things.parse(" one : low = 0.2 ").low == 0.2


def test_lengths_of_a_trace_are_read_only_once():
    first, second = (named_lengths("mooncake")[0] for _ in range(2))
    assert isinstance(first, TraceLengths)
    assert first.trace is second.trace
    assert isinstance(named_lengths("default")[0], Lengths)


@pytest.mark.parametrize("module", [registry, acceptance_process], ids=["registry", "acceptance"])
def test_doctests_pass(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
