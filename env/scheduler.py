"""Scheduling as SGLang does it: arrivals, prefill first in chunks, KV admission, retraction.

What is modelled, after ``Scheduler``, ``PrefillAdder`` and ``NewTokenRatioTracker`` of SGLang:

- Requests are served first come, first served. Prefill goes before decode for as long as a waiting
  request fits; a prefill batch has at most ``chunk_tokens`` new tokens, and at most one request is
  in the middle of a chunk.
- A request is admitted if its prompt and all its allowed new tokens fit beside what the running
  requests hold and are expected to add: their remaining tokens times ``new_token_ratio``, which
  falls with every decode round from 0.7 to 0.1 and is estimated anew at a retraction. After a
  refusal nobody is admitted until a request leaves the batch.
- If the running requests' tokens and reserved slots exceed the KV cache, those with the fewest
  output tokens are retracted: they queue again, and prefill prompt and output anew.

Not modelled: prefix cache hits, priorities, mixed chunks, aborts.
"""

from env.compiled import kernel
from env.outcome import finish_request

CLIP_NEW_TOKENS = 4096
NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = 0.098
NEW_TOKEN_RATIO_DECAY = (NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600.0
RETRACT_DECODE_STEPS = 20


@kernel
def push_waiting(state, e, request_id):
    """Append a request to the waiting queue."""
    server = state.server[e]
    size = state.waiting.shape[1]
    state.waiting[e, (server.waiting_head + server.num_waiting) % size] = request_id
    server.num_waiting += 1


@kernel
def pull_arrivals(state, e):
    """Queue the requests that the scheduler can see by now."""
    server = state.server[e]
    while (
        server.next_visible < server.num_issued
        and state.request[e, server.next_visible].arrival_s <= server.visible_s
    ):
        push_waiting(state, e, server.next_visible)
        server.next_visible += 1


@kernel
def pass_time(state, e, seconds):
    """Let a batch run: move the clock and add to the integral of requests in system."""
    server = state.server[e]
    start = server.now_s
    end = start + seconds
    area = server.num_in_system * seconds
    while (
        server.next_arrival < server.num_issued
        and state.request[e, server.next_arrival].arrival_s <= end
    ):
        arrival = state.request[e, server.next_arrival].arrival_s
        area += end - max(arrival, start)
        server.num_in_system += 1
        server.next_arrival += 1
    server.area += area
    server.now_s = end
    # Under overlap the next batch is put together while this one runs.
    server.visible_s = start if state.config[e].overlap else end


@kernel
def retract(state, e):
    """Send running requests back to the queue until the KV cache can hold the next round.

    Returns:
        Whether any was sent back.
    """
    server = state.server[e]
    config = state.config[e]
    running = state.running[e]
    if server.kv_tokens <= config.kv_capacity_tokens or server.num_running <= 1:
        return False
    server.batch_full = False
    while server.kv_tokens > config.kv_capacity_tokens and server.num_running > 1:
        worst = 0
        for i in range(1, server.num_running):
            a = state.request[e, running[i]]
            b = state.request[e, running[worst]]
            if a.generated < b.generated or (
                a.generated == b.generated and a.prompt_tokens >= b.prompt_tokens
            ):
                worst = i
        request_id = running[worst]
        request = state.request[e, request_id]
        held = request.prompt_tokens + request.generated
        for i in range(worst, server.num_running - 1):
            running[i] = running[i + 1]
        server.num_running -= 1
        server.context_tokens -= held
        server.kv_tokens -= held + config.reserved_tokens
        if request.finished_in < 0:
            request.prefilled = 0
            push_waiting(state, e, request_id)
            server.num_retracted += 1
        else:
            server.num_lingering -= 1
        decoded = 0
        allowed = 1
        for i in range(server.num_running):
            decoded += state.request[e, running[i]].generated + RETRACT_DECODE_STEPS
            allowed += state.request[e, running[i]].max_new_tokens
        server.new_token_ratio = min(1.0, decoded / allowed)
    return True


@kernel
def decay_new_token_ratio(server):
    """Expect a little less of the running requests, as SGLang does with every decode round."""
    server.new_token_ratio = max(
        server.new_token_ratio - NEW_TOKEN_RATIO_DECAY, MIN_NEW_TOKEN_RATIO
    )


@kernel
def new_tokens_left(request):
    """Return the output tokens that the scheduler still has to provide for."""
    return min(max(request.max_new_tokens - request.generated, 0), CLIP_NEW_TOKENS)


@kernel
def admissible_tokens(state, e):
    """Return the KV tokens that are neither held nor expected to be needed by those running."""
    server = state.server[e]
    free = state.config[e].kv_capacity_tokens - server.kv_tokens
    for i in range(server.num_running):
        request = state.request[e, state.running[e, i]]
        free -= int(new_tokens_left(request) * server.new_token_ratio)
    if server.chunked >= 0:
        request = state.request[e, server.chunked]
        rest = request.prompt_tokens + request.generated - request.prefilled
        free -= rest + new_tokens_left(request)
    return free


@kernel
def prefill_request(state, e, request_id, chunk_left):
    """Compute as much of a request as the chunk allows; it joins the batch if that is all."""
    server = state.server[e]
    request = state.request[e, request_id]
    total = request.prompt_tokens + request.generated
    take = min(chunk_left, total - request.prefilled)
    request.prefilled += take
    server.kv_tokens += take
    if request.prefilled < total:
        server.chunked = request_id
    else:
        server.chunked = -1
        state.running[e, server.num_running] = request_id
        server.num_running += 1
    return take


@kernel
def fill_prefill_batch(state, e):
    """Choose what the next prefill batch computes; return its number of new tokens."""
    server = state.server[e]
    config = state.config[e]
    free = admissible_tokens(state, e)
    # SGLang keeps this mark on the running batch, and an empty one is replaced by the new one.
    was_running = server.num_running > 0
    new_tokens = 0
    if server.chunked >= 0:
        new_tokens += prefill_request(state, e, server.chunked, config.chunk_tokens)
    while (
        server.chunked < 0
        and new_tokens < config.chunk_tokens
        and server.num_waiting > 0
        and server.num_running < config.max_running_requests
    ):
        request_id = state.waiting[e, server.waiting_head]
        request = state.request[e, request_id]
        need = request.prompt_tokens + request.generated + new_tokens_left(request)
        need += config.reserved_tokens
        if need > free and server.num_running > 0:
            server.batch_full = was_running
            break
        free -= need
        server.waiting_head = (server.waiting_head + 1) % state.waiting.shape[1]
        server.num_waiting -= 1
        server.kv_tokens += config.reserved_tokens
        new_tokens += prefill_request(state, e, request_id, config.chunk_tokens - new_tokens)
    if server.num_running >= config.max_running_requests:
        server.batch_full = True
    return new_tokens


@kernel
def run_prefill(state, costs, e):
    """Put a prefill batch together and run it.

    Returns:
        Number of requests that joined the running batch, or -1 if no prefill could run.
    """
    server = state.server[e]
    running = state.running[e]
    if server.num_running == 0:
        server.batch_full = False
    if server.chunked < 0 and (server.num_waiting == 0 or server.batch_full):
        return -1
    first_joined = server.num_running
    new_tokens = fill_prefill_batch(state, e)
    if new_tokens == 0:
        return -1
    row = state.config[e].cost_row
    pass_time(state, e, costs.prefill_base_s[row] + costs.prefill_token_s[row] * new_tokens)
    server.num_batches += 1
    for i in range(first_joined, server.num_running):
        request = state.request[e, running[i]]
        request.stale_tokens = 0.0
        request.deficit = 0.0
        if request.generated == 0:
            request.first_token_s = server.now_s
        request.generated += 1
        server.output_tokens += 1
        server.expected_tokens += 1.0
        server.context_tokens += request.prompt_tokens + request.generated
        server.kv_tokens += 1
        if request.generated >= request.output_tokens:
            finish_request(state, e, running[i])
    return server.num_running - first_joined
