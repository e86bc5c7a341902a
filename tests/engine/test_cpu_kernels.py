"""Every op of the stand-in for sgl_kernel against a plain formula, token by token, in float64."""

import math

import pytest
import sgl_kernel
import torch

BF16 = torch.bfloat16
# One rounding to bfloat16, whose spacing is 2^-8 of a number at most.
CLOSE = {"rtol": 2**-8, "atol": 1e-6}


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(3)


def normal(rng, *shape, dtype=BF16):
    return torch.randn(*shape, generator=rng).to(dtype)


def integers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# --- the package ---------------------------------------------------------------------------------


def test_the_ops_are_where_sglang_looks():
    for name in sgl_kernel.registry.OPS:
        assert getattr(torch.ops.sgl_kernel, name) is getattr(sgl_kernel, name)
    assert hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    assert not hasattr(torch.ops.sgl_kernel, "no_such_op")


@pytest.mark.parametrize("place", [sgl_kernel, torch.ops.sgl_kernel])
def test_a_missing_op_is_named_when_it_is_called(place):
    op = place.fused_experts_cpu
    with pytest.raises(NotImplementedError, match=r"'fused_experts_cpu'.*bfloat16\[2, 3\], k=4"):
        op(torch.zeros(2, 3, dtype=BF16), k=4)


def test_what_a_chain_does_not_need_is_refused():
    empty = torch.zeros(0)
    with pytest.raises(NotImplementedError, match="topk = 2"):
        sgl_kernel.build_draft_decode_metadata_cpu(empty, empty, empty, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="topk = 4"):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[empty] * 8, 4, 3, 8, 1)
    with pytest.raises(NotImplementedError, match="mask mode 0"):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[empty] * 8, 1, 3, 4, 0)


# --- dense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rng, has_bias):
    x, weight = normal(rng, 5, 96), normal(rng, 48, 96)
    bias = normal(rng, 48) if has_bias else None
    packed = sgl_kernel.convert_weight_packed(weight)
    got = sgl_kernel.weight_packed_linear(x, packed, bias, True)
    assert got.dtype == BF16
    for i in range(5):
        for j in range(48):
            exact = math.fsum((x[i].double() * weight[j].double()).tolist())
            exact += float(bias[j]) if has_bias else 0.0
            # Correctly rounded: the sum is exact in float64, and is rounded once.
            assert got[i, j] == torch.tensor(exact, dtype=torch.float64).to(BF16)


def test_rmsnorm(rng):
    x, weight = normal(rng, 4, 64), normal(rng, 64)
    for row, got in zip(x.double(), sgl_kernel.rmsnorm_cpu(x, weight, 1e-5), strict=True):
        size = math.sqrt(sum(v * v for v in row.tolist()) / 64 + 1e-5)
        torch.testing.assert_close(got.double(), row / size * weight.double(), **CLOSE)


def test_fused_add_rmsnorm_works_in_place(rng):
    x, residual, weight = normal(rng, 4, 64), normal(rng, 4, 64), normal(rng, 64)
    total = x + residual
    assert sgl_kernel.fused_add_rmsnorm_cpu(x, residual, weight, 1e-5) is None
    assert torch.equal(residual, total)
    assert torch.equal(x, sgl_kernel.rmsnorm_cpu(total, weight, 1e-5))


