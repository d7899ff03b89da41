"""OLMo 2: no norm before a block, one after it, and q/k norms over all heads at once.

OLMo team, "2 OLMo 2 Furious" (2024); transformers' modeling_olmo2.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, TensorRules
from sdk.models.decoder import MLP, Attention, Decoder, Step

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv_pages import KVPages
    from sdk.models.layers import Source


class Olmo2Attention(Attention):
    """Attention with an RMSNorm over the whole width of q and of k.

    A rank has only some of the heads, so the mean square over all of them is summed over the ranks.
    """

    def __init__(self, source: Source, path: str, index: int) -> None:
        super().__init__(source, path, index)
        c, heads = source.config, source.heads
        self.eps = c.rms_norm_eps
        self.mesh = source.mesh
        self.q_width, self.k_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.kv_copies = heads.kv_copies
        q_norm = source.norm(f"{path}.q_norm", self.q_width).view(-1, c.head_dim)
        k_norm = source.norm(f"{path}.k_norm", self.k_width).view(-1, c.head_dim)
        self.q_norm = q_norm[heads.start : heads.start + heads.count].flatten()
        self.k_norm = k_norm[heads.kv_start : heads.kv_start + heads.kv_count].flatten()

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide_q, wide_k = q.flatten(1), k.flatten(1)
        if self.mesh.group is None:
            wide_q = self.ops.rms_norm(wide_q, self.q_norm, self.eps)
            wide_k = self.ops.rms_norm(wide_k, self.k_norm, self.eps)
        else:
            squares = wide_q.new_empty(len(wide_q), 2)
            squares[:, 0] = (wide_q * wide_q).sum(dim=1) / self.q_width
            squares[:, 1] = (wide_k * wide_k).sum(dim=1) / (self.k_width * self.kv_copies)
            shrink = (self.ops.all_reduce(squares, self.mesh.group) + self.eps).rsqrt()
            wide_q = wide_q * shrink[:, :1] * self.q_norm
            wide_k = wide_k * shrink[:, 1:] * self.k_norm
        return wide_q.view(q.shape), wide_k.view(k.shape)


class Olmo2Layer:
    """``x += norm(attention(x)); x += norm(mlp(x))``."""

    def __init__(self, source: Source, path: str, index: int) -> None:
        self.ops = source.ops
        self.eps = source.config.rms_norm_eps
        self.attention = Olmo2Attention(source, f"{path}.self_attn", index)
        self.post_attention_norm = source.norm(f"{path}.post_attention_layernorm")
        self.mlp = MLP(source, f"{path}.mlp")
        self.post_mlp_norm = source.norm(f"{path}.post_feedforward_layernorm")

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        residual = delta if residual is None else self.ops.add(residual, delta)
        x = self.attention(residual, step, pages)
        self.ops.add(residual, self.ops.rms_norm(x, self.post_attention_norm, self.eps))
        x = self.mlp(residual)
        return self.ops.rms_norm(x, self.post_mlp_norm, self.eps), residual


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Olmo2Layer


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """OLMo 3 has the same name in GGUF files, and a sliding window. transformers runs it."""
    if config["sliding_window"]:
        config["model_type"] = "olmo3"
        config["layer_types"] = keys.layer_types(
            config["num_hidden_layers"], window=config["sliding_window"], period=4
        )


ARCHITECTURE = Architecture(
    "olmo2",
    Model,
    config=ConfigRules(keys=("attention_bias",)),
    tensors=TensorRules(
        shapes={"q_norm": lambda sizes: (sizes.queries,), "k_norm": lambda sizes: (sizes.keys,)},
        norms_before_blocks=False,
    ),
    gguf=GgufRules(
        "olmo2",
        tensors={
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        read=_read_gguf,
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="plain",  # of OLMo 3
    ),
)
