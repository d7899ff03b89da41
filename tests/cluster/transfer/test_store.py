"""A store between two engines that need not run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdk import LLM, RequestError
from sdk.api.errors import TransferError
from sdk.cluster.transfer import (
    EnginePages,
    FolderStore,
    HandOverReceiver,
    HandOverSender,
    KVStore,
    MemoryStore,
    StoreConnector,
)
from sdk.cluster.transfer.connector import Offer
from tests.cluster.transfer.pairs import (
    LIMIT,
    PARAMS,
    PREFILL,
    PROMPT,
    USABLE,
    answer,
    check,
    facts,
)

STORES: dict[str, Callable[[Path], KVStore]] = {
    "memory": lambda folder: MemoryStore(1 << 20),
    "folder": lambda folder: FolderStore(folder / "kv" / "pages"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return STORES[request.param](tmp_path)


def _put(llm: LLM, store: KVStore, prompt: list[int] = PROMPT, **options: str) -> tuple[int, int]:
    """Send a prompt that was computed to the store; tokens that it had and that it has."""
    with HandOverSender(EnginePages.of(llm), StoreConnector(store)) as sender:
        result = sender.hand_over("x", "", prompt, **options).result(LIMIT)
        assert result.problem is None
        return result.num_known, result.num_tokens


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_an_answer_with_pages_of_a_store_is_the_same_bits(
    tiny_path: Path, store: KVStore, dtype: str
) -> None:
    options = {"max_model_len": 128, "kv_cache_dtype": dtype}
    with LLM(tiny_path, **options) as llm:
        alone = facts(answer(llm))
        assert _put(llm, store) == (0, USABLE)
        assert _put(llm, store) == (USABLE, USABLE)
    with LLM(tiny_path, **options) as llm, HandOverReceiver(EnginePages.of(llm)) as receiver:
        answer(llm, PROMPT[:20], PREFILL)
        result = receiver.fetch(StoreConnector(store), PROMPT)
        assert result[1:] == (USABLE, 16, None)
        output = answer(llm)
        assert output.num_cached_tokens == USABLE and facts(output) == alone
        check(llm)


def test_prompts_share_the_pages_of_their_beginning(
    engines: tuple[LLM, LLM], store: KVStore
) -> None:
    a, b = engines
    b.reset_prefix_cache()
    other = [*PROMPT[:40], *range(30, 60)]
    answer(a, PROMPT, PREFILL)
    answer(a, other, PREFILL)
    assert _put(a, store) == (0, USABLE)
    assert _put(a, store, other) == (32, USABLE)
    receiver = HandOverReceiver(EnginePages.of(b))
    third = [*PROMPT[:50], *range(30, 60)]
    result = receiver.fetch(StoreConnector(store), third)
    assert result.num_tokens == 48 and result.problem == "the sender had only 48 of 64 tokens"
    assert answer(b, third).num_cached_tokens == 48
    for salt in ({"cache_salt": "a"}, {"adapter": "b"}):
        assert receiver.fetch(StoreConnector(store), PROMPT, **salt).num_tokens == 0
    receiver.close()


def test_engines_of_other_types_do_not_find_each_other_s_pages(
    engines: tuple[LLM, LLM], tiny_path: Path, store: KVStore
) -> None:
    answer(engines[0], PROMPT, PREFILL)
    _put(engines[0], store)
    for options in ({"kv_cache_dtype": "int8"}, {"block_size": 8}):
        with LLM(tiny_path, max_model_len=128, **options) as llm:
            receiver = HandOverReceiver(EnginePages.of(llm))
            assert receiver.fetch(StoreConnector(store), PROMPT).num_tokens == 0
            receiver.close()


class Damaged:
    """A store that damages one value, or fails."""

    def __init__(self, store: KVStore, key: bytes, value: Callable[[bytes], bytes]) -> None:
        self._store, self._key, self._value = store, key, value

    def contains(self, key: bytes) -> bool:
        return self._store.contains(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._store.put(key, value)

    def get(self, key: bytes) -> bytes | None:
        value = self._store.get(key)
        return self._value(value) if key == self._key and value is not None else value


def _fails(value: bytes) -> bytes:
    raise TransferError("the store is gone")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda value: value[:-1], "a stored page of"),
        (lambda value: value[:10], "another protocol or version"),
        (lambda value: b"", "another protocol or version"),
        (lambda value: value[:500] + b"~~" + value[502:], "a CHUNK frame is damaged"),
        (_fails, "the store is gone"),
    ],
)
def test_a_damaged_page_ends_what_is_taken_from_a_store(
    engines: tuple[LLM, LLM], damage: Callable[[bytes], bytes], message: str
) -> None:
    a, b = engines
    b.reset_prefix_cache()
    alone = facts(answer(b))
    b.reset_prefix_cache()
    answer(a, PROMPT, PREFILL)
    store = MemoryStore(1 << 20)
    _put(a, store)
    key = EnginePages.of(a).offer("x", PROMPT, None, None).digests()[2]
    receiver = HandOverReceiver(EnginePages.of(b))
    result = receiver.fetch(StoreConnector(Damaged(store, key, damage)), PROMPT)
    assert result.num_tokens == 32 and result.problem is not None and message in result.problem
    output = answer(b)
    assert output.num_cached_tokens == 32 and facts(output) == alone
    receiver.close()


def test_a_page_under_another_key_is_not_used(engines: tuple[LLM, LLM]) -> None:
    answer(engines[0], PROMPT, PREFILL)
    store = MemoryStore(1 << 20)
    _put(engines[0], store)
    first, second, *_ = EnginePages.of(engines[0]).offer("x", PROMPT, None, None).digests()
    swapped = Damaged(store, first, lambda value: store.get(second) or b"")
    receiver = HandOverReceiver(EnginePages.of(engines[1]))
    engines[1].reset_prefix_cache()
    result = receiver.fetch(StoreConnector(swapped), PROMPT)
    assert result.num_tokens == 0 and "the key that it was stored under" in (result.problem or "")
    receiver.close()


class _NoFetch:
    def fetch(self, offer: Offer) -> object:
        raise TransferError("nobody there")


def test_a_source_that_cannot_be_reached_is_a_result(engines: tuple[LLM, LLM]) -> None:
    with HandOverReceiver(EnginePages.of(engines[1])) as receiver:
        assert receiver.fetch(_NoFetch(), PROMPT).problem == "nobody there"  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="has no full page of 16"):
            receiver.fetch(StoreConnector(MemoryStore(1)), [1])


def test_a_store_in_memory_forgets_what_was_not_used_for_longest() -> None:
    store = MemoryStore(100)
    for key in (b"a", b"b"):
        store.put(key, bytes(40))
    assert store.get(b"a") is not None
    store.put(b"c", bytes(40))
    store.put(b"c", bytes(50))
    assert [store.contains(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert store.num_bytes == 90
    store.put(b"d", bytes(101))
    assert store.num_bytes == 0 and store.get(b"d") is None
    with pytest.raises(RequestError, match="max_bytes: expected at least 1"):
        MemoryStore(0)


def test_a_folder_keeps_pages_private_and_says_why_it_cannot(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "pages")
    store.put(b"key", b"value")
    [file] = (tmp_path / "pages").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and store.get(b"key") == b"value"
    assert store.get(b"other") is None and not store.contains(b"other")
    file.unlink()
    file.mkdir()
    with pytest.raises(TransferError, match="cannot be read"):
        store.get(b"key")
    with pytest.raises(TransferError, match="cannot be written"):
        store.put(b"key", b"value")
    assert list((tmp_path / "pages").iterdir()) == [file]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TransferError, match="not a usable folder"):
        FolderStore(tmp_path / "file")


def test_the_first_answer_of_a_second_engine_may_come_from_a_store(
    engines: tuple[LLM, LLM], tmp_path: Path
) -> None:
    """A sender stores a prompt while it is computed."""
    a, b = engines
    for llm in engines:
        llm.reset_prefix_cache()
    store = FolderStore(tmp_path)
    [request_id] = a.enqueue([PROMPT], PARAMS)
    with HandOverSender(EnginePages.of(a), StoreConnector(store)) as sender:
        outcome = sender.hand_over("x", "", PROMPT, request_id=request_id)
        [expected] = a.wait_for_completion()
        assert outcome.result(LIMIT)[1:] == (USABLE, 0, None)
    with HandOverReceiver(EnginePages.of(b)) as receiver:
        assert receiver.fetch(StoreConnector(store), PROMPT).num_tokens == USABLE
    assert facts(answer(b)) == facts(expected)