def test_silu_and_mul(rng):
    x = normal(rng, 3, 32)
    got = sgl_kernel.silu_and_mul_cpu(x)
    assert got.shape == (3, 16)
    for i in range(3):
        for j in range(16):
            gate, up = float(x[i, j]), float(x[i, 16 + j])
            assert float(got[i, j]) == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=2**-8)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_embedding_turns_pairs_by_their_angle(rng, is_neox):
    head_size, positions = 8, integers(0, 3, 11)
    angle = torch.arange(16)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    query, key = normal(rng, 3, 16), normal(rng, 3, 8)
    got = sgl_kernel.rotary_embedding_cpu(positions, query, key, head_size, cos_sin, is_neox)
    for x, y in zip((query, key), got, strict=True):
        assert y.shape == x.shape
        for row, position in enumerate(positions.tolist()):
            for head in range(x.shape[1] // head_size):
                for pair in range(4):
                    a, b = (pair, pair + 4) if is_neox else (2 * pair, 2 * pair + 1)
                    a, b = head * head_size + a, head * head_size + b
                    z = complex(float(x[row, a]), float(x[row, b]))
                    theta = float(angle[position, pair])
                    z *= complex(math.cos(theta), math.sin(theta))
                    assert float(y[row, a]) == pytest.approx(z.real, rel=2**-8, abs=1e-6)
                    assert float(y[row, b]) == pytest.approx(z.imag, rel=2**-8, abs=1e-6)


# --- attention -----------------------------------------------------------------------------------

HEADS, GROUPS, HEAD_DIM, SLOTS = 4, 2, 8, 64


class Pool:
    """A KV cache of random slots and three requests with contexts of 9, 4 and 1 tokens."""

    def __init__(self, rng):
        self.seq_lens = integers(9, 4, 1)
        self.req_pool_indices = integers(2, 0, 3)
        self.req_to_token = torch.randperm(SLOTS, generator=rng)[: 4 * 16].view(4, 16).int()
        self.keys = normal(rng, SLOTS, GROUPS, HEAD_DIM)
        self.values = normal(rng, SLOTS, GROUPS, HEAD_DIM)

    def attend(self, request, query, context, cap=0.0):
        """Attend with one query (HEADS, HEAD_DIM) to the first `context` tokens of a request."""
        row = self.req_to_token[self.req_pool_indices[request]]
        out = torch.zeros(HEADS, HEAD_DIM, dtype=torch.float64)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            slots = [int(row[i]) for i in range(context)]
            scores = [
                float(query[head].double() @ self.keys[s, group].double()) * 0.3 for s in slots
            ]
            if cap:
                scores = [cap * math.tanh(score / cap) for score in scores]
            weights = [math.exp(score) for score in scores]
            for slot, weight in zip(slots, weights, strict=True):
                out[head] += weight / sum(weights) * self.values[slot, group].double()
        return out

    def decode(self, query, key=None, value=None, cache_loc=None, pick=slice(None), cap=0.0):
        out = torch.empty_like(query)
        seq_lens = self.seq_lens[pick]
        scratch = torch.zeros(seq_lens.numel(), HEADS, 8, HEAD_DIM + 1)
        sgl_kernel.decode_attention_cpu(
            query, self.keys, self.values, 1.0, 1.0, out, key, value, cache_loc, scratch,
            self.req_to_token, self.req_pool_indices[pick], seq_lens, 0.3, cap,
            False, 0, None, None,
        )  # fmt: skip
        return out

    def extend(self, query, lens, pick=slice(None), tree_mask=None):
        out = torch.full_like(query, math.nan)
        start = torch.cumsum(lens, 0) - lens
        sgl_kernel.extend_attention_cpu(
            query, None, None, out, self.keys, self.values, 1.0, 1.0,
            self.req_to_token, self.req_pool_indices[pick], self.seq_lens[pick], lens, start,
            int(lens.max()), 0.3, 0.0, False, 0, None, None, tree_mask, True,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_decode_attention(rng, cap):
    pool, query = Pool(rng), normal(rng, 3, HEADS, HEAD_DIM)
    got = pool.decode(query, cap=cap)
    for i, context in enumerate(pool.seq_lens.tolist()):
        expected = pool.attend(i, query[i], context, cap)
        torch.testing.assert_close(got[i].double(), expected, **CLOSE)


def test_decode_attention_stores_the_new_token_first(rng):
    pool, query = Pool(rng), normal(rng, 3, HEADS, HEAD_DIM)
    key, value = normal(rng, 3, GROUPS * HEAD_DIM), normal(rng, 3, GROUPS * HEAD_DIM)
    last = pool.req_to_token[pool.req_pool_indices, pool.seq_lens - 1].long()
    before = pool.keys.clone()
    got = pool.decode(query, key, value, last)
    assert torch.equal(pool.keys[last].flatten(1), key)
    assert torch.equal(pool.values[last].flatten(1), value)
    others = [slot for slot in range(SLOTS) if slot not in last.tolist()]
    assert torch.equal(pool.keys[others], before[others])
    for i, context in enumerate(pool.seq_lens.tolist()):
        torch.testing.assert_close(got[i].double(), pool.attend(i, query[i], context), **CLOSE)


def test_extend_attention_is_causal(rng):
    pool, lens = Pool(rng), integers(3, 4, 1)
    query = normal(rng, 8, HEADS, HEAD_DIM)
    got = pool.extend(query, lens)
    row = 0
    for i, (context, length) in enumerate(zip(pool.seq_lens.tolist(), lens.tolist(), strict=True)):
        for j in range(length):
            expected = pool.attend(i, query[row], context - length + 1 + j)
            torch.testing.assert_close(got[row].double(), expected, **CLOSE)
            row += 1
    with pytest.raises(NotImplementedError, match="a tree of drafts"):
        pool.extend(query, lens, tree_mask=torch.ones(1, dtype=torch.bool))


# --- a row depends on nothing beside it ----------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_a_row_is_bitwise_the_same_beside_any_others(rng, rows):
    x, weight, norm = normal(rng, 64, 256), normal(rng, 512, 256), normal(rng, 256)
    some = x[:rows].clone()
    for function in (
        lambda x: sgl_kernel.weight_packed_linear(x, weight, None),
        lambda x: sgl_kernel.rmsnorm_cpu(x, norm, 1e-5),
        sgl_kernel.silu_and_mul_cpu,
    ):
        assert torch.equal(function(x)[:rows], function(some))


def test_decoding_verifying_and_prefilling_agree_bitwise(rng):
    pool, lens = Pool(rng), integers(5, 4, 1)
    query = normal(rng, 10, HEADS, HEAD_DIM)
    last = query[[4, 8, 9]]
    together = pool.extend(query, lens)
    assert torch.equal(pool.decode(last), together[[4, 8, 9]])
    assert torch.equal(pool.extend(last, integers(1, 1, 1)), together[[4, 8, 9]])
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(pool.decode(last[one], pick=one), together[[[4, 8, 9][i]]])


# --- the cache and its table ---------------------------------------------------------------------


def test_store_cache(rng):
    key, value = normal(rng, 3, 2, 4), normal(rng, 3, 2, 4)
    keys, values = torch.zeros(10, 2, 4, dtype=BF16), torch.zeros(10, 2, 4, dtype=BF16)
    sgl_kernel.store_cache_cpu(key, value, keys, values, integers(7, 0, 4), 8)
    for cache, rows in ((keys, key), (values, value)):
        assert torch.equal(cache[[7, 0, 4]], rows)
        assert int((cache != 0).any(-1).any(-1).sum()) == 3


def test_copying_slots_reads_all_before_it_writes(rng):
    layers = [normal(rng, 12, 2, 4) for _ in range(3)]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[3], layer[5], layer[4] = layer[5].clone(), layer[4].clone(), layer[9].clone()
    ptrs = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([16, 16, 16])
    sgl_kernel.copy_all_layer_kv_cache_cpu(ptrs, strides, integers(3, 5, 4), integers(5, 4, 9))
    sgl_kernel.copy_all_layer_kv_cache_cpu(ptrs, strides, integers(), integers())
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer, wanted)


def test_assign_req_to_token_pool():
    table = torch.zeros(3, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        integers(2, 0, 1),
        table,
        integers(1, 0, 4),
        integers(4, 0, 6),
        integers(11, 12, 13, 14, 15),
        6,
    )
    assert table.tolist() == [[0] * 6, [0, 0, 0, 0, 14, 15], [0, 11, 12, 13, 0, 0]]


def test_assign_extend_cache_locs():
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    out = torch.full((6,), -1)
    sgl_kernel.assign_extend_cache_locs_cpu(
        integers(2, 0), table, integers(1, 3), integers(4, 5), out, 6
    )
    assert out.tolist() == [13, 14, 15, 3, 4, -1]


def test_assign_draft_cache_locs():
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    out = torch.full((4,), -1)
    lens = integers(2, 4, dtype=torch.int32)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(integers(1, 0), table, lens, out, 6, 1, 2)
    assert out.tolist() == [8, 9, 4, 5]


def test_draft_metadata_is_a_copy_of_each_requests_row():
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    got = sgl_kernel.build_draft_decode_metadata_cpu(table, integers(2, 0), integers(2, 3), 1, 3, 6)
    assert got.tolist() == [[12, 13, 14, 15, 16, 17], [0, 1, 2, 3, 4, 5]]
    got.fill_(0)
    assert int(table.sum()) == 153


# --- the chain -----------------------------------------------------------------------------------


def build(seq_lens, n):
    """Build the chain as SGLang calls it; return its outputs."""
    requests = len(seq_lens)
    mask = torch.ones(requests * n * n, dtype=torch.bool)
    positions = torch.empty(requests * n, dtype=torch.int64)
    index, next_token, sibling = torch.full((3, requests, n), -1)
    parents = torch.arange(-1, max(n - 3, -1)).expand(requests, -1)
    selected = torch.arange(n - 1).expand(requests, -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        parents, selected, integers(*seq_lens), mask, positions, index, next_token, sibling,
        1, n - 1, n, 1,
    )  # fmt: skip
    return mask.view(requests, n, n), positions, index, next_token, sibling


def test_the_tree_of_a_chain():
    mask, positions, index, next_token, sibling = build([5, 9], 4)
    assert positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next_token.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2
    assert mask.tolist() == [[[j <= i for j in range(4)] for i in range(4)]] * 2


def test_a_chain_of_no_drafts():
    mask, positions, index, next_token, _ = build([5, 9], 1)
    assert (positions.tolist(), index.tolist(), next_token.tolist()) == (
        [5, 9], [[0], [1]], [[-1], [-1]],
    )  # fmt: skip
    assert mask.all()


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_greedy_verification_walks_down_the_chain(rng, n):
    requests = 50
    _, _, index, next_token, sibling = build([3] * requests, n)
    candidates = torch.randint(0, 3, (requests, n), generator=rng)
    target = torch.randint(0, 3, (requests, n), generator=rng)
    predicts = torch.zeros(requests * n, dtype=torch.int32)
    accepted = torch.full((requests, n), -1, dtype=torch.int32)
    num_correct = torch.full((requests,), 99, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=num_correct,
        candidates=candidates, retrive_index=index, retrive_next_token=next_token,
        retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    for i in range(requests):
        length = 0
        while length + 1 < n and candidates[i, length + 1] == target[i, length]:
            length += 1
        assert num_correct[i] == length
        kept = [i * n + node for node in range(length + 1)]
        assert accepted[i].tolist() == kept + [-1] * (n - 1 - length)
        chosen = predicts[i * n : (i + 1) * n].tolist()
        assert chosen == target[i, : length + 1].tolist() + [0] * (n - 1 - length)


def test_a_tree_is_refused():
    sibling = integers(-1, 2).view(1, 2)
    empty = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="a tree of drafts"):
        sgl_kernel.verify_tree_greedy_cpu(
            empty[0], empty, empty[0, :1], empty, empty, empty, sibling, empty
        )


def test_fill_bonus_tokens():
    tokens = integers(10, 11, 12, 20, 21, 22, dtype=torch.int32)
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, integers(1, 3, dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [10, 22]


def test_fill_accept_out_cache_loc():
    accepted = integers(0, -1, -1, 3, 4, -1, dtype=torch.int32)
    slots = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accepted, integers(30, 31, 32, 33, 34, 35), slots)
    assert slots.tolist() == [30, 33, 34, 0, 0, 0]


# --- ranks ---------------------------------------------------------------------------------------


def collect(rank, store, results):
    """Run both collectives as one of two ranks."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    total = torch.full((2, 3), float(rank + 1), dtype=BF16)
    assert sgl_kernel.shm_allreduce(total, sgl_kernel.collective.SUM) is total
    parts = sgl_kernel.shm_allgather(torch.full((2, 1), rank), 1)
    torch.save((total, parts), f"{results}/{rank}")
    torch.distributed.destroy_process_group()


def test_sums_and_gathers_between_ranks(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=collect, args=(i, tmp_path / "store", tmp_path)) for i in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    for i in (0, 1):
        total, parts = torch.load(tmp_path / str(i))
        assert total.tolist() == [[3.0] * 3] * 2
        assert parts.tolist() == [[0, 1]] * 2


def test_setting_up_a_rank_changes_nothing():
    threads = torch.get_num_threads()
    assert "0-1" in sgl_kernel.init_cpu_threads_env("0-1")
    assert sgl_kernel.initialize(1, 0) is None
    assert torch.get_num_threads() == threads
    with pytest.raises(NotImplementedError, match="only a sum"):
        sgl_kernel.shm_allreduce(torch.zeros(1), sgl_kernel.collective.SUM + 1)
