"""The state of many simulated servers, as arrays; no behaviour.

``num_servers`` servers run side by side. Records hold what is one number a server (``CONFIG``,
which is constant through an episode, and ``SERVER``) or a request (``REQUEST``); what is a list is
a row of a two-dimensional array. Kernels read and write these in place.
"""

from typing import NamedTuple

import numpy as np

from controller.acceptance import NUM_COUNTS
from controller.memory import NUM_MEMORY
from controller.tiers import MAX_NUM_STEPS

CONFIG = np.dtype(
    [
        ("seed", np.uint64),
        ("accept_stream", np.uint64),  # keys of the seed's streams, see env.counter_rng
        ("drift_stream", np.uint64),
        ("cost_row", np.int32),  # row of Costs
        ("initial_tier", np.int32),
        ("concurrency", np.int32),  # clients of a closed loop; 0 for an open one
        ("think_s", np.float64),  # from an answer to its client's next request
        ("token_target", np.int64),  # a closed loop ends here; 0 for an open one
        ("num_requests", np.int32),
        ("max_running_requests", np.int32),
        ("kv_capacity_tokens", np.int64),
        ("reserved_tokens", np.int32),  # KV slots held for each running request's next rounds
        ("chunk_tokens", np.int32),
        ("overlap", np.bool_),
        ("mean_output_tokens", np.float64),
        ("accept_kind", np.int32),
        ("accept_low", np.float64),
        ("accept_high", np.float64),
        ("accept_period", np.float64),
        ("accept_share", np.float64),
        ("accept_shape", np.float64, (MAX_NUM_STEPS + 1,)),  # factor of the rate by position
        ("cold_start_share", np.float64),
        ("worst_loss", np.float64),
        ("gap_scale_tokens", np.float64),
        ("recovery_tokens", np.float64),
        ("recovery", np.float64, (MAX_NUM_STEPS + 2,)),  # share of a deficit left, by tokens
        ("slo_weight", np.float64),
        ("slo_ttft_s", np.float64),
        ("slo_tpot_s", np.float64),
    ]
)

SERVER = np.dtype(
    [
        ("now_s", np.float64),
        ("visible_s", np.float64),  # arrivals up to here are known to the scheduler
        ("num_running", np.int32),
        ("num_waiting", np.int32),
        ("waiting_head", np.int32),
        ("next_visible", np.int32),  # first request that the scheduler has not seen
        ("next_arrival", np.int32),  # first request that has not arrived
        ("num_issued", np.int32),  # requests whose arrival time is set
        ("num_finished", np.int32),
        ("num_in_system", np.int32),
        ("num_lingering", np.int32),  # finished requests whose rows are still in the batch
        ("chunked", np.int32),  # request in the middle of a chunked prefill, or -1
        ("context_tokens", np.int64),  # summed over the running requests
        ("kv_tokens", np.int64),  # held or reserved, running requests and the chunked one
        ("new_token_ratio", np.float64),
        ("batch_full", np.bool_),  # nobody is admitted until a request leaves
        ("output_tokens", np.int64),
        ("expected_tokens", np.float64),  # the same, drafts counted by their accept rate
        ("ideal_tokens", np.float64),  # what the best tiers would have been expected to give
        ("lost_s", np.float64),  # request-seconds lost against the best rate of each round
        ("num_rounds", np.int64),
        ("num_batches", np.int64),
        ("num_switches", np.int64),
        ("num_retracted", np.int64),
        ("num_proposed", np.int64),
        ("num_correct", np.int64),
        ("pending_tier", np.int32),  # round whose result is not processed yet, or -1
        ("pending_cold_start", np.bool_),
        ("pending_batch", np.int64),  # number of the batch launched last, or -1
        ("area", np.float64),  # integral of requests in system over time, seconds
        ("slo_misses", np.int32),
        ("done", np.bool_),
    ]
)

REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),  # where it will stop
        ("max_new_tokens", np.int32),  # what the scheduler knows
        ("generated", np.int32),
        ("prefilled", np.int32),
        ("stale_tokens", np.float32),  # gap in the draft's KV
        ("deficit", np.float32),
        ("finished_in", np.int64),  # number of the batch that finished it, or -1
    ]
)


class Costs(NamedTuple):
    """Round times of ``num_rows`` systems; a server uses the row in its config.

    Attributes:
        num_steps: ``(num_tiers,)`` draft steps, ascending, one list for all rows.
        keeps_warm: ``(num_tiers,)`` whether a tier extends the draft's KV.
        base_s: ``(num_rows, num_tiers, max_batch_size + 1)`` seconds at zero context.
        context_s: ``(num_rows, num_tiers)`` seconds for each context token.
        noise: ``(num_rows, num_tiers, max_batch_size + 1)`` relative standard deviation.
        prefill_base_s: ``(num_rows,)``.
        prefill_token_s: ``(num_rows,)``.
    """

    num_steps: np.ndarray
    keeps_warm: np.ndarray
    base_s: np.ndarray
    context_s: np.ndarray
    noise: np.ndarray
    prefill_base_s: np.ndarray
    prefill_token_s: np.ndarray


class State(NamedTuple):
    """Everything that changes, for ``num_servers`` servers.

    Attributes:
        config: ``(num_servers,)`` of ``CONFIG``.
        server: ``(num_servers,)`` of ``SERVER``.
        request: ``(num_servers, num_requests)`` of ``REQUEST``.
        running: ``(num_servers, max_running)`` request indices, in batch order.
        waiting: ``(num_servers, num_requests)`` ring of request indices.
        rates: ``(num_servers, 2, max_running)`` accept rates of the last round by row of the
            batch: of a warm draft, and of the draft as it was.
        drawn: ``(num_servers, max_running)`` correct drafts of the last round.
        moments: ``(num_servers, MAX_NUM_STEPS + 1)`` summed powers of its warm rates.
        histogram: ``(num_servers, MAX_NUM_STEPS + 1)`` result of the pending round.
        tier_rounds: ``(num_servers, num_tiers)`` rounds that ran each tier.
        memory: ``(num_servers, NUM_MEMORY)``, and the rest of the controller's memory:
        tries: ``(num_servers, NUM_COUNTS)``.
        successes: ``(num_servers, NUM_COUNTS)``.
        recent: ``(num_servers, num_tiers)`` recent accept lengths.
        ages: ``(num_servers, num_tiers)``.
    """

    config: np.ndarray
    server: np.ndarray
    request: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    rates: np.ndarray
    drawn: np.ndarray
    moments: np.ndarray
    histogram: np.ndarray
    tier_rounds: np.ndarray
    memory: np.ndarray
    tries: np.ndarray
    successes: np.ndarray
    recent: np.ndarray
    ages: np.ndarray


def new_state(num_servers: int, max_requests: int, max_running: int, num_tiers: int) -> State:
    """Allocate the arrays, all zero."""
    return State(
        config=np.zeros(num_servers, CONFIG).view(np.recarray),
        server=np.zeros(num_servers, SERVER).view(np.recarray),
        request=np.zeros((num_servers, max_requests), REQUEST).view(np.recarray),
        running=np.zeros((num_servers, max_running), np.int32),
        waiting=np.zeros((num_servers, max_requests), np.int32),
        rates=np.zeros((num_servers, 2, max_running)),
        drawn=np.zeros((num_servers, max_running), np.int32),
        moments=np.zeros((num_servers, MAX_NUM_STEPS + 1)),
        histogram=np.zeros((num_servers, MAX_NUM_STEPS + 1), np.int64),
        tier_rounds=np.zeros((num_servers, num_tiers), np.int64),
        memory=np.zeros((num_servers, NUM_MEMORY)),
        tries=np.zeros((num_servers, NUM_COUNTS)),
        successes=np.zeros((num_servers, NUM_COUNTS)),
        recent=np.zeros((num_servers, num_tiers)),
        ages=np.zeros((num_servers, num_tiers)),
    )
