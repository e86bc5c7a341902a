"""A plugin of the measurements: a file says which tiers run and how many drafts are accepted.

`CONTROL_FILE` holds a JSON object, read ten times a second:

- `tiers`: "policy", or the name of a tier, or "cycle": every tier for `CYCLE_ROUNDS` in turn. The
  policy decides in any case, so that its time is spent, and the guard keeps out of the other two.
- `bypass`: the governor's hooks hand everything through, as if they were not there;
- `log`: whether the decision log is written;
- `accept_rate`: each draft is accepted with this chance, request by request; null leaves SGLang's
  own simulation (`SGLANG_SIMULATE_ACC_LEN`), which has to be on.
"""

import json
import os
import pathlib
import threading
import time

CYCLE_ROUNDS = 24
POLL_S = 0.1


class Control:
    """What the file said last."""

    def __init__(self, file):
        self._file = pathlib.Path(file)
        self.said = {"tiers": "policy", "accept_rate": None, "bypass": False, "log": True}
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
    control_driver(control)
    control_tiers(control)
    control_acceptance(control)


def control_driver(control):
    """Let the control take the hooks out. SGLang must load this plugin before the governor's."""
    from engine_hooks.driver import Driver

    run, process = Driver.run_batch, Driver.process_batch_result
    logs = []

    def run_batch(self, original, *args, **kwargs):
        if control.said["bypass"]:
            return original(*args, **kwargs)
        if self.decisions is not None:
            logs.append(self.decisions)
        self.decisions = logs[0] if logs and control.said["log"] else None
        del logs[1:]
        return run(self, original, *args, **kwargs)

    def process_batch_result(self, original, *args, **kwargs):
        if control.said["bypass"]:
            return original(*args, **kwargs)
        return process(self, original, *args, **kwargs)

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
