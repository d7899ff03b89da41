"""Prefixes of models with recurrent states alone: their pages have no keys and values, so that the
memory for states, not a number of pages, decides how many prefixes stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.memory.shares import id_bytes
from tests.models.conftest import prompt, tiny
from tests.models.test_rwkv import folder
from tests.models.tiny_architectures import ARCHITECTURES

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_model_len": 160,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
    "num_threads": 1,
}
#: Conversations, six times as many as requests that run.
CONVERSATIONS = [prompt(140, 20 + number) for number in range(12)]


@pytest.fixture(scope="module", params=["mamba", "mamba2", "rwkv7"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp(request.param)
    if request.param == "rwkv7":
        return folder(to)
    tiny(request.param, **ARCHITECTURES[request.param]).save_pretrained(to)
    return to


def cached(llm: LLM) -> list[int]:
    """How many tokens of each conversation are found, one after another."""
    outputs = (llm.generate([ids], ONE_TOKEN)[0] for ids in CONVERSATIONS)
    return [one.num_cached_tokens or 0 for one in outputs]


def test_conversations_stay_as_long_as_there_is_memory_for_states(path: Path) -> None:
    with LLM(path, kv_cache_memory_bytes=2**21, **OPTIONS) as llm:
        assert cached(llm) == [0] * len(CONVERSATIONS)
        assert cached(llm) == [128] * len(CONVERSATIONS)
        pool = llm._driver.engine.scheduler.pool
        assert not pool.unit_bytes and pool.num_cached > 2 * 160 // 16


def test_pages_without_keys_take_a_share_of_the_memory(path: Path) -> None:
    """They are counted, so that short states do not make for any number of them."""
    least = LLM.plan(path, kv_cache_memory_bytes=2**17, **OPTIONS)
    more = LLM.plan(path, kv_cache_memory_bytes=2**21, **OPTIONS)
    pages = 2 * 160 // 16
    for made, nbytes in ((least, 2**17), (more, 2**21)):
        ids = (made.num_pages - pages) * id_bytes(16)
        assert made.page_bytes == 0 and 0 <= ids <= nbytes // 16
        assert made.kv_cache + ids <= nbytes
    assert more.num_pages > pages
    ids = (more.num_pages - least.num_pages) * id_bytes(16)
    assert more.workspace - least.workspace == ids
