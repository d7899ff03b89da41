"""Random GGUF files with the shapes of published models, whose weights need not be downloaded.

Names of tensors, metadata and the mixture of types (Q4_K_M if no other is named) are those of
llama.cpp's converter and quantizer, so that other engines open the files too. A matrix consists of
blocks that were quantized from normal numbers of variance 1 / columns, drawn from a small bank for
each type and width. There is no vocabulary. Sizes are those of the published configs, as far as
known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from sdk.bench.shape_parts import USUAL, Block, RealShape, Tensor, common, ends


@dataclass(frozen=True, slots=True)
class Dense:
    """Llama 3: every layer has attention and an MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int = 128
    vocab: int = 128256
    architecture: str = "llama"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        found = common(self, self.mlp, self.kv_heads, 5e5)
        return {**found, "rope.dimension_count": self.head_dim}

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden, tied=False)
        hidden, keys = self.hidden, self.kv_heads * self.head_dim
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            yield block.matrix("attn_q", self.heads * self.head_dim, hidden)
            yield block.matrix("attn_k", keys, hidden)
            yield block.value("attn_v", (keys, hidden), i, self.layers)
            yield block.matrix("attn_output", hidden, self.heads * self.head_dim)
            yield block.norm("ffn_norm", hidden)
            yield from block.mlp(hidden, self.mlp)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Qwen3.5: three of four layers are gated delta nets, with ``k_heads`` and ``v_heads`` of
    ``state`` features each."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    v_heads: int
    k_heads: int = 16
    state: int = 128
    head_dim: int = 256
    vocab: int = 248320
    kernel: int = 4
    every: int = 4
    architecture: str = "qwen35"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        turned = self.head_dim // 4
        sections = [turned // 2 - 2 * (turned // 6), turned // 6, turned // 6, 0]
        return {
            **common(self, self.mlp, self.kv_heads, 1e7),
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": turned,
            "rope.dimension_sections": sections,
            "full_attention_interval": self.every,
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.state,
            "ssm.group_count": self.k_heads,
            "ssm.time_step_rank": self.v_heads,
            "ssm.inner_size": self.v_heads * self.state,
        }

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden)
        values, hidden = self.v_heads * self.state, self.hidden
        mixed = 2 * self.k_heads * self.state + values
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            if (i + 1) % self.every == 0:
                yield block.matrix("attn_q", 2 * queries, hidden)  # and the gate
                yield block.matrix("attn_k", keys, hidden)
                yield block.value("attn_v", (keys, hidden), i, self.layers)
                yield block.matrix("attn_output", hidden, queries)
                yield block.norm("attn_q_norm", self.head_dim)
                yield block.norm("attn_k_norm", self.head_dim)
            else:
                yield block.value("attn_qkv", (mixed, hidden), i, self.layers)
                yield block.matrix("attn_gate", values, hidden)
                yield block.matrix("ssm_alpha", self.v_heads, hidden)
                yield block.matrix("ssm_beta", self.v_heads, hidden)
                yield block.values("ssm_a", "decays", self.v_heads)
                yield block.values("ssm_dt.bias", "steps", self.v_heads)
                yield block.values("ssm_conv1d.weight", "taps", mixed, self.kernel)
                yield block.norm("ssm_norm", self.state)
                yield block.matrix("ssm_out", hidden, values)
            yield block.norm("post_attention_norm", hidden)
            yield from block.mlp(hidden, self.mlp)


