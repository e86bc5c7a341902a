"""Verification of a chain of drafts: a tree whose every node has one child (topk = 1).

Shapes: R requests, n = num_draft_tokens: the last accepted token, then num_steps = n - 1 drafts. A
node is numbered in its request from 0 to n - 1, and in the batch `request * n + node`.
"""

import torch
from torch import Tensor

from .registry import op, unsupported

QLEN_ONLY = 1  # SGLang's TreeMaskMode on a CPU


@op
def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    num_steps: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Fill in the tree that the drafts form, for R requests of n nodes.

    Writes: tree_mask (flat, R * n * n), who sees whom; positions (R * n,) in the text;
    retrieve_index (R, n), the node's number in the batch; retrieve_next_token (R, n), its first
    child, or -1; retrieve_next_sibling (R, n), always -1 in a chain.
    """
    if topk != 1:
        raise unsupported("build_tree_kernel_efficient_cpu", f"topk = {topk}, only 1")
    if int(tree_mask_mode) != QLEN_ONLY:
        raise unsupported("build_tree_kernel_efficient_cpu", f"mask mode {tree_mask_mode}, only 1")
    requests, n = seq_lens.numel(), num_draft_tokens
    node = torch.arange(n)
    past = node[None, :] <= node[:, None]
    tree_mask.view(-1)[: requests * n * n].view(requests, n, n).copy_(past.expand(requests, n, n))
    positions[: requests * n] = (seq_lens.long()[:, None] + node).flatten()
    retrieve_index.copy_(torch.arange(requests * n).view(requests, n))
    retrieve_next_token.copy_(torch.where(node < n - 1, node + 1, -1).expand(requests, n))
    retrieve_next_sibling.fill_(-1)


@op
def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept drafts as long as each is what the target would have generated there.

    Reads candidates (R, n) and target_predict (R, n), the target's choice after each candidate.
    Writes, for the accepted nodes and the root: predicts (R * n,), the target's choice, the last of
    which is the bonus token; accept_index (R, depth), their numbers in the batch; and
    accept_token_num (R,), the drafts accepted, without the bonus token.
    """
    if bool((retrive_next_sibling != -1).any()):
        raise unsupported("verify_tree_greedy_cpu", "a tree of drafts (topk above 1)")
    width = min(candidates.shape[1], accept_index.shape[1])
    correct = candidates[:, 1:width] == target_predict[:, : width - 1]
    num_correct = correct.long().cumprod(1).sum(1)
    kept = torch.arange(width) <= num_correct[:, None]
    number = retrive_index[:, :width]
    accept_index[:, :width] = torch.where(kept, number, -1).to(accept_index.dtype)
    accept_token_num.copy_(num_correct)
    predicts[number[kept]] = target_predict[:, :width][kept].to(predicts.dtype)


@op
def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """Write each request's last accepted token, the bonus: accept_tokens[i * stride + len - 1]."""
    requests = accept_lens.numel()
    last = torch.arange(requests) * stride + accept_lens.long() - 1
    bonus_tokens[:requests] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


@op
def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Write the slots of the accepted tokens (accept_index is -1 elsewhere), close together."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]
