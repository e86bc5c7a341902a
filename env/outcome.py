"""What happens when a request has its last token."""

from env.compiled import kernel


@kernel
def finish_request(state, e, request_id):
    """Close a request at the current time; in a closed loop its client sends the next one."""
    server = state.server[e]
    config = state.config[e]
    request = state.request[e, request_id]
    request.finish_s = server.now_s
    request.finished_in = server.num_batches
    server.num_finished += 1
    server.num_in_system -= 1
    server.num_lingering += 1
    if config.slo_weight > 0.0:
        ttft_s = request.first_token_s - request.arrival_s
        gaps = max(request.output_tokens - 1, 1)
        tpot_s = (request.finish_s - request.first_token_s) / gaps
        if ttft_s > config.slo_ttft_s or tpot_s > config.slo_tpot_s:
            server.slo_misses += 1
    if config.concurrency > 0 and server.num_issued < config.num_requests:
        state.request[e, server.num_issued].arrival_s = server.now_s + config.think_s
        server.num_issued += 1
        if config.think_s == 0.0:
            server.next_arrival += 1
            server.num_in_system += 1


@kernel
def drop_finished(state, e, batch_number):
    """Take the requests that finished in ``batch_number`` or before out of the running batch."""
    server = state.server[e]
    if server.num_lingering == 0:
        return
    running = state.running[e]
    kept = 0
    for i in range(server.num_running):
        request_id = running[i]
        request = state.request[e, request_id]
        if 0 <= request.finished_in <= batch_number:
            held = request.prompt_tokens + request.generated
            server.context_tokens -= held
            server.kv_tokens -= held + state.config[e].reserved_tokens
            server.num_lingering -= 1
        else:
            running[kept] = request_id
            kept += 1
    if kept < server.num_running:
        server.batch_full = False
    server.num_running = kept