@dataclass(frozen=True, slots=True)
class ShortConvolutions:
    """LFM2: most layers are gated short convolutions; ``attention``: the others."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    attention: tuple[int, ...]
    head_dim: int = 64
    vocab: int = 65536
    kernel: int = 3
    architecture: str = "lfm2"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        each = [self.kv_heads if i in self.attention else 0 for i in range(self.layers)]
        found = common(self, self.mlp, each, 1e6)
        return {**found, "shortconv.l_cache": self.kernel}

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden, norm="token_embd_norm")
        hidden, keys = self.hidden, self.kv_heads * self.head_dim
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            if i in self.attention:
                at, count = self.attention.index(i), len(self.attention)
                yield block.matrix("attn_q", hidden, hidden)
                yield block.matrix("attn_k", keys, hidden)
                yield block.value("attn_v", (keys, hidden), at, count)
                yield block.matrix("attn_output", hidden, hidden)
                yield block.norm("attn_q_norm", self.head_dim)
                yield block.norm("attn_k_norm", self.head_dim)
            else:
                yield block.matrix("shortconv.in_proj", 3 * hidden, hidden)
                yield block.values("shortconv.conv.weight", "taps", hidden, self.kernel)
                yield block.matrix("shortconv.out_proj", hidden, hidden)
            yield block.norm("ffn_norm", hidden)
            yield from block.mlp(hidden, self.mlp)


@dataclass(frozen=True, slots=True)
class StateSpaces:
    """Granite 4 H: Mamba-2 layers with a mixture of experts each; ``attention``: the others."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    expert: int
    experts: int
    used: int
    shared: int
    attention: tuple[int, ...]
    ssm_heads: int
    state: int = 128
    groups: int = 1
    kernel: int = 4
    head_dim: int = 128
    vocab: int = 100352
    architecture: str = "granitehybrid"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        each = [self.kv_heads if i in self.attention else 0 for i in range(self.layers)]
        return {
            **common(self, self.expert, each, 10000.0),
            "rope.dimension_count": self.head_dim,
            "rope.scaling.finetuned": False,  # attention without positions
            "attention.scale": 1 / self.head_dim,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 6.0,
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "expert_shared_feed_forward_length": self.shared,
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.state,
            "ssm.group_count": self.groups,
            "ssm.inner_size": 2 * self.hidden,
            "ssm.time_step_rank": self.ssm_heads,
        }

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden)
        hidden, inner, keys = self.hidden, 2 * self.hidden, self.kv_heads * self.head_dim
        mixed = inner + 2 * self.groups * self.state
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            if i in self.attention:
                at, count = self.attention.index(i), len(self.attention)
                yield block.matrix("attn_q", self.heads * self.head_dim, hidden)
                yield block.matrix("attn_k", keys, hidden)
                yield block.value("attn_v", (keys, hidden), at, count)
                yield block.matrix("attn_output", hidden, self.heads * self.head_dim)
            else:
                yield block.matrix("ssm_in", inner + mixed + self.ssm_heads, hidden)
                yield block.values("ssm_conv1d.weight", "taps", mixed, self.kernel)
                yield block.values("ssm_conv1d.bias", "normal", mixed)
                yield block.values("ssm_dt.bias", "steps", self.ssm_heads)
                yield block.values("ssm_a", "decays", self.ssm_heads, 1)
                yield block.values("ssm_d", "ones", self.ssm_heads, 1)
                yield block.values("ssm_norm.weight", "ones", self.groups, inner // self.groups)
                yield block.matrix("ssm_out", hidden, inner)
            yield block.norm("ffn_norm", hidden)
            yield block.values("ffn_gate_inp.weight", "normal", self.experts, hidden)
            yield from block.mlp(hidden, self.expert, "_exps", self.experts)
            yield from block.mlp(hidden, self.shared, "_shexp")


@dataclass(frozen=True, slots=True)
class TwoGeometries:
    """Gemma 4 E2B: windows but for every fifth layer, whose heads are twice as wide; an embedding
    for each layer; the last ``reusing`` layers read the keys of others and have wider MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    reusing: int
    per_layer: int = 256
    head_dim: int = 256
    every: int = 5
    window: int = 512
    vocab: int = 262144
    architecture: str = "gemma4"
    mixture: str = USUAL

    def _slides(self, layer: int) -> bool:
        return (layer + 1) % self.every != 0

    def metadata(self) -> dict[str, Any]:
        first = self.layers - self.reusing
        widths = [self.mlp if i < first else 2 * self.mlp for i in range(self.layers)]
        return {
            **common(self, widths, self.kv_heads, 1e6),
            "rope.freq_base_swa": 1e4,
            "attention.key_length": 2 * self.head_dim,
            "attention.value_length": 2 * self.head_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "rope.dimension_count": 2 * self.head_dim,
            "rope.dimension_count_swa": self.head_dim,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [self._slides(i) for i in range(self.layers)],
            "attention.shared_kv_layers": self.reusing,
            "embedding_length_per_layer_input": self.per_layer,
            "final_logit_softcapping": 30.0,
        }

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden)
        hidden, own = self.hidden, self.per_layer
        yield Tensor("rope_freqs.weight", (self.head_dim,), "rope")
        table = (self.vocab, own * self.layers)
        yield Tensor("per_layer_token_embd.weight", table, "token_embd")
        yield Tensor("per_layer_model_proj.weight", (own * self.layers, hidden), "f16")
        yield Tensor("per_layer_proj_norm.weight", (own,), "ones")
        first = self.layers - self.reusing
        for i in range(self.layers):
            block, width = Block(i, self.layers), self.head_dim * (1 if self._slides(i) else 2)
            yield block.norm("attn_norm", hidden)
            yield block.matrix("attn_q", self.heads * width, hidden)
            yield block.norm("attn_q_norm", width)
            if i < first:
                yield block.matrix("attn_k", self.kv_heads * width, hidden)
                yield block.norm("attn_k_norm", width)
                yield block.value("attn_v", (self.kv_heads * width, hidden), i, first)
            yield block.matrix("attn_output", hidden, self.heads * width)
            yield block.norm("post_attention_norm", hidden)
            yield block.norm("ffn_norm", hidden)
            yield from block.mlp(hidden, self.mlp if i < first else 2 * self.mlp)
            yield block.norm("post_ffw_norm", hidden)
            yield block.matrix("inp_gate", own, hidden)
            yield block.matrix("proj", hidden, own)
            yield block.norm("post_norm", hidden)
            yield block.norm("layer_output_scale", 1)


@dataclass(frozen=True, slots=True)
class ResidualStreams:
    """Gemma 3n E2B: several copies of the hidden state, a narrow matrix beside attention, an
    embedding for each layer, sparse activations in the first ``sparse`` layers. The last ones
    (``reusing``) read the keys of others; the file has their own, which llama.cpp requires."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    reusing: int
    sparse: int = 10
    copies: int = 4
    rank: int = 64
    per_layer: int = 256
    head_dim: int = 256
    every: int = 5
    window: int = 512
    vocab: int = 262144
    architecture: str = "gemma3n"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        limit = NormalDist().inv_cdf(0.95)
        return {
            **common(self, self.mlp, self.kv_heads, 1e6),
            "rope.freq_base_swa": 1e4,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [
                (i + 1) % self.every != 0 for i in range(self.layers)
            ],
            "attention.shared_kv_layers": self.reusing,
            "embedding_length_per_layer_input": self.per_layer,
            "altup.num_inputs": self.copies,
            "altup.active_idx": 0,
            "activation_sparsity_scale": [
                limit if i < self.sparse else -math.inf for i in range(self.layers)
            ],
            "final_logit_softcapping": 30.0,
        }

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden)
        hidden, own, width = self.hidden, self.per_layer, self.head_dim
        for name in ("altup_proj", "altup_unembd_proj"):
            yield Tensor(f"{name}.weight", (self.copies - 1, hidden, hidden), "f16")
        table = (self.vocab, own * self.layers)
        yield Tensor("per_layer_token_embd.weight", table, "token_embd")
        yield Tensor("per_layer_model_proj.weight", (own * self.layers, hidden), "f16")
        yield Tensor("per_layer_proj_norm.weight", (own,), "ones")
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            yield block.matrix("attn_q", self.heads * width, hidden)
            yield block.matrix("attn_k", self.kv_heads * width, hidden)
            yield block.value("attn_v", (self.kv_heads * width, hidden), i, self.layers)
            yield block.matrix("attn_output", hidden, self.heads * width)
            yield block.norm("attn_q_norm", width)
            yield block.norm("attn_k_norm", width)
            yield block.norm("post_attention_norm", hidden)
            yield block.norm("ffn_norm", hidden)
            yield from block.mlp(hidden, self.mlp)
            yield block.norm("post_ffw_norm", hidden)
            yield from self._streams(block)
            yield block.matrix("inp_gate", own, hidden)
            yield block.matrix("proj", hidden, own)
            yield block.norm("post_norm", hidden)

    def _streams(self, block: Block) -> Iterator[Tensor]:
        hidden, copies = self.hidden, self.copies
        yield block.values("altup_router.weight", "f16", copies, hidden)
        yield block.norm("altup_router_norm", hidden)
        yield block.values("altup_predict_coef.weight", "normal", copies * copies, copies)
        yield block.values("altup_correct_coef.weight", "normal", copies, copies)
        yield block.norm("altup_correct_scale", hidden)
        yield block.values("laurel_l.weight", "f16", self.rank, hidden)
        yield block.values("laurel_r.weight", "f16", hidden, self.rank)
        yield block.norm("laurel_post_norm", hidden)


