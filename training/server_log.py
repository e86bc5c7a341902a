"""The lines of an SGLang server log that say how fast it decoded, from every version's format.

A ``Decode batch`` line is printed once every N decode rounds (``--decode-log-interval``) by every
scheduler that logs. Read from SGLang's sources (``managers/scheduler.py`` in 2024 and 2025,
``scheduler_components/metrics_reporter.py`` in 0.5.17 and 0.5.23), three eras of it exist:

A
    ``Decode batch. #running-req: ...`` with ``accept len`` and no ``accept rate``.
B
    ``accept rate`` is ``accept len / num_draft_tokens``: the bonus token counts.
C
    ``accept rate`` is ``(accept len - 1) / (num_draft_tokens - 1)``: it does not.

So the rate is never used as such; it serves to tell the era and to check the depth. Everything else
in a line (graph label, token pools of hybrid models, disaggregation, bandwidth) is optional, so a
line is read field by field, by name.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_PREFIX = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<ranks>(?: +[A-Z_]+\d+)*)\] *"
)
_BATCH = re.compile(r"(?P<phase>Decode|Prefill) batch\b(?: \[\d+\])?[.,]? *(?P<fields>.*)")
_FIELD = re.compile(r"(?:^|, *)(?P<name>[#A-Za-z][^:,]*): *(?P<value>[^,]*)")
_SWITCH = re.compile(r"Switch adaptive runtime state: steps (\d+) -> (\d+)")
_CAPACITY = re.compile(r"max_total_num_tokens=(\d{1,15}), chunked_prefill_size=(-?\d{1,15})\b")
_ARGUMENT = re.compile(r"\b(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\w.+-]+)")
# The pool that holds the context: plain models, hybrids, and pools on two devices.
_TOKEN_FIELDS = ("#token", "#full token", "#gpu token")
_ARGUMENTS = {
    "model_path": str,
    "attention_backend": str,
    "speculative_algorithm": str,
    "speculative_draft_model_path": str,
    "speculative_num_steps": int,
    "speculative_eagle_topk": int,
    "speculative_num_draft_tokens": int,
    "speculative_adaptive": bool,
    "tp_size": int,
    "pp_size": int,
    "dp_size": int,
    "disable_overlap_schedule": bool,
    "decode_log_interval": int,
}


@dataclass(frozen=True)
class DecodeLine:
    """A ``Decode batch`` line.

    Attributes:
        number: Its line in the file.
        time_s: Seconds since the epoch of the log's clock, whole; None without a time stamp.
        scheduler: Which scheduler printed it: its data-parallel rank, or ``""``.
        batch_size: Running requests.
        context_tokens: Tokens in the KV pool.
        throughput: Tokens a second since the scheduler's previous line.
        accept_len: Accept length, bonus included, since that line; None without speculation.
        accept_rate: As printed; its meaning depends on the version.
        graph: Whether the last round ran as a captured graph; None if the line does not say.
    """

    number: int
    time_s: float | None
    scheduler: str
    batch_size: int
    context_tokens: int
    throughput: float
    accept_len: float | None
    accept_rate: float | None
    graph: bool | None


@dataclass(frozen=True)
class PrefillLine:
    """A ``Prefill batch`` line.

    Attributes:
        number: Its line in the file.
        time_s: As in :class:`DecodeLine`.
        scheduler: Likewise.
        new_tokens: Tokens of the batch that were not cached.
        throughput: New tokens a second since the last prefill line; None if not printed.
        more: Whether requests or chunks wait, so that the next prefill follows at once.
    """

    number: int
    time_s: float | None
    scheduler: str
    new_tokens: int
    throughput: float | None
    more: bool


@dataclass(frozen=True)
class SwitchLine:
    """The adaptive worker changed its number of draft steps."""

    number: int
    old: int
    new: int


@dataclass(frozen=True)
class ArgumentsLine:
    """The server's arguments, those that matter here; a repeated line is another start."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class CapacityLine:
    """What the scheduler says of its KV cache when it starts.

    Attributes:
        number: Its line in the file.
        kv_tokens: Tokens that the KV cache holds.
        chunk_tokens: Most new tokens of a prefill batch; None without chunked prefill.
    """

    number: int
    kv_tokens: int
    chunk_tokens: int | None


@dataclass(frozen=True)
class BrokenLine:
    """A batch line that is cut or holds a figure that makes no sense."""

    number: int
    reason: str


LogLine = DecodeLine | PrefillLine | SwitchLine | ArgumentsLine | CapacityLine | BrokenLine


