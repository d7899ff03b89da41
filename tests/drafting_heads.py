"""Small heads of EAGLE, EAGLE-3 and Medusa in plain torch, written from their papers and code.

They are trained for a few seconds on the hidden states of a tiny model, and saved as their authors'
tools do: with the same names, shapes and configs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sdk import LLM, SamplingParams

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 448, 64, 128, 8, 4, 2
#: Tokens that the EAGLE-3 head knows, and the layers that it reads.
DRAFT_VOCAB, STREAMS = 300, (2, LAYERS // 2, LAYERS - 3)
MEDUSA_HEADS, MEDUSA_BLOCKS = 3, 2
THETA, EPS = 10000.0, 1e-5
#: Prompts that repeat themselves, one that does not, and one that begins like the first.
PROMPTS = [
    [5, 9, 30, 31, 200, 17] * 6,
    [44, 8, 9, 10, 44, 8, 9],
    [7] * 9,
    [3, 1, 4, 15, 9, 2, 6, 53],
    [5, 9, 30, 31, 200, 17] * 6 + [40, 41],
]
#: Tokens of the texts that heads are trained on.
LENGTH = 64


def tiny_target() -> LlamaForCausalLM:
    """A random model whose next tokens are rarely uncertain."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1.0)
        model.lm_head.weight.normal_(0, 0.35)
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.normal_(0, 0.08)
    return model


