"""A plugin of the measurements: a file says which tiers run and how many drafts are accepted.

`CONTROL_FILE` holds a JSON object, read ten times a second:

- `tiers`: "policy", or the name of a tier, or "cycle": every tier for `CYCLE_ROUNDS` in turn. The
  policy decides in any case, so that its time is spent, and the guard keeps out of the other two.
- `blocks`: a file; rounds then run in blocks of `BLOCK_ROUNDS`, in which the governor's hooks
  work, or hand everything through as if they were not there, and what each block took is added to
  that file as a JSON line; null: they work all the time;
- `log`: whether the decision log is written;
- `accept_rate`: each draft is accepted with this chance, request by request; null leaves SGLang's
  own simulation (`SGLANG_SIMULATE_ACC_LEN`), which has to be on.
"""

import collections
import json
import os
import pathlib
import threading
import time

CYCLE_ROUNDS = 24
BLOCK_ROUNDS = 12
"""So few because the KV cache of an H200 holds some 680 rounds of 256 requests, for 50 blocks."""
SETTLING_ROUNDS = 3
"""Rounds at the start of a block that are not timed: one of the block before is still running."""
LAST_ROUNDS = 1
"""Rounds at its end that are not: the overlap schedule launches the next block in that time."""
ABBA = (False, True, True, False)
"""Whether the hooks are bypassed, by block: any steady drift falls on both alike."""
POLL_S = 0.1


class Control:
    """What the file said last."""

    def __init__(self, file):
        self._file = pathlib.Path(file)
        self.said = {"tiers": "policy", "accept_rate": None, "blocks": None, "log": True}
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self):
        while True:
            try:
                self.said = json.loads(self._file.read_text())
            except (OSError, ValueError):
                pass  # Not written yet, or just being written.
            time.sleep(POLL_S)


def register():
    """Put the control between the policy and the governor, and before the acceptance."""
    if "CONTROL_FILE" not in os.environ:
        return
    control = Control(os.environ["CONTROL_FILE"])
    control_driver(control, time_background())
    control_tiers(control)
    control_acceptance(control)


def time_background():
    """Time the plugin's threads; return a function for the CPU seconds that they had so far."""
    from engine_hooks.background import BackgroundWriter

    start = BackgroundWriter.__init__
    taken_s = collections.Counter()

    def timed_start(self, write, *args, **kwargs):
        def timed(rows):
            started_s = time.thread_time()
            try:
                write(rows)
            finally:
                taken_s[threading.get_ident()] += time.thread_time() - started_s

        start(self, timed, *args, **kwargs)

    BackgroundWriter.__init__ = timed_start
    return lambda: sum(list(taken_s.values()))


