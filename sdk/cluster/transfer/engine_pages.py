"""What hand-overs see of one engine: which prefixes it has, read and written between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError, TransferError
from sdk.cluster.transfer.connector import Offer
from sdk.engine.model_key import ModelKey
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.pages.prefix_store import PrefixStore
from sdk.quant.safe_repr import safe_repr
from sdk.requests.driver import Driver
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
        self._numerics = _numerics(model, kept.dtype, centres)

    @classmethod
    def of(cls, llm: LLM) -> EnginePages:
        """Those of an ``LLM``; they do not keep it open.

        :raises RequestError: its layers are in several processes, several engines serve it, or its
            pages do not have all that there is of their tokens.
        """
        driver, prefixes = llm._driver, llm._prefixes
        whole = llm.config.pipeline_parallel_size == 1
        if not (whole and isinstance(driver, Driver) and isinstance(prefixes, SavedPrefixes)):
            raise RequestError(
                "hand over: expected one engine with all layers; use data_parallel_size=1 and "
                "pipeline_parallel_size=1"
            )
        if driver.engine.scheduler.groups is not None:
            model = prefixes.model_key.name
            raise RequestError(
                f"hand over: expected pages with all layers of {model}, found recurrent states, or "
                "layers with a window that keep only its tokens (see explain()): such prefixes are "
                "not handed over yet; save them with snapshot() and restore()"
            )
        return cls(driver, prefixes.kept, prefixes.model_key)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._spec.page_size

    def group_bytes(self, num_tokens: int) -> int:
        """Bytes of this many tokens, over all layers and heads."""
        layers = range(self._spec.num_layers)
        return num_tokens * sum(map(self._spec.layer_bytes, layers)) // self.page_size

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
        return Offer(transfer_id, self._model, self._numerics, self._spec, ids, salt, adapter)

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
        if given.caches != own.caches:
            layers = range(own.num_layers)
            layer = next(i for i in layers if given.cache(i) != own.cache(i))
            raise TransferError(
                f"the sender's keys and values have another shape: layer {layer} has "
                f"{given.cache(layer)}, expected {own.cache(layer)}"
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
