"""One engine computes a prompt, another answers it: the same bits as if it had done both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError
from sdk.api.errors import TransferError
from sdk.cluster.transfer import (
    EnginePages,
    HandOverReceiver,
    HandOverSender,
    MemoryStore,
    SharedMemoryConnector,
    StoreConnector,
)
from sdk.engine.rank.kv_transfer import read_layer
from sdk.engine.rank.page_rows import read_rows, write_rows
from sdk.testing import tiny_adapter
from tests.cluster.transfer.pairs import (
    CONNECTORS,
    LIMIT,
    PARAMS,
    PREFILL,
    PROMPT,
    USABLE,
    Pair,
    answer,
    facts,
    pair,
)
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

TYPES = ["float32", "float16", "int16", "int8", "int4", "fp8", "bfloat16", "k8v4", "int4:skip=1"]
SOME_TYPES = {"float32", "int4"}  # the others are slow ones


def _alone(llm: LLM, prompt: list[int] = PROMPT) -> tuple[object, ...]:
    """What an engine answers that got nothing."""
    llm.reset_prefix_cache()
    found = facts(answer(llm, prompt))
    llm.reset_prefix_cache()
    return found


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    "dtype",
    [x if x in SOME_TYPES else pytest.param(x, marks=pytest.mark.slow) for x in TYPES],
)
def test_an_answer_after_a_hand_over_is_the_same_bits(
    tiny_path: Path, dtype: str, connector: str
) -> None:
    with pair(tiny_path, CONNECTORS[connector], kv_cache_dtype=dtype) as two:
        alone = _alone(two.b)
        assert two.hand_over()[1:] == (USABLE, 0, None)
        output = answer(two.b)
        assert output.num_cached_tokens == USABLE
        assert facts(output) == alone
        assert two.b.get_metrics()["restored"] == USABLE // 16


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_prompt_in_chunks_is_sent_chunk_by_chunk(tiny_path: Path, connector: str) -> None:
    """Pages arrive while later ones are not computed yet."""
    options = {"first": {"max_num_batched_tokens": 16, "max_num_seqs": 4}}
    with pair(tiny_path, CONNECTORS[connector], **options) as two:
        alone = _alone(two.b)
        [request_id] = two.a.enqueue([PROMPT], PREFILL)
        transfer_id = two.begin(request_id=request_id)
        keys = two.receiver._pages.kept.keys(PROMPT, None)
        for count in range(1, 4):
            two.a.step()
            _wait_for(lambda count=count: two.receiver._pages.kept.num_cached(keys) >= count)
            assert not two.last.done()
        two.a.wait_for_completion()
        assert two.end(transfer_id)[1:] == (USABLE, 0, None)
        assert facts(answer(two.b)) == alone


def _wait_for(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_only_what_the_receiver_has_not_is_sent(two: Pair) -> None:
    alone = _alone(two.b)
    answer(two.b, PROMPT[:40], PREFILL)
    result = two.hand_over()
    assert result.num_known == 32 and result.num_tokens == USABLE
    output = answer(two.b)
    assert output.num_cached_tokens == USABLE and facts(output) == alone
    again = two.hand_over()
    assert again.num_known == again.num_tokens == USABLE and again.problem is None


def test_a_prompt_that_was_computed_before_can_be_handed_over_without_a_request(two: Pair) -> None:
    alone = _alone(two.b)
    answer(two.a, PROMPT, PREFILL)
    assert two.end(two.begin())[1:] == (USABLE, 0, None)
    assert facts(answer(two.b)) == alone


def test_the_last_token_of_a_prompt_of_whole_pages_stays_for_the_receiver(two: Pair) -> None:
    prompt = PROMPT[:USABLE]
    alone = _alone(two.b, prompt)
    assert two.hand_over(prompt).num_tokens == USABLE - 16
    output = answer(two.b, prompt)
    assert output.num_cached_tokens == USABLE - 16 and facts(output) == alone


def test_a_salt_is_part_of_what_is_handed_over(two: Pair) -> None:
    salted = {"prompt_token_ids": PROMPT, "cache_salt": "a\ud800 salt"}
    [output] = two.a.generate([salted], PREFILL)
    transfer_id = two.begin(cache_salt=salted["cache_salt"])
    assert two.end(transfer_id).num_tokens == USABLE
    assert answer(two.b).num_cached_tokens == 0
    two.b.reset_prefix_cache()
    assert two.end(two.begin(cache_salt=salted["cache_salt"])).num_tokens == USABLE
    [output] = two.b.generate([salted], PARAMS)
    assert output.num_cached_tokens == USABLE


def test_an_adapter_is_part_of_what_is_handed_over(tiny_path: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", tiny_path)
    with pair(tiny_path, enable_lora=True, max_lora_rank=8) as two:
        for llm in (two.a, two.b):
            llm.add_lora("one", adapter)
        [alone] = two.b.generate([PROMPT], PARAMS, lora_request="one")
        two.b.reset_prefix_cache()
        two.a.generate([PROMPT], PREFILL, lora_request="one")
        [read] = two.a._job_maker.read([PROMPT], None, lora="one").prompts
        assert read.adapter is not None
        assert two.end(two.begin(adapter=read.adapter.key)).num_tokens == USABLE
        [output] = two.b.generate([PROMPT], PARAMS, lora_request="one")
        assert output.num_cached_tokens == USABLE and facts(output) == facts(alone)
        assert answer(two.b).num_cached_tokens == 0


@pytest.mark.parametrize(("sizes", "usable"), [((8, 32), 64), ((32, 8), 64), ((16, 8), 64)])
def test_page_sizes_may_differ(tiny_path: Path, sizes: tuple[int, int], usable: int) -> None:
    first, second = ({"block_size": size} for size in sizes)
    with pair(tiny_path, first=first, second=second) as two:
        alone = _alone(two.b)
        assert two.hand_over()[1:] == (usable, 0, None)
        output = answer(two.b)
        assert output.num_cached_tokens == usable and facts(output) == alone


def test_layers_with_sliding_windows_are_handed_over(golden: Path) -> None:
    """Where they keep only the tokens of their window."""
    prompt = [3 + 7 * i % 200 for i in range(70)]
    with pair(golden / "arch-gemma3" / "hf") as two:
        assert two.sender._pages.rest_layers
        alone = _alone(two.b, prompt)
        assert two.hand_over(prompt).num_tokens == USABLE
        assert facts(answer(two.b, prompt)) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "k8v4"])
def test_ranks_share_the_heads_of_what_is_handed_over(
    tiny_path: Path, ranks: int, others: int, dtype: str
) -> None:
    """Two ranks round differently, so answers are compared with those of a restored snapshot."""
    options = {"compute": "exact", "kv_cache_dtype": dtype}
    first, second = {"tensor_parallel_size": ranks}, {"tensor_parallel_size": others}
    with pair(tiny_path, first=first, second=second, **options) as two:
        two.b.restore(two.a.snapshot(PROMPT))
        expected = facts(answer(two.b))
        two.a.reset_prefix_cache()
        two.b.reset_prefix_cache()
        assert two.hand_over()[1:] == (USABLE, 0, None)
        output = answer(two.b)
        assert output.num_cached_tokens == USABLE and facts(output) == expected


@pytest.mark.parametrize("through", ["connector", "store"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("gemma4_text", {"enable_chunked_prefill": False}), ("deepseek_v2-lite", {})],
)
def test_layers_of_several_shapes_and_latents_are_handed_over(
    name: str, options: dict[str, Any], through: str, tmp_path: Path
) -> None:
    """Without chunked prefill layers with a window keep all tokens."""
    tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(tmp_path)
    ids, options = prompt(70, 5), {**options, "skip_tokenizer_init": True}
    with pair(tmp_path, **options) as two:
        expected = facts(answer(two.b, ids))
        two.b.reset_prefix_cache()
        if through == "store":
            answer(two.a, ids, PREFILL)
            store = StoreConnector(MemoryStore(1 << 24))
            with HandOverSender(EnginePages.of(two.a), store) as sender:
                assert sender.hand_over("x", "", ids).result(LIMIT).num_tokens == 64
            assert two.receiver.fetch(store, ids).num_tokens == 64
        else:
            assert two.hand_over(ids)[1:] == (64, 0, None)
        output = answer(two.b, ids)
        assert output.num_cached_tokens == 64 and facts(output) == expected
        other = two.sender._pages.offer("x", ids, None, None)
        narrow = other.spec.cache(0)._replace(key_dim=2)
        caches = (narrow, *map(other.spec.cache, range(1, other.spec.num_layers)))
        offer = replace(other, spec=replace(other.spec, caches=caches))
        with pytest.raises(TransferError, match="another shape: layer 0 has AttentionCache"):
            two.receiver._pages.check(offer)


LONG = [3 + 7 * i % 400 for i in range(300)]


def test_tiered_pages_are_handed_over_as_long_as_they_are_in_the_first_tier(
    tiny_path: Path,
) -> None:
    with pair(tiny_path, max_model_len=512, kv_policy="float16>int8>int4") as two:
        alone = _alone(two.b, LONG)
        assert two.hand_over(LONG)[1:] == (256, 0, None)
        output = answer(two.b, LONG)
        assert output.num_cached_tokens == 256 and facts(output) == alone


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kv_policy": "float16>int8"}, {"kv_cache_dtype": "float16"}),
        ({"kv_cache_dtype": "float16"}, {"kv_policy": "float16>int8"}),
        ({"kv_policy": "float16>int8"}, {"kv_policy": "float16>int8>int4"}),
    ],
)
def test_pages_are_not_handed_over_between_engines_with_different_policies(
    tiny_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Their first tiers have the same type, but the same rows mean other keys and values."""
    with pair(tiny_path, first=first, second=second, max_model_len=512, block_size=128) as two:
        alone = _alone(two.b, LONG)
        answer(two.a, LONG, PREFILL)
        result = two.end(two.begin(LONG))
        assert result.num_tokens == 0 and "another kv_policy" in (result.problem or "")
        store = StoreConnector(MemoryStore(1 << 24))
        with HandOverSender(EnginePages.of(two.a), store) as sender:
            assert sender.hand_over("x", "", LONG).result(LIMIT).num_tokens == 256
        assert two.receiver.fetch(store, LONG).num_tokens == 0
        output = answer(two.b, LONG)
        assert output.num_cached_tokens == 0 and facts(output) == alone


