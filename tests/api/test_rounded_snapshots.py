"""``state_snapshot_dtype="float16"``: snapshots of recurrent states in half the bytes, in prefix
hits, files, the swap space and hand-overs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams, SnapshotError
from tests.cluster.transfer.pairs import CONNECTORS, LIMIT, PREFILL, USABLE, answer, pair
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

ROUNDED = {"state_snapshot_dtype": "float16"}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "dtype": "float32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPT = prompt(70, 5)
#: Short convolutions, delta nets, Mamba-2 beside attention, Mamba-1.
NAMES = ("lfm2", "qwen3_5_text", "falcon_h1", "jamba")


def written(name: str, folder: Path) -> Path:
    tiny(name, **ARCHITECTURES[name]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("qwen3_5_text", tmp_path_factory.mktemp("delta"))


def facts(llm: LLM, ids: list[int]) -> tuple[Any, int]:
    """Tokens and log-probabilities of an answer, and how many tokens were cached."""
    [output] = llm.generate([ids], GREEDY)
    found = output.outputs[0]
    assert found.logprobs is not None
    steps = [{t: x.logprob for t, x in step.items()} for step in found.logprobs]
    return (list(found.token_ids), steps), output.num_cached_tokens


def first_step(found: tuple[Any, int]) -> dict[int, float]:
    return found[0][1][0]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_hits_are_as_long_and_answers_differ_in_rounding_alone(name: str, tmp_path: Path) -> None:
    path, found = written(name, tmp_path), []
    for options in ({}, ROUNDED):
        with LLM(path, **OPTIONS, **options) as llm:
            alone = facts(llm, PROMPT)
            conversation = [*PROMPT, *alone[0][0], 7, 8]
            found.append((alone, facts(llm, conversation), facts(llm, PROMPT)))
    exact, rounded = found
    assert exact[0] == rounded[0]  # nothing was read yet
    for one, other in zip(exact[1:], rounded[1:], strict=True):
        assert one[1] == other[1] > 60  # hits
        a, b = first_step(one), first_step(other)
        assert a != b, "nothing was rounded"
        assert max(abs(a[t] - b[t]) for t in a.keys() & b.keys()) < 2e-2


def test_a_plan_has_twice_the_snapshots_in_the_same_bytes(delta: Path) -> None:
    exact, rounded = (LLM.plan(delta, **OPTIONS, **one) for one in ({}, ROUNDED))
    states = rounded.states
    assert states.slot_bytes == exact.states.slot_bytes
    assert 0.5 < states.rounded_bytes / states.slot_bytes < 0.6
    # eight for each request, and the one that is read: in places of their own
    assert states.num_rounded == 1 + 1 + 8 * 4 and states.num_slots == 1 + 2 * 4
    assert "snapshots of states in 16 bits" in str(rounded)
    parts = rounded.num_pages * rounded.page_bytes + states.nbytes
    assert rounded.kv_cache == parts < exact.kv_cache
    nbytes = exact.kv_cache
    many = [
        LLM.plan(delta, kv_cache_memory_bytes=nbytes, **OPTIONS, **one).states
        for one in ({}, ROUNDED)
    ]
    assert many[1].num_rounded - 2 > 1.5 * (many[0].num_slots - 2 - 4)


def test_evicted_snapshots_come_back_from_the_swap_space(delta: Path) -> None:
    """In memory for one request: the snapshot of the first prompt is evicted by the others."""
    others = [prompt(60 + i, 30 + i) for i in range(6)]
    plan = LLM.plan(delta, **{**OPTIONS, "max_num_seqs": 1}, **ROUNDED)
    nbytes = 16 * plan.page_bytes + 2 * plan.states.slot_bytes + 2 * plan.states.rounded_bytes
    options = {**OPTIONS, **ROUNDED, "max_num_seqs": 1, "kv_cache_memory_bytes": nbytes}
    with LLM(delta, **{**OPTIONS, **ROUNDED}) as llm:
        facts(llm, PROMPT)
        expected = facts(llm, PROMPT)
    with LLM(delta, swap_space="64MiB", **options) as llm:
        facts(llm, PROMPT)
        for other in others:
            facts(llm, other)
        assert llm.get_metrics()["swapped_out"] > 0
        assert facts(llm, PROMPT) == expected
        assert llm.get_metrics()["swapped_in"] > 0


def test_a_file_says_the_type_and_goes_back_to_an_engine_with_the_same(
    delta: Path, tmp_path: Path
) -> None:
    with LLM(delta, **OPTIONS, **ROUNDED) as llm:
        facts(llm, PROMPT)
        llm.snapshot(PROMPT).save(tmp_path / "rounded.kv")
        expected = facts(llm, PROMPT)
    with LLM(delta, **OPTIONS, **ROUNDED) as llm:
        assert llm.restore(tmp_path / "rounded.kv") == 64
        assert facts(llm, PROMPT) == expected
    with LLM(delta, **OPTIONS) as llm:
        facts(llm, PROMPT)
        llm.snapshot(PROMPT).save(tmp_path / "exact.kv")
        with pytest.raises(SnapshotError, match=r"delta_scale.*the same state_snapshot_dtype"):
            llm.restore(tmp_path / "rounded.kv")
    small, large = (tmp_path / f"{one}.kv" for one in ("rounded", "exact"))
    assert small.stat().st_size < large.stat().st_size


def test_rounded_states_are_handed_over_and_others_are_refused(delta: Path) -> None:
    connector = CONNECTORS["shared memory"]
    with pair(delta, connector, skip_tokenizer_init=True, **ROUNDED) as two:
        ids = prompt(70, 5)
        answer(two.b, ids)
        expected = answer(two.b, ids).outputs[0].token_ids
        two.b.reset_prefix_cache()
        assert two.hand_over(ids)[1:] == (USABLE, 0, None)
        output = answer(two.b, ids)
        assert output.num_cached_tokens == USABLE
        assert output.outputs[0].token_ids == expected
    with pair(delta, connector, skip_tokenizer_init=True, first=ROUNDED) as two:
        [request_id] = two.a.enqueue([ids], PREFILL)
        two.begin(ids, request_id=request_id)
        two.a.wait_for_completion()
        assert "set the same state_snapshot_dtype" in str(two.last.result(LIMIT).problem)


@pytest.mark.slow
def test_ranks_round_their_own_heads(delta: Path) -> None:
    with LLM(delta, tensor_parallel_size=2, **OPTIONS, **ROUNDED) as llm:
        (alone, _), _ = facts(llm, PROMPT)
        (again, _), cached = facts(llm, PROMPT)
        assert cached >= 64 and again[0] == alone[0]


def test_what_has_no_snapshots_of_states_refuses_the_option(delta: Path, tmp_path: Path) -> None:
    llama = written("llama", tmp_path)
    with pytest.raises(RequestError, match="state_snapshot_dtype='float16': llama has no recur"):
        LLM.plan(llama, **OPTIONS, **ROUNDED)
    with pytest.raises(
        RequestError, match="state_snapshot_dtype: expected one of 'auto', 'float16"
    ):
        LLM.plan(delta, **OPTIONS, state_snapshot_dtype="int8")
    with pytest.raises(RequestError, match="state_snapshot_dtype: expected enable_prefix_caching"):
        LLM.plan(delta, **OPTIONS, **ROUNDED, enable_prefix_caching=False)
