"""The text that the tiny pair learns and is tested on: the sources of Python's standard library."""

import hashlib
import json
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "test", "tests", "idle_test"}  # not always installed
OF_ONE_MACHINE = ("config-", "_sysconfigdata_")
HELD_OUT_ONE_IN = 16
EXCERPT_BYTES = 256


def read_library() -> dict[str, bytes]:
    """Return the sources by their path in the library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return {
        path.as_posix(): (root / path).read_bytes()
        for path in paths
        if not LEFT_OUT.intersection(path.parts)
        and not path.parts[0].startswith(OF_ONE_MACHINE)
        and (root / path).stat().st_size > 0
    }


def is_held_out(name: str) -> bool:
    """Return whether a file is not trained on; its path alone decides."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def join(texts: list[bytes]) -> Tensor:
    """Return all bytes, one text after the other, (N,)."""
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, length: int, rng: torch.Generator) -> Tensor:
    """Return pieces of a text at random places, (count, length)."""
    begin = torch.randint(len(text) - length, (count, 1), generator=rng)
    return text[begin + torch.arange(length)]


def excerpts(library: dict[str, bytes], count: int, seed: int) -> list[dict[str, str]]:
    """Return pieces of as many held-out files, from the begin of a line, ASCII only."""
    rng = random.Random(seed)
    held_out = [name for name in library if is_held_out(name)]
    rng.shuffle(held_out)
    found = []
    for name in held_out:
        lines = library[name].splitlines(keepends=True)
        rest = b"".join(lines[rng.randrange(len(lines)) :])[:EXCERPT_BYTES]
        if len(rest) == EXCERPT_BYTES and rest.isascii():
            found.append({"file": name, "text": rest.decode()})
    if len(found) < count:
        raise ValueError(f"expected {count} held-out files with an excerpt, found {len(found)}")
    return found[:count]


def write_excerpts(path: Path, found: list[dict[str, str]]) -> None:
    """Write excerpts as JSON, one a line."""
    lines = ",\n".join(json.dumps(excerpt) for excerpt in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
