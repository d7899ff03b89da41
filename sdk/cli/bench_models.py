"""Model files the bench makes for itself: a 1B shape of random weights, and unpacked copies."""

from __future__ import annotations

from pathlib import Path

#: The shape of Llama-3.2-1B with a smaller vocabulary; the head is the embedding matrix.
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _MLP, _VOCAB = 2048, 16, 32, 8, 8192, 32000
_HEAD_DIM = _HIDDEN // _HEADS


def write_random_1b(path: Path) -> None:
    """Write a Llama GGUF of 1.04 billion random Q4_0 weights (585 MB), the same bytes every time.

    It has no vocabulary: speed is all it is good for. Scales are such that activations stay finite.
    """
    import gguf
    import numpy

    draw = numpy.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random-1b")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_MLP)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCAB)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, rows: int, columns: int) -> None:
        blocks = numpy.frombuffer(draw.bytes(rows * columns // 32 * 18), numpy.uint8)
        blocks = blocks.reshape(rows, columns // 32, 18).copy()
        blocks[:, :, :2] = numpy.array([0.004], numpy.float16).view(numpy.uint8)
        writer.add_tensor(
            f"{name}.weight",
            blocks.reshape(rows, -1),
            raw_dtype=gguf.GGMLQuantizationType.Q4_0,
        )

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(_HIDDEN, numpy.float32))

    add("token_embd", _VOCAB, _HIDDEN)
    add_norm("output_norm")
    for i in range(_LAYERS):
        add_norm(f"blk.{i}.attn_norm")
        add(f"blk.{i}.attn_q", _HIDDEN, _HIDDEN)
        add(f"blk.{i}.attn_k", _KV_HEADS * _HEAD_DIM, _HIDDEN)
        add(f"blk.{i}.attn_v", _KV_HEADS * _HEAD_DIM, _HIDDEN)
        add(f"blk.{i}.attn_output", _HIDDEN, _HIDDEN)
        add_norm(f"blk.{i}.ffn_norm")
        add(f"blk.{i}.ffn_gate", _MLP, _HIDDEN)
        add(f"blk.{i}.ffn_up", _MLP, _HIDDEN)
        add(f"blk.{i}.ffn_down", _HIDDEN, _MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