def test_pages_in_a_lower_tier_are_not_handed_over(tiny_path: Path) -> None:
    """They would give other answers than keys and values that the receiver computes."""
    options: dict[str, Any] = {"max_model_len": 512, "kv_policy": "float16>int8>int4"}
    options["kv_cache_memory_bytes"] = 6 * LLM.plan(tiny_path, **options).page_bytes
    with pair(tiny_path, first=options, second=options) as two:
        alone = _alone(two.b, LONG)
        answer(two.a, LONG, PREFILL)
        for salt in "abc":
            two.a.generate([{"prompt_token_ids": LONG, "cache_salt": salt}], PREFILL)
        assert two.a.get_metrics()["num_pages_lowered"] > 0
        transfer_id = two.begin(LONG)
        result = two.end(transfer_id)
        assert result.num_tokens < 256
        assert result.problem == f"the sender had only {result.num_tokens} of 256 tokens"
        assert two.last.result(LIMIT).problem == result.problem.replace("had", "has")
        assert facts(answer(two.b, LONG)) == alone


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_pages_are_those_that_snapshots_have(tiny_path: Path, dtype: str) -> None:
    with LLM(tiny_path, max_model_len=128, kv_cache_dtype=dtype) as llm:
        answer(llm, PROMPT, PREFILL)
        runner, spec = llm._runner(), EnginePages.of(llm).kept.spec
        for pages in ([1, 2, 3], [4, 1, 3]):
            first, found = read_rows(runner, pages)
            assert set(first) == {0}
            for layer, rows in enumerate(found):
                expected = read_layer(runner, layer, pages, 0)[1].rows
                assert rows.any() and (rows == expected).all()
            target = [page + 4 for page in reversed(pages)]
            write_rows(runner, target, found, spec)
            for rows, again in zip(found, read_rows(runner, target).layers, strict=True):
                assert (rows == again).all()


