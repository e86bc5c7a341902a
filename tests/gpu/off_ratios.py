"""What blocks of rounds of several kinds say: cost against plain decoding, and cost of a switch."""

import statistics

from blocks import student_95

SETTLING_ROUNDS = 3
"""Rounds at the start of a block that do not count: one of the block before is still running."""
LAST_ROUNDS = 1
"""Rounds at its end that do not: the overlap schedule launches the next block in that time."""
WARM_UP = 2
"""Blocks at the start of a run that do not count."""


def steady_s(block, batch_size):
    """Return the mean seconds of a block's steady rounds; None if it is not all of one kind."""
    timed = block["round_s"][SETTLING_ROUNDS : len(block["round_s"]) - LAST_ROUNDS]
    alike = set(block["batch_size"]) == {batch_size} and len(set(block["ran"])) == 1
    if not timed or not alike or None in timed or block["ran"][0] not in ("plain", block["kind"]):
        return None
    return statistics.fmean(timed)


def mean_interval(values, digits=5):
    """Return mean, 95% interval by Student's t, and number of values; None for too few."""
    found = {"mean": None, "interval_95": None, "count": len(values)}
    if values:
        found["mean"] = round(statistics.fmean(values), digits)
    if len(values) > 1:
        half = student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        found["interval_95"] = [
            round(found["mean"] - half, digits),
            round(found["mean"] + half, digits),
        ]
    return found


def ratios(plain_runs, governed_runs, batch_size, pattern):
    """Compare the kinds of off with plain decoding, at the same place in runs of the same work.

    Blocks are grouped by a whole pattern, in which every kind stands as early as it stands late; a
    ratio is that of the sums of a group, and the interval is over groups.

    Args:
        plain_runs: Runs of the server without speculation, each a list of blocks.
        governed_runs: The same of the other; run i is compared with plain run i.
        batch_size: Requests of every counted round.
        pattern: Kinds of the blocks of the governed server, in order.

    Returns:
        For each kind its ratio of time a round, with interval, and the seconds of both.
    """
    found = {}
    for kind in dict.fromkeys(pattern):
        each, kind_s, plain_s, num_blocks = [], [], [], 0
        for plain, governed in zip(plain_runs, governed_runs, strict=True):
            plain_at = {b["block"]: steady_s(b, batch_size) for b in plain}
            groups = {}
            for block in governed:
                if block["kind"] != kind or block["block"] < WARM_UP:
                    continue
                pair = steady_s(block, batch_size), plain_at.get(block["block"])
                if None not in pair:
                    group = (block["block"] - WARM_UP) // len(pattern)
                    groups.setdefault(group, []).append(pair)
            whole = [pairs for pairs in groups.values() if len(pairs) == pattern.count(kind)]
            for pairs in whole:
                ours, theirs = (sum(pair[i] for pair in pairs) for i in (0, 1))
                each.append(ours / theirs)
                kind_s.append(ours / len(pairs))
                plain_s.append(theirs / len(pairs))
                num_blocks += len(pairs)
        found[kind] = {
            "ratio": mean_interval(each),
            "blocks": num_blocks,
            "ms_a_round": round(1e3 * statistics.fmean(kind_s), 4) if kind_s else None,
            "ms_a_round_plain": round(1e3 * statistics.fmean(plain_s), 4) if plain_s else None,
        }
    return found


def switch_cost(blocks, batch_size):
    """Return what the switches between the kinds of alternating blocks cost, by direction.

    A switch's cost is what the first rounds of a block took more than they would have in the steady
    state of what they are: the first of them is still one of the block before.
    """
    known = {b["block"]: b for b in blocks}
    costs = {}
    for index, block in sorted(known.items()):
        before = known.get(index - 1)
        if before is None or before["kind"] == block["kind"] or index < WARM_UP:
            continue
        steady, steady_before = steady_s(block, batch_size), steady_s(before, batch_size)
        # A round of the last block that overlaps with the launch of this one counts as well.
        early = [*before["round_s"][-LAST_ROUNDS:], *block["round_s"][:SETTLING_ROUNDS]]
        if None in (steady, steady_before, *early):
            continue
        usual = LAST_ROUNDS * steady_before + SETTLING_ROUNDS * steady
        way = f"{before['kind']}->{block['kind']}"
        costs.setdefault(way, []).append(1e3 * (sum(early) - usual))
    return {way: mean_interval(values, 4) for way, values in costs.items()}
