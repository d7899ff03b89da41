"""The tensors of KV pages."""

from __future__ import annotations

from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.kv_types import KVType
from sdk.kernels.lazy_torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys and values: ``k`` ``[num_pages, kv_heads, page_size, head_dim]``, ``v`` the
    same with ``value_dim`` in place of ``head_dim``.

    In memory a page's keys of one head are transposed, ``[head_dim][page_size]``, so that
    neighbouring keys are the lanes of a vector; its values are ``[page_size][value_dim]``. Floats
    may have padding after each value, also after the last one, up to a multiple of 16. Keys and
    values each have a type, ``k_type`` and ``v_type`` (``types.py``), whose elements the tensors
    hold: the last dimension is ``head_dim / packing``.

    *Latent* pages have no values: a value is the first numbers of its key, as many as the model
    says (multi-head latent attention). ``v`` has a last dimension of 0 then, and no scales.

    Codes have scales, ``k_scale`` and ``v_scale`` ``[num_pages, kv_heads * groups, page_size]``:
    head by head, the groups of a head next to each other. The number of groups says how many
    dimensions share a scale, a multiple of 32 (``scale_group``). Types with ``hadamard`` store
    *mixed* heads (``reference/page_codes.py``). ``rope_and_cache`` mixes the queries too, and
    ``attention`` undoes it in its result.

    ``k_centre`` float32 ``[kv_heads, head_dim]`` is subtracted from every key between rotary
    embedding and the write. It changes all scores of a query by the same amount, which softmax
    ignores. With a softcap or sinks the result would change: ``attention`` rejects them.

    ``next_tier`` is the next lower tier, at most two in all: the same memory as twice as many
    pages of an integer type of half the bits. A page id says which tier it belongs to
    (``kernels/kv/tiers.py``): ``rope_and_cache`` writes the first, ``attention`` reads all of them,
    ``page_recoder`` moves a page to another tier. All tiers are mixed, floats too, and have the
    same centre, so that a page is recoded value by value. Their pages have 128 tokens, so that each
    tile of keys that attention multiplies has one type.
    """

    k: Tensor
    v: Tensor
    k_type: KVType
    v_type: KVType
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_centre: Tensor | None = None
    next_tier: KVPages | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Of keys."""
        return self.k.shape[3] * self.k_type.packing

    @property
    def value_dim(self) -> int:
        """Of values; 0 for latent pages, whose values are the first numbers of their keys."""
        return self.v.shape[3] * self.v_type.packing

    @property
    def latent(self) -> bool:
        """Whether values are parts of keys."""
        return self.v.shape[3] == 0

    @property
    def dtype(self) -> str:
        """The types' names: ``int8``, ``int8/int4`` where they differ, ``float16>int8``."""
        k, v = self.k_type.name, self.v_type.name
        own = k if k == v else f"{k}/{v}"
        return own if self.next_tier is None else f"{own}>{self.next_tier.dtype}"

    def problem(self, latent: int = 0) -> dict[str, Any]:
        """The fields of a :class:`~sdk.kernels.backend.Problem`; ``latent``: the width of the
        values of latent pages. ``value_dim`` is 0 where keys are as wide."""
        values = latent or self.value_dim
        width = 0 if values == self.head_dim else values
        return {"head_dim": self.head_dim, "value_dim": width, "kv_dtype": self.dtype}

    @property
    def tiers(self) -> tuple[KVPages, ...]:
        """These pages and those below them."""
        return (self,) if self.next_tier is None else (self, *self.next_tier.tiers)

    @property
    def k_mixed(self) -> bool:
        """Whether keys are mixed."""
        return self.next_tier is not None or self.k_type.hadamard

    @property
    def v_mixed(self) -> bool:
        """Whether values are mixed."""
        return self.next_tier is not None or self.v_type.hadamard
