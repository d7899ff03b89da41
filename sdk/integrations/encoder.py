"""An :class:`sdk.LLM` with the methods of sentence-transformers' ``SentenceTransformer``.

For libraries that call ``model.encode(texts)``, such as BERTopic, KeyBERT and ``dspy.Embedder``.
``docs/embeddings.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from sdk import LLM, RequestError

Vectors = npt.NDArray[np.float32]
#: Arguments of sentence-transformers that say how it computes, not what: the engine decides itself.
_UNUSED = frozenset({"batch_size", "show_progress_bar", "device", "chunk_size", "pool"})
#: Arguments that may only have these values here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "output_value": ("sentence_embedding",),
    "precision": ("float32",),
    "convert_to_numpy": (True,),
    "convert_to_tensor": (False,),
    "normalize_embeddings": (True, False),
}


class SentenceEncoder:
    """Embeddings as arrays, by the names that sentence-transformers uses.

    Vectors have length 1, whatever ``normalize_embeddings`` says: only their direction is the
    model's. Texts longer than the model was trained for lose their end. The owner of ``llm``
    closes it.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @overload
    def encode(
        self,
        sentences: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Vectors: ...
    @overload
    def encode(
        self,
        sentences: Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Vectors: ...
    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        truncate_dim: int | None = None,
        **options: Any,
    ) -> Vectors:
        """A vector ``[dimensions]`` of a text, or ``[texts, dimensions]`` of several, in float32.

        ``prompt_name``, ``prompt``, ``truncate_dim``: see :meth:`sdk.LLM.embed` (there
        ``dimensions``). ``batch_size``, ``show_progress_bar`` and ``device`` mean nothing here.

        :raises RequestError: an argument, or a value of one, that is not supported.
        """
        for name, value in options.items():
            if name not in _UNUSED and name not in _FIXED:
                raise RequestError(f"encode: unknown argument {name}")
            if name in _FIXED and value not in _FIXED[name]:
                allowed = " or ".join(map(repr, _FIXED[name]))
                raise RequestError(f"encode: {name}: expected {allowed}, found {value!r}")
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        if not texts:
            return np.zeros((0, self.get_sentence_embedding_dimension()), np.float32)
        found = self.llm.embed(
            texts,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=truncate_dim,
            truncate_prompt_tokens=-1,
            use_tqdm=False,
        )
        vectors = np.array([one.embedding for one in found], np.float32)
        return vectors[0] if isinstance(sentences, str) else vectors

    def similarity(self, first: Vectors, second: Vectors) -> Vectors:
        """The cosines ``[a, b]`` of vectors ``[a, dimensions]`` and ``[b, dimensions]``."""
        cosines: Vectors = np.atleast_2d(first) @ np.atleast_2d(second).T
        return cosines

    def get_sentence_embedding_dimension(self) -> int:
        """Numbers of a vector."""
        return len(self.llm.embed("a", use_tqdm=False)[0].embedding)
