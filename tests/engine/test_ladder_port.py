"""Our port of SGLang's adaptive ladder against the real class, round by round."""

import json
import random

import numpy as np
import pytest
from sglang.srt.speculative.adaptive_spec_params import (
    DEFAULT_ADAPTIVE_CONFIG,
    AdaptiveSpeculativeParams,
)

from controller.calibration import Calibration, PrefillCost, TierCost
from training.baselines.ladder import (
    AT,
    AVERAGE,
    DEFAULT_LADDER,
    Slot,
    SlotTable,
    update_slot,
)

GRAPHS = [1, 2, 4, 8, 16, 32, 64, 96]


def as_config(slots):
    return {
        str(slot.batch_size): {
            "candidate_steps": list(slot.steps),
            "ema_alpha": slot.alpha,
            "update_interval": slot.interval,
            "warmup_batches": slot.warmup,
            "down_hysteresis": slot.down,
            "up_hysteresis": slot.up,
            "ceiling_coeff": slot.ceiling,
        }
        for slot in slots
    }


def system_with_graphs():
    cost = TierCost("native", (1,), (0.01,), 0.0, (0.0,), 10**6, 100)
    prefill = PrefillCost(0.0, 0.0)
    return Calibration("graphs", (cost,), prefill, prefill, cuda_graph_batch_sizes=tuple(GRAPHS))


def random_slots(rng):
    sizes = sorted(rng.sample([1, 2, 5, 8, 20, 32, 64], rng.randint(1, 4)))
    return tuple(
        Slot(
            size,
            tuple(sorted(rng.sample(range(8), rng.randint(1, 5)))),
            down=rng.choice([-0.5, -0.25, 0.0, 0.3]),
            up=rng.choice([-0.3, 0.0, 0.4]),
            ceiling=rng.choice([0.0, 0.0, 1.0, 1.7]),
            alpha=rng.choice([0.05, 0.2, 0.7]),
            interval=rng.choice([1, 3, 5]),
            warmup=rng.choice([0, 4, 10]),
        )
        for size in sizes
    )


def play(slots, real, initial, rng, graphs, rounds=600):
    """Feed both the same results; every choice and every average must be equal, bit for bit."""
    table = SlotTable(slots, initial)
    state = table.first.copy()
    calibration = system_with_graphs() if graphs else None
    real.set_cuda_graph_bs(GRAPHS if graphs else None)
    chosen = set()
    level = 0.7
    for _ in range(rounds):
        if rng.random() < 0.02:
            level = rng.random()
        batch_size = rng.choice([1, 1, 3, 7, 9, 33, 63, 65, 97, 200])
        s = table.slot_of(batch_size, calibration)
        steps = int(table.steps[s, int(state[s, AT])])
        assert real.get_steps_for_batch(batch_size) == steps
        chosen.add(steps)
        correct = []
        for _ in range(batch_size):
            count = 0
            while count < steps and rng.random() < level:
                count += 1
            correct.append(count)
        real.on_verify_complete(correct, batch_size)
        update_slot(
            table.settings[s],
            table.steps[s],
            table.num_candidates[s],
            state[s],
            len(correct),
            sum(correct),
        )
        slot = real._slots[int(table.sizes[s])]
        assert state[s, AVERAGE] == slot.ema_accept_len
        assert table.steps[s, int(state[s, AT])] == slot.current_steps
    return chosen


def test_the_default_configuration_is_sglangs():
    real = AdaptiveSpeculativeParams(3)
    assert [int(key) for key in DEFAULT_ADAPTIVE_CONFIG] == [s.batch_size for s in DEFAULT_LADDER]
    for slot in DEFAULT_LADDER:
        theirs = real._slots[slot.batch_size]
        assert theirs.candidate_steps == list(slot.steps)
        assert (theirs.ema_alpha, theirs.update_interval) == (slot.alpha, slot.interval)
        assert theirs.warmup_batches == slot.warmup
        assert (theirs.down_hysteresis, theirs.up_hysteresis) == (slot.down, slot.up)
        assert theirs.ceiling_coeff == slot.ceiling


@pytest.mark.parametrize("initial", [0, 1, 3, 7])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_default_ladder_moves_as_sglangs(initial, graphs):
    rng = random.Random(initial)
    real = AdaptiveSpeculativeParams(initial)
    chosen = play(DEFAULT_LADDER, real, initial, rng, graphs, rounds=2000)
    assert {0, 1, 3} <= chosen, "the walk must reach more than one depth"


@pytest.mark.parametrize("seed", range(40))
def test_any_ladder_moves_as_sglangs(tmp_path, seed):
    rng = random.Random(seed)
    slots = random_slots(rng)
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(as_config(slots)))
    initial = rng.randrange(8)
    play(slots, AdaptiveSpeculativeParams(initial, str(path)), initial, rng, rng.random() < 0.5)


def test_an_empty_result_counts_for_neither():
    slots = (Slot(1, (1, 3), warmup=0, interval=1),)
    table = SlotTable(slots, 1)
    before = table.first.copy()
    update_slot(table.settings[0], table.steps[0], 2, table.first[0], 0, 0)
    assert np.array_equal(table.first, before)
    real = AdaptiveSpeculativeParams(1)
    assert real.on_verify_complete([], 1) is None
    assert real._slots[1]._batch_count == 0
