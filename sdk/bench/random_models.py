"""Writes files of random weights, for measuring speed; the same bytes every time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gguf


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama, or with ``experts`` of a Qwen3 MoE: a token uses ``used`` of them, each
    of size ``mlp``. The head is the embedding matrix."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 32000
    experts: int = 0
    used: int = 0

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "llama"


#: The shape of Llama-3.2-1B with a smaller vocabulary: 1.04 billion weights, 585 MB; and an MoE
#: model of 0.88 billion, 495 MB, of which a token uses a third.
SHAPES = {
    "random-1b": Shape(2048, 16, 32, 8, 64, 8192),
    "random-moe": Shape(1024, 16, 16, 4, 64, 512, experts=32, used=8),
}


def write_random(path: Path, name: str) -> None:
    """Write the model of :data:`SHAPES` as a GGUF file, its matrices in Q4_0.

    The scales keep activations finite.
    """
    import gguf

    shape = SHAPES[name]
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.mlp)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
    writer.add_tokenizer_model("no_vocab")
    _add_tensors(writer, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, shape: Shape) -> None:
    import gguf
    import numpy

    draw = numpy.random.default_rng(1)
    hidden = shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def add(name: str, *sizes: int) -> None:
        *rows, columns = sizes
        count = int(numpy.prod(sizes)) // 32
        blocks = numpy.frombuffer(draw.bytes(count * 18), numpy.uint8).reshape(count, 18).copy()
        blocks[:, :2] = numpy.array([0.004], numpy.float16).view(numpy.uint8)
        writer.add_tensor(
            f"{name}.weight",
            blocks.reshape(*rows, columns // 32 * 18),
            raw_dtype=gguf.GGMLQuantizationType.Q4_0,
        )

    def add_norm(name: str, size: int = hidden) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(size, numpy.float32))

    add("token_embd", shape.vocab, hidden)
    add_norm("output_norm")
    for i in range(shape.layers):
        add_norm(f"blk.{i}.attn_norm")
        add(f"blk.{i}.attn_q", queries, hidden)
        add(f"blk.{i}.attn_k", keys, hidden)
        add(f"blk.{i}.attn_v", keys, hidden)
        add(f"blk.{i}.attn_output", hidden, queries)
        add_norm(f"blk.{i}.ffn_norm")
        ending = ""
        experts: tuple[int, ...] = ()
        if shape.experts:
            add_norm(f"blk.{i}.attn_q_norm", shape.head_dim)
            add_norm(f"blk.{i}.attn_k_norm", shape.head_dim)
            router = draw.standard_normal((shape.experts, hidden), numpy.float32) * 0.05
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            ending, experts = "_exps", (shape.experts,)
        add(f"blk.{i}.ffn_gate{ending}", *experts, shape.mlp, hidden)
        add(f"blk.{i}.ffn_up{ending}", *experts, shape.mlp, hidden)
        add(f"blk.{i}.ffn_down{ending}", *experts, hidden, shape.mlp)