@pytest.mark.parametrize("is_prefix_cached", [False, True])
def test_hand_overs_of_requests_that_wait_do_not_block_those_of_others(
    tiny_path: Path, is_prefix_cached: bool
) -> None:
    """Three requests of low priority wait; one of high priority comes last and runs first."""
    options = {"scheduling_policy": "priority", "max_num_seqs": 1, "max_model_len": 512}
    low = [[*PROMPT[:32], *range(20 * i, 20 * i + 38)] for i in range(1, 4)]
    with pair(tiny_path, first=options) as two:
        if is_prefix_cached:
            answer(two.a, PROMPT[:40], PREFILL)
        pages, address = EnginePages.of(two.a), two.listener.address
        with HandOverSender(pages, SharedMemoryConnector(), max_active=2) as sender:
            names = two.a.enqueue(low, PREFILL.clone(priority=1))
            later = [
                sender.hand_over(name, address, prompt, request_id=name)
                for name, prompt in zip(names, low, strict=True)
            ]
            time.sleep(0.05)  # all threads of the sender have work
            [name] = two.a.enqueue([PROMPT[::-1]], PREFILL.clone(priority=0))
            urgent = sender.hand_over(name, address, PROMPT[::-1], request_id=name)
            two.a.step()
            assert urgent.result(LIMIT)[1:] == (USABLE, 0, None)
            assert not any(outcome.done() for outcome in later)
            two.a.wait_for_completion()
            for outcome in later:
                found = outcome.result(LIMIT)
                assert found.num_tokens == USABLE and found.problem is None


