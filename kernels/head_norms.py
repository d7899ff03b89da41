"""The norms of queries and keys that come before rotation (Qwen 3, Gemma 3)."""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass
from sdk.kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms over each head's query and key."""

    q: Norm
    k: Norm

    @property
    def plain(self) -> bool:
        """Whether both are RMSNorms with one weight ``[head_dim]`` for all heads and one eps."""
        return not self.q.form and not self.k.form and self.q.eps == self.k.eps
