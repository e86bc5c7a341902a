"""Attention over the paged KV cache, for decoding and for passes of several tokens a request.

Shapes: R requests, L the longest context, n the longest pass, H query heads, G key and value heads.
A request's context is the rows `req_to_token[req_pool_index, :seq_len]` of the key and value
buffers (slots, G, head_dim).
"""

import torch
from torch import Tensor

from .registry import op, unsupported


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, logit_cap: float
) -> Tensor:
    """Return softmax attention (R, n, H, head_dim) of padded requests, in float64.

    Args:
        query: (R, n, H, head_dim).
        key: (R, L, G, head_dim); each serves H / G neighbouring query heads.
        value: like key.
        visible: (R, n, L), true where a query may look; every row has a true.
        scale: factor of the dot products.
        logit_cap: scores become cap * tanh(score / cap), if above 0.
    """
    requests, width, heads, head_dim = query.shape
    groups = key.shape[2]
    q = query.double().view(requests, width, groups, heads // groups, head_dim)
    q = q.permute(0, 2, 3, 1, 4)
    k = key.double().permute(0, 2, 3, 1).unsqueeze(2)
    v = value.double().permute(0, 2, 1, 3).unsqueeze(2)
    scores = q @ k * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    out = scores.softmax(-1) @ v
    return out.permute(0, 3, 1, 2, 4).reshape(requests, width, heads, v.shape[-1])


def _slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Tensor:
    """Return the slot (R, L) of every context position; past a context, that of its first token."""
    position = torch.arange(int(seq_lens.max()))
    position = torch.where(position < seq_lens[:, None], position, 0)
    return req_to_token[req_pool_indices.long()[:, None], position].long()


def _check(
    name: str, scales: tuple[float, float], is_cross: bool, window: int, sinks: Tensor | None
) -> None:
    """Refuse what a Llama target and its draft never ask for."""
    for what, asked in (
        ("scaled (quantised) KV", scales != (1.0, 1.0)),
        ("cross attention", is_cross),
        ("a sliding window", window > 0),
        ("attention sinks", sinks is not None),
    ):
        if asked:
            raise unsupported(name, what)


@op
def decode_attention_cpu(
    query: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    out: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache_loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store each request's new key and value, then attend with its one query.

    query and out are (R, H, head_dim); key and value, if given, go to slots cache_loc (R,) first.
    A context of seq_lens (R,) tokens includes the new one. attn_logits is scratch of the real op.
    """
    _check("decode_attention_cpu", (key_scale, value_scale), is_cross, window, sinks)
    if key is not None and value is not None:
        key_buffer[cache_loc.long()] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[cache_loc.long()] = value.view(-1, *value_buffer.shape[1:]).to(
            value_buffer.dtype
        )
    slots = _slots(req_to_token, req_pool_indices, seq_lens)
    visible = torch.arange(slots.shape[1]) < seq_lens[:, None]
    result = _attend(
        query[:, None],
        key_buffer[slots],
        value_buffer[slots],
        visible[:, None],
        scale,
        logit_cap,
    )
    out.copy_(result[:, 0])


@op
def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attend with the last extend_lens (R,) tokens of every context: prefill, verify, draft-extend.

    query and out (tokens, H, head_dim) hold the requests one after the other, from extend_start
    (R,). The new keys and values are in the buffers already (SGLang stores them before the call),
    so key and value are not read. A token sees its own past.
    """
    _check("extend_attention_cpu", (key_scale, value_scale), is_cross, window, sinks)
    if tree_mask is not None:
        raise unsupported("extend_attention_cpu", "a tree of drafts (topk above 1)")
    if not is_causal:
        raise unsupported("extend_attention_cpu", "attention to later tokens")
    slots = _slots(req_to_token, req_pool_indices, seq_lens)
    offset = torch.arange(int(extend_lens.max()))
    # A query past the end of a request repeats its last one; its result is not used.
    offset = torch.minimum(offset, extend_lens[:, None] - 1).long()
    rows = extend_start[:, None].long() + offset
    position = seq_lens[:, None] - extend_lens[:, None] + offset
    visible = torch.arange(slots.shape[1]) <= position[:, :, None]
    result = _attend(query[rows], key_buffer[slots], value_buffer[slots], visible, scale, logit_cap)
    out[rows.flatten()] = result.flatten(0, 1).to(out.dtype)
