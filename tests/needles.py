"""A llama of two layers that copies: what followed a token when it last stood in the prompt.

Its weights are written down, not trained. The first layer looks at the token before, whatever it
is: key and query are constants whose rotation is largest at a distance of one. The second looks for
the place whose token before is the one that is asked for, by codes in the dimensions that hardly
rotate, and returns the code of the token there. So the answer to a *needle*, a token that stands
once in a prompt of any length, is the tokens that follow it, if attention in both layers finds one
position among all of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

#: Needles of a prompt, and the tokens of each: its name and what follows it.
NEEDLES, LENGTH = 8, 5
#: Tokens that stand between needles: those below this.
FILLERS = 200
VOCAB = FILLERS + NEEDLES * LENGTH
HIDDEN, HEADS, HEAD_DIM = 256, 1, 64
_THETA = 1e10
#: Pairs of dimensions, by what they are for: 16 tell the distance, and 12 turn by at most 0.1
#: radians within 131,072 tokens.
_DISTANCE, _CONTENT = range(16), range(20, 32)
#: What the largest score is, and the part of it by which the next one is smaller, at least: by
#: distance 0.1, by content a half. Codes of 4 bits change a score by some hundredths of it.
_SCORES = (250.0, 100.0)
_CONSTANT = 4.0
#: Where the residual stream holds a token's code, the one before it, the copy, and a constant.
_CODE, _BEFORE, _COPY, _ONE = (slice(0, 64), slice(64, 128), slice(128, 192), 192)


def needle(number: int) -> list[int]:
    """The tokens of a needle, its name first."""
    first = FILLERS + number * LENGTH
    return list(range(first, first + LENGTH))


def haystack(tokens: int, at: list[int], seed: int = 5) -> list[int]:
    """A prompt of this many tokens with the n-th needle at position ``at[n]``, from 1 on: the first
    token has none before it.
    """
    draw = random.Random(seed)
    prompt = [draw.randrange(FILLERS) for _ in range(tokens)]
    for number, position in enumerate(at):
        prompt[position : position + LENGTH] = needle(number)
    if len(prompt) != tokens:
        raise ValueError(f"haystack: a needle at {max(at)} does not fit in {tokens} tokens")
    return prompt


def copying_llama(folder: Path, context: int = 131_072) -> Path:
    """Write the model into ``folder`` and return it: a folder of safetensors in float16."""
    folder.mkdir(parents=True)
    codes = _codes()
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, _CODE], embedding[:, _ONE] = codes, _CONSTANT
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, _COPY] = codes
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
        **_layer(0, *_by_distance(), _BEFORE),
        **_layer(1, *_by_content(), _COPY),
    }
    save_file({name: x.half() for name, x in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _codes() -> Tensor:
    """Codes of ±1 for all tokens. In the part that attention compares, those of needles agree with
    no other code in more than 18 of 24 dimensions.
    """
    draw = torch.Generator().manual_seed(3)
    compared = 2 * len(_CONTENT)
    codes: list[Tensor] = []
    while len(codes) < VOCAB:
        one = torch.randint(2, (64,), generator=draw) * 2.0 - 1.0
        others = torch.stack(codes)[:, :compared] if codes else torch.zeros(1, compared)
        if len(codes) < FILLERS or float((others @ one[:compared]).max()) <= 12:
            codes.append(one)
    return torch.stack(codes)


def _by_distance() -> tuple[Tensor, Tensor]:
    """Matrices of queries and keys of the layer that looks at the token before."""
    query, key = torch.zeros(2, HEAD_DIM, HIDDEN)
    turns = [_THETA ** (-pair / 32) for pair in _DISTANCE]
    parts = [turn**0.5 for turn in turns]
    # The first layer's norm divides the constant by this.
    size = _CONSTANT / (80 / HIDDEN) ** 0.5
    for pair, turn, part in zip(_DISTANCE, turns, parts, strict=True):
        length = (_SCORES[0] * HEAD_DIM**0.5 * part / sum(parts)) ** 0.5 / size
        query[pair, _ONE] = length
        key[pair, _ONE] = length * float(torch.tensor(turn).cos())
        key[pair + 32, _ONE] = length * float(torch.tensor(turn).sin())
    return query, key


def _by_content() -> tuple[Tensor, Tensor]:
    """Matrices of the layer that looks for the place whose token before has the query's code."""
    query, key = torch.zeros(2, HEAD_DIM, HIDDEN)
    rows = [pair + half for half in (0, 32) for pair in _CONTENT]
    length = (_SCORES[1] * HEAD_DIM**0.5 / len(rows)) ** 0.5 * (144 / HIDDEN) ** 0.5
    for column, row in enumerate(rows):
        query[row, _CODE.start + column] = length
        key[row, _BEFORE.start + column] = length
    return query, key


def _layer(number: int, query: Tensor, key: Tensor, to: slice) -> dict[str, Tensor]:
    """A layer whose heads are equal, and which writes the code of what it finds to ``to``."""
    value, out = torch.zeros(HEAD_DIM, HIDDEN), torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    value[:, _CODE] = torch.eye(HEAD_DIM) * ((144 if number else 80) / HIDDEN) ** 0.5
    for head in range(HEADS):
        out[to, head * HEAD_DIM : (head + 1) * HEAD_DIM] = torch.eye(HEAD_DIM) / HEADS
    name = f"model.layers.{number}"
    return {
        f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{name}.self_attn.q_proj.weight": query.repeat(HEADS, 1),
        f"{name}.self_attn.k_proj.weight": key,
        f"{name}.self_attn.v_proj.weight": value,
        f"{name}.self_attn.o_proj.weight": out,
        f"{name}.mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
        f"{name}.mlp.up_proj.weight": torch.zeros(64, HIDDEN),
        f"{name}.mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
    }
