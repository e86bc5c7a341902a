"""The step traces of a data folder, plain or gzip."""

from pathlib import Path


def trace_stem(name: str) -> str:
    """Return a trace's file name without ``.jsonl`` or ``.jsonl.gz``."""
    return name.removesuffix(".gz").removesuffix(".jsonl")


def traces_by_stem(folder: Path) -> dict[str, Path]:
    """Return a folder's traces by name; of one that is there plain and as gzip, the gzip one."""
    found = [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]
    return {trace_stem(path.name): path for path in sorted(found)}