@dataclass(frozen=True, slots=True)
class Latent:
    """DeepSeek V2 Lite with fewer experts: latent attention, a dense first layer."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    expert: int
    experts: int
    used: int
    shared: int
    rank: int = 512
    turned: int = 64
    plain: int = 128
    value: int = 128
    vocab: int = 102400
    architecture: str = "deepseek2"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        return {
            **common(self, self.mlp, 1, 10000.0),
            "attention.kv_lora_rank": self.rank,
            "attention.key_length": self.rank + self.turned,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.plain + self.turned,
            "attention.value_length_mla": self.value,
            "rope.dimension_count": self.turned,
            "leading_dense_block_count": 1,
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "expert_shared_count": self.shared,
            "expert_feed_forward_length": self.expert,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 1,
        }

    def tensors(self) -> Iterator[Tensor]:
        yield from ends(self.vocab, self.hidden, tied=False)
        hidden, heads = self.hidden, self.heads
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            yield block.matrix("attn_q", heads * (self.plain + self.turned), hidden)
            yield block.matrix("attn_kv_a_mqa", self.rank + self.turned, hidden)
            yield block.norm("attn_kv_a_norm", self.rank)
            yield block.matrix("attn_k_b", heads, self.rank, self.plain)
            yield block.matrix("attn_v_b", heads, self.value, self.rank)
            yield block.matrix("attn_output", hidden, heads * self.value)
            yield block.norm("ffn_norm", hidden)
            if i == 0:
                yield from block.mlp(hidden, self.mlp)
                continue
            yield block.values("ffn_gate_inp.weight", "normal", self.experts, hidden)
            yield from block.mlp(hidden, self.expert, "_exps", self.experts)
            yield from block.mlp(hidden, self.shared * self.expert, "_shexp")


@dataclass(frozen=True, slots=True)
class Experts:
    """Qwen3 30B-A3B: every layer has a mixture of experts. Embeddings are as large as what layers
    add, so that tokens differ in the experts that they choose; a random router uses all about
    equally often. ``skewed``: it prefers some of them, as in trained models."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    expert: int
    experts: int
    used: int
    head_dim: int = 128
    vocab: int = 151936
    skewed: bool = False
    architecture: str = "qwen3moe"
    mixture: str = USUAL

    def metadata(self) -> dict[str, Any]:
        return {
            **common(self, self.expert, self.kv_heads, 1e6),
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "expert_feed_forward_length": self.expert,
        }

    def tensors(self) -> Iterator[Tensor]:
        embedding, *others = ends(self.vocab, self.hidden, tied=False)
        yield embedding._replace(part=f"wide:{embedding.part}")
        yield from others
        hidden, keys = self.hidden, self.kv_heads * self.head_dim
        for i in range(self.layers):
            block = Block(i, self.layers)
            yield block.norm("attn_norm", hidden)
            yield block.matrix("attn_q", self.heads * self.head_dim, hidden)
            yield block.matrix("attn_k", keys, hidden)
            yield block.value("attn_v", (keys, hidden), i, self.layers)
            yield block.matrix("attn_output", hidden, self.heads * self.head_dim)
            yield block.norm("attn_q_norm", self.head_dim)
            yield block.norm("attn_k_norm", self.head_dim)
            yield block.norm("ffn_norm", hidden)
            kind = "skewed" if self.skewed else "normal"
            yield block.values("ffn_gate_inp.weight", kind, self.experts, hidden)
            yield from block.mlp(hidden, self.expert, "_exps", self.experts)


