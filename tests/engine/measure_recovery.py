"""How acceptance recovers after rounds that left the draft's KV behind, on the real engine.

    python tests/engine/measure_recovery.py --output FILE

A batch of held-out texts is continued by the tiny pair: some rounds of three draft steps, an off
stretch, and again rounds of three. The draft in PyTorch, which has seen everything, says how many
drafts would have been correct at the very positions where each round began (greedy output is the
same whatever runs), so that what is lost is told apart from what the text makes hard. Before the
stretch both agree to the last draft, which is checked.

What the gap's KV slots hold is not controlled: SGLang leaves them as they are, and here they may
keep the KV of an earlier run over the same text, or nothing, which is milder than a busy server.

The output is JSON: the first round after each stretch, what share of a warm draft's correct drafts
later rounds have, and the constants of the simulator's model that fit best (`recovery_fit.py`).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "cpu_kernels"), str(HERE / "tiny"), str(HERE.parents[1])]

from harness import TINY, start_engine, write_plugin  # noqa: E402
from pair import load_pair  # noqa: E402
from recovery_fit import fit, rows_of, shares  # noqa: E402
from texts import EXCERPTS  # noqa: E402
from train_pair import correct_drafts  # noqa: E402

from tests.engine.test_governor import make_checkpoint  # noqa: E402

PROMPT = 128
NUM_STEPS = 3
BEFORE, AFTER = 20, 40
"""Rounds with drafts before the stretch, and after it."""
STRETCHES = (1, 10, 100, 1000)
"""Off rounds, each of which gives a request one token."""

# A plan of the tiers by decode round, counted from the first with all requests.
PLAN = """
import json, os, pathlib

def register():
    from engine_hooks.governor import Governor

    file = pathlib.Path(os.environ["PLAN_FILE"])
    rounds = -1

    def policy_tier(self, batch_size, *seen):
        nonlocal rounds
        names = [tier.name for tier in self.tiers.tiers]
        plan = json.loads(file.read_text())
        if batch_size < plan["batch_size"] and rounds < 0:
            return names.index("3")
        rounds += 1
        at = rounds - plan["before"]
        off = 0 <= at < plan["stretch"]
        if batch_size < plan["batch_size"]:
            rounds = -1  # the end of it: the next plan begins anew
        return names.index(plan["off"] if off else "3")

    Governor.policy_tier = policy_tier
"""


def play(engine, plan, file, decisions, num_texts):
    """Run one plan; return the prompts' continuations and the rounds, by request."""
    file.write_text(json.dumps(plan))
    known = len(decisions.read_text().splitlines()) if decisions.exists() else 0
    # Enough tokens that no request ends before the last round that is looked at.
    count = 2 + (NUM_STEPS + 1) * (BEFORE + AFTER + num_texts) + plan["stretch"]
    words = [list(excerpt["text"].encode()[:PROMPT]) for excerpt in EXCERPTS[:num_texts]]
    requests = [engine.submit(prompt, count) for prompt in words]
    outputs = [request.output(limit_s=900) for request in requests]
    engine.call("flush_cache")
    rows = [json.loads(line) for line in decisions.read_text().splitlines()[known:]]
    texts = [prompt + list(output.token_ids) for prompt, output in zip(words, outputs, strict=True)]
    return texts, rows, [request.rid for request in requests]


def follow(texts, rows, rids, target, draft, plan):
    """Return, for each round after the stretch: position, correct drafts, and those of a warm one.

    Raises:
        SystemExit: If the engine and PyTorch do not agree before the stretch.
    """
    correct = correct_drafts(target, draft, torch.tensor(texts), NUM_STEPS)
    warm = correct.long().cumprod(-1).sum(-1)[:, PROMPT - 1 :]
    generated = dict.fromkeys(rids, 0)
    index = {rid: i for i, rid in enumerate(rids)}
    full, found, before = 0, [], []
    for row in rows:
        if len(row["requests"]) == len(rids):
            full += 1
        correct_of = row["num_correct"] or [0] * len(row["requests"])
        after = full - plan["before"] - plan["stretch"]
        entry = []
        for rid, number in zip(row["requests"], correct_of, strict=True):
            at = generated[rid]
            if row["num_steps"] == NUM_STEPS and at < warm.shape[1]:
                entry.append((at, number, int(warm[index[rid], at])))
            generated[rid] += 1 + number
        if full <= plan["before"]:
            before += entry
        elif 1 <= after <= AFTER and len(entry) == len(rids):
            found.append(entry)
    differ = sum(number != expected for _, number, expected in before)
    if differ > 0.01 * len(before):
        raise SystemExit(f"{differ} of {len(before)} rounds before the stretch differ from PyTorch")
    return found, {"rounds": len(before), "differ": differ}


def main():
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=len(EXCERPTS))
    parser.add_argument("--stretches", type=int, nargs="+", default=STRETCHES)
    options = parser.parse_args()
    target, draft = load_pair(TINY)
    report, cases = {"stretches": []}, []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        decisions, plan_file = scratch / "decisions.jsonl", scratch / "plan.json"
        env = {
            "SPECGOVERNOR_POLICY": str(make_checkpoint(scratch / "checkpoint", "cold,warm,3")),
            "SPECGOVERNOR_DECISIONS": str(decisions),
            "SPECGOVERNOR_GUARD": "0",
            "PLAN_FILE": str(plan_file),
        }
        plugin = write_plugin(scratch / "plan", PLAN, "plan")
        with start_engine(
            env=env,
            plugins=[plugin],
            max_total_tokens=65536,
            max_running_requests=options.texts,
            context_length=4096,
        ) as engine:
            for off, stretch in (("warm", 100), *(("cold", n) for n in options.stretches)):
                plan = {
                    "off": off,
                    "stretch": stretch,
                    "before": BEFORE,
                    "batch_size": options.texts,
                }
                texts, rows, rids = play(engine, plan, plan_file, decisions, options.texts)
                rounds, check = follow(texts, rows, rids, target, draft, plan)
                report["stretches"].append(
                    {
                        "off": off,
                        "tokens": stretch,
                        "rounds_before": check,
                        "first_round": [sum(e[k] for e in rounds[0]) for k in (1, 2)],
                    }
                )
                cases.append((off, stretch, rounds))
                print(report["stretches"][-1], flush=True)
    for off in ("warm", "cold"):
        rows = rows_of([(stretch, rounds) for kind, stretch, rounds in cases if kind == off])
        point = fit(rows)
        report[off] = {
            "fit": dict(
                zip(
                    ("worst_loss", "gap_scale_tokens", "recovery_tokens"),
                    (round(float(x), 2) for x in point),
                    strict=True,
                )
            ),
            "shares": shares(rows, point),
        }
        print(off, report[off]["fit"])
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
