"""Logs of a scheduler whose round times are known, shared by the tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_log(
    path: Path,
    runs: Sequence[tuple[int, float]],
    *,
    draft_tokens: int = 4,
    era: str = "C",
    lines: int = 4,
    interval: int = 40,
    prompt: int = 512,
    seed: int = 1,
) -> dict[int, float]:
    """Write what a scheduler would log: a prefill, then ``lines`` decode lines, for every run.

    Args:
        path: File to write.
        runs: Batch size and seconds a round.
        draft_tokens: 1 for no speculation.
        era: Of the accept rate.
        lines: Decode lines a run.
        interval: Rounds a line.
        prompt: Tokens of a prompt.
        seed: Of the accepted drafts.

    Returns:
        The seconds a round by batch size.
    """
    rng = np.random.default_rng(seed)
    clock, tokens_since, tic = 1_000_000.0, 0, 1_000_000.0
    out = []

    def stamp() -> str:
        whole = int(clock)
        return f"[2026-11-{1 + whole // 86400 % 28:02}" + (
            f" {whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}] "
        )

    for batch, step_s in runs:
        clock += 0.4
        out.append(
            f"{stamp()}Prefill batch, #new-seq: {batch}, #new-token: {batch * prompt}, "
            "#cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, cuda graph: "
            "False, input throughput (token/s): 1000.00"
        )
        context = batch * prompt
        for _ in range(lines):
            drafts = rng.binomial(draft_tokens - 1, 0.6, size=(interval, batch))
            made = int(drafts.sum()) + interval * batch
            clock += interval * step_s
            context += made
            tokens_since += made
            length = made / interval / batch
            rate = length / draft_tokens
            if era == "C":
                rate = (length - 1) / max(draft_tokens - 1, 1)
            accept = f"accept len: {length:.2f}, " + (
                f"accept rate: {rate:.2f}, " if era != "A" else ""
            )
            out.append(
                f"{stamp()}Decode batch, #running-req: {batch}, #token: {context}, token usage: "
                f"0.10, {accept if draft_tokens > 1 else ''}cuda graph: True, gen throughput "
                f"(token/s): {tokens_since / (clock - tic):.2f}, #queue-req: 0"
            )
            tokens_since, tic = 0, clock
            out.append(f'{stamp()}INFO:     client:1 - "GET /metrics HTTP/1.1" 200 OK')
    path.write_text("\n".join(out) + "\n")
    return dict(runs)