def _8b(layers: int, mixture: str = USUAL) -> Dense:
    return Dense(4096, layers, 32, 8, 14336, mixture=mixture)


def _a3b(layers: int, *, skewed: bool = False, mixture: str = USUAL) -> Experts:
    return Experts(
        2048, layers, 32, 4, expert=768, experts=128, used=8, skewed=skewed, mixture=mixture
    )


#: By name of the bench's model. LLaMA.cpp takes a model of 27 layers for DeepSeek V2 Lite; with all
#: of its 64 experts the file would be 10 GB. ``random-30b-a3b`` is 18 GB, or 2.7 GB with 6 layers
#: of its 48. The 8B has 8 of its 32 layers in other mixtures of types.
REAL_SHAPES: Mapping[str, RealShape] = {
    "random-qwen3.5-0.8b": DeltaNet(1024, 24, 8, 2, 3584, v_heads=16),
    "random-qwen3.5-4b": DeltaNet(2560, 32, 16, 4, 9216, v_heads=32),
    "random-lfm2-1.2b": ShortConvolutions(2048, 16, 32, 8, 8192, (2, 5, 8, 10, 12, 14)),
    "random-gemma4-e2b": TwoGeometries(1536, 35, 8, 1, 6144, reusing=20),
    "random-gemma3n-e2b": ResidualStreams(2048, 30, 8, 2, 8192, reusing=10),
    "random-granite4-h-tiny": StateSpaces(
        *(1536, 40, 12, 4),
        expert=512,
        experts=64,
        used=6,
        shared=1024,
        attention=(5, 15, 25, 35),
        ssm_heads=48,
    ),
    "random-deepseek-v2-lite": Latent(
        2048, 27, 16, 10944, expert=1408, experts=16, used=6, shared=2
    ),
    "random-30b-a3b": _a3b(48),
    "random-30b-a3b-12": _a3b(12),
    "random-30b-a3b-6": _a3b(6),
    "random-30b-a3b-6-skewed": _a3b(6, skewed=True),
    "random-30b-a3b-6-mxfp4": _a3b(6, mixture="mxfp4_moe"),
    "random-8b": _8b(32),
    "random-8b-8": _8b(8),
    "random-8b-8-q4_0": _8b(8, "q4_0"),
    "random-8b-8-q8_0": _8b(8, "q8_0"),
    "random-8b-8-iq4_xs": _8b(8, "iq4_xs"),
}


def num_weights(shape: RealShape) -> int:
    """All numbers of the model."""
    return sum(math.prod(tensor.shape) for tensor in shape.tensors())
