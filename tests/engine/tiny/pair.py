"""The tiny target and its EAGLE-3 draft in PyTorch, for training; SGLang has its own of both.

Both are Llama layers. Parameters have the names under which SGLang loads them.

What the draft sees follows SGLang's `llama_eagle3`: at row t, the target's hidden states at
position t after three of its layers (`fc` makes one of them), and the embedding of token t + 1. It
predicts token t + 2, and hands its own hidden state, before the last norm, to its next step, which
stands for the target's at t + 1.

Shapes: B texts, S tokens, T rows, H query heads, G key and value heads, D head_dim.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shape:
    """The part of a config.json that shapes a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


def read_config(name: str) -> dict:
    """Return the config.json of the target or the draft."""
    return json.loads((HERE / name / "config.json").read_text(encoding="utf-8"))


def read_shape(name: str) -> Shape:
    """Return the shape of the target or the draft."""
    config = read_config(name)
    return Shape(**{field.name: config[field.name] for field in fields(Shape)})


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Return a layer without bias, drawn from a normal distribution."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return x (B, heads, T, D) rotated by its positions (T,): dimension i with i + D / 2."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped heads, also over the keys of a draft's earlier steps."""

    def __init__(self, shape: Shape, inputs: int):
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta
        self.q_proj = linear(inputs, self.heads * self.head_dim)
        self.k_proj = linear(inputs, self.groups * self.head_dim)
        self.v_proj = linear(inputs, self.groups * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, shape.hidden_size, gain=0.3)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (B, H, T, D), of x (B, T, inputs)."""

        def split(y: Tensor) -> Tensor:
            y = y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return y.repeat_interleave(self.heads // y.shape[1], dim=1)

        query = rotate(split(self.q_proj(x)), positions, self.theta)
        key = rotate(split(self.k_proj(x)), positions, self.theta)
        return query, key, split(self.v_proj(x))

    def forward(
        self, x: Tensor, positions: Tensor, earlier: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Return what x (B, T, inputs) attends to, (B, T, hidden).

        Args:
            x: one row a token.
            positions: (T,), in the text.
            earlier: keys and values of the draft's steps up to now, to which these are appended.
                A row sees the first step's rows up to its own, and its own row of each later step.
        """
        query, key, value = self.project(x, positions)
        if earlier is None:
            earlier = []
        earlier.append((key, value))
        (key, value), *later = earlier
        if not later:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            rows = query.shape[2]
            query = query / math.sqrt(self.head_dim)
            future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
            scores = (query @ key.transpose(2, 3)).masked_fill(future, float("-inf"))
            own = [(query * k).sum(-1, keepdim=True) for k, _ in later]
            weights = torch.cat((scores, *own), dim=-1).softmax(-1)
            out = weights[..., :rows] @ value
            for i, (_, v) in enumerate(later):
                out = out + weights[..., rows + i, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Llama's gated layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape as x (..., hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer of the target or, with twice the inputs, of the draft."""

    def __init__(self, shape: Shape, is_draft: bool = False):
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        if is_draft:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, 2 * hidden if is_draft else hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(shape)


class Target(nn.Module):
    """A Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = shape = read_shape("target")
        # SGLang counts a layer's output, and takes the input of the next one.
        taps = read_config("draft")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.taps = [layer + 1 for layer in taps]
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, S, vocab) and the tapped hidden states (B, S, 3 * hidden)."""
        positions = torch.arange(tokens.shape[1])
        x, tapped = self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            if i in self.taps:
                tapped.append(x)
            x = x + layer.self_attn(layer.input_layernorm(x), positions)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.norm(x)), torch.cat(tapped, dim=-1)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under their Hugging Face names."""
        return {
            name if name.startswith("lm_head") else f"model.{name}": weight
            for name, weight in self.state_dict().items()
        }


class Draft(nn.Module):
    """An EAGLE-3 draft; its embeddings are the target's, its head its own."""

    def __init__(self, target: Target):
        super().__init__()
        shape = read_shape("draft")
        self.embed_tokens = target.embed_tokens
        self.fc = linear(len(target.taps) * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape, is_draft=True)])
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self.lm_head.weight.data.copy_(target.lm_head.weight.data)

    def forward(self, tapped: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
        """Draft `depth` tokens after every row, as if those before were right.

        Args:
            tapped: the target's hidden states (B, S, 3 * hidden).
            tokens: the text (B, S).
            depth: number of steps.

        Returns:
            Of every step j, logits (B, S - depth, vocab) of token t + 2 + j at row t.
        """
        rows = tokens.shape[1] - depth
        hidden = self.fc(tapped[:, :rows])
        (layer,), earlier, logits = self.layers, [], []
        for step in range(depth):
            embedded = self.embed_tokens(tokens[:, 1 + step : 1 + step + rows])
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
            hidden = hidden + layer.self_attn(x, torch.arange(rows) + step, earlier)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under SGLang's names; it takes the embeddings from the target."""
        own = self.state_dict()
        del own["embed_tokens.weight"]
        return own


def load_pair(folder: Path) -> tuple[Target, Draft]:
    """Return the pair that is in a folder, with weights in float64, as the CPU kernels compute."""
    target = Target()
    stored = load_file(folder / "target/model.safetensors")
    target.load_state_dict({key.removeprefix("model."): value for key, value in stored.items()})
    draft = Draft(target)
    stored = load_file(folder / "draft/model.safetensors")
    draft.load_state_dict(stored | {"embed_tokens.weight": target.embed_tokens.weight.data})
    return target.double(), draft.double()
