"""Prompts for the tiny pair: pieces of text that it was not trained on, one token a byte."""

import json
import random
from pathlib import Path

EXCERPTS = json.loads(
    (Path(__file__).resolve().parent / "tiny/held_out.json").read_text(encoding="utf-8")
)


def prompts(count: int, seed: int, shortest: int = 4, longest: int = 40) -> list[list[int]]:
    """Return pieces of the excerpts; the first ones are the same for every count."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        text = rng.choice(EXCERPTS)["text"].encode()
        length = rng.randint(shortest, longest)
        begin = rng.randrange(len(text) - length + 1)
        found.append(list(text[begin : begin + length]))
    return found
