"""Engines that turn texts into vectors: texts in, tokenizing included.

Each has ``hello`` and ``embed(texts)``, which returns a row of numbers for each text. No text of
the suite is cut: all engines read up to ``MOST`` tokens, whatever the model's files say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .opening import Opening

MOST = 512
#: Files with the ONNX form of a model, the fastest first, as sentence-transformers publishes them.
ONNX = (
    "onnx/model_qint8_avx512_vnni.onnx",
    "onnx/model_quint8_avx2.onnx",
    "onnx/model_qint8.onnx",
    "onnx/model.onnx",
)


def _hello(name: str, start: float) -> dict[str, Any]:
    took = time.perf_counter() - start
    return {"name": name, "kv": "", "vocab_size": 0, "open_s": took}


class Embedlm:
    def __init__(self, opening: Opening) -> None:
        from sdk import __version__
        from sdk.llm import LLM

        start = time.perf_counter()
        packed = "int8" if opening.engine.endswith("-int8") else None
        self._llm = LLM(
            opening.model, device="cpu", num_threads=opening.threads, quantization=packed
        )
        self.hello = _hello(f"{opening.engine} {__version__}", start)

    def embed(self, texts: Sequence[str]) -> list[Any]:
        found = self._llm.embed(texts, truncate_prompt_tokens=MOST, use_tqdm=False)
        return [one.embedding for one in found]


class SentenceTransformers:
    def __init__(self, opening: Opening) -> None:
        import sentence_transformers
        import torch

        start = time.perf_counter()
        torch.set_num_threads(opening.threads)
        kind = sentence_transformers.SentenceTransformer
        self._model = kind(opening.model, device="cpu", local_files_only=True)
        self._model.max_seq_length = MOST
        self.hello = _hello(f"sentence-transformers {sentence_transformers.__version__}", start)

    def embed(self, texts: Sequence[str]) -> Any:
        return self._model.encode(list(texts), show_progress_bar=False)


class FastEmbed:
    """ONNX Runtime: the file is in the model's folder, because nothing is downloaded."""

    def __init__(self, opening: Opening) -> None:
        import fastembed
        from fastembed.common.model_description import ModelSource, PoolingType

        start = time.perf_counter()
        file = next((one for one in ONNX if (Path(opening.model) / one).is_file()), None)
        if file is None:
            raise ValueError(f"{opening.model}: expected one of {', '.join(ONNX)} in the folder")
        fastembed.TextEmbedding.add_custom_model(
            model="bench/model",
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="bench/model"),
            dim=1,
            model_file=file,
        )
        self._model = fastembed.TextEmbedding(
            "bench/model", specific_model_path=opening.model, threads=opening.threads
        )
        self._model.model.tokenizer.enable_truncation(MOST)
        self.hello = _hello(f"fastembed {fastembed.__version__}, {Path(file).stem}", start)

    def embed(self, texts: Sequence[str]) -> list[Any]:
        return list(self._model.embed(texts))


class LlamaCpp:
    def __init__(self, opening: Opening) -> None:
        import llama_cpp

        start = time.perf_counter()
        self._llm = llama_cpp.Llama(
            opening.model,
            embedding=True,
            n_ctx=0,
            n_batch=2048,
            n_ubatch=2048,
            n_threads=opening.threads,
            n_threads_batch=opening.threads,
            verbose=False,
        )
        self.hello = _hello(f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", start)

    def embed(self, texts: Sequence[str]) -> Any:
        return self._llm.embed(list(texts), normalize=True, truncate=True)
