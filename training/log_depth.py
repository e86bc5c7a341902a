"""The depth of an SGLang server log: told by its arguments or its reader, checked by its figures.

One depth a log. It is refused where the depth moved: the adaptive worker says so (``Switch adaptive
runtime state``), and otherwise the figures do. At a fixed depth the printed accept rate is a
function of the printed accept length, ``L / n`` or ``(L - 1) / (n - 1)`` by era (see
:mod:`training.server_log`), with ``n`` draft tokens the same in every line. So if no era and ``n``
explain the lines to their two decimals, the depth (or the engine) changed between them. Without an
accept rate (era A) only an accept length above ``n`` tells.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.errors import CalibrationError
from controller.tiers import MAX_NUM_STEPS, NATIVE
from training.server_log import DecodeLine

ERAS = {"A": "no accept rate", "B": "bonus token counted", "C": "bonus token not counted"}
"""What the accept rate of an era means."""
MAX_DRAFT_TOKENS = 128
MAX_PAIRS = 100_000
ROUNDING = 0.005 + 1e-9
"""Half of the last printed digit of an accept length or rate."""


class DepthReader:
    """Takes the decode lines of a log and says its tier and era at the end.

    Attributes:
        num_decode: Lines taken.
    """

    def __init__(self, path: Path) -> None:
        self.num_decode = 0
        self._path = path
        self._pairs: Counter[tuple[float, float]] = Counter()
        self._with_accept = 0
        self._max_accept_len = 0.0
        self._max_at = 0

    def take(self, line: DecodeLine) -> None:
        """Take note of a line's accept length and rate."""
        self.num_decode += 1
        if line.accept_len is None:
            return
        self._with_accept += 1
        if line.accept_rate is not None and len(self._pairs) < MAX_PAIRS:
            self._pairs[line.accept_len, line.accept_rate] += 1
        if line.accept_len > self._max_accept_len:
            self._max_accept_len, self._max_at = line.accept_len, line.number

    def finish(
        self, arguments: Mapping[str, Any], told: int | None, strict: bool
    ) -> tuple[str, str | None]:
        """Return the tier and the era.

        Args:
            arguments: The server's, as far as the log says.
            told: Its depth by the reader; None if unknown.
            strict: Whether it is an error if ``told`` contradicts the log.

        Raises:
            CalibrationError: If there is no single depth, or it is not known.
        """
        if self._with_accept not in (0, self.num_decode):
            raise CalibrationError(
                f"{self._path}: expected one server, got {self._with_accept} of {self.num_decode} "
                "decode lines with an accept len; split the log"
            )
        if arguments.get("speculative_adaptive"):
            raise CalibrationError(
                f"{self._path}: expected one depth, but its server ran with "
                f"--speculative-adaptive; "
                "record a log at each fixed depth, or a step trace"
            )
        if not self._with_accept:
            return self._native(arguments, told if strict else None), None
        era, draft_tokens = self._era()
        steps = self._steps(arguments, told, strict, draft_tokens)
        if self._max_accept_len > steps + 1 + ROUNDING:
            raise CalibrationError(
                f"{self._path}:{self._max_at}: expected an accept len up to {steps + 1} at "
                f"{steps} draft steps, got {self._max_accept_len:g}; correct --num-steps"
            )
        return str(steps), era

    def _native(self, arguments: Mapping[str, Any], told: int | None) -> str:
        if arguments.get("speculative_algorithm"):
            raise CalibrationError(
                f"{self._path}: expected an accept len in its lines for a speculating server, got "
                "none; give the log of the scheduler itself"
            )
        if told:
            raise CalibrationError(
                f"{self._path}: --num-steps says {told}, but its lines have no accept len, so it "
                f"did "
                "not speculate; leave it out for this log"
            )
        return NATIVE

    def _steps(
        self,
        arguments: Mapping[str, Any],
        told: int | None,
        strict: bool,
        draft_tokens: list[int],
    ) -> int:
        stated = arguments.get("speculative_num_steps")
        if stated and strict and told not in (None, stated):
            raise CalibrationError(
                f"{self._path}: its server ran {stated} draft steps, but --num-steps says {told}; "
                "leave it out for this log"
            )
        topk = arguments.get("speculative_eagle_topk")
        if isinstance(topk, int) and topk > 1:
            raise CalibrationError(
                f"{self._path}: expected a chain of drafts, got topk {topk}; trees are not "
                "modelled, so record with --speculative-eagle-topk 1"
            )
        steps = stated or told
        shown = " or ".join(str(n - 1) for n in draft_tokens[:3])
        hint = f" (the accept rates fit {shown} for a chain of drafts)" if draft_tokens else ""
        if steps == 0:
            raise CalibrationError(
                f"{self._path}: expected no accept len without speculation, got one in every line; "
                f"correct --num-steps{hint}"
            )
        if steps is None:
            raise CalibrationError(
                f"{self._path}: expected a depth, but the log has no server_args line; give "
                f"--num-steps N{hint}"
            )
        if steps > MAX_NUM_STEPS:
            raise CalibrationError(
                f"{self._path}: expected 1 to {MAX_NUM_STEPS} draft steps, got {steps}; deeper "
                "drafts are not modelled"
            )
        if draft_tokens and steps + 1 not in draft_tokens:
            raise CalibrationError(
                f"{self._path}: its accept rates do not fit {steps} draft steps{hint}; correct "
                "--num-steps, or record with topk 1"
            )
        return int(steps)

    def _era(self) -> tuple[str | None, list[int]]:
        """Return the era and the numbers of draft tokens that explain every line."""
        if not self._pairs:
            return "A", []
        fitting = {
            (era, n): sum(count for pair, count in self._pairs.items() if _fits(era, n, *pair))
            for era in ("B", "C")
            for n in range(2, MAX_DRAFT_TOKENS + 1)
        }
        lines = sum(self._pairs.values())
        found = [key for key, count in fitting.items() if count == lines]
        if not found:
            raise CalibrationError(
                f"{self._path}: expected one depth, but no number of draft tokens explains the "
                f"accept rate of every line by its accept len (at best {max(fitting.values())} of "
                f"{lines} lines): the depth changed between lines; record a log at each fixed "
                "depth, or a step trace"
            )
        eras = {era for era, _ in found}
        return (eras.pop() if len(eras) == 1 else None), sorted({n for _, n in found})


def _fits(era: str, n: int, accept_len: float, accept_rate: float) -> bool:
    bonus, denominator = (0.0, n) if era == "B" else (1.0, n - 1)
    low = (accept_len - ROUNDING - bonus) / denominator
    high = (accept_len + ROUNDING - bonus) / denominator
    return accept_rate - ROUNDING <= high and low <= accept_rate + ROUNDING
