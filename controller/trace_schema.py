"""The step-trace schema, version 1: what one batch result of a server looks like on disk.

A step trace is JSON Lines: one header object, then one object a batch result. The two classes here
are the schema; they check every value on construction, so a recorder cannot write what a reader
would refuse. Reading and writing files is in :mod:`controller.trace`.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from controller.errors import TraceError
from controller.tiers import MAX_NUM_STEPS

SCHEMA = "specgovernor.trace"
SCHEMA_VERSION = 1
MAX_COUNT = 2**53
"""Largest integer of a row: the last one that every JSON reader keeps exact."""

_Check = tuple[Callable[[Any], bool], str]


def _is_int(value: Any, low: int, high: int = MAX_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= MAX_COUNT and math.isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _graph_sizes(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, tuple) or not value or not all(_is_int(item, 1) for item in value):
        return False
    return all(a < b for a, b in pairwise(value))


def _one_of(*allowed: Any) -> _Check:
    shown = ", ".join("null" if item is None else repr(item) for item in allowed)
    return (lambda value: isinstance(value, (str, type(None))) and value in allowed), shown


_TEXT: _Check = (_text, "a non-empty string")
_FLAG: _Check = (lambda value: isinstance(value, bool), "true or false")

_HEADER_CHECKS: dict[str, _Check] = {
    "engine": _TEXT,
    "engine_version": _TEXT,
    "hardware": _TEXT,
    "model": _TEXT,
    "draft": (lambda value: value is None or _text(value), "a non-empty string or null"),
    "attention_backend": _TEXT,
    "overlap_schedule": _FLAG,
    "cuda_graph_batch_sizes": (_graph_sizes, "ascending integers of at least 1, or null"),
    "speculative": _FLAG,
    "zero_step": _one_of("warm", "cold", None),
    "acceptance": _one_of("real", "simulated"),
    "recorder": _TEXT,
    "notes": (lambda value: isinstance(value, str), "a string"),
}

_ROW_CHECKS: dict[str, _Check] = {
    "phase": _one_of("decode", "prefill"),
    "num_steps": (
        lambda value: value is None or _is_int(value, 0, MAX_NUM_STEPS),
        f"an integer from 0 to {MAX_NUM_STEPS}, or null",
    ),
    "batch_size": (lambda value: _is_int(value, 1), "an integer of at least 1"),
    "context_tokens": (lambda value: _is_int(value, 0), "an integer of at least 0"),
    "new_tokens": (
        lambda value: value is None or _is_int(value, 0),
        "an integer of at least 0, or null",
    ),
    "step_s": (
        lambda value: value is None or (_is_number(value) and value > 0),
        "a finite number of seconds above 0, or null",
    ),
    "launch_host_s": (
        lambda value: value is None or (_is_number(value) and value >= 0),
        "a finite number of seconds of at least 0, or null",
    ),
    "mean_correct_drafts": (
        lambda value: value is None or (_is_number(value) and 0 <= value <= MAX_NUM_STEPS),
        f"a number from 0 to {MAX_NUM_STEPS}, or null",
    ),
    "queue_depth": (lambda value: _is_int(value, 0), "an integer of at least 0"),
}


def _fail(field: str, expected: str, actual: Any, fix: str) -> TraceError:
    shown = "null" if actual is None else repr(actual)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return TraceError(f"field {field!r}: expected {expected}, got {shown}; {fix}")


def _check_fields(item: Any, checks: dict[str, _Check], fix: str) -> None:
    for name, (holds, expected) in checks.items():
        value = getattr(item, name)
        if not holds(value):
            raise _fail(name, expected, value, fix)


@dataclass(frozen=True)
class TraceHeader:
    """First line of a step trace: the system that was recorded, the same for every row.

    Attributes:
        engine: Serving engine, ``"sglang"``.
        engine_version: Its version, such as ``"0.5.17"``.
        hardware: Accelerators, such as ``"NVIDIA H200"``.
        model: Target model.
        draft: Draft model and shape of the drafts; None without speculation.
        attention_backend: Such as ``"fa3"``.
        overlap_schedule: Whether a round is launched before the last one's result is processed.
        cuda_graph_batch_sizes: Captured decode batch sizes, ascending; None for no graphs.
        speculative: Whether the server speculates; if not, every decode row is native.
        zero_step: What rows with ``num_steps`` 0 are: ``"warm"`` (SGLang's zero-step tier with the
            draft-extend), ``"cold"`` (without), or None when there are none.
        acceptance: ``"real"``, or ``"simulated"`` when the engine made acceptance up: then
            ``mean_correct_drafts`` says nothing about the draft.
        recorder: What wrote the trace.
        notes: Anything else, may be empty.
    """

    engine_version: str
    hardware: str
    model: str
    attention_backend: str
    speculative: bool
    overlap_schedule: bool = True
    draft: str | None = None
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    zero_step: str | None = None
    acceptance: str = "real"
    recorder: str = "specgovernor"
    notes: str = ""
    engine: str = "sglang"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            TraceError: If one is out of range.
        """
        if isinstance(self.cuda_graph_batch_sizes, list):
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(self.cuda_graph_batch_sizes))
        _check_fields(self, _HEADER_CHECKS, "correct the header")
        if not self.speculative and self.zero_step is not None:
            raise _fail(
                "zero_step",
                "null when 'speculative' is false",
                self.zero_step,
                "a server without speculation has no zero-step tier",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the header line as plain values."""
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}

    @staticmethod
    def from_json(value: Any) -> "TraceHeader":
        """Build a header from a parsed line.

        Raises:
            TraceError: If it is no header, of another version, or has bad fields.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise TraceError(
                f"expected a header with schema {SCHEMA!r}, got "
                f"{_kind_of(value)}; add one to a recording without a header with "
                "`python -m training.convert_trace IN OUT`"
            )
        version = value.get("schema_version")
        if isinstance(version, bool) or version != SCHEMA_VERSION:
            raise _fail(
                "schema_version",
                str(SCHEMA_VERSION),
                version,
                "record again with this version of specgovernor",
            )
        body = {k: v for k, v in value.items() if k not in ("schema", "schema_version")}
        _check_keys(body, _HEADER_CHECKS)
        if isinstance(body["cuda_graph_batch_sizes"], list):
            body["cuda_graph_batch_sizes"] = tuple(body["cuda_graph_batch_sizes"])
        return TraceHeader(**body)


@dataclass(frozen=True)
class TraceRow:
    """One batch result.

    Attributes:
        phase: ``"decode"`` or ``"prefill"``.
        num_steps: Draft steps of a decode round, 0 to 7; None for a native round and for prefill.
        batch_size: Requests of the batch, at least 1, without padding.
        context_tokens: Tokens in the KV cache that the round attends to, summed over the batch.
        queue_depth: Requests waiting when the result was processed, at least 0.
        step_s: Wall seconds since the previous batch result, above 0; None if there was none to
            measure from (the first row, or after idling). Under the overlap schedule the time of a
            single prefill row means nothing alone: sum it over the burst.
        new_tokens: Tokens that a prefill computed; None if unknown, and for decode.
        launch_host_s: Host seconds to launch the batch, at least 0; None if not measured.
        mean_correct_drafts: Accepted drafts a request, bonus token excluded, 0 to ``num_steps``;
            None if not measured, and without ``num_steps``.
    """

    phase: str
    num_steps: int | None
    batch_size: int
    context_tokens: int
    queue_depth: int = 0
    step_s: float | None = None
    new_tokens: int | None = None
    launch_host_s: float | None = None
    mean_correct_drafts: float | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            TraceError: If one is out of range or contradicts another.
        """
        fix = "correct the recorder or remove the row"
        _check_fields(self, _ROW_CHECKS, fix)
        if self.phase == "prefill" and self.num_steps is not None:
            raise _fail("num_steps", "null for a prefill", self.num_steps, fix)
        if self.phase == "decode" and self.new_tokens is not None:
            raise _fail("new_tokens", "null for a decode round", self.new_tokens, fix)
        correct = self.mean_correct_drafts
        if correct is not None and (self.num_steps is None or correct > self.num_steps):
            expected = (
                "null for a row without num_steps"
                if self.num_steps is None
                else f"at most num_steps, {self.num_steps} (leave the bonus token out)"
            )
            raise _fail("mean_correct_drafts", expected, correct, fix)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> "TraceRow":
        """Build a row from a parsed line.

        Raises:
            TraceError: If keys are missing or unknown, or a value is out of range.
        """
        if not isinstance(value, dict):
            raise TraceError(
                f"expected a row object, got {_kind_of(value)}; remove the line or record again"
            )
        if value.get("schema") == SCHEMA:
            raise TraceError("expected a row, got a second header; keep one recording a file")
        _check_keys(value, _ROW_CHECKS)
        return TraceRow(**value)

    def check_against(self, header: TraceHeader) -> None:
        """Check the fields that depend on the header.

        Raises:
            TraceError: If the row cannot come from the system of the header.
        """
        if self.num_steps is not None and not header.speculative:
            raise _fail(
                "num_steps",
                "null, because the header says 'speculative': false",
                self.num_steps,
                "correct the header",
            )
        if self.num_steps == 0 and header.zero_step is None:
            raise _fail(
                "num_steps",
                "1 or more, because the header says 'zero_step': null",
                0,
                "set the header's zero_step to 'warm' (with draft-extend) or 'cold' (without)",
            )


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with keys {sorted(value)[:4]}"
    return f"a {type(value).__name__}"


def _check_keys(value: dict[str, Any], checks: dict[str, _Check]) -> None:
    unknown = sorted(set(value) - set(checks))
    missing = sorted(set(checks) - set(value))
    if unknown:
        raise TraceError(
            f"field {unknown[0]!r}: expected one of {sorted(checks)}, got an unknown field; "
            "remove it, or record with the version that this file is read with"
        )
    if missing:
        raise TraceError(
            f"field {missing[0]!r}: expected a value, got nothing; write every field of the "
            "schema, null where unknown"
        )


ROW_FIELDS = tuple(item.name for item in fields(TraceRow))
"""Names of a row's fields."""