class Timed:
    """Times what a hook stands around, so that what is left is the hook's own time."""

    def __init__(self, call):
        self._call = call
        self.seconds = 0.0

    def __call__(self, *args, **kwargs):
        started_s = time.perf_counter()
        try:
            return self._call(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started_s


class Blocks:
    """Says which rounds the hooks are bypassed in, and times the blocks of them."""

    def __init__(self, background_s):
        self._background_s = background_s
        self._file = None
        self._launches = 0
        self._block = None  # of the launch that is being made
        self._of_result = {}  # block by the identity of its result, which lives until processed
        self.hooks_s = 0.0  # of the hooks themselves, in the thread of the scheduler
        self._timed = None  # what the block of the last result has so far
        self._last_s = None

    def launch(self, file, decode):
        """Note a launch; return whether to bypass the hooks."""
        if file != self._file:
            self._file, self._launches = file, 0
        self._block = None
        if file is not None and decode:
            self._block = self._launches // BLOCK_ROUNDS
            self._launches += 1
        return self._bypasses(self._block)

    def launched(self, result):
        """Note the result that the launch will have."""
        self._of_result[id(result)] = self._block

    def bypassed(self, result):
        """Tell whether the hooks were bypassed at the launch of a result."""
        return self._bypasses(self._of_result.get(id(result)))

    def processed(self, result, batch_size):
        """Time the round of a result, from the result before."""
        now_s = time.perf_counter()
        block = self._of_result.pop(id(result), None)
        timed = self._timed
        if timed is not None and (block is None or block != timed["block"]):
            if self._file is not None and timed["rounds"] == BLOCK_ROUNDS:
                timed["background_s"] = self._background_s() - timed["background_s"]
                timed["hooks_s"] = self.hooks_s - timed["hooks_s"]
                with open(self._file, "a") as stream:
                    stream.write(json.dumps(timed) + "\n")
                now_s = time.perf_counter()
            timed = self._timed = None
        if block is not None:
            if timed is None:
                timed = self._timed = {
                    "block": block, "bypassed": self._bypasses(block), "batch_size": batch_size,
                    "width": result.speculative_num_draft_tokens,
                    "rounds": 0, "timed_rounds": 0, "tokens": 0, "seconds": 0.0,
                    "background_s": self._background_s(), "hooks_s": self.hooks_s,
                }  # fmt: skip
            if (timed["batch_size"], timed["width"]) != (
                batch_size,
                result.speculative_num_draft_tokens,
            ):
                timed["batch_size"] = None  # Not of one kind: of no use.
            if SETTLING_ROUNDS <= timed["rounds"] < BLOCK_ROUNDS - LAST_ROUNDS:
                timed["timed_rounds"] += 1
                timed["seconds"] += now_s - self._last_s
                timed["tokens"] += batch_size + sum(result.num_correct_drafts_per_req_cpu or ())
            timed["rounds"] += 1
        self._last_s = now_s

    @staticmethod
    def _bypasses(block):
        return block is not None and ABBA[block % len(ABBA)]


def control_driver(control, background_s):
    """Let the control take the hooks out. SGLang must load this plugin before the governor's."""
    from engine_hooks.driver import Driver

    run, process = Driver.run_batch, Driver.process_batch_result
    logs = []
    blocks = Blocks(background_s)

    def run_batch(self, original, scheduler, batch, *args, **kwargs):
        if blocks.launch(control.said["blocks"], batch.forward_mode.is_decode()):
            result = original(scheduler, batch, *args, **kwargs)
        else:
            result = governed(self, original, scheduler, batch, *args, **kwargs)
        blocks.launched(result)
        return result

    def governed(self, original, *args, **kwargs):
        if self.decisions is not None:
            logs.append(self.decisions)
        self.decisions = logs[0] if logs and control.said["log"] else None
        del logs[1:]
        return timed(run, self, original, *args, **kwargs)

    def timed(hook, self, original, *args, **kwargs):
        inner, started_s = Timed(original), time.perf_counter()
        try:
            return hook(self, inner, *args, **kwargs)
        finally:
            blocks.hooks_s += time.perf_counter() - started_s - inner.seconds

    def process_batch_result(self, original, scheduler, batch, result, *args, **kwargs):
        size = len(batch.reqs)
        # As at its launch: the driver would miss the launch of a result that it alone saw.
        if blocks.bypassed(result):
            returned = original(scheduler, batch, result, *args, **kwargs)
            # Else the trace and the guard would take the whole block for the next round's time.
            self._last_result_s = time.perf_counter()
        else:
            returned = timed(process, self, original, scheduler, batch, result, *args, **kwargs)
        blocks.processed(result, size)
        return returned

    Driver.run_batch, Driver.process_batch_result = run_batch, process_batch_result


def control_tiers(control):
    """Let the control overrule the policy."""
    from engine_hooks.governor import Governor
    from engine_hooks.guard import Guard

    decide, guard_tier = Governor.policy_tier, Guard.tier
    rounds = 0

    def policy_tier(self, *seen):
        nonlocal rounds
        chosen = decide(self, *seen)
        if control.said["tiers"] == "policy":
            return chosen
        if control.said["tiers"] == "cycle":
            rounds += 1
            return rounds // CYCLE_ROUNDS % len(self.tiers.tiers)
        return [tier.name for tier in self.tiers.tiers].index(control.said["tiers"])

    Governor.policy_tier = policy_tier
    Guard.tier = lambda self, size: (
        guard_tier(self, size) if control.said["tiers"] == "policy" else None
    )


def control_acceptance(control):
    """Draw how many drafts are accepted, request by request."""
    import torch
    from sglang.srt.speculative import spec_utils

    simulate = spec_utils.generate_simulated_accept_index

    def drawn(**given):
        rate, steps = control.said["accept_rate"], given["spec_steps"]
        if rate is None or steps == 0:
            return simulate(**given)
        num_correct, device = given["num_correct_drafts"], given["accept_index"].device
        accepted = torch.rand(given["bs"], steps, device=device) < rate
        correct = accepted.int().cumprod(dim=1).sum(dim=1)
        num_correct.copy_(correct)
        position = torch.arange(steps + 1, device=device, dtype=torch.int32)
        given["predict"].fill_(100)  # Any token that is none of the special ones.
        rows = given["accept_index"][:, :1] + position
        return torch.where(position <= correct[:, None], rows, -1).to(torch.int32)

    spec_utils.generate_simulated_accept_index = drawn
