"""What happens to the heads of queries, keys and values besides rotation."""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass
from sdk.kernels.operators.norm import Norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms over each head's query, key and, where there is one, value.

    Those of queries and keys come before the rotation (Qwen 3, Gemma 3) or ``after`` it (Hunyuan).
    """

    q: Norm
    k: Norm
    v: Norm | None = None
    after: bool = False

    @property
    def plain(self) -> bool:
        """Whether all are RMSNorms with one weight ``[head_dim]`` for all heads and one eps."""
        norms = [norm for norm in (self.q, self.k, self.v) if norm is not None]
        return not any(norm.form or norm.eps != self.q.eps for norm in norms)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries times ``1 + beta * log(1 + floor((position + shift) / length))``, after rotation and
    norms.

    Scores of long contexts stay sharp ("temperature tuning" of Llama 4; Ministral 3). ``length``
    counts tokens, those of the context before it was extended.
    """

    beta: float
    length: int
    shift: int = 0
