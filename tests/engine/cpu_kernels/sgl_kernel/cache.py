"""The KV cache, and `req_to_token`: the table (requests, positions) of each request's slots."""

import ctypes

import torch
from torch import Tensor

from .registry import op, unsupported


def _ragged(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """List the positions start[i] to end[i] - 1 of every row i, as (rows, positions), each flat."""
    lengths = (end - start).long()
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(rows.numel()) - first[rows] + start.long()[rows]


@op
def store_cache_cpu(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, row_dim: int
) -> None:
    """Store the rows of key and value (tokens, row_dim in all) at their slots (tokens,)."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, row_dim)[slots.long()] = rows.reshape(-1, row_dim).to(cache.dtype)


@op
def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor
) -> None:
    """Copy slots to slots in every layer's key and value buffer; both lists may overlap.

    A buffer is given by its address in data_ptrs and the bytes of a slot in strides. All reads come
    before all writes, as in the real op.
    """
    if target_slots.numel() == 0:
        return
    slots = 1 + int(torch.maximum(target_slots.max(), source_slots.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        rows[target_slots.long()] = rows[source_slots.long()]


@op
def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    slots: Tensor,
    pool_len: int,
) -> None:
    """Write the new slots, request after request, at positions start to end of each request."""
    rows, positions = _ragged(start, end)
    new = slots[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[rows], positions] = new


@op
def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_slots: Tensor,
    pool_len: int,
) -> None:
    """Read the slots at positions start to end of each request, in turn, into out_slots."""
    rows, positions = _ragged(start, end)
    found = req_to_token[req_pool_indices.long()[rows], positions]
    out_slots[: rows.numel()] = found.to(out_slots.dtype)


@op
def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_slots: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read the topk * num_cols slots that follow each request's context into out_slots."""
    start = seq_lens.long()
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, start, start + topk * num_cols, out_slots, pool_len
    )


@op
def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Return the table (requests * topk, pool_len) that the draft's steps read: a row a candidate.

    A candidate sees its request's context and its own drafted tokens. The one candidate of a chain
    has its drafts right after the context, so its row is the request's.
    """
    if topk != 1:
        raise unsupported("build_draft_decode_metadata_cpu", f"topk = {topk}, only 1")
    return req_to_token[req_pool_indices.long()]