def test_a_hand_over_that_is_looked_at_while_its_sender_is_closed_has_a_result(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()

    def look(task: object) -> bool:
        looks.set()
        return two.sender._closed.wait(LIMIT)

    monkeypatch.setattr(two.sender, "_is_early", look)
    two.begin()
    assert looks.wait(LIMIT)
    two.sender.close()
    assert two.last.result(LIMIT).problem == "the sender was closed"


def test_what_is_read_at_a_time_is_bounded(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(two.a, PROMPT, PREFILL)
    pages, counts = EnginePages.of(two.a), []
    read = pages.kept.read_pages
    monkeypatch.setattr(
        pages.kept, "read_pages", lambda keys: counts.append(len(keys)) or read(keys)
    )
    page = pages.group_bytes(pages.page_size)
    for is_busy in (False, True):
        if is_busy:
            two.a.enqueue([PROMPT[::-1]], PREFILL)
        for size, expected in ((1, [1, 1, 1, 1]), (3 * page, [3, 1]), (64 << 20, [4])):
            two.b.reset_prefix_cache()
            counts.clear()
            with HandOverSender(pages, SharedMemoryConnector(), read_bytes=size) as sender:
                outcome = sender.hand_over("x", two.listener.address, PROMPT)
                assert outcome.result(LIMIT).num_tokens == USABLE
            assert counts == expected
    two.a.wait_for_completion()


def test_options_must_make_sense(two: Pair) -> None:
    pages = EnginePages.of(two.a)
    with pytest.raises(RequestError, match="15 tokens has no full page of 16"):
        two.begin(PROMPT[:15])
    with pytest.raises(RequestError, match="transfer_id: expected a text, found ''"):
        two.sender.hand_over("", "x", PROMPT)
    with pytest.raises(RequestError, match="max_active: expected at least 1, found 0"):
        HandOverSender(pages, SharedMemoryConnector(), max_active=0)
    with pytest.raises(RequestError, match="read_bytes: expected at least 1, found 0"):
        HandOverSender(pages, SharedMemoryConnector(), read_bytes=0)
    with pytest.raises(RequestError, match="step_share: expected 0 to 1, found 2"):
        HandOverReceiver(pages, step_share=2)
    with pytest.raises(RequestError, match="group_bytes: expected at least 1"):
        HandOverReceiver(pages, group_bytes=0)


def test_a_closed_sender_and_receiver_say_so(engines: tuple[LLM, LLM]) -> None:
    pages = EnginePages.of(engines[0])
    sender, receiver = HandOverSender(pages, SharedMemoryConnector()), HandOverReceiver(pages)
    waiting = receiver.result("x")
    for _ in range(2):
        sender.close()
        receiver.close()
    with pytest.raises(TransferError, match="sender was closed"):
        sender.hand_over("x", "y", PROMPT)
    assert waiting.result(0).problem == receiver.result("z").result(0).problem
    assert waiting.result(0).problem == "the receiver was closed"


def test_without_a_prefix_cache_nothing_can_be_handed_over(tiny_path: Path) -> None:
    with (
        LLM(tiny_path, max_model_len=128, enable_prefix_caching=False) as llm,
        HandOverSender(EnginePages.of(llm), SharedMemoryConnector()) as sender,
        pytest.raises(RequestError, match="need the prefix cache"),
    ):
        sender.hand_over("x", "y", PROMPT)
