"""One record of a benchmark of SGLang: its round time, depth and accept length.

See :mod:`training.bench_outputs` for where the figures come from.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from controller.errors import CalibrationError
from controller.tiers import MAX_NUM_STEPS, NATIVE
from training.points import MAX_CONCURRENCY, Point, check_step

SERVING = "bench_serving"
ONE_BATCH = "bench_one_batch_server"
SPECULATIVE = "bench_speculative"
AGREE = 0.03
"""Most relative difference of two figures of a record that mean the same."""


class LeftOut(Exception):
    """A record that gives no round time, with the reason."""


def _serving(
    where: str, record: Mapping[str, Any], arguments: Mapping[str, Any], told: int | None
) -> Point:
    completed = _figure(where, record, "completed", whole=True)
    if completed is None:
        raise LeftOut("without a completed request")
    accept_len = _figure(where, record, "accept_length")
    tier, accept_len = _tier(where, accept_len, arguments, told, "accept_length" in record)
    tpot_ms = _figure(where, record, "mean_tpot_ms")
    duration = _figure(where, record, "duration")
    throughput = _figure(where, record, "output_throughput")
    tokens = _figure(where, record, "total_output_tokens", whole=True)
    if tpot_ms is None or duration is None or throughput is None or tokens is None:
        raise LeftOut("without a time per output token")
    _agree(where, "output_throughput", throughput, tokens / duration)
    tpot_s = tpot_ms / 1000.0
    e2e_ms = _figure(where, record, "mean_e2e_latency_ms")
    if e2e_ms is not None:
        ttft_ms = _figure(where, record, "mean_ttft_ms") or 0.0
        running = completed * (e2e_ms - ttft_ms) / 1000.0 / duration
    else:
        # Every decoding request gives a token each TPOT.
        running = throughput * tpot_s
    if not 0.0 < running <= MAX_CONCURRENCY:
        raise CalibrationError(
            f"{where}: expected requests in flight, got {running:.4g} from its latencies; check "
            "the units"
        )
    limit = _figure(where, record, "max_concurrency", whole=True)
    if limit is not None and running > 1.1 * limit:
        raise CalibrationError(
            f"{where}: expected at most max_concurrency {limit:g} requests in flight, got "
            f"{running:.4g} from its latencies; check the units"
        )
    batch_size = max(round(running), 1)
    prompts = _figure(where, record, "total_input_tokens", whole=True)
    context = None
    if prompts is not None:
        context = round(batch_size * (prompts + 0.5 * tokens) / completed)
    step_s = check_step(where, tpot_s * accept_len, f"mean_tpot_ms {tpot_ms:g}")
    return Point(
        where=where,
        kind="benchmark",
        tier=tier,
        concurrency=int(limit) if limit is not None else batch_size,
        batch_size=batch_size,
        context_tokens=context,
        step_s=step_s,
        accept_len=accept_len,
        assumed=False,
        throughput=throughput,
    )


def _one_batch(
    where: str, record: Mapping[str, Any], arguments: Mapping[str, Any], told: int | None
) -> Point:
    if "last_ttft" not in record:
        raise LeftOut("of a version that does not tell prefill from decode")
    batch = _need(where, record, "batch_size", whole=True)
    prompt = _need(where, record, "input_len", whole=True)
    output = _need(where, record, "output_len", whole=True)
    latency = _need(where, record, "latency")
    ttft = _need(where, record, "last_ttft")
    given = record.get("acc_length")
    # -1 is how it writes that there is none.
    accept_len = None if given == -1 else _figure(where, record, "acc_length")
    tier, accept_len = _tier(where, accept_len, arguments, told, given is not None)
    if record.get("num_early_stopped"):
        raise LeftOut("whose requests stopped early")
    decode_s = latency - ttft
    if output < 2 * accept_len + 1 or decode_s <= 0.0:
        raise LeftOut("with too few output tokens")
    throughput = _need(where, record, "output_throughput")
    _agree(where, "output_throughput", throughput, batch * output / decode_s)
    step_s = check_step(
        where, decode_s * accept_len / (output - 1), f"{output - 1:g} tokens in {decode_s:.4g} s"
    )
    return Point(
        where=where,
        kind="benchmark",
        tier=tier,
        concurrency=int(batch),
        batch_size=int(batch),
        context_tokens=round(batch * (prompt + 0.5 * output)),
        step_s=step_s,
        accept_len=accept_len,
        assumed=False,
        throughput=throughput,
    )


def _speculative(
    where: str, record: Mapping[str, Any], arguments: Mapping[str, Any], told: int | None
) -> Point:
    steps, topk = (_figure(where, record, name, whole=True) or 0 for name in ("steps", "topk"))
    if topk > 1:
        raise LeftOut("of draft trees (topk above 1)")
    if steps > MAX_NUM_STEPS:
        raise LeftOut(f"deeper than {MAX_NUM_STEPS} draft steps")
    batch = _need(where, record, "batch_size", whole=True)
    accept_len = _need(where, record, "acc_length")
    step_s = _need(where, record, "step_time")
    tier, accept_len = _tier(where, accept_len, {"speculative_num_steps": int(steps)}, None, True)
    speed = _figure(where, record, "speed")
    if speed is not None:
        _agree(where, "speed", speed, accept_len / step_s)
    check_step(where, step_s, f"step_time {step_s:g}")
    return Point(
        where=where,
        kind="benchmark",
        tier=tier,
        concurrency=int(batch),
        batch_size=int(batch),
        context_tokens=None,
        step_s=step_s,
        accept_len=accept_len,
        assumed=False,
        throughput=None,
    )


READERS: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any], int | None], Point]] = {
    SERVING: _serving,
    ONE_BATCH: _one_batch,
    SPECULATIVE: _speculative,
}


def _tier(
    where: str,
    accept_len: float | None,
    arguments: Mapping[str, Any],
    told: int | None,
    says: bool,
) -> tuple[str, float]:
    """Return the tier of a record and its accept length.

    Args:
        where: File and line.
        accept_len: The record's; None without one.
        arguments: Of its server.
        told: Depth for records that do not say theirs.
        says: Whether the record would have an accept length if it had speculated.
    """
    if arguments.get("speculative_adaptive"):
        raise CalibrationError(
            f"{where}: expected one depth, but its server ran with --speculative-adaptive; "
            "benchmark each fixed depth"
        )
    topk = arguments.get("speculative_eagle_topk")
    if isinstance(topk, int) and topk > 1:
        raise LeftOut("of draft trees (topk above 1)")
    stated = arguments.get("speculative_num_steps")
    if stated is None and accept_len is None and says:
        return NATIVE, 1.0
    steps = stated if stated is not None else told
    if steps is None:
        if accept_len is not None:
            raise CalibrationError(
                f"{where}: expected the server's arguments in the record, got none with accept "
                f"length {accept_len:g}; give --num-steps N"
            )
        raise CalibrationError(
            f"{where}: cannot tell whether it speculated (its version writes no accept length); "
            "give --num-steps N or --num-steps off"
        )
    if not steps:
        if accept_len is not None and accept_len > 1.0 and (stated is not None or told == 0):
            raise CalibrationError(
                f"{where}: expected no accept length without speculation, got {accept_len:g}; "
                "correct --num-steps"
            )
        return NATIVE, 1.0
    if accept_len is None:
        raise CalibrationError(
            f"{where}: expected an accept length at {steps} draft steps, got none; correct "
            "--num-steps, or benchmark a server that reports it"
        )
    if not 1 <= steps <= MAX_NUM_STEPS or not 1.0 <= accept_len <= steps + 1 + 1e-6:
        raise CalibrationError(
            f"{where}: accept length: expected 1 to {steps + 1} at {steps} draft steps (of at most "
            f"{MAX_NUM_STEPS}), got {accept_len:g}; correct --num-steps"
        )
    return str(steps), accept_len


def _figure(where: str, record: Mapping[str, Any], name: str, whole: bool = False) -> float | None:
    """Return a figure above 0, or None where it is absent, null or 0."""
    value = record.get(name)
    if value is None or value == 0:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 < value < 1e15 or (whole and value != math.floor(value)):
        raise CalibrationError(
            f"{where}: {name}: expected {'an integer' if whole else 'a number'} above 0, got "
            f"{value!r:.40}; run the benchmark again"
        )
    return float(value)


def _need(where: str, record: Mapping[str, Any], name: str, whole: bool = False) -> float:
    value = _figure(where, record, name, whole)
    if value is None:
        raise CalibrationError(
            f"{where}: {name}: expected a number above 0, got {record.get(name)!r}; run the "
            "benchmark again"
        )
    return value


def _agree(where: str, name: str, given: float, worked_out: float) -> None:
    if not 1.0 - AGREE <= given / worked_out <= 1.0 + AGREE:
        raise CalibrationError(
            f"{where}: {name} is {given:g} but the record's other figures give {worked_out:.4g}; "
            "check for altered figures or mixed units (ms against s)"
        )
