"""A store between engines of models with recurrent states or windows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.cluster.transfer import (
    EnginePages,
    FolderStore,
    HandOverReceiver,
    HandOverSender,
    KVStore,
    MemoryStore,
    StoreConnector,
    store,
)
from sdk.cluster.transfer.connector import Offer
from sdk.cluster.transfer.engine_pages import HandedOver
from tests.cluster.transfer.pairs import LIMIT, PREFILL, USABLE, answer, facts
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES
from tests.scripts import ROOT

#: Short convolutions, delta nets, Mamba-2 beside attention, windows; states or windows alone.
MODELS = ["lfm2", "qwen3_5_text", "granitemoehybrid-experts", "gemma4_text", "mamba2", "mistral"]
IDS = prompt(70, 5)
OPTIONS: dict[str, Any] = {"max_model_len": 160, "skip_tokenizer_init": True, "num_threads": 1}
#: Computes a prompt, puts it into a folder and says how it answers.
SENDER = """
import sys
from sdk import LLM
from sdk.cluster.transfer import EnginePages, FolderStore, HandOverSender, StoreConnector
from tests.cluster.transfer.test_store_of_states import IDS, OPTIONS
from tests.cluster.transfer.pairs import answer, facts

with LLM(sys.argv[1], **OPTIONS) as llm:
    found = facts(answer(llm, IDS))
    with HandOverSender(EnginePages.of(llm), StoreConnector(FolderStore(sys.argv[2]))) as sender:
        assert sender.hand_over("x", "", IDS).result(60).problem is None
