"""The plugin on a GPU server: cost, traces, and the policy under a load that rises and falls.

    python tests/gpu/measure.py fixed --output OUT       # native and fixed depths: logs and traces
    python tests/gpu/measure.py governed --output OUT    # overhead, full trace, policy under load

`--rehearse` runs the same on the CPU engine of the tests, with small batches. What comes out is
described in README.md beside this.
"""

import argparse
import asyncio
import collections
import json
import random
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from blocks import share_kept
from servers import POLICY, ControlFile, Server, cpu, generate, get, h200, session


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    platform: object
    depths: tuple
    batches: tuple  # of the fixed depths: (batch size, output tokens)
    overhead: tuple  # (batch size, output tokens, times)
    trace: tuple  # (prompt tokens, batch size, output tokens)
    stages: tuple  # (clients, seconds, accept rate)
    arms: tuple


GPU = Plan(
    platform=h200,
    depths=(None, 1, 3, 7),
    batches=((1, 600), (8, 600), (32, 500), (64, 450), (128, 400), (256, 360)),
    overhead=((1, 5000, 3), (8, 3000, 4), (64, 2000, 2), (240, 2000, 1)),
    trace=(
        *((512, size, 800) for size in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)),
        *((2048, size, 650) for size in (1, 8, 32, 64, 96)),
        *((6144, size, 600) for size in (1, 8, 16, 32, 40)),
    ),
    stages=(
        (1, 4, 0.85), (8, 4, 0.85), (32, 4, 0.75), (128, 5, 0.65), (256, 7, 0.45),
        (256, 5, 0.85), (96, 4, 0.6), (16, 4, 0.3), (1, 4, 0.8),
    ),
    arms=("policy", "3", "cold", "cold", "3", "policy"),
)  # fmt: skip
CPU = Plan(
    platform=cpu,
    depths=(None, 3),
    batches=((1, 60), (4, 60)),
    overhead=((2, 500, 1), (4, 250, 2)),
    trace=((32, 1, 200), (64, 4, 200)),
    stages=((1, 2, 0.8), (4, 3, 0.6), (1, 2, 0.8)),
    arms=("policy", "cold"),
)


PARTS = ("load", "overhead", "trace")


def prompt(rng, size):
    """Return a prompt of random tokens that no other shares."""
    return [rng.randrange(5, 250) for _ in range(size)]


async def batch(server, rng, size, prompt_tokens, num_tokens):
    """Run a batch to its end; return its output tokens a second, prefill included."""
    async with session() as http:
        prompts = [prompt(rng, prompt_tokens) for _ in range(size)]
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(generate(http, server, p, num_tokens) for p in prompts))
        wall_s = time.perf_counter() - started_s
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / wall_s


def fixed(plan, out):
    """Record log and trace of servers whose depth never changes, one after the other."""
    for depth in plan.depths:
        name = "native" if depth is None else f"depth{depth}"
        arguments, env = plan.platform(0.75, depth)
        env |= {"SPECGOVERNOR_TRACE": str(out / f"{name}.trace.jsonl.gz")}
        with Server(out, name, arguments, env) as server:
            rng = random.Random(1)
            for size, num_tokens in plan.batches:
                rate = asyncio.run(batch(server, rng, size, 64 if plan is CPU else 512, num_tokens))
                print(f"{name}: batch {size}: {rate:.0f} tokens/s", flush=True)
            time.sleep(1.5)  # the trace is written once a second


