"""Frames of windows and recurrent states are handed over with pages: answers keep their bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM
from sdk.api.errors import TransferError
from sdk.cluster.transfer.connector import Part
from sdk.cluster.transfer.intake import Rest
from tests.cluster.transfer.pairs import (
    CONNECTORS,
    LIMIT,
    PREFILL,
    USABLE,
    Pair,
    answer,
    facts,
    pair,
)
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

#: Short convolutions, delta nets, Mamba-2 beside attention, windows; states or windows alone.
MODELS = ["lfm2", "qwen3_5_text", "granitemoehybrid-experts", "gemma4_text", "mamba2", "mistral"]
IDS = prompt(70, 5)


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(request.param, tmp_path_factory.mktemp("model"))


def _saved(name: str, folder: Path) -> Path:
    tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(folder)
    return folder


@contextmanager
def _pair(path: Path, connector: str = "shared memory", **options: Any) -> Iterator[Pair]:
    with pair(path, CONNECTORS[connector], skip_tokenizer_init=True, **options) as two:
        assert two.sender._pages.rest_layers
        yield two


def _alone(llm: LLM, ids: list[int] = IDS) -> tuple[object, ...]:
    llm.reset_prefix_cache()
    found = facts(answer(llm, ids))
    llm.reset_prefix_cache()
    return found


@pytest.mark.parametrize("connector", CONNECTORS)
def test_an_answer_after_a_hand_over_has_the_bits_of_one_engine(path: Path, connector: str) -> None:
    with _pair(path, connector) as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone
        again = two.hand_over(IDS)
        assert again.num_known == again.num_tokens == USABLE and again.problem is None


def test_a_prompt_in_chunks_is_handed_over_while_it_runs(path: Path) -> None:
    first = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with _pair(path, first=first) as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_of_windows_keep_their_type(tmp_path: Path, dtype: str) -> None:
    with _pair(_saved("gemma4_text", tmp_path), kv_cache_dtype=dtype) as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone


def test_a_receiver_that_has_all_pages_gets_what_else_it_needs(path: Path) -> None:
    """Its own request has gone on from there with other tokens, and left pages behind."""
    with _pair(path) as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        kept = two.receiver._pages.kept
        keys = kept.keys(IDS[:USABLE], None)
        groups = two.b._driver.engine.scheduler.groups
        assert groups is not None
        for page in two.b._driver.engine.scheduler.pool.match(keys):  # pages alone stay
            groups._forget(page)
        assert kept.num_cached(keys) == USABLE // 16 and kept.num_usable(keys) == 0
        assert two.hand_over(IDS)[1:] == (USABLE, USABLE - 16, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone


def test_states_that_the_sender_has_no_more_are_computed_by_the_receiver(path: Path) -> None:
    with _pair(path) as two:
        alone = _alone(two.b)
        answer(two.a, IDS, PREFILL)
        scheduler = two.a._driver.engine.scheduler
        keys = two.sender._pages.kept.keys(IDS[:USABLE], None)
        assert scheduler.groups is not None
        for page in scheduler.pool.match(keys):
            scheduler.groups._forget(page)
        result = two.end(two.begin(IDS))
        assert result.num_tokens == 0
        assert "had not the states or windows any more after 64 tokens" in (result.problem or "")
        assert "has not the states or windows" in (two.last.result(LIMIT).problem or "")
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == 0 and facts(output) == alone


def test_what_finds_no_room_is_computed_again(path: Path) -> None:
    with _pair(path) as two:
        alone = _alone(two.b)
        answer(two.a, IDS, PREFILL)
        groups = two.b._driver.engine.scheduler.groups
        assert groups is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "begin_writing", lambda num_pages: None)
            result = two.end(two.begin(IDS))
        assert result.num_tokens == 0
        assert "no room for the states or windows after 64 tokens" in (result.problem or "")
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == 0 and facts(output) == alone


def test_windows_are_sent_in_several_parts_if_they_are_larger_than_a_group(tmp_path: Path) -> None:
    options = ARCHITECTURES["gemma4_text"] | {"sliding_window": 100}
    tiny("gemma4_text", **options).save_pretrained(tmp_path)
    ids, sent, take = prompt(200, 5), [], Rest.take

    def counted(rest: Rest, part: Part, digest: bytes) -> bool:
        sent.append(part)
        return take(rest, part, digest)

    with _pair(tmp_path, max_model_len=256) as two, pytest.MonkeyPatch.context() as patch:
        alone = _alone(two.b, ids)
        patch.setattr(Rest, "take", counted)
        answer(two.a, ids, PREFILL)
        two.receiver._group_bytes = 1
        assert two.end(two.begin(ids))[1:] == (192, 0, None)
        assert len(sent) > len(two.sender._pages.rest_layers)
        output = answer(two.b, ids)
        assert output.num_cached_tokens == 192 and facts(output) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "gemma4_text"])
def test_two_ranks_hand_over_to_two(name: str, tmp_path: Path) -> None:
    with _pair(_saved(name, tmp_path), tensor_parallel_size=2, compute="exact") as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone


@pytest.mark.slow
def test_ranks_share_the_heads_of_windows_between_engines(tmp_path: Path) -> None:
    options = {"compute": "exact", "first": {"tensor_parallel_size": 2}}
    with _pair(_saved("gemma4_text", tmp_path), **options) as two:
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        assert answer(two.b, IDS).num_cached_tokens == USABLE


def test_states_of_other_ranks_or_pages_are_refused(tmp_path: Path) -> None:
    with _pair(_saved("lfm2", tmp_path), second={"block_size": 32}) as two:
        answer(two.a, IDS, PREFILL)
        result = two.end(two.begin(IDS))
        assert result.num_tokens == 0
        assert "states are of 1 ranks, at the ends of pages of 16" in (result.problem or "")
        own = two.receiver._pages
        offer = replace(own.offer("x", IDS, None, None), ranks=2)
        with pytest.raises(TransferError, match="are of 2 ranks, at the ends of pages of 32"):
            own.check(offer)


def test_windows_may_have_other_page_sizes(tmp_path: Path) -> None:
    with _pair(_saved("gemma4_text", tmp_path), second={"block_size": 32}) as two:
        alone = _alone(two.b)
        assert two.hand_over(IDS)[1:] == (USABLE, 0, None)
        output = answer(two.b, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone


def test_windows_that_keep_all_tokens_are_other_ones(tmp_path: Path) -> None:
    second = {"enable_chunked_prefill": False}
    with _pair(_saved("gemma4_text", tmp_path), second=second) as two:
        answer(two.a, IDS, PREFILL)
        result = two.end(two.begin(IDS))
        assert "windows of (8,) at the sender, and of () here" in (result.problem or "")


def test_parts_after_the_pages_come_in_order(tmp_path: Path) -> None:
    with _pair(_saved("gemma4_text", tmp_path)) as two:
        pages = two.receiver._pages
        offer = two.sender._pages.offer("x", IDS, None, None)
        digest, (first, second, *_) = offer.digests()[-1], pages.rest_layers

        def part(layer: int, begin: int, count: int, digest: bytes = digest) -> Part:
            return Part(layer, begin, np.zeros((count, 2, 4), dtype=np.uint8), digest)

        for wrong in (part(second, 48, 16), part(first, 39, 16), part(first, 48, 17)):
            with pytest.raises(TransferError, match=f"expected layer {first} from 40 to 64, found"):
                Rest(pages, offer, 64).take(wrong, digest)
        with pytest.raises(TransferError, match="belongs to another prompt"):
            Rest(pages, offer, 64).take(part(first, 48, 16, bytes(32)), digest)
        rest = Rest(pages, offer, 64)
        assert rest.take(part(first, 48, 8), digest)
        with pytest.raises(TransferError, match=f"expected layer {first} from 56 to 64, found"):
            rest.take(part(first, 48, 8), digest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "gemma4_text", "mamba2"])
def test_replicas_for_prompts_hand_over_to_those_that_answer(name: str, tmp_path: Path) -> None:
    options = {"max_model_len": 128, "skip_tokenizer_init": True}
    path = _saved(name, tmp_path)
    with LLM(path, **options) as llm:
        alone = facts(answer(llm, IDS))
    with LLM(path, data_parallel_size=2, prefill_replicas=1, **options) as llm:
        output = answer(llm, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone
        metrics = llm.get_metrics()
        assert (metrics["num_hand_overs"], metrics["num_hand_overs_failed"]) == (1, 0)
