"""What a decision costs: from the scheduler's objects to a tier, beside SGLang's own policy.

    python -m engine_hooks.bench_decision [--policy DIR] [--batch-size 256] [--json]

One core, with stand-ins for the scheduler's objects of the real types where that matters for the
time: the context lengths are a PyTorch tensor if PyTorch is installed, else they are counted. Each
round also has its result and its place in the memory, timed apart. In a server other work empties
the caches between two decisions: ``--cold`` times that too. With ``--json`` the last line is one
JSON object.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.checkpoint import Checkpoint, load_checkpoint
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.policy import NumpyPolicy, parameter_shapes
from controller.tiers import tier_of
from engine_hooks.driver import Driver
from engine_hooks.governor import Governor
from engine_hooks.params import GovernedParams
from engine_hooks.server_setup import write_candidate_steps
from engine_hooks.settings import ON

NUM_DECISIONS = 20_000
WARM_UP = 1_000
COLD_DECISIONS = 300
COLD_NUMBERS = 6_000_000
"""Numbers, 8 bytes each, that are touched before a decision with cold caches."""
HIDDEN = (64, 64)
TIERS = ("cold", "1", "2", "3", "5", "7")
INITIAL_STEPS = 3


def stand_in_checkpoint() -> Checkpoint:
    """Return a policy of the usual size with random weights; the time does not depend on them."""
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, *HIDDEN)
    sizes = (1, 64, 256)
    costs = tuple(
        TierCost(
            tier=name,
            batch_sizes=sizes,
            base_s=tuple(0.005 + 0.0001 * size * (index + 1) for size in sizes),
            context_s_per_token=1e-8,
            relative_noise=(0.0,) * len(sizes),
            max_context_tokens=10**6,
            num_rows=1,
        )
        for index, name in enumerate(TIERS)
    )
    prefill = PrefillCost(base_s=0.01, s_per_token=1e-5)
    calibration = Calibration("stand-in", costs, prefill, prefill)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return Checkpoint(
        policy=NumpyPolicy(weights),
        tiers=tuple(tier_of(name) for name in TIERS),
        calibration=calibration,
        training_config={},
        evaluation={},
        sha256="",
        directory=Path("stand-in"),
    )


class Bench:
    """A scheduler's objects, and a driver on them."""

    def __init__(self, checkpoint: Checkpoint, batch_size: int, counted: bool = False) -> None:
        """Make a batch of requests and a governor."""
        self.batch_size = batch_size
        self.rng = random.Random(0)
        requests = [
            SimpleNamespace(
                rid=str(i),
                origin_input_ids=array("q", range(self.rng.randrange(100, 1000))),
                output_ids=array("q", range(self.rng.randrange(1, 300))),
                finished=lambda: False,
            )
            for i in range(batch_size)
        ]
        mode = SimpleNamespace(
            is_decode=lambda: True, is_extend=lambda: False, is_idle=lambda: False
        )
        self.batch = SimpleNamespace(
            reqs=requests,
            seq_lens_sum=None,
            seq_lens_cpu=None if counted else _lengths(requests),
            forward_mode=mode,
            decoding_reqs=None,
            extend_num_tokens=None,
        )
        self.scheduler = SimpleNamespace(
            waiting_queue=[None] * 10,
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 300_000),
            tree_cache=SimpleNamespace(evictable_size=lambda: 50_000),
            max_total_num_tokens=700_000,
        )
        self.driver = Driver()
        self.driver.mode = ON
        self.driver.governor = Governor(checkpoint, batch_size, INITIAL_STEPS)
        self.driver.params = GovernedParams.__new__(GovernedParams)
        self.driver.params.static_steps = self.driver.params.next_steps = INITIAL_STEPS

    def launch(self) -> Any:
        """Take a snapshot and decide; what the scheduler waits for before a launch."""
        return self.driver._begin_round(self.scheduler, self.batch, 0.0)

    def learn(self, launch: Any, correct: list[int]) -> None:
        """Note the launch and its result."""
        steps = 0 if self.driver.params is None else self.driver.params.next_steps
        result = SimpleNamespace(
            speculative_num_draft_tokens=steps + 1, num_correct_drafts_per_req_cpu=correct
        )
        self.driver._launched(launch, result)
        self.driver._launches.pop(id(result))
        self.driver._learn(launch, self.batch.reqs, None, 0.0)

    def correct_drafts(self) -> list[int]:
        """Draw the correct drafts of a round."""
        steps = 0 if self.driver.params is None else self.driver.params.next_steps
        return [self.rng.randint(0, steps) for _ in range(self.batch_size)]