def parse_log(lines: Iterable[tuple[int, str]]) -> Iterator[LogLine]:
    """Yield what matters of a log's numbered lines; everything else is skipped.

    Where several ranks of one scheduler log the same rounds, only the first rank's lines count.
    """
    first_rank: dict[str, str] = {}
    for number, text in lines:
        # Not " batch" alone: the server's arguments hold ", batch_notify_size=16".
        match = _BATCH.search(text) if " batch" in text else None
        if match:
            # The last one: another process may have written into the start of the line.
            *_, prefix = None, *_PREFIX.finditer(text, 0, match.start())
            ranks = prefix["ranks"].split() if prefix else []
            scheduler = " ".join(rank for rank in ranks if re.match(r"(DP|PP)\d", rank))
            if first_rank.setdefault(scheduler, " ".join(ranks)) == " ".join(ranks):
                yield _batch(number, match, prefix, scheduler)
        else:
            found = _other(number, text)
            if found:
                yield found


def _other(number: int, text: str) -> LogLine | None:
    """Return what a line that is about no batch says, if it matters."""
    if "Switch adaptive" in text:
        switch = _SWITCH.search(text)
        return SwitchLine(number, int(switch[1]), int(switch[2])) if switch else None
    if "server_args=" in text:
        return ArgumentsLine(number, read_arguments(text[text.index("server_args=") + 12 :]))
    capacity = _CAPACITY.search(text) if "max_total_num_tokens=" in text else None
    if capacity:
        chunk = int(capacity[2])
        return CapacityLine(number, int(capacity[1]), chunk if chunk > 0 else None)
    return None


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that matter from ``ServerArgs(...)`` or, since 0.5.23, ``{...}``."""
    text = text.strip()
    found: Mapping[str, Any] = {}
    if text.startswith("{"):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pairs = re.findall(r"'(\w+)': ('[^']*'|[\w.+-]+)", text)
            found = {name: _literal(value) for name, value in pairs}
    else:
        found = {name: _literal(value) for name, value in _ARGUMENT.findall(text)}
    return pick_arguments(found)


def pick_arguments(found: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the arguments that matter and have the expected type."""
    return {
        name: found[name]
        for name, kind in _ARGUMENTS.items()
        if name in found and (found[name] is None or type(found[name]) is kind)
    }


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _batch(
    number: int, match: re.Match[str], prefix: re.Match[str] | None, scheduler: str
) -> LogLine:
    pairs = [(m["name"].strip(), m["value"].strip()) for m in _FIELD.finditer(match["fields"])]
    fields = dict(pairs)
    if len(fields) != len(pairs):
        return BrokenLine(number, "two lines in one")
    time_s = None
    if prefix:
        try:
            time_s = datetime.fromisoformat(prefix["time"]).timestamp()
        except ValueError:
            return BrokenLine(number, "time stamp")
    try:
        if match["phase"] == "Prefill":
            return PrefillLine(
                number,
                time_s,
                scheduler,
                _count(fields, "#new-token"),
                _number(fields, "input throughput (token/s)"),
                any(
                    _count(fields, name) > 0
                    for name in ("#queue-req", "#pending-token")
                    if name in fields
                ),
            )
        throughput = _number(fields, "gen throughput (token/s)")
        if throughput is None:
            raise ValueError("gen throughput (token/s)")
        tokens = [name for name in _TOKEN_FIELDS if name in fields]
        if not tokens:
            raise ValueError("#token")
        batch_size = _count(fields, "#running-req")
        # The last field of every version: a line without it was cut, perhaps inside a number.
        _count(fields, "#queue-req")
        accept_len = _number(fields, "accept len")
        if accept_len is not None and accept_len < 1.0:
            raise ValueError("accept len")
        graphs = [value for name, value in fields.items() if name.endswith(" graph")]
        return DecodeLine(
            number=number,
            time_s=time_s,
            scheduler=scheduler,
            batch_size=batch_size,
            context_tokens=_count(fields, tokens[0]),
            throughput=throughput,
            accept_len=accept_len,
            accept_rate=_number(fields, "accept rate"),
            graph=graphs[0] == "True" if graphs else None,
        )
    except ValueError as error:
        return BrokenLine(number, str(error))


def _count(fields: Mapping[str, str], name: str) -> int:
    value = fields.get(name, "")
    if not value.isdecimal() or len(value) > 15:
        raise ValueError(name)
    return int(value)


def _number(fields: Mapping[str, str], name: str) -> float | None:
    if name not in fields:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", fields[name]) or len(fields[name]) > 20:
        raise ValueError(name)
    return float(fields[name])
