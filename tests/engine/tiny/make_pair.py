"""Write a tiny target and an EAGLE-3 draft whose acceptance is real, partial and varying.

    python tests/engine/tiny/make_pair.py FOLDER      # a second; FOLDER/target and FOLDER/draft

The weights are set by hand, not trained. Every token t has two successors, `first(t)` and
`second(t)`: the head's row of a token is the sum of the embeddings of the two tokens that it
succeeds, the second times a weight. The embeddings are orthogonal, so without anything else the
target would take the first successor. Its eight random layers add what attention finds in the
context, about half as large as the embedding, and that moves the choice:

- an **easy** token's second successor weighs little: the context changes nothing;
- a **hard** token's two successors weigh the same: the context decides.

The first successors form one cycle through the vocabulary, in which 32 easy tokens precede 64 hard
ones; second successors jump. So a text alternates between stretches that the draft predicts and
stretches where it often fails.

The draft knows the same tables. Its one attention layer looks at its own position alone (queries
and keys are the embedding, sharpened) and adds the token's embedding to about half of the hidden
state that it got: the target's at the previous position, through `fc`, or its own. So it sees a
stale piece of the context, and guesses hard tokens better than a coin, but not always right.

Two ranks of a tensor-parallel target agree bit for bit with one: the projections back into the
hidden state are block-diagonal, so each rank fills half of it and adds zeros to the other's half.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIGS = Path(__file__).resolve().parent
SEED = 20261129
STRETCH = 32  # along the cycle of first successors, every third stretch of tokens is easy
EASY_WEIGHT, HARD_WEIGHT = 0.6, 1.0  # of the second successor
SCORE_GAIN = 1.7  # of the target's queries and keys: each attends to a few tokens
ATTENTION_GAIN, MLP_GAIN = 0.35, 0.2  # what a layer adds to an embedding of size 1
SHARPNESS = 2.0  # of the draft's queries and keys
FORGET = 0.6  # how much of the hidden state the draft takes away a step


def read_config(name: str) -> dict[str, int]:
    """Return the shape of the target or the draft."""
    return json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))


def language(rng: torch.Generator, vocab: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Return the embeddings and the head, both (vocab, hidden)."""
    if vocab > hidden:
        raise ValueError(
            f"orthogonal embeddings need vocab_size <= hidden_size = {hidden}: {vocab}"
        )
    random = torch.randn(vocab, hidden, generator=rng, dtype=torch.float64)
    unit = torch.linalg.qr(random.T).Q.T
    cycle = torch.randperm(vocab, generator=rng)
    place = torch.arange(vocab)
    first, second = torch.empty_like(cycle), torch.empty_like(cycle)
    first[cycle] = cycle.roll(-1)
    second[cycle] = cycle[torch.randperm(vocab, generator=rng)]
    weight = torch.empty(vocab, 1, dtype=torch.float64)
    weight[cycle, 0] = torch.where(place // STRETCH % 3 == 0, EASY_WEIGHT, HARD_WEIGHT).double()
    head = torch.zeros_like(unit)
    head.index_add_(0, first, unit)
    head.index_add_(0, second, weight * unit)
    return unit * math.sqrt(hidden), head


def block_diagonal(rng: torch.Generator, rows: int, columns: int, gain: float) -> Tensor:
    """Return a random (rows, columns) matrix of two blocks that scales a vector by gain."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    for half in range(2):
        block = torch.randn(rows // 2, columns // 2, generator=rng, dtype=torch.float64)
        block *= gain / math.sqrt(columns // 2)
        matrix[half * (rows // 2) :, half * (columns // 2) :][: rows // 2, : columns // 2] = block
    return matrix


def target_weights(rng: torch.Generator, embed: Tensor, head: Tensor) -> dict[str, Tensor]:
    """Return the target's weights under their Hugging Face names."""
    config = read_config("target")
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim

    def dense(rows: int, gain: float = 1.0) -> Tensor:
        matrix = torch.randn(rows, hidden, generator=rng, dtype=torch.float64)
        return matrix * gain / math.sqrt(hidden)

    ones = torch.ones(hidden)
    weights = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    for layer in range(config["num_hidden_layers"]):
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": ones,
                "self_attn.q_proj": dense(query_size, SCORE_GAIN),
                "self_attn.k_proj": dense(kv_size, SCORE_GAIN),
                "self_attn.v_proj": dense(kv_size),
                "self_attn.o_proj": block_diagonal(rng, hidden, query_size, ATTENTION_GAIN),
                "post_attention_layernorm": ones,
                "mlp.gate_proj": dense(inner),
                "mlp.up_proj": dense(inner),
                "mlp.down_proj": block_diagonal(rng, hidden, inner, MLP_GAIN),
            }.items()
        }
    return weights


def draft_weights(embed: Tensor, head: Tensor) -> dict[str, Tensor]:
    """Return the draft's weights under SGLang's names; its layer sees embedding | hidden state."""
    config = read_config("draft")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    identity, nothing, ones = torch.eye(hidden), torch.zeros(hidden, hidden), torch.ones(hidden)
    of_embedding = torch.cat((identity, nothing), 1)
    of_hidden = torch.cat((nothing, identity), 1)
    return {
        "embed_tokens.weight": embed,
        "fc.weight": torch.cat((nothing, nothing, identity), 1),  # the last of the three taps
        "layers.0.input_layernorm.weight": ones,
        "layers.0.hidden_norm.weight": ones,
        "layers.0.self_attn.q_proj.weight": SHARPNESS * of_embedding,
        "layers.0.self_attn.k_proj.weight": SHARPNESS * of_embedding,
        "layers.0.self_attn.v_proj.weight": of_embedding - FORGET * of_hidden,
        "layers.0.self_attn.o_proj.weight": identity,
        "layers.0.post_attention_layernorm.weight": ones,
        "layers.0.mlp.gate_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.up_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.down_proj.weight": torch.zeros(hidden, inner),
        "norm.weight": ones,
        "lm_head.weight": head,
    }


def make_pair(folder: Path) -> None:
    """Write folder/target and folder/draft, each a config.json and a model.safetensors."""
    rng = torch.Generator().manual_seed(SEED)
    config = read_config("target")
    embed, head = language(rng, config["vocab_size"], config["hidden_size"])
    models = {
        "target": target_weights(rng, embed, head),
        "draft": draft_weights(embed, head),
    }
    for name, weights in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(CONFIGS / name / "config.json", folder / name)
        stored = {key: value.to(torch.bfloat16).contiguous() for key, value in weights.items()}
        save_file(stored, folder / name / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make_pair(parser.parse_args().folder)