def _lengths(requests: Sequence[Any]) -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch.tensor([len(r.origin_input_ids) + len(r.output_ids) for r in requests])


def percentiles(samples_ns: Sequence[int]) -> dict[str, float]:
    """Return the 50th, the 99th and the 99.9th percentile in microseconds.

    Fewer than one decision in a hundred counts the context: the last of them shows it.
    """
    values = np.percentile(np.asarray(samples_ns), (50, 99, 99.9)) / 1e3
    names = ("p50_us", "p99_us", "p999_us")
    return {name: round(float(v), 2) for name, v in zip(names, values, strict=True)}


def time_governor(bench: Bench, num_decisions: int) -> dict[str, dict[str, float]]:
    """Time decisions, and what is done with their results."""
    decide_ns, learn_ns = [], []
    clock = time.perf_counter_ns
    for index in range(WARM_UP + num_decisions):
        start = clock()
        launch = bench.launch()
        decided = clock()
        correct = bench.correct_drafts()
        result = clock()
        bench.learn(launch, correct)
        learned = clock()
        if index >= WARM_UP:
            decide_ns.append(decided - start)
            learn_ns.append(learned - result)
    return {"decision": percentiles(decide_ns), "result": percentiles(learn_ns)}


def time_cold(bench: Bench) -> dict[str, float]:
    """Time decisions after work that fills the caches with other data."""
    other = np.zeros(COLD_NUMBERS)
    samples = []
    clock = time.perf_counter_ns
    for _ in range(COLD_DECISIONS):
        other += 1.0
        start = clock()
        launch = bench.launch()
        samples.append(clock() - start)
        bench.learn(launch, bench.correct_drafts())
    return percentiles(samples)


def sglang_policy(checkpoint: Checkpoint) -> Any:
    """Return SGLang's own policy over the same candidate steps, or None without SGLang."""
    try:
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
    except ImportError:
        return None
    steps = {tier.num_steps for tier in checkpoint.tiers} | {INITIAL_STEPS}
    return AdaptiveSpeculativeParams(INITIAL_STEPS, str(write_candidate_steps(steps)))


def time_sglang(policy: Any, bench: Bench, num_decisions: int) -> dict[str, float]:
    """Time the two calls a round of SGLang's own policy."""
    samples = []
    clock = time.perf_counter_ns
    ask: Callable[[int], Any] = policy.get_steps_for_batch
    tell: Callable[[list[int], int], Any] = policy.on_verify_complete
    for index in range(WARM_UP + num_decisions):
        correct = bench.correct_drafts()
        start = clock()
        ask(bench.batch_size)
        tell(correct, bench.batch_size)
        if index >= WARM_UP:
            samples.append(clock() - start)
    return percentiles(samples)


@contextmanager
def one_core() -> Iterator[None]:
    """Stay on one core, and keep the garbage collector from what is there already."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if cores:
            os.sched_setaffinity(0, cores)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m engine_hooks.bench_decision")
    parser.add_argument("--policy", metavar="DIR", help="a checkpoint; default: random weights")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--decisions", type=int, default=NUM_DECISIONS)
    parser.add_argument(
        "--count-context",
        action="store_true",
        help="as with an attention backend that keeps no context lengths on the CPU",
    )
    parser.add_argument("--cold", action="store_true", help="also time decisions with cold caches")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args(arguments)
    checkpoint = load_checkpoint(options.policy) if options.policy else stand_in_checkpoint()
    bench = Bench(checkpoint, options.batch_size, options.count_context)
    report: dict[str, Any] = {
        "batch_size": options.batch_size,
        "decisions": options.decisions,
        "tiers": [tier.name for tier in checkpoint.tiers],
        "hidden_sizes": list(checkpoint.policy.hidden_sizes),
        "context": "counted" if bench.batch.seq_lens_cpu is None else "summed",
    }
    policy = sglang_policy(checkpoint)
    with one_core():
        report |= time_governor(bench, options.decisions)
        if options.cold:
            report["cold_decision"] = time_cold(bench)
        if policy is not None:
            report["sglang"] = time_sglang(policy, bench, options.decisions)
    for name in ("decision", "cold_decision", "result", "sglang"):
        if name in report:
            times = report[name]
            print(
                f"{name:13} p50 {times['p50_us']:7.2f} us   p99 {times['p99_us']:7.2f} us   "
                f"p99.9 {times['p999_us']:7.2f} us"
            )
    if options.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