class Norm(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * self.weight


class Attention(nn.Module):
    """Causal attention over ``[T, inputs]``, the row at position i being the i-th."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        dim = HIDDEN // HEADS
        self.q_proj = nn.Linear(inputs, HEADS * dim, bias=False)
        self.k_proj = nn.Linear(inputs, KV_HEADS * dim, bias=False)
        self.v_proj = nn.Linear(inputs, KV_HEADS * dim, bias=False)
        self.o_proj = nn.Linear(HEADS * dim, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        *lead, tokens, _ = x.shape
        q = self.q_proj(x).view(*lead, tokens, HEADS, -1).transpose(-2, -3)
        k = self.k_proj(x).view(*lead, tokens, KV_HEADS, -1).transpose(-2, -3)
        v = self.v_proj(x).view(*lead, tokens, KV_HEADS, -1).transpose(-2, -3)
        q, k = _turned(q), _turned(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=-3) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(-2, -3).flatten(-2))


def _turned(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    frequencies = THETA ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """EAGLE's first layer has no norm at its beginning."""

    def __init__(self, inputs: int = HIDDEN) -> None:
        super().__init__()
        self.self_attn = Attention(inputs)
        self.mlp = MLP()
        self.post_attention_layernorm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(Layer):
    def __init__(self) -> None:
        super().__init__(2 * HIDDEN)
        self.input_layernorm = Norm()
        self.hidden_norm = Norm()

    def both(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        x = hidden + self.self_attn(joined)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle(nn.Module):
    """``features`` are the target's last hidden states, after the final norm."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=True)
        self.layers = nn.ModuleList([Layer()])
        self.ends = [target.model.embed_tokens, target.lm_head]  # a list: not part of this module

    def inputs(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Token i + 1 and the hidden state of token i, for each i: the next hidden states."""
        embedded = self.ends[0](tokens)
        return self.layers[0](self.fc(torch.cat([embedded, hidden], dim=-1)))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ends[1](hidden)


class Eagle3(nn.Module):
    """``features`` are three residual streams of the target, joined."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Eagle3Layer()
        self.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
        tokens = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        self.register_buffer("d2t", tokens - torch.arange(DRAFT_VOCAB))
        self.register_buffer("t2d", torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, 1))
        self.ends = [target.model.embed_tokens]

    def inputs(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return self.midlayer.both(self.ends[0](tokens), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of all tokens of the target."""
        known = torch.arange(DRAFT_VOCAB) + self.d2t
        found = self.lm_head(self.norm(hidden))
        return torch.full((*found.shape[:-1], VOCAB), -1e30).index_copy(-1, known, found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def medusa(target: LlamaForCausalLM) -> nn.ModuleList:
    """Sequential heads, named like ``0.0.linear.weight`` and ``0.2.weight``."""
    heads = []
    for _ in range(MEDUSA_HEADS):
        last = nn.Linear(HIDDEN, VOCAB, bias=False)
        last.weight.data.copy_(target.lm_head.weight)
        heads.append(nn.Sequential(*(Block() for _ in range(MEDUSA_BLOCKS)), last))
    return nn.ModuleList(heads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Several threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def features(target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states, the three residual streams joined, and the logits."""
    with torch.no_grad():
        found = target(tokens, output_hidden_states=True)
    streams = torch.cat([found.hidden_states[i] for i in STREAMS], dim=-1)
    return found.hidden_states[-1], streams, found.logits


def texts(path: Path) -> Tensor:
    """How the target continues the prompts, and random ones: ``[N, LENGTH]``."""
    torch.manual_seed(1)
    random = torch.randint(3, VOCAB, (3, 6)).tolist()
    starts = [list(prompt) for prompt in (*PROMPTS, *PROMPTS, *random)]
    params = [SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)] * len(starts)
    params[: len(PROMPTS)] = [params[0].clone(temperature=0.9, top_p=0.9, seed=3)] * len(PROMPTS)
    with LLM(path, max_model_len=LENGTH, compute="exact") as llm:
        outputs = llm.generate(starts, params)
    pairs = zip(starts, outputs, strict=True)
    return torch.tensor([[*start, *found.outputs[0].token_ids][:LENGTH] for start, found in pairs])


def train(head: nn.Module, target: LlamaForCausalLM, tokens: Tensor, steps: int = 50) -> None:
    """The losses are those of their authors: the target's next distribution, and for EAGLE its next
    hidden state too.
    """
    last, streams, logits = features(target, tokens)
    given = streams if isinstance(head, Eagle3) else last
    optimizer = torch.optim.Adam(head.parameters(), lr=6e-3)
    for _ in range(steps):
        if isinstance(head, nn.ModuleList):
            pairs = [(one(last[:, : -1 - k]), logits[:, 1 + k :]) for k, one in enumerate(head)]
        else:
            hidden = head(tokens[:, 1:], head.inputs(given[:, :-1]))
            pairs = [(head.logits(hidden), logits[:, 1:])]
        loss = sum((_loss(*pair) for pair in pairs), torch.tensor(0.0))
        if isinstance(head, Eagle):
            loss = loss + F.smooth_l1_loss(hidden, last[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _loss(found: Tensor, expected: Tensor) -> Tensor:
    return -(expected.softmax(-1) * found.log_softmax(-1)).sum(-1).mean()


def layer_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": VOCAB,
        **changes,
    }


EAGLE3_CONFIG = layer_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB)
MEDUSA_CONFIG = {
    "medusa_num_heads": MEDUSA_HEADS,
    "medusa_num_layers": MEDUSA_BLOCKS,
    "base_model_name_or_path": "tiny",
}


def save(folder: Path, head: nn.Module, config: dict[str, Any]) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(config))
    if isinstance(head, nn.ModuleList):
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def untrained_eagle(folder: Path, hidden: int, vocab: int) -> None:
    """Write a head for a model of these sizes."""
    inner, attention, mlp = 2 * hidden, "layers.0.self_attn", "layers.0.mlp"
    shapes = {"fc": (hidden, 2 * hidden), f"{mlp}.down_proj": (hidden, inner)}
    shapes |= {f"{attention}.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    tensors = {f"{name}.weight": torch.randn(shape) / 64 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(layer_config(**sizes, **heads)))
    save_file(tensors, folder / "model.safetensors")


def draft_logits(
    head: nn.Module, found: tuple[Tensor, Tensor, Tensor], tokens: Sequence[int], known: int
) -> Tensor:
    """The logits of the draft after ``tokens``, of which the last ones are drafts themselves.

    ``found``: the :func:`features` of the known ones, or of more.
    """
    last, streams = (values[0, : known - 1] for values in found[:2])
    with torch.no_grad():
        if isinstance(head, nn.ModuleList):
            return head[len(tokens) - known](last[-1])
        hidden = head.inputs(streams if isinstance(head, Eagle3) else last)
        shifted = torch.tensor(tokens[1:])
        while True:
            following = head(shifted[: len(hidden)], hidden)
            if len(hidden) == len(shifted):
                return head.logits(following[-1])
            hidden = torch.cat([hidden, following[-1:]])


class TinyHeads(NamedTuple):
    """A tiny model and the folders of its heads, each with its torch module."""

    target: Path
    model: LlamaForCausalLM
    folders: dict[str, Path]
    modules: dict[str, nn.Module]


def write_tiny_heads(folder: Path, tokenizer: Path) -> TinyHeads:
    """Train one head for each method."""
    model, path = tiny_target(), folder / "target"
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path)
    tokens = texts(path)
    torch.manual_seed(0)
    modules = {"eagle": Eagle(model), "eagle3": Eagle3(model), "medusa": medusa(model)}
    configs = {"eagle": layer_config(), "eagle3": EAGLE3_CONFIG, "medusa": MEDUSA_CONFIG}
    folders = {}
    for method, module in modules.items():
        with one_thread():
            train(module, model, tokens)
        folders[method] = save(folder / method, module, configs[method])
    return TinyHeads(path, model, folders, modules)
