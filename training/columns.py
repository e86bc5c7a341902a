"""The columns of a throughput table, by the names that people give them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.errors import CalibrationError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_steps": ("steps", "draft_steps", "speculative_num_steps", "num_speculative_tokens", "k"),
    "concurrency": ("max_concurrency", "conc", "batch_size", "bs", "requests", "num_requests"),
    "throughput_tok_s": (
        "throughput",
        "output_throughput",
        "output_throughput_tok_s",
        "tok_s",
        "tokens_s",
        "tokens_per_second",
    ),
    "per_request_tok_s": ("per_user_tok_s", "tok_s_user", "tok_s_request"),
    "tpot_ms": ("mean_tpot_ms", "median_tpot_ms"),
    "tpot_s": ("mean_tpot_s", "median_tpot_s"),
    "accept_len": ("accept_length", "acc_length", "acceptance_length", "mean_acceptance_length"),
    "accept_by_position": ("per_position_acceptance",),
    "context_tokens": ("context", "context_len"),
    "hardware": ("gpu",),
    "model": (),
    "config": (),
}
NEEDED = ("num_steps", "concurrency")
FIGURES = ("throughput_tok_s", "per_request_tok_s", "tpot_ms", "tpot_s", "accept_len")


def map_columns(path: Path, columns: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the table's column for each of ours that it has.

    A name counts as written here, whatever its case and punctuation (``Tok/s`` is ``tok_s``); one
    of ours wins over its other names.

    Args:
        path: The table, for messages.
        columns: Its column names.
        given: Columns by our names, from the user.

    Raises:
        CalibrationError: If a column is missing, twice there, or ambiguous.
    """
    if len(set(columns)) != len(columns):
        double = next(name for name in columns if columns.count(name) > 1)
        raise CalibrationError(f"{path}: column {double!r} is there twice; remove or rename one")
    shown = ", ".join(columns)[:200] or "an empty file"
    found = {}
    for name, others in ALIASES.items():
        if name in given:
            if given[name] not in columns:
                raise CalibrationError(
                    f"{path}: --column {name}={given[name]}: expected one of the columns {shown}"
                )
            found[name] = given[name]
            continue
        exact = [column for column in columns if _plain(column) == name]
        fitting = exact or [column for column in columns if _plain(column) in others]
        if len(fitting) > 1:
            raise CalibrationError(
                f"{path}: columns {' and '.join(fitting)} may both be {name}; choose with "
                f"--column {name}=NAME"
            )
        if fitting:
            found[name] = fitting[0]
    missing = [name for name in NEEDED if name not in found]
    if not any(name in found for name in FIGURES):
        missing.append("throughput_tok_s")
    if missing:
        unknown = "" if found else "no step trace, server log, benchmark output or table: "
        raise CalibrationError(
            f"{path}: {unknown}expected a CSV with columns {', '.join((*NEEDED, FIGURES[0]))}, got "
            f"{shown}; add {', '.join(missing)}, or name it with --column {missing[0]}=NAME"
        )
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
