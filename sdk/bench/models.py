"""The model of a run: its file, temporary versions of it, and the work per token."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sdk.bench.random_models import SHAPES, write_random
from sdk.bench.real_shapes import REAL_SHAPES
from sdk.demo import SMOLLM2, DemoModel, demo_model


class ModelFiles:
    """The model ``file`` (``None``: the demo model ``usual``), and temporary versions of it. Random
    ones with the shapes of published models stay in the user's cache.

    A context manager that removes the folder at its end.
    """

    def __init__(self, file: str | None, usual: DemoModel = SMOLLM2) -> None:
        self._folder = TemporaryDirectory(prefix="embedlm-bench-")
        self._unpacked: Path | None = None
        self._random = file in SHAPES or file in REAL_SHAPES
        if file in SHAPES:
            made = Path(self._folder.name) / f"{file}.Q4_0.gguf"
            write_random(made, file)
            self.path = str(made)
        elif file is not None and file in REAL_SHAPES:
            from sdk.bench.random_blocks import cached_file  # imports numpy

            self.path = str(cached_file(file, REAL_SHAPES[file]))
        else:
            self.path = str(demo_model(usual)) if file is None else file

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def with_vocabulary(self) -> str:
        """The file, or of a random one, which has no vocabulary, a copy beside it that has one."""
        if not self._random:
            return self.path
        from sdk.bench.vocabulary import with_vocabulary  # imports numpy

        return str(with_vocabulary(Path(self.path)))

    def unpacked(self) -> str:
        """A folder that every engine can read: a GGUF file's weights as float32, made once."""
        model = Path(self.path)
        if model.suffix != ".gguf":
            return self.path
        if self._unpacked is None:
            self._unpacked = Path(self._folder.name) / "unpacked"
            write_unpacked(model, self._unpacked)
        return str(self._unpacked)


def write_unpacked(model: Path, folder: Path) -> None:
    """Write the exact weights of the GGUF ``model`` as a folder of float32 safetensors.

    For engines that do not read GGUF, or read it slowly. Needs eight bytes per weight while it
    works.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars, three of them
        unpacked = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
    # The values are plain floats now, but transformers refuses to save a model that is marked as
    # coming from GGUF.
    del unpacked.config.quantization_config
    unpacked.hf_quantizer = None
    unpacked.is_quantized = False
    with contextlib.redirect_stderr(io.StringIO()):
        unpacked.save_pretrained(folder)


def write_tokenizer(model: Path, folder: Path) -> None:
    """Write the tokenizer and chat template of the GGUF ``model``, for servers."""
    from transformers import AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)


def files_of(model: str | None) -> list[str]:
    """The file or hub id that ``model`` names; none if it is the demo model or random weights."""
    made = model is None or model in SHAPES or model in REAL_SHAPES
    return [] if made or model is None else [model]


@dataclass(frozen=True, slots=True)
class Work:
    """The least work for one token, by the headers of a model file."""

    #: Bytes of all tensors read for a decoded token: all, except an embedding separate from a head.
    bytes_per_token: int
    #: Weights multiplied for a prompt token (without the head) and for a decoded one.
    prompt_weights: int
    decode_weights: int
    #: The number of values in the keys and values of one token.
    kv_numbers: int


#: Embeddings for each layer (Gemma 3n, Gemma 4), of which a token reads one row.
_TABLES_OF_LAYERS = ("per_layer_token_embd", "embed_tokens_per_layer")


def work_of(model: str) -> Work:
    """The work per token, from the headers alone.

    :raises CheckpointError: the file is missing or damaged.
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
    # A token is routed to some of the experts only.
    experts = [e for e in entries if ".experts." in e.name or "_exps." in e.name]
    count = config.get("num_experts") or config.get("num_local_experts") or 1
    idle = 1 - config["num_experts_per_tok"] / count if experts else 0.0
    idle_bytes = int(idle * sum(entry.nbytes for entry in experts))
    layers = sum(parts[part].parameters for part in ("attention", "mlp", "other") if part in parts)
    layers -= int(idle * sum(entry.num_elements for entry in experts))
    head = parts.get("head", parts["embeddings"])
    by_row = [e for e in entries if e.name.split(".")[-2] in _TABLES_OF_LAYERS]
    skipped = parts["embeddings"].nbytes if "head" in parts else sum(e.nbytes for e in by_row)
    of_tables = 0 if "head" in parts else sum(e.num_elements for e in by_row)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Work(
        bytes_per_token=sum(part.nbytes for part in parts.values()) - skipped - idle_bytes,
        prompt_weights=layers,
        decode_weights=layers + head.parameters - of_tables,
        kv_numbers=2 * config["num_hidden_layers"] * heads * size,
    )
