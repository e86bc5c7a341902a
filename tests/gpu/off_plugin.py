"""A plugin of `off.py`: runs rounds in blocks of one kind each, and times them in the scheduler.

`CONTROL_FILE` holds a JSON object, read ten times a second:

- `blocks`: a file; each decode round is then one of a block, and what the rounds of a block took is
  added to that file as a JSON line; null: rounds run as if this plugin were not there;
- `pattern`: names of tiers; block after block takes the next, from the first on for each new file;
- `block_rounds`: rounds a block;
- `stamp`: whenever it changes, the scheduler's next idle moment writes a line with it to
  `stamps.jsonl` beside the control file: the KV slots that are free and the GPU's free memory.

In these rounds neither policy nor guard decides and nothing is recorded: the governor's own cost is
in no time here, only the call that makes a round native is. A server without the governor runs what
it always runs, whatever the pattern says.
"""

import json
import os
import pathlib
import threading
import time

POLL_S = 0.1
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class Said:
    """What the file said last."""

    def __init__(self, file):
        self.file = pathlib.Path(file)
        self.now = {"blocks": None, "pattern": ["plain"], "block_rounds": 12, "stamp": None}
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self):
        while True:
            try:
                self.now = json.loads(self.file.read_text())
            except (OSError, ValueError):
                pass  # Not written yet, or just being written.
            time.sleep(POLL_S)


class Blocks:
    """Says which kind a round is, and writes what those of each block took."""

    def __init__(self):
        self._file = None
        self._launches = 0
        self._of_result = {}  # (block, kind, ran) by the identity of a result that is not processed
        self._rows = {}
        self._last_s = None

    def kind(self, said):
        """Return the block and the kind of the decode round that is launched now, or None."""
        if said["blocks"] != self._file:
            self._file, self._launches, self._rows = said["blocks"], 0, {}
        if self._file is None:
            return None
        block = self._launches // said["block_rounds"]
        self._launches += 1
        return block, said["pattern"][block % len(said["pattern"])]

    def launched(self, result, block, kind, ran):
        """Note the result that a launch will have, and what it ran."""
        self._of_result[id(result)] = (block, kind, ran)

    def knows(self, result):
        """Tell whether a result is that of a round of a block."""
        return id(result) in self._of_result

    def processed(self, result, batch_size, block_rounds):
        """Time the round of a result, from the result before."""
        now_s = time.perf_counter()
        block, kind, ran = self._of_result.pop(id(result), (None, None, None))
        if block is not None and self._file is not None:
            row = self._rows.setdefault(
                block,
                {"block": block, "kind": kind, "batch_size": [], "ran": [], "round_s": []},
            )
            row["batch_size"].append(batch_size)
            row["ran"].append(ran)
            row["round_s"].append(None if self._last_s is None else round(now_s - self._last_s, 7))
            if len(row["round_s"]) == block_rounds:
                with open(self._file, "a") as stream:
                    stream.write(json.dumps(self._rows.pop(block)) + "\n")
                now_s = time.perf_counter()
        self._last_s = now_s

    def idle(self):
        """Note that the next round begins with its launch."""
        self._last_s = None


class Hooks:
    """Stands on SGLang's scheduler, inside the governor's hooks."""

    def __init__(self, said):
        self._said = said
        self._stamped = []
        self.blocks = Blocks()
        self.driver = None

    @property
    def active(self):
        """Whether decode rounds are of blocks now."""
        return self._said.now["blocks"] is not None

    def run_batch(self, original, scheduler, batch, *args, **kwargs):
        """Set the kind of a decode round, and note what ran."""
        found = self.blocks.kind(self._said.now) if batch.forward_mode.is_decode() else None
        driver = self.driver
        if found is not None and driver is not None and driver.governor is not None:
            tiers = driver.governor.tiers
            index = [tier.name for tier in tiers.tiers].index(found[1])
            driver.params.next_steps = tiers.num_steps[index]
            if tiers.num_steps[index] == 0:
                driver.off.ask(tiers.kinds[index])
        result = original(scheduler, batch, *args, **kwargs)
        if found is not None:
            self.blocks.launched(result, *found, self._ran(result))
        return result

    def _ran(self, result):
        width = result.speculative_num_draft_tokens
        if width is None or self.driver is None:
            return "plain"
        return self.driver.off.ran if width == 1 else str(width - 1)

    def process_batch_result(self, original, scheduler, batch, result, *args, **kwargs):
        """Time the round."""
        size = len(batch.reqs)
        returned = original(scheduler, batch, result, *args, **kwargs)
        self.blocks.processed(result, size, self._said.now["block_rounds"])
        return returned

    def on_idle(self, original, scheduler, *args, **kwargs):
        """Write what is free, if that is asked for."""
        self.blocks.idle()
        stamp = self._said.now["stamp"]
        if stamp is not None and stamp not in self._stamped:
            self._stamped.append(stamp)
            file = self._said.file.with_name(f"{self._said.file.stem}.stamps.jsonl")
            with open(file, "a") as stream:
                stream.write(json.dumps({"stamp": stamp, **memory(scheduler)}) + "\n")
        return original(scheduler, *args, **kwargs)


def register():
    """Put the hooks in place. SGLang must load this plugin before the governor's."""
    if "CONTROL_FILE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(Said(os.environ["CONTROL_FILE"]))
    take_the_governor_out(hooks)
    for name in ("run_batch", "process_batch_result", "on_idle"):
        HookRegistry.register(f"{SCHEDULER}.{name}", getattr(hooks, name), HookType.AROUND)


def take_the_governor_out(hooks):
    """Let the governor see nothing of rounds in blocks."""
    from engine_hooks.driver import Driver

    run, process = Driver.run_batch, Driver.process_batch_result

    def run_batch(self, original, scheduler, batch, *args, **kwargs):
        hooks.driver = self
        if hooks.active and batch.forward_mode.is_decode():
            return original(scheduler, batch, *args, **kwargs)
        return run(self, original, scheduler, batch, *args, **kwargs)

    def process_batch_result(self, original, scheduler, batch, result, *args, **kwargs):
        if hooks.blocks.knows(result):
            return original(scheduler, batch, result, *args, **kwargs)
        return process(self, original, scheduler, batch, result, *args, **kwargs)

    Driver.run_batch, Driver.process_batch_result = run_batch, process_batch_result


def memory(scheduler):
    """Return the KV slots that no request holds, and the GPU memory that is free."""
    import torch

    free = scheduler.token_to_kv_pool_allocator.available_size()
    return {
        "free_slots": free + scheduler.tree_cache.evictable_size(),
        "slots": scheduler.max_total_num_tokens,
        "free_gpu_bytes": torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None,
    }
