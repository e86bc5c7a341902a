"""What blocks of rounds that alternate between two settings say about them."""

import itertools
import statistics


def share_kept(blocks, batch_size, width):
    """Return how much of the throughput is left with the hooks, from blocks in ABBA order.

    Args:
        blocks: What `control_plugin.Blocks` wrote.
        batch_size: Only blocks of that many requests count,
        width: and of that verify width.

    Returns:
        Seconds a round and tokens a round with and without the hooks, the ratio of seconds without
        to seconds with them, and its 95% interval over the groups of four blocks, or None in place
        of what fewer than two groups cannot say. The first group, in which things warm up, is out.
    """
    groups = []
    for _, group in itertools.groupby(blocks, key=lambda block: block["block"] // 4):
        group = [b for b in group if (b["batch_size"], b["width"]) == (batch_size, width)]
        if len(group) == 4 and group[0]["block"] >= 4:
            groups.append(group)
    found = {"groups": len(groups)}
    for name, bypassed in (("with", False), ("without", True)):
        chosen = [b for group in groups for b in group if b["bypassed"] == bypassed]
        rounds = sum(block["timed_rounds"] for block in chosen)
        for unit in ("seconds", "tokens"):
            total = sum(block[unit] for block in chosen)
            found[f"{unit}_a_round_{name}"] = round(total / rounds, 7) if rounds else None
    ratios = [
        sum(b["seconds"] for b in group if b["bypassed"])
        / sum(b["seconds"] for b in group if not b["bypassed"])
        for group in groups
    ]
    found["share_kept"] = round(statistics.fmean(ratios), 5) if ratios else None
    found["interval_95"] = None
    if len(ratios) > 1:
        half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        found["interval_95"] = [round(found["share_kept"] + sign * half, 5) for sign in (-1, 1)]
        found["median"] = round(statistics.median(ratios), 5)
    return found
