"""Random numbers as a pure function of a key and a counter.

The draw for draft position 17 of request 5 under seed 3 is always the same number, in whatever
order rounds happen. Two controllers on one seed therefore meet the same luck (common random
numbers), and a copy of a server can be run ahead without touching the original.

The mixer is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

import numpy as np

from env.compiled import kernel

STREAM_ACCEPT = np.uint64(1)
STREAM_DRIFT = np.uint64(2)
STREAM_NOISE = np.uint64(3)
STREAM_MIXTURE = np.uint64(4)


@kernel
def mix(value):
    """Scramble 64 bits."""
    value = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@kernel
def stream_key(seed, stream):
    """Return the key of a stream under a seed."""
    return mix(np.uint64(seed) ^ (np.uint64(stream) << np.uint64(56)))


@kernel
def item_key(stream, item):
    """Return the key of one item (a request, say) of the stream with this key."""
    return mix(stream + np.uint64(item))


@kernel
def key_of(seed, stream, item):
    """Return the key of one item of one stream under a seed."""
    return item_key(stream_key(seed, stream), item)


@kernel
def uniform(key, counter):
    """Return the draw number ``counter`` of ``key``, in [0, 1)."""
    # 53 bits fit a signed number, which processors turn into a float faster than an unsigned one.
    return np.int64(mix(key + np.uint64(counter)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def standard_bell(key, counter):
    """Return a draw with mean 0 and variance 1 from a bounded bell (four uniforms, +-3.46)."""
    start = np.uint64(counter) * np.uint64(4)
    total = 0.0
    for i in range(4):
        total += uniform(key, start + np.uint64(i))
    return (total - 2.0) * 1.7320508075688772
