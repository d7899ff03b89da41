"""The model of a run: its file, what the bench makes of it for itself, and what a token costs."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sdk.demo import demo_model

#: The name that stands for a file of random weights.
RANDOM_1B = "random-1b"

#: The shape of Llama-3.2-1B with a smaller vocabulary; the head is the embedding matrix.
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _MLP, _VOCAB = 2048, 16, 32, 8, 8192, 32000
_HEAD_DIM = _HIDDEN // _HEADS


class ModelFiles:
    """The model ``file`` (``None``: the demo model), and what is made of it in a temporary folder.

    A context manager: leaving it removes the folder.
    """

    def __init__(self, file: str | None) -> None:
        self._folder = TemporaryDirectory(prefix="embedlm-bench-")
        self._unpacked: Path | None = None
        if file == RANDOM_1B:
            made = Path(self._folder.name) / f"{RANDOM_1B}.Q4_0.gguf"
            write_random_1b(made)
            self.path = str(made)
        else:
            self.path = file or str(demo_model())

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def unpacked(self) -> str:
        """A folder that every engine reads: of a GGUF file its weights as float32, made once."""
        model = Path(self.path)
        if model.suffix != ".gguf":
            return self.path
        if self._unpacked is None:
            self._unpacked = Path(self._folder.name) / "unpacked"
            write_unpacked(model, self._unpacked)
        return str(self._unpacked)


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


def write_unpacked(model: Path, folder: Path) -> None:
    """Write the GGUF ``model`` as a folder of float32 safetensors, its weights' exact values.

    This is what engines that do not read GGUF, or read it slowly, are given to run. Needs twice
    four bytes per weight while it works.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars, three of them
        unpacked = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
    # The values are plain floats by now, but transformers still refuses to save what came from
    # GGUF while the model says so.
    del unpacked.config.quantization_config
    unpacked.hf_quantizer = None
    unpacked.is_quantized = False
    with contextlib.redirect_stderr(io.StringIO()):
        unpacked.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Work:
    """What one token costs at least, by the headers of a model file."""

    #: Bytes of every tensor read for a decoded token: all but an embedding matrix beside a head.
    bytes_per_token: int
    #: Weights multiplied for a prompt token (the head is not) and for a decoded one.
    prompt_weights: int
    decode_weights: int
    #: Keys and values of one token, as numbers.
    kv_numbers: int


def work_of(model: str) -> Work:
    """Read from the headers alone.

    :raises CheckpointError: for a file that is missing or damaged.
    """
    from sdk.cli.inspect_file import sum_parts
    from sdk.loaders.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    try:
        entries = checkpoint.entries()
        parts = sum_parts(entries)
        config = checkpoint.config
    finally:
        checkpoint.close()
    # Of its experts a token meets some only.
    experts = [e for e in entries if ".experts." in e.name or "_exps." in e.name]
    count = config.get("num_experts") or config.get("num_local_experts") or 1
    idle = 1 - config["num_experts_per_tok"] / count if experts else 0.0
    idle_bytes = int(idle * sum(entry.nbytes for entry in experts))
    layers = sum(parts[part].parameters for part in ("attention", "mlp") if part in parts)
    layers -= int(idle * sum(entry.num_elements for entry in experts))
    head = parts.get("head", parts["embeddings"])
    skipped = parts["embeddings"].nbytes if "head" in parts else 0
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Work(
        bytes_per_token=sum(part.nbytes for part in parts.values()) - skipped - idle_bytes,
        prompt_weights=layers,
        decode_weights=layers + head.parameters,
        kv_numbers=2 * config["num_hidden_layers"] * heads * size,
    )
