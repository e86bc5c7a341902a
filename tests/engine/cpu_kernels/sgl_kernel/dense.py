"""Linear layers, normalisation, activation and rotary embedding: one row (token) at a time."""

import torch
from torch import Tensor

from .registry import op


@op
def convert_weight_packed(weight: Tensor) -> Tensor:
    """Pack a weight (out, in) into AMX tiles; nothing to do here."""
    return weight


@op
def weight_packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool = True
) -> Tensor:
    """Return x (rows, in) times the packed weight (out, in) transposed, plus bias (out,)."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
    return y.to(x.dtype)


@op
def rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension of x (..., hidden)."""
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(x.dtype)


@op
def fused_add_rmsnorm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add x to the residual, both (rows, hidden), in place; leave the norm of the sum in x."""
    residual.add_(x)
    x.copy_(rmsnorm_cpu(residual, weight, eps))


@op
def silu_and_mul_cpu(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x (rows, 2 * width) = gate | up."""
    gate, up = x.double().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@op
def rotary_embedding_cpu(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Return query and key (rows, heads * head_size) rotated by their positions (rows,).

    The cache (max_position, head_size) holds cosines, then sines. NeoX style rotates dimension i
    with i + head_size / 2; the other style rotates neighbours.
    """
    cos, sin = cos_sin_cache[positions.flatten().long()].double()[:, None].chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        heads = x.double().reshape(cos.shape[0], -1, head_size)
        if is_neox:
            a, b = heads.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = heads[..., ::2], heads[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return rotated.reshape(x.shape).to(x.dtype)

    return rotate(query), rotate(key)