def governed(plan, out, parts):
    """Put the policy under load, measure what it costs, and record a full trace."""
    control = ControlFile(out / "control.json")
    arguments, env = plan.platform(0.75, 7 if plan is GPU else 3)
    env |= {"CONTROL_FILE": str(control.path)}
    ours = ["--policy", POLICY, "--governor-trace", out / "governed.trace.jsonl.gz"]
    ours += ["--governor-decisions", out / "decisions.jsonl", "--"]
    report = {}
    with Server(out, "governed", arguments, env, "engine_hooks.launch", ours) as server:
        report["start_line"] = next(
            line for line in server.log.read_text().splitlines() if "hooks verified" in line
        )
        asyncio.run(warm_up(server))
        for part, measure in (("load", under_load), ("overhead", overhead), ("trace", full_trace)):
            if part in parts:
                report[part] = measure(plan, control, server)
                # What was measured so far is kept, whatever happens to the rest.
                (out / "governed.json").write_text(json.dumps(report, indent=1) + "\n")
    if any(row["fallbacks"] for row in report.get("overhead", ())):
        raise SystemExit("the governor failed while its overhead was measured: see governed.log")


async def warm_up(server):
    """Compile what SGLang compiles at the first request of a kind, which can take minutes."""
    async with session() as http:
        words = prompt(random.Random(0), 64)
        for temperatures in ((0,), (0.8,), (0, 0.8)):
            await asyncio.gather(
                *(generate(http, server, words, 16, temperature=t) for t in temperatures)
            )


def overhead(plan, control, server):
    """Compare one depth with all of the plugin and without it, in alternating blocks of rounds.

    With it, the policy decides, the guard measures, and trace and metrics are recorded; what runs
    is the same. The decision log, which is for finding faults, is off.
    """
    rows = []
    rng = random.Random(2)
    for size, num_tokens, times in plan.overhead:
        file = control.path.with_name(f"blocks-{size}.jsonl")
        file.unlink(missing_ok=True)
        control.say("3", blocks=str(file), log=False)
        before = asyncio.run(governor_metrics(server))["governor_fallbacks_total"]
        for _ in range(times):
            asyncio.run(batch(server, rng, size, 64 if plan is CPU else 512, num_tokens))
        control.say("3", log=False)
        after = asyncio.run(governor_metrics(server))["governor_fallbacks_total"]
        blocks = [json.loads(line) for line in file.read_text().splitlines()]
        row = {"batch_size": size, "fallbacks": after - before, **share_kept(blocks, size, 4)}
        rows.append(row)
        print(f"overhead: {row}", flush=True)
    return rows


def full_trace(plan, control, server):
    """Run every tier at every batch size and context."""
    control.say("cycle", log=False)
    rng = random.Random(3)
    # Bursts of prompts first: what a prefill batch costs is fitted from them.
    bursts = [(p, s, 8) for p, _, _ in plan.trace[::5] for s in (1, 2, 4, 8, 16, 32)]
    rows = []
    for prompt_tokens, size, num_tokens in (*bursts, *plan.trace):
        rate = asyncio.run(batch(server, rng, size, prompt_tokens, num_tokens))
        rows.append([prompt_tokens, size, num_tokens, round(rate, 1)])
        print(f"trace: {prompt_tokens} tokens, batch {size}: {rate:.0f} tokens/s", flush=True)
    return rows


