"""The kinds of off on a GPU: what each costs against a server without speculation, and switching.

    python tests/gpu/off.py --output OUT                                    # FA3
    python tests/gpu/off.py --output OUT --attention-backend triton

Two servers are resident on the GPU, one without speculation and one under the governor, and decode
the same batches in turn. `off.json` is written anew after every batch size; README.md says what is
in it. `--rehearse` runs the same on the CPU engine of the tests.
"""

import argparse
import asyncio
import concurrent.futures
import json
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import off_ratios
from measure import batch, warm_up
from servers import POLICY, Server, cpu, h200

KINDS = ("warm", "cold", "native")
BLOCK_ROUNDS = 12
RUN_LIMIT_S = 120.0
"""After which a run counts as failed."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    platform: object
    kv_tokens: int  # of each server
    groups: int  # of blocks a run, in each of which every kind has two
    batches: tuple  # (prompt tokens, batch size, pairs of runs)
    flips: tuple  # (batch size, blocks of one round, blocks of a pair)
    depths: tuple


GPU = Plan(
    platform=h200,
    kv_tokens=262_144,
    groups=5,
    batches=(
        (512, 32, 2), (512, 128, 2), (512, 8, 2), (512, 64, 2),
        (512, 256, 2), (512, 1, 2), (6144, 32, 2),
    ),
    flips=(32, 3000, 24),
    depths=(1, 3),
)  # fmt: skip
CPU = Plan(
    platform=cpu,
    kv_tokens=16_384,
    groups=2,
    batches=((32, 4, 2), (32, 1, 2)),
    flips=(2, 300, 6),
    depths=(1, 3),
)


class Said:
    """Tells a server's plugin what to do."""

    def __init__(self, path):
        self.path = path
        self._stamps = 0
        self.say()

    def say(self, blocks=None, pattern=("plain",), block_rounds=BLOCK_ROUNDS, stamp=None):
        """Write what shall be so, and wait until it is."""
        said = {"blocks": blocks and str(blocks), "pattern": list(pattern)}
        said |= {"block_rounds": block_rounds, "stamp": stamp}
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(said))
        unfinished.rename(self.path)
        time.sleep(0.25)

    def memory(self):
        """Return what is free while nothing runs."""
        self._stamps += 1
        self.say(stamp=self._stamps)
        file = self.path.with_name(f"{self.path.stem}.stamps.jsonl")
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            rows = (
                [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else ()
            )
            for row in rows:
                if row["stamp"] == self._stamps:
                    return row
            time.sleep(0.1)
        return None


def start(plan, out, backend, name, kinds):
    """Start a server: under the governor with these kinds of off, or without speculation."""
    governed = bool(kinds)
    arguments, env = plan.platform(0.9, max(plan.depths) if governed else None)
    arguments["max-total-tokens"] = plan.kv_tokens
    if backend is not None:
        arguments["attention-backend"] = backend
    # Acceptance is no matter here, and making it up would be part of the rounds without drafts.
    env.pop("SGLANG_SIMULATE_ACC_LEN", None)
    if backend == "flashinfer":
        env["SGLANG_FLASHINFER_WORKSPACE_SIZE"] = str(2 << 30)
    env["CONTROL_FILE"] = str(out / f"{name}.json")
    ours = ()
    if governed:
        tiers = ",".join((*kinds, *map(str, plan.depths)))
        ours = ["--policy", POLICY, "--governor-tiers", tiers, "--governor-guard", "off", "--"]
    module = "engine_hooks.launch" if governed else "sglang.launch_server"
    return Server(out, name, arguments, env, module, ours, control="off_plugin")


class Bench:
    """The two servers, and what was measured so far."""

    def __init__(self, plan, out, backend, deadline_s):
        self.plan, self.out, self.backend = plan, out, backend
        self._end_s = time.monotonic() + deadline_s
        self.said = {name: Said(out / f"{name}.json") for name in ("plain", "governed")}
        self.servers = {}
        self.kinds = KINDS
        self.report = {"attention_backend": backend or "default", "sizes": [], "errors": []}

    def boot(self):
        """Start both at the same time."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            plain = pool.submit(start, self.plan, self.out, self.backend, "plain", ())
            governed = pool.submit(start, self.plan, self.out, self.backend, "governed", self.kinds)
        # Both are up or down by now: none is left behind when the other one failed.
        if governed.exception() is None:
            self.servers["governed"] = governed.result()
        self.servers["plain"] = plain.result()
        if governed.exception() is not None:
            self.without_native(governed.exception())
        self.look()
        for server in self.servers.values():
            asyncio.run(warm_up(server))

    def look(self):
        """Note what the governed server says of itself."""
        lines = self.servers["governed"].log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "] specgovernor" in line]
        self.report["governor"] = said[:20]
        if any("'native' cannot run here" in line for line in said):
            self.kinds = tuple(kind for kind in self.kinds if kind != "native")

    def without_native(self, error):
        """Start the governed server anew without native rounds, after it failed with them."""
        if "native" not in self.kinds:
            raise error
        log = self.out / "governed.log"
        tail = log.read_text(errors="replace").splitlines()[-40:]
        self.report["errors"].append({"error": repr(error)[:2000], "log": tail})
        self.save()
        if "governed" in self.servers:
            self.servers["governed"].close()
        log.rename(log.with_suffix(".failed.log"))
        self.kinds = tuple(kind for kind in self.kinds if kind != "native")
        self.servers["governed"] = start(self.plan, self.out, self.backend, "governed", self.kinds)

    def reboot(self, error):
        """Go on without native rounds, after the governed server failed."""
        self.without_native(error)
        self.look()
        asyncio.run(warm_up(self.servers["governed"]))

    def left_s(self):
        """Return the seconds until nothing new is to be begun."""
        return self._end_s - time.monotonic()

    def save(self):
        """Keep what was measured so far, whatever happens to the rest."""
        (self.out / "off.json").write_text(json.dumps(self.report, indent=1) + "\n")

    def run(self, name, file, pattern, size, prompt_tokens, num_tokens, block_rounds=BLOCK_ROUNDS):
        """Decode a batch on one server, in blocks; return them."""
        path = self.out / f"{file}.jsonl"
        path.unlink(missing_ok=True)
        self.said[name].say(path, pattern, block_rounds)
        try:
            rng = random.Random(size)
            work = batch(self.servers[name], rng, size, prompt_tokens, num_tokens)
            asyncio.run(asyncio.wait_for(work, RUN_LIMIT_S))
        finally:
            self.said[name].say()
        return [json.loads(line) for line in path.read_text().splitlines()]

    def size(self, prompt_tokens, size, pairs):
        """Measure one batch size."""
        pattern = (*self.kinds, *reversed(self.kinds))
        num_blocks = off_ratios.WARM_UP + self.plan.groups * len(pattern)
        num_tokens = num_blocks * BLOCK_ROUNDS + 8
        # The order of the pattern begins after the blocks that warm up.
        shifted = tuple(
            pattern[(i - off_ratios.WARM_UP) % len(pattern)] for i in range(len(pattern))
        )
        runs = {"plain": [], "governed": []}
        for pair in range(pairs):
            order = ("plain", "governed") if pair % 2 == 0 else ("governed", "plain")
            for name in order:
                file = f"{name}-{prompt_tokens}-{size}-{pair}"
                kinds = shifted if name == "governed" else ("plain",)
                blocks = self.run(name, file, kinds, size, prompt_tokens, num_tokens)
                runs[name].append(blocks)
        row = {"batch_size": size, "prompt_tokens": prompt_tokens, "pairs_of_runs": pairs}
        row |= off_ratios.ratios(runs["plain"], runs["governed"], size, pattern)
        ran = [ran for run in runs["governed"] for block in run for ran in block["ran"]]
        row["rounds_ran"] = {kind: ran.count(kind) for kind in sorted(set(ran))}
        self.report["sizes"].append(row)
        self.save()
        print(f"batch {size}, {prompt_tokens} tokens:", {
            kind: (row[kind]["ratio"]["mean"], row[kind]["ratio"]["interval_95"])
            for kind in self.kinds
        }, flush=True)  # fmt: skip

    def flip(self):
        """Flip the tier every round, and look for leaks and a slowdown; then time the switches."""
        size, num_flips, num_blocks = self.plan.flips
        prompt_tokens = self.plan.batches[0][0]
        depths = tuple(map(str, self.plan.depths))
        found = self.report["flip"] = {"batch_size": size, "flips": 0}
        off = self.kinds[-1]
        steady_tokens = 12 * BLOCK_ROUNDS

        def steady(name):
            blocks = self.run("governed", name, (off,), size, prompt_tokens, steady_tokens)
            times = [off_ratios.steady_s(b, size) for b in blocks[off_ratios.WARM_UP :]]
            return {b: t for b, t in enumerate(times) if t is not None}

        before_s = steady("flip-before")
        found["memory_before"] = self.said["governed"].memory()
        every = [kind for depth in (*depths, *self.kinds[:-1]) for kind in (off, depth)]
        counts = {}
        while found["flips"] < num_flips and self.left_s() > 0:
            name = f"flip-{found['flips']}"
            blocks = self.run(
                "governed", name, every, size, prompt_tokens, 12 * BLOCK_ROUNDS * 3, 1
            )
            if not blocks:
                break
            found["flips"] += len(blocks)
            for block in blocks:
                way = f"{block['kind']} ran {block['ran'][0]}"
                counts[way] = counts.get(way, 0) + 1
        found["rounds"] = counts
        found["memory_after"] = self.said["governed"].memory()
        after_s = steady("flip-after")
        both = sorted(before_s.keys() & after_s.keys())
        found["steady_after_over_before"] = off_ratios.mean_interval(
            [after_s[b] / before_s[b] for b in both]
        )
        self.save()
        found["switch_ms"] = {}
        for one, other in (
            (off, depths[-1]),
            (off, depths[0]),
            (off, "warm"),
            ("cold", depths[-1]),
        ):
            if self.left_s() < 0 or one == other:
                continue
            blocks = self.run(
                "governed", f"switch-{one}-{other}", (one, other), size, prompt_tokens,
                num_blocks * BLOCK_ROUNDS * 2,
            )  # fmt: skip
            found["switch_ms"] |= off_ratios.switch_cost(blocks, size)
            self.save()
        print("flip:", {k: v for k, v in found.items() if k != "rounds"}, flush=True)


def main():
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=("off", "flip"), default=("flip", "off"))
    parser.add_argument("--attention-backend", help="of both servers; default: FA3 on a GPU")
    parser.add_argument("--groups", type=int, help="of blocks a run; default: 5")
    parser.add_argument(
        "--batches", nargs="+", metavar="TOKENSxSIZE", help="such as 512x32 6144x32; default: all"
    )
    parser.add_argument("--depths", type=int, nargs="+", help="of the governed server")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds; then it ends")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plan, out = CPU if options.rehearse else GPU, options.output.resolve()
    changes = {}
    if options.groups:
        changes["groups"] = options.groups
    if options.depths:
        changes["depths"] = tuple(options.depths)
    if options.batches:
        changes["batches"] = tuple((*map(int, b.split("x")), 2) for b in options.batches)
    plan = replace(plan, **changes)
    bench = Bench(plan, out, options.attention_backend, options.deadline)
    try:
        bench.boot()
        bench.save()
        jobs = [lambda given=given: bench.size(*given) for given in plan.batches]
        jobs = jobs if "off" in options.parts else []
        if "flip" in options.parts:
            jobs.insert(min(2, len(jobs)), bench.flip)
        for job in jobs:
            if bench.left_s() < 0:
                bench.report["errors"].append("the time was out before all was measured")
                break
            try:
                job()
            except Exception as error:
                bench.reboot(error)
                job()
    finally:
        bench.save()
        for server in bench.servers.values():
            server.close()
        shutil.rmtree(out / "plugins", ignore_errors=True)


if __name__ == "__main__":
    main()
