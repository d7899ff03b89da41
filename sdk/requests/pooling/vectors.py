"""Embeddings as callers ask for them, with a prompt before texts, fewer numbers or smaller types,
and how alike two of them are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from sdk.api.errors import RequestError
from sdk.kernels.dataclass import dataclass
from sdk.quant.embedding_head import EmbeddingHead, unit
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import PromptLike

#: sentence-transformers' names of the types of vectors.
OutputDtype = Literal["float32", "int8", "uint8", "binary", "ubinary"]
_NO_PROMPTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of :meth:`sdk.LLM.embed`, checked. :raises RequestError: one is invalid."""

    prompt_name: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    output_dtype: OutputDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("prompt_name", "prompt"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):
                raise RequestError(f"{name}: expected a string, found {safe_repr(given)}")
        if self.prompt_name is not None and self.prompt is not None:
            raise RequestError("prompt_name, prompt: expected one of the two, found both")
        count = self.dimensions
        if count is not None and (type(count) is not int or count < 1):
            raise RequestError(f"dimensions: expected a positive integer, found {safe_repr(count)}")
        if self.output_dtype not in get_args(OutputDtype):
            raise RequestError(
                f"output_dtype: expected one of {', '.join(get_args(OutputDtype))}, found "
                f"{safe_repr(self.output_dtype)}"
            )

    @property
    def asks(self) -> bool:
        """Whether a prompt is asked for."""
        return self.prompt_name is not None or self.prompt is not None

    def text_before(self, head: EmbeddingHead | None) -> str:
        """What is put before every text. :raises RequestError: the model has no such prompt."""
        if self.prompt is not None:
            return self.prompt
        prompts = _NO_PROMPTS if head is None else head.prompts
        name = self.prompt_name
        if name is None:
            name = None if head is None else head.default_prompt
            return "" if name is None else prompts[name]
        if name not in prompts:
            known = f"one of {', '.join(map(repr, sorted(prompts)))}" if prompts else "none"
            raise RequestError(
                f"prompt_name: expected {known}, as in the model's "
                f"config_sentence_transformers.json, found {safe_repr(name)}; prompt=TEXT puts any "
                "text before the texts"
            )
        return prompts[name]

    def check_size(self, size: int) -> None:
        """:raises RequestError: ``size``, the numbers of the model's vectors, are fewer."""
        if self.dimensions is not None and self.dimensions > size:
            raise RequestError(
                f"dimensions: expected at most {size}, which the model's vectors have, found "
                f"{self.dimensions}"
            )

    def vector(self, values: Sequence[float], is_unit: bool) -> list[Any]:
        """The vector as asked for; ``is_unit``: it has length 1, and a shorter one shall too."""
        self.check_size(len(values))
        found = list(values)
        if self.dimensions is not None and self.dimensions < len(found):
            found = found[: self.dimensions]
            found = unit(found) if is_unit else found
        return found if self.output_dtype == "float32" else packed(found, self.output_dtype)


def packed(vector: Sequence[float], dtype: str) -> list[int]:
    """A vector as integers.

    ``int8``: the largest number becomes 127 or -127, so that each vector has its own scale, which
    a cosine does not see; ``uint8`` is 128 more. ``binary`` and ``ubinary``: a bit for each number
    that is above 0, eight in an integer, the first one highest (sentence-transformers').
    """
    x = np.asarray(vector, np.float32)
    if dtype in ("int8", "uint8"):
        largest = float(np.abs(x).max(initial=0.0)) or 1.0
        numbers = np.rint(x.astype(np.float64) * (127 / largest)).astype(np.int64)
        offset = 128 if dtype == "uint8" else 0
    else:
        numbers = np.packbits(x > 0).astype(np.int64)
        offset = -128 if dtype == "binary" else 0
    found: list[int] = (numbers + offset).tolist()
    return found


def with_text_before(item: PromptLike, text: str, *, asked: bool, lower: bool) -> PromptLike:
    """A prompt with a text before it, perhaps in lower case. Token ids stay as they are.

    :raises RequestError: they are token ids, and the caller ``asked`` for a text before them.
    """
    if isinstance(item, str):
        joined = text + item
        return joined.lower() if lower else joined
    if isinstance(item, Mapping) and isinstance(item.get("prompt"), str):
        joined = text + item["prompt"]
        return {**item, "prompt": joined.lower() if lower else joined}
    if asked and text:
        raise RequestError(
            "prompt: expected texts to put the prompt before, found token ids; put its tokens "
            "before them, and leave prompt and prompt_name out"
        )
    return item


def similarity(a: Sequence[float], b: Sequence[float], kind: str = "cosine") -> float:
    """``cosine``, ``dot``, or the negative distance ``euclidean`` or ``manhattan``; larger is more
    alike (sentence-transformers' names)."""
    if kind == "cosine":
        a, b = unit(a), unit(b)
    if kind in ("cosine", "dot"):
        return sum(x * y for x, y in zip(a, b, strict=True))
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    if kind == "euclidean":
        return -float(np.sqrt(np.square(difference).sum()))
    return -float(np.abs(difference).sum())


def max_similarity(query: Any, document: Any) -> float:
    """Late interaction (ColBERT): the sum over a query's vectors ``[n, width]`` of the product with
    the best one of a document's ``[m, width]``."""
    products = np.asarray(query, np.float64) @ np.asarray(document, np.float64).T
    return float(products.max(1).sum())
