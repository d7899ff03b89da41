"""Prefixes that are kept after their requests: pins, snapshots and their restoring."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TypeVar

from sdk.api.errors import OutOfMemoryError, RequestError, SnapshotError
from sdk.api.flags import check_flags
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.engine.snapshot import Snapshot
from sdk.loading.load import Loaded
from sdk.requests.driver import Driver
from sdk.requests.job_maker import JobMaker
from sdk.requests.job_runner import run_jobs
from sdk.requests.prompts import Prompt

T = TypeVar("T")
_ONE = SamplingParams(temperature=0.0, max_tokens=1)
#: How often a prefix is computed at most: other requests may evict its pages between the step that
#: wrote them and the moment they are read.
_ATTEMPTS = 3


class SavedPrefixes:
    """The saved prefixes of one ``LLM``."""

    def __init__(self, driver: Driver, loaded: Loaded, job_maker: JobMaker) -> None:
        self._driver = driver
        self._engine = loaded.engine
        self.kept = loaded.kept
        self.model_key = loaded.model_key
        self._config = loaded.facts.model_config
        self._max_model_len = loaded.facts.plan.max_model_len
        self._job_maker = job_maker

    def snapshot(self, prompt: Prompt) -> Snapshot:
        """The full pages of a prompt; missing ones are computed."""
        if prompt.embeds is not None:
            raise RequestError("snapshot: expected a prompt of tokens, found prompt_embeds")
        if prompt.adapter is not None:
            raise RequestError("snapshot: a prompt with an adapter cannot be saved; use pin")
        ids, salt = prompt.token_ids, prompt.cache_salt
        stored = self._when_cached(prompt, lambda: self.kept.read(ids, salt))
        return Snapshot(self.model_key, ids[: len(stored.layers[0].rows)], stored)

    def snapshot_of(self, request_id: str) -> Snapshot:
        """The full pages of an unfinished request so far."""

        def read() -> Snapshot:
            ids, salt = self.kept.tokens_of(request_id)
            stored = self.kept.read(ids, salt)
            if stored is None:
                raise RequestError(
                    f"request {request_id!r}: its pages are no longer in the prefix cache; take "
                    "the snapshot again once it runs"
                )
            return Snapshot(self.model_key, tuple(ids), stored)

        return self._driver.between_steps(read)

    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int:
        """Put a snapshot back; returns how many of its tokens are in the cache now."""
        check_flags(pin=pin)
        snapshot = source if isinstance(source, Snapshot) else Snapshot.load(source)
        self._check(snapshot)
        ids = snapshot.token_ids[: self._max_model_len - 1]  # the most that a prompt can use
        return self._driver.between_steps(
            lambda: self.kept.restore(ids, salt, snapshot.kv, pin=pin)
        )

    def _check(self, snapshot: Snapshot) -> None:
        given, own = snapshot.model, self.model_key
        if given.digest != own.digest:
            raise SnapshotError(
                f"the snapshot belongs to {given.name} ({given.digest}), but this LLM runs "
                f"{own.name} ({own.digest})"
            )
        spec, config = snapshot.kv.spec, self._config
        shape = (spec.num_layers, spec.kv_heads, spec.head_dim)
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        ids = snapshot.token_ids
        if shape != expected or not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise SnapshotError(
                f"the snapshot contradicts itself: layers, heads and head size {shape} for "
                f"{own.name}, which has {expected}, and token ids up to {max(ids)} of "
                f"{config.vocab_size}"
            )

    def pin(self, prompt: Prompt) -> int:
        """Pin a prompt's full pages, computing missing ones; returns the number of tokens."""
        ids, salt, adapter = prompt.token_ids, prompt.cache_salt, _key_of(prompt)
        return self._when_cached(prompt, lambda: self.kept.pin(ids, salt, adapter))

    def unpin(self, prompt: Prompt) -> bool:
        """Remove the pin of exactly these pages. False: there is none."""
        return self._driver.between_steps(
            lambda: self.kept.unpin(prompt.token_ids, prompt.cache_salt, _key_of(prompt))
        )

    def forget(self) -> bool:
        """Forget all prefixes, in every tier."""
        return self._driver.between_steps(self._engine.reset_prefix_cache)

    def _when_cached(self, prompt: Prompt, action: Callable[[], T | None]) -> T:
        """What ``action`` returns once the pages of ``prompt`` are in the cache.

        :raises OutOfMemoryError: other requests evict them again and again.
        """
        for attempt in range(_ATTEMPTS + 1):
            found = self._driver.between_steps(action)
            if found is not None:
                return found
            if attempt < _ATTEMPTS:
                self._compute(prompt)
        raise OutOfMemoryError(
            f"the prefix of {len(prompt.token_ids)} tokens does not stay in the KV cache, because "
            "other requests need its pages; try again when fewer requests run"
        )

    def _compute(self, prompt: Prompt) -> None:
        """Run a prompt, so that its pages are in the cache.

        :raises RequestError: the request failed or was aborted.
        """
        [output] = run_jobs(self._driver, self._job_maker.make([prompt], [_ONE]))
        assert isinstance(output, RequestOutput)
        [answer] = output.outputs
        if answer.finish_reason not in ("stop", "length"):
            raise RequestError(f"the prefix was not computed: {answer.stop_reason}")


def _key_of(prompt: Prompt) -> str | None:
    """The hash of its adapter: prefixes of other adapters are others."""
    return None if prompt.adapter is None else prompt.adapter.key
