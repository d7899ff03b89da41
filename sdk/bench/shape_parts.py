"""What random files with the shapes of published models consist of: tensors and their types."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

#: The mixture of types of a file, unless its shape names another.
USUAL = "q4_k_m"


class Tensor(NamedTuple):
    """``part``: its name in the mixture of types, ``f16``, or how its float32 values are made: a
    word of :data:`VALUES`. After ``wide:`` its numbers have the variance 1."""

    name: str
    shape: tuple[int, ...]
    part: str
    #: Its number among those of its part, and how many there are.
    at: int = 0
    of: int = 1

    def type(self, mixture: str = USUAL) -> str:
        """The name of its block type, ``f16`` or ``f32``, in a file of that mixture."""
        if self.part == "f16":
            return "f16"
        if self.part in VALUES:
            return "f32"
        from sdk.quant.methods.gguf_mixtures import tensor_type  # imports numpy

        part = self.part.removeprefix("wide:")
        if mixture == "iq4_xs":
            return _iq4_xs(part, self.at, self.of)
        part += "_exps" if "_exps." in self.name else ""
        return tensor_type(mixture, part, self.at, self.of, self.shape[-1])


def _iq4_xs(part: str, layer: int, layers: int) -> str:
    """llama.cpp's mixture of that name, where a key head serves at least four query heads."""
    if part == "output":
        return "q6_k"
    more = part == "attn_v" or (part == "ffn_down" and layer < layers // 8)
    return "q5_k" if more else "iq4_xs"


#: Kinds of float32 values. ``normal``: with the variance of a matrix; ``taps``: the same, of a
#: convolution; ``decays``: -16 to -1; ``steps``: biases of the steps of a recurrence; ``rope``:
#: factors of frequencies; ``skewed``: of a router, whose experts are not equally popular.
VALUES = ("ones", "normal", "taps", "decays", "steps", "rope", "skewed")


class RealShape(Protocol):
    """``metadata``: without the name of the ``architecture``, which comes before each key.
    ``mixture``: of types, as in :mod:`sdk.quant.methods.gguf_mixtures`."""

    @property
    def architecture(self) -> str: ...

    @property
    def mixture(self) -> str: ...

    def metadata(self) -> dict[str, Any]: ...

    def tensors(self) -> Iterator[Tensor]: ...


def digest(shape: RealShape) -> str:
    """Changes with everything that is written in one mixture of types."""
    text = repr((sorted(shape.metadata().items()), list(shape.tensors())))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Block:
    """Names the tensors of one layer."""

    def __init__(self, index: int, layers: int) -> None:
        self.index, self.layers = index, layers

    def norm(self, name: str, size: int) -> Tensor:
        return Tensor(f"blk.{self.index}.{name}.weight", (size,), "ones")

    def matrix(self, name: str, *shape: int) -> Tensor:
        """One whose type depends on the layer alone, if at all."""
        part = name.removesuffix("_exps").removesuffix("_shexp")
        return Tensor(f"blk.{self.index}.{name}.weight", shape, part, self.index, self.layers)

    def values(self, name: str, kind: str, *shape: int) -> Tensor:
        return Tensor(f"blk.{self.index}.{name}", shape, kind)

    def value(self, name: str, shape: tuple[int, int], index: int, count: int) -> Tensor:
        """A projection to values, number ``index`` among ``count``: some have more bits."""
        return Tensor(f"blk.{self.index}.{name}.weight", shape, "attn_v", index, count)

    def mlp(self, hidden: int, width: int, ending: str = "", experts: int = 0) -> Iterator[Tensor]:
        each = (experts,) if experts else ()
        yield self.matrix(f"ffn_gate{ending}", *each, width, hidden)
        yield self.matrix(f"ffn_up{ending}", *each, width, hidden)
        yield self.matrix(f"ffn_down{ending}", *each, hidden, width)


def ends(vocab: int, hidden: int, *, norm: str = "output_norm", tied: bool = True) -> list[Tensor]:
    """The embedding, the last norm and, unless the embedding is it, the head."""
    kind = "output" if tied else "token_embd"
    found = [
        Tensor("token_embd.weight", (vocab, hidden), kind),
        Tensor(f"{norm}.weight", (hidden,), "ones"),
    ]
    return found if tied else [*found, Tensor("output.weight", (vocab, hidden), "output")]


def common(shape: Any, width: Any, heads_kv: Any, theta: float) -> dict[str, Any]:
    return {
        "block_count": shape.layers,
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "feed_forward_length": width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": heads_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": theta,
        "vocab_size": shape.vocab,
    }
