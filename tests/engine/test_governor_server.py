"""A server with an HTTP port that the launcher starts: it generates, and shows its metrics."""

import itertools
import re
import subprocess
import sys
import time

import pytest
from harness import start_engine, start_server, write_plugin
from test_governor import RANDOM_TIERS, governed, prompts, ran, read_rounds

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 120


def samples_of(text, name):
    """Return the samples of one of the governor's metrics, {tier or "": value}."""
    found = {}
    for labels, value in re.findall(rf"^sglang:governor_{name}{{(.*)}} (\S+)$", text, re.M):
        tier = re.search(r'tier="(\w+)"', labels)
        assert 'model_name="' in labels
        found["" if tier is None else tier[1]] = float(value)
    return found


def test_launch_starts_a_governed_server_with_metrics(tmp_path):
    decisions, env = governed(tmp_path, "cold,1,3")
    plugin = write_plugin(tmp_path / "plugin", RANDOM_TIERS)
    with start_engine() as engine:
        expected = engine.generate(prompts(1), NUM_TOKENS)[0].token_ids
    command = ("-m", "engine_hooks.launch", "--policy", env["SPECGOVERNOR_POLICY"])
    command += ("--governor-guard", "off", "--governor-decisions", decisions, "--")
    with start_server(
        command, plugins=[plugin], max_running_requests=None, enable_metrics=True
    ) as server:
        assert server.generate(prompts(1)[0], NUM_TOKENS).token_ids == expected
        rounds = read_rounds(decisions)
        time.sleep(1.0)  # metrics are counted once a second
        metrics = server.get("/metrics")
        switch = (sys.executable, "-m", "engine_hooks.mode", server.url)
        changed = subprocess.run([*switch, "shadow"], capture_output=True, text=True, timeout=60)
        log = server.log()
        later = server.get("/metrics")
    assert "governs SGLang 0.5.23" in log
    assert "SGLang runs at most 48 requests at a time unless --max-running-requests" in log
    assert "sglang:num_running_reqs" in metrics

    names = [str(ran(row)) for row in rounds]
    rows = [row["num_correct"] or [0] for row in rounds]
    assert samples_of(metrics, "rounds_total") == {name: names.count(name) for name in set(names)}
    assert sum(samples_of(metrics, "tokens_total").values()) == sum(1 + sum(row) for row in rows)
    assert samples_of(metrics, "wasted_drafts_total")[""] == sum(
        row["num_steps"] - sum(correct) for row, correct in zip(rounds, rows, strict=True)
    )
    switches = sum(a != b for a, b in itertools.pairwise(names))
    assert samples_of(metrics, "switches_total") == {"": switches}
    assert samples_of(metrics, "num_steps") == {"": rounds[-1]["num_steps"]}
    decided = sum(not row["repeats"] for row in rounds)
    assert samples_of(metrics, "decision_seconds_count") == {"": decided}
    assert 0 < samples_of(metrics, "decision_seconds_sum")[""] < 0.01 * len(rounds)
    for name in ("fallbacks_total", "guard_active", "guard_forced_total"):
        assert samples_of(metrics, name) == {"": 0}

    assert (changed.returncode, changed.stdout) == (0, "the governor is shadow\n"), changed.stderr
    assert samples_of(metrics, "mode") == {"": 2}
    assert samples_of(later, "mode") == {"": 1}
