"""All tensor-parallel ranks decide alike, in the real engine with two of them."""

import json
import time

import pytest
from harness import EngineFailed, start_engine, write_plugin
from test_governor import RANDOM_TIERS, governed, play, prompts

pytestmark = pytest.mark.timeout(500)

# Every rank draws its own tiers, as a policy would that read a clock.
RANK_LOCAL = """
import os, random

def register():
    from controller.policy import NumpyPolicy

    generator = random.Random(os.getpid())
    NumpyPolicy.choose = lambda self, seen: generator.randrange(self.num_tiers(len(seen)))
"""


def sequences(path):
    """Return what each rank asked for and ran, round by round."""
    time.sleep(1.5)  # the logs are written once a second
    ranks = []
    for file in (path, path.with_name(f"{path.name}.rank1")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        ranks.append([(row["asked"], row["num_steps"], row["num_correct"]) for row in rows])
    return ranks


def check_ranks_agree(engine, path, work):
    """Give the engine work and compare the ranks."""
    work(engine)
    first, second = sequences(path)
    assert first
    assert first == second
    return first


@pytest.mark.parametrize("source", [None, RANDOM_TIERS], ids=["policy", "random"])
def test_both_ranks_run_the_same_tiers(tmp_path, source):
    decisions, env = governed(tmp_path, "cold,1,2,3,5")
    plugins = [] if source is None else [write_plugin(tmp_path / "plugin", source)]
    with start_engine(env=env, plugins=plugins, tp_size=2) as engine:
        rounds = check_ranks_agree(engine, decisions, play)
    assert {asked for asked, _, _ in rounds} == {"cold", "1", "2", "3", "5"}


def test_a_decision_of_a_rank_of_its_own_is_found(tmp_path):
    decisions, env = governed(tmp_path, "cold,1,2,3,5")
    plugin = write_plugin(tmp_path / "plugin", RANK_LOCAL)
    with start_engine(env=env, plugins=[plugin], tp_size=2) as engine:
        with pytest.raises((AssertionError, EngineFailed)):
            check_ranks_agree(
                engine, decisions, lambda engine: engine.generate(prompts(2), 100, limit_s=30)
            )
