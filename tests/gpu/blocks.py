"""What blocks of rounds that alternate between two settings say about them."""

import itertools
import statistics

WARM_UP = 2
"""Blocks at the start that do not count."""
NORMAL_95 = 1.959964


def share_kept(blocks, batch_size, width):
    """Return how much of the throughput is left with the hooks, from blocks in ABBA order.

    Tokens a round are drawn at random, so seconds a round are what is compared.

    Args:
        blocks: What `control_plugin.Blocks` wrote.
        batch_size: Only blocks of that many requests count,
        width: and of that verify width.

    Returns:
        What `overhead` in README.md describes; None in place of what too few blocks cannot say.
    """
    quads = []
    for index, quad in itertools.groupby(blocks, key=lambda b: (b["block"] - WARM_UP) // 4):
        quad = [b for b in quad if (b["batch_size"], b["width"]) == (batch_size, width)]
        if index >= 0 and len(quad) == 4:
            quads.append(quad)
    chosen = [block for quad in quads for block in quad]
    found = {"rounds": sum(b["timed_rounds"] for b in chosen), "blocks": len(chosen)}
    if not chosen:
        return found | {"share_kept": None, "standard_error": None, "interval_95": None}
    seconds = {}
    for name, bypassed in (("with", False), ("without", True)):
        arm = [b for b in chosen if b["bypassed"] == bypassed]
        rounds, arm_s, tokens = (
            sum(b[k] for b in arm) for k in ("timed_rounds", "seconds", "tokens")
        )
        seconds[name] = arm_s / rounds
        found[f"seconds_a_round_{name}"] = round(arm_s / rounds, 7)
        found[f"tokens_a_round_{name}"] = round(tokens / rounds, 3)
        found[f"tokens_per_s_{name}"] = round(tokens / arm_s, 1)
    ratios = [
        sum(b["seconds"] for b in quad if b["bypassed"])
        / sum(b["seconds"] for b in quad if not b["bypassed"])
        for quad in quads
    ]
    share = statistics.fmean(ratios)
    found |= {"share_kept": round(share, 5), "median": round(statistics.median(ratios), 5)}
    found |= {"standard_error": None, "interval_95": None}
    if len(ratios) > 1:
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        half = student_95(len(ratios) - 1) * error
        found["standard_error"] = round(error, 5)
        found["interval_95"] = [round(share - half, 5), round(share + half, 5)]
    # The threads write once a second, what the blocks with the hooks gave them, during either kind.
    governed = sum(b["rounds"] for b in chosen if not b["bypassed"])
    background_s = sum(b["background_s"] for b in chosen) / governed
    found["background_s_a_round"] = round(background_s, 7)
    # Of all blocks: the hooks of a block's first launch run before the block is timed.
    hooks_s = sum(b["hooks_s"] for b in chosen) / governed
    found["hooks_s_a_round"] = round(hooks_s, 7)
    found["hooks_share"] = round(hooks_s / seconds["with"], 5)
    found["least_share_kept"] = round(
        (seconds["without"] - background_s / 2) / (seconds["with"] + background_s / 2), 5
    )
    return found


def student_95(degrees):
    """Return the two-sided 95% point of Student's t, within 1% from 5 degrees of freedom on.

    Cornish and Fisher's expansion: Abramowitz and Stegun 26.7.5, its first two terms.
    """
    z, n = NORMAL_95, degrees
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
