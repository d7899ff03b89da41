"""What hand-overs see of one engine: which prefixes it has, read and written between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError, TransferError
from sdk.cluster.transfer.connector import Offer
from sdk.cluster.transfer.messages import row_shape
from sdk.engine.model_key import ModelKey
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.pages.prefix_store import PrefixStore, rest_layers
from sdk.quant.caches import AttentionCache, Cache, StateCache
from sdk.quant.safe_repr import safe_repr
from sdk.quant.spec import KVSpec
from sdk.requests.driving.driver import Driver
from sdk.requests.served_engine import SavedPrefixes

if TYPE_CHECKING:
    from sdk.llm import LLM


class HandedOver(NamedTuple):
    """How a hand-over ended: the first ``num_tokens`` tokens of the prompt are cached at the
    receiver, of which it had ``num_known`` before. ``problem``: why it is not all of them.
    """

    transfer_id: str
    num_tokens: int
    num_known: int
    problem: str | None


class EnginePages:
    """The prefixes of one engine. Its methods may be called from any thread, and raise what
    ``Driver.between_steps`` raises.
    """

    def __init__(self, driver: Driver, kept: PrefixStore, model: ModelKey) -> None:
        self.driver = driver
        self.kept = kept
        self.scheduler = driver.engine.scheduler
        self._model = model
        self._spec = kept.spec
        centres = driver.between_steps(kept.centres)
        #: By layer what is subtracted from its keys, if anything.
        self.centres = centres
        self._numerics = _numerics(model, kept.dtype, centres)
        self.page_layers = self._spec.layers_in(0)
        #: The others, which have frames or states.
        self.rest_layers = rest_layers(self._spec)

    @classmethod
    def of(cls, llm: LLM) -> EnginePages:
        """Those of an ``LLM``; they do not keep it open.

        :raises RequestError: its layers are in several processes, or several engines serve it.
        """
        driver, prefixes = llm._driver, llm._prefixes
        whole = llm.config.pipeline_parallel_size == 1
        if not (whole and isinstance(driver, Driver) and isinstance(prefixes, SavedPrefixes)):
            raise RequestError(
                "hand over: expected one engine with all layers; use data_parallel_size=1 and "
                "pipeline_parallel_size=1"
            )
        return cls(driver, prefixes.kept, prefixes.model_key)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._spec.page_size

    def group_bytes(self, num_tokens: int) -> int:
        """Bytes of this many tokens, over all heads and all layers that keep all tokens."""
        nbytes = sum(map(self._spec.layer_bytes, self.page_layers))
        return num_tokens * nbytes // self.page_size

    @property
    def row_bytes(self) -> int:
        """The most bytes of a token or of a state on one rank, in one layer of the rest."""
        shapes = (row_shape(self._spec, layer) for layer in self.rest_layers)
        return max((heads * width for heads, width in shapes), default=0)

    def offer(
        self, transfer_id: str, token_ids: Sequence[int], salt: str | None, adapter: str | None
    ) -> Offer:
        """An offer of the pages that a prompt can use: at least its last token always runs.

        :raises RequestError: there is none, or no prefix cache.
        """
        size = self.page_size
        usable = (len(token_ids) - 1) // size * size
        if usable < size:
            raise RequestError(
                f"hand over: a prompt of {len(token_ids)} tokens has no full page of {size} that "
                "another engine could use; compute it there"
            )
        if not isinstance(transfer_id, str) or not transfer_id:
            raise RequestError(f"transfer_id: expected a text, found {safe_repr(transfer_id)}")
        ids = tuple(token_ids[:usable])
        spec, ranks = self._spec, self.kept.num_ranks
        return Offer(transfer_id, self._model, self._numerics, spec, ids, salt, adapter, ranks)

    def keys(self, offer: Offer) -> list[PageKey]:
        """The keys that this engine gives to the full pages of an offer.

        :raises RequestError: they are shorter than a page, or there is no prefix cache.
        """
        return self.kept.keys(offer.token_ids, offer.salt, offer.adapter)

    def check(self, offer: Offer) -> None:
        """:raises TransferError: keys and values of the offer are not those of this engine."""
        given, own = offer.spec, self._spec
        model = self._model
        if offer.model.digest != model.digest:
            raise TransferError(
                f"the keys and values belong to {offer.model.name} ({offer.model.digest}), but "
                f"this engine runs {model.name} ({model.digest})"
            )
        if given.dtype != own.dtype:
            raise TransferError(
                f"kv_cache_dtype: the sender has {given.dtype}, this engine {own.dtype}; set the "
                "same for both, because converted keys and values would change answers"
            )
        shape = given.num_layers, given.kv_heads, given.head_dim
        expected = own.num_layers, own.kv_heads, own.head_dim
        if shape != expected:
            raise TransferError(
                f"the sender's keys and values have another shape: layers, heads and head size "
                f"{shape}, expected {expected}"
            )
        if given.windows != own.windows:
            raise TransferError(
                f"layers with a window have memory of their own for windows of {given.windows} at "
                f"the sender, and of {own.windows} here: set the same kv_policy, "
                "enable_chunked_prefill and max_model_len for both"
            )
        states = any(isinstance(one, StateCache) for one in own.caches)
        if states and (given.page_size, offer.ranks) != (own.page_size, self.kept.num_ranks):
            raise TransferError(
                f"the sender's states are of {offer.ranks} ranks, at the ends of pages of "
                f"{given.page_size} tokens; expected {self.kept.num_ranks} ranks and pages of "
                f"{own.page_size}, because states are not converted: set the same "
                "tensor_parallel_size and block_size for both"
            )
        if given.caches != own.caches:
            layers = range(own.num_layers)
            pairs = ((i, _cache(given, i), _cache(own, i)) for i in layers)
            layer, found, expected_cache = next(x for x in pairs if x[1] != x[2])
            raise TransferError(
                f"the sender's keys and values have another shape: layer {layer} has {found}, "
                f"expected {expected_cache}{_hint(expected_cache)}"
            )
        if offer.numerics != self._numerics:
            raise TransferError(
                "the sender's keys and values are made differently: it has another kv_policy or "
                f"other centres of keys than this engine, whose KV cache is {self.kept.dtype}; set "
                "the same kv_policy, or none, for both"
            )
        capacity = self.scheduler.pool.capacity * self.page_size
        if len(offer.token_ids) > capacity:
            raise TransferError(
                f"a prefix of {len(offer.token_ids)} tokens does not fit into a KV cache of "
                f"{capacity}"
            )


def _cache(spec: KVSpec, layer: int) -> Cache:
    return spec.caches[layer] if spec.caches else spec.cache(layer)


def _hint(cache: Cache) -> str:
    if isinstance(cache, AttentionCache):
        return ""
    return "; set the same state_snapshot_dtype for both, because states are not converted"


def _numerics(model: ModelKey, dtype: str, centres: Sequence[NDArray[np.float32] | None]) -> bytes:
    """The digest of :class:`Offer`: rows mean the same where all of this is the same. ``dtype``
    has all tiers, because below a first tier others change how it stores keys and values: rotated,
    and with a centre subtracted from keys.
    """
    digest = sha256(f"{model.digest} {dtype} ".encode())
    for centre in centres:
        digest.update(b"none" if centre is None else centre.astype("<f4").tobytes())
    return digest.digest()


def checked_count(name: str, value: int) -> int:
    """:raises RequestError: it is not a number of at least one."""
    if not isinstance(value, int) or not 0 < value < 1 << 40:
        raise RequestError(f"{name}: expected at least 1, found {safe_repr(value)}")
    return value