print(repr(found))
"""


def saved(name: str, folder: Path) -> Path:
    tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_5_text", tmp_path_factory.mktemp("delta"))


def put(llm: LLM, values: KVStore, ids: list[int] = IDS) -> HandedOver:
    answer(llm, ids, PREFILL)
    with HandOverSender(EnginePages.of(llm), StoreConnector(values)) as sender:
        return sender.hand_over("x", "", ids).result(LIMIT)


def fetch(llm: LLM, values: KVStore, ids: list[int] = IDS) -> HandedOver:
    with HandOverReceiver(EnginePages.of(llm)) as receiver:
        return receiver.fetch(StoreConnector(values), ids)


def test_answers_after_what_a_store_has_are_the_same_bits(path: Path) -> None:
    values = MemoryStore(1 << 24)
    with LLM(path, **OPTIONS) as llm:
        alone = facts(answer(llm, IDS))
        assert put(llm, values)[1:] == (USABLE, 0, None)
        assert put(llm, values)[1:] == (USABLE, USABLE, None)
        longer = [*IDS, *prompt(40, 9)]
        expected = facts(answer(llm, longer))
    with LLM(path, **OPTIONS) as llm:
        assert fetch(llm, values)[1:] == (USABLE, 0, None)
        output = answer(llm, IDS)
        assert output.num_cached_tokens == USABLE and facts(output) == alone
    with LLM(path, **OPTIONS) as llm:  # the next turn goes on from the prompt that was stored
        result = fetch(llm, values, longer)
        assert result[1:] == (USABLE, 0, "the sender had only 64 of 96 tokens")
        output = answer(llm, longer)
        assert output.num_cached_tokens == USABLE and facts(output) == expected
        assert put(llm, values, longer)[1:] == (96, USABLE, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "gemma4_text", "mamba2", "mistral"])
def test_a_prefix_of_another_process_is_a_hit_here(name: str, tmp_path: Path) -> None:
    path, folder = saved(name, tmp_path / "model"), tmp_path / "kv"
    done = subprocess.run(
        [sys.executable, "-c", SENDER, path, folder],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT,
    )
    with LLM(path, **OPTIONS) as llm:
        assert fetch(llm, FolderStore(folder))[1:] == (USABLE, 0, None)
        output = answer(llm, IDS)
        assert output.num_cached_tokens == USABLE
        assert repr(facts(output)) == done.stdout.strip()


class Changed:
    """A store with one value that is another one, or gone."""

    def __init__(
        self, values: MemoryStore, key: bytes, change: Callable[[bytes], bytes | None]
    ) -> None:
        self._values, self._key, self._change = values, key, change
        self.contains, self.put = values.contains, values.put

    def get(self, key: bytes) -> bytes | None:
        value = self._values.get(key)
        return self._change(value) if key == self._key and value is not None else value


def rest_key(llm: LLM) -> bytes:
    offer: Offer = EnginePages.of(llm).offer("x", IDS, None, None)
    return store._Keys(offer).rest(USABLE // 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: None, "had not the states or windows any more after 64 tokens"),
        (lambda value: value[:10], "another protocol or version"),
        (lambda value: value[:-1], "a REST frame is damaged"),
        (lambda value: value[:50] + b"~~" + value[52:], "expected the key that it was stored"),
        (lambda value: value[:90] + b"~~" + value[92:], "a REST frame is damaged"),
    ],
)
def test_a_state_that_is_damaged_or_gone_is_computed(
    delta: Path, change: Callable[[bytes], bytes | None], message: str
) -> None:
    values = MemoryStore(1 << 24)
    with LLM(delta, **OPTIONS) as llm:
        alone = facts(answer(llm, IDS))
        put(llm, values)
        key = rest_key(llm)
        llm.reset_prefix_cache()
        result = fetch(llm, Changed(values, key, change))
        assert result.num_tokens == 0 and message in (result.problem or "")
        output = answer(llm, IDS)
        assert output.num_cached_tokens == 0 and facts(output) == alone


@pytest.mark.parametrize("wrong", ["layers", "rows"])
def test_states_of_another_arrangement_are_not_read(delta: Path, wrong: str) -> None:
    """Whoever writes into a store may write anything with right checksums."""
    values = MemoryStore(1 << 24)
    with LLM(delta, **OPTIONS) as llm:
        put(llm, values)
        key = rest_key(llm)
        _, head, payload = store._split(values.get(key) or b"")
        head, payload = (head[:-12], payload) if wrong == "layers" else (head, payload[:-4])
        own = store.pack_header(store.Kind.REST, head, payload) + bytes(head) + bytes(payload)
        llm.reset_prefix_cache()
        result = fetch(llm, Changed(values, key, lambda value: own))
        expected = "of other layers than" if wrong == "layers" else "which has others"
        assert result.num_tokens == 0 and expected in (result.problem or "")


def test_what_was_not_stored_is_said(delta: Path) -> None:
    values = MemoryStore(1 << 24)
    with LLM(delta, **OPTIONS) as llm:
        put(llm, values)
        result = fetch(llm, values, IDS[:40])  # pages of it are stored, but no state
        assert "no state or window after which this prompt could go on" in (result.problem or "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "MOST_PAYLOAD", 100)
            result = put(llm, values, prompt(70, 6))
        assert "a store takes at most 100" in (result.problem or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 32}, "block_size: the store has pages of 16 tokens of this model"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: the sender has float16, this engine int8"),
        ({"enable_chunked_prefill": False}, "set the same kv_policy, enable_chunked_prefill"),
    ],
)
def test_an_engine_with_other_options_learns_which(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path, values = saved("gemma4_text", tmp_path), MemoryStore(1 << 24)
    with LLM(path, **OPTIONS) as llm:
        put(llm, values)
    with LLM(path, **OPTIONS, **options) as llm:
        for ids in (IDS, prompt(70, 6)):  # also of a prompt that nobody has stored
            result = fetch(llm, values, ids)
            assert result.num_tokens == 0 and message in (result.problem or "")
        put(llm, values)
        result = fetch(llm, values, prompt(70, 6))  # now only the prompt is missing
        assert result.num_tokens == 0 and message not in (result.problem or "")
        assert fetch(llm, values)[1:] == (USABLE // 32 * 32, USABLE // 32 * 32, None)
    with LLM(path, **OPTIONS) as llm:
        assert fetch(llm, values)[1:] == (USABLE, 0, None)


def test_engines_that_keep_other_states_do_not_find_each_other(delta: Path) -> None:
    values = MemoryStore(1 << 24)
    with LLM(delta, **OPTIONS) as llm:
        put(llm, values)
    with LLM(delta, **OPTIONS, state_snapshot_dtype="float16") as llm:
        result = fetch(llm, values)
        assert result.num_tokens == 0
        assert "set the same state_snapshot_dtype for both" in (result.problem or "")
        assert put(llm, values)[1:] == (USABLE, 0, None)
        assert fetch(llm, values)[1:] == (USABLE, USABLE, None)