class Load:
    """Clients that send one request after the other; their number rises and falls."""

    def __init__(self, server, small, seed):
        self._server = server
        self._small = small
        # Each load has prompts of its own: the prefix cache would give the later ones a start.
        self._rng = random.Random(seed)
        self._shared = prompt(self._rng, 32 if small else 256)
        self._wanted = 0
        self._tasks = set()
        self.tokens = 0
        self.requests = collections.Counter()
        self.cached_tokens = 0

    async def _client(self, http, index):
        while index < self._wanted:
            rng = self._rng
            size = min(1500, int(rng.lognormvariate(5.5, 0.7)))
            words = prompt(rng, max(4, size // (16 if self._small else 1)))
            shared = rng.random() < 0.5
            sampled = rng.random() < 0.25
            answer = await generate(
                http,
                self._server,
                (self._shared + words) if shared else words,
                rng.randrange(64, 256) // (4 if self._small else 1),
                temperature=0.8 if sampled else 0,
            )
            self.tokens += answer["meta_info"]["completion_tokens"]
            self.cached_tokens += answer["meta_info"].get("cached_tokens", 0)
            self.requests["sampled" if sampled else "greedy"] += 1

    async def run(self, stages, change):
        """Run the stages; return what each made."""
        rows = []
        async with session() as http:
            running = {}
            for clients, seconds, rate in stages:
                await asyncio.to_thread(change, rate)
                self._wanted = clients
                for index in range(clients):
                    if index not in running or running[index].done():
                        running[index] = asyncio.create_task(self._client(http, index))
                started = time.time()
                await asyncio.sleep(seconds)
                rows.append(
                    {
                        "clients": clients,
                        "accept_rate": rate,
                        "started": started,
                        "seconds": round(time.time() - started, 2),
                    }
                )
            self._wanted = 0
            await asyncio.gather(*running.values())
        return rows


async def governor_metrics(server):
    """Return the governor's samples on /metrics."""
    async with session() as http:
        text = await get(http, server, "/metrics")
    found = {}
    for name, labels, value in re.findall(r"^sglang:(governor_\w+){(.*)} (\S+)$", text, re.M):
        tier = re.search(r'tier="(\w+)"', labels)
        if not name.endswith(("_bucket", "_created")):
            found[name if tier is None else f"{name} {tier[1]}"] = float(value)
    return found


def under_load(plan, control, server):
    """Run the same load under the policy and under fixed tiers; say what ran when."""
    arms = []
    decisions = control.path.with_name("decisions.jsonl")
    for seed, arm in enumerate(plan.arms, start=100):
        time.sleep(1.5)
        known = len(decisions.read_text().splitlines())
        load = Load(server, plan is CPU, seed)
        stages = asyncio.run(load.run(plan.stages, lambda rate, arm=arm: control.say(arm, rate)))
        time.sleep(1.5)
        rounds = [json.loads(line) for line in decisions.read_text().splitlines()[known:]]
        times = sorted(row["decision_us"] for row in rounds)
        account(stages, rounds)
        arms.append(
            {
                "arm": arm,
                "tokens": load.tokens,
                "requests": dict(load.requests),
                "cached_tokens": load.cached_tokens,
                "stages": stages,
                "rounds": len(rounds),
                "decision_us": {
                    "p50": times[len(times) // 2],
                    "p99": times[len(times) * 99 // 100],
                },
                "batch_sizes": [min(r["batch_size"] for r in rounds),
                                max(r["batch_size"] for r in rounds)],
                "metrics": asyncio.run(governor_metrics(server)),
            }
        )  # fmt: skip
        print(f"load under {arm}: {load.tokens} tokens, {len(rounds)} rounds", flush=True)
        for stage in stages:
            print("  ", stage, flush=True)
    return arms


def account(stages, rounds):
    """Note the tokens/s and the tiers of each stage, from the decision log."""
    starts = [stage.pop("started") for stage in stages]
    counts = [collections.Counter() for _ in stages]
    tokens = [0] * len(stages)
    for row in rounds:
        index = sum(start <= row["time"] for start in starts) - 1
        if index < 0 or row["time"] > starts[index] + stages[index]["seconds"]:
            continue
        tier = row["num_steps"] or ("warm" if row["keeps_warm"] else "cold")
        counts[index][str(tier)] += 1
        correct = row["num_correct"] or [0] * row["batch_size"]
        tokens[index] += sum(
            1 + count
            for count, finished in zip(correct, row["finished_before"], strict=True)
            if not finished
        )
    for stage, count, made in zip(stages, counts, tokens, strict=True):
        stage["tokens_per_s"] = round(made / stage["seconds"], 1)
        stage["rounds_by_tier"] = dict(sorted(count.items()))


def main():
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("fixed", "governed"))
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="of the governed measurements"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plan, output = CPU if options.rehearse else GPU, options.output.resolve()
    if options.what == "fixed":
        fixed(plan, output)
    else:
        governed(plan, output, options.parts)
    shutil.rmtree(options.output / "plugins", ignore_errors=True)


if __name__ == "__main__":
    main()
