"""Steps with prompts, replayed in pieces between their attentions: the bits of single operators.

On a card made of the CPU's kernels (``fake_card.py``): what a piece forgets to record, keeps for
too short or writes for nobody's rows changes answers here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_card import on_a_card

from sdk import LLM, SamplingParams
from sdk.engine.rank import inputs
from sdk.engine.rank.inputs import StepInputs
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.sized_graphs import PieceGraphs, StepGraphs, token_buckets

#: A llama, sliding windows of 8 in five of six layers, a mixture of experts with sinks.
MODELS = ["gguf-Q8_0/model.gguf", "arch-gemma3/hf", "gptoss-mxfp4"]
LENGTHS = (21, 3, 70, 9, 40, 1, 13)
SMALL: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 40, "max_num_seqs": 4}


def prompts() -> list[list[int]]:
    return [[(7 * length + 13 * i) % 300 + 4 for i in range(length)] for length in LENGTHS]


def params(length: int = 9, **options: Any) -> SamplingParams:
    drawn = {"temperature": 0.8, "top_k": 20, "seed": 3, "ignore_eos": True}
    return SamplingParams(max_tokens=length, **drawn | options)


def answers(llm: LLM, *given: Any, **options: Any) -> list[Any]:
    """Tokens and log-probabilities, which differ where a bit of any hidden state does."""
    outputs = llm.generate(*given, **options)
    llm._driver._engine.scheduler.check()
    return [(x.outputs[0].token_ids, x.outputs[0].cumulative_logprob) for x in outputs]


class Replayed:
    """The steps that ran in pieces: their batches, and how many tokens their graphs hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[AttentionBatch] = []
        self.captured: list[int] = []
        replay, capture = PieceGraphs.replay, PieceGraphs._capture

        def replaying(graphs: PieceGraphs, batch: AttentionBatch) -> Any:
            self.batches.append(batch)
            return replay(graphs, batch)

        def capturing(graphs: PieceGraphs, size: int) -> Any:
            self.captured.append(size)
            return capture(graphs, size)

        monkeypatch.setattr(PieceGraphs, "replay", replaying)
        monkeypatch.setattr(PieceGraphs, "_capture", capturing)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    return Replayed(monkeypatch)


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / MODELS[0]


def eager(path: Path, **options: Any) -> LLM:
    return LLM(path, enforce_eager=True, **SMALL | options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_beside_decoding_requests_have_the_same_bits(
    golden: Path, replayed: Replayed, name: str
) -> None:
    options = {"skip_tokenizer_init": True}
    wanted = [params(length, logprobs=1) for length in (9, 5, 12, 3, 8, 20, 4)]
    with on_a_card(golden / name, **SMALL | options) as (llm, card):
        found = answers(llm, prompts(), wanted)
        layers = llm._runner().model.config.num_layers
    with eager(golden / name, **options) as llm:
        assert answers(llm, prompts(), wanted) == found
    mixed = [b for b in replayed.batches if 1 < b.max_query_len < b.num_tokens]
    assert mixed and {b.num_tokens for b in replayed.batches} - set(replayed.captured)
    assert max(replayed.captured) == 40  # and not one of 64
    assert card.graphs >= (layers + 1) * len(replayed.captured)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_codes_in_pages_have_the_same_bits(path: Path, kv: str) -> None:
    with on_a_card(path, **SMALL, kv_cache_dtype=kv) as (llm, _):
        found = answers(llm, prompts(), params(logprobs=1))
    with eager(path, kv_cache_dtype=kv) as llm:
        assert answers(llm, prompts(), params(logprobs=1)) == found


def test_a_prefix_that_is_cached_is_read_by_the_pieces_in_between(
    path: Path, replayed: Replayed
) -> None:
    beginning = prompts()[2]
    later = [[*beginning, 5, 6, 7], [*beginning[:40], 9, 9], [*beginning, 8]]
    found = []
    with on_a_card(path, **SMALL) as (llm, _):
        for asked in ([beginning], later):
            found.append(answers(llm, asked, params()))
        hits = llm.get_metrics()["prefix_hits"]
    with eager(path) as llm:
        assert [answers(llm, asked, params()) for asked in ([beginning], later)] == found
    assert hits >= 4 + 2 + 4  # pages of 16 tokens
    assert 3 + 10 + 1 in {b.num_tokens for b in replayed.batches}  # after hits and copied tails


@pytest.mark.slow
def test_preempted_requests_are_computed_again_with_the_same_bits(path: Path) -> None:
    wanted = params(60)
    asked = [prompt for prompt in prompts() if len(prompt) < 30]
    with eager(path) as llm:
        memory = 9 * llm.memory_plan.page_bytes
        expected = answers(llm, asked, wanted)
    with on_a_card(path, **SMALL, kv_cache_memory_bytes=memory) as (llm, _):
        assert answers(llm, asked, wanted) == expected
        assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.slow
def test_what_is_asked_of_the_hidden_states_is_there(path: Path, replayed: Replayed) -> None:
    wanted = params(6, prompt_logprobs=1, repetition_penalty=1.2)
    found = []
    with on_a_card(path, **SMALL) as (llm, _):
        outputs = llm.generate(prompts(), wanted)
        found = [(x.prompt_logprobs, x.outputs[0].token_ids) for x in outputs]
        vectors = [x.embedding for x in llm.embed(prompts())]
    with eager(path) as llm:
        outputs = llm.generate(prompts(), wanted)
        assert [(x.prompt_logprobs, x.outputs[0].token_ids) for x in outputs] == found
        assert [x.embedding for x in llm.embed(prompts())] == vectors
    assert replayed.captured


@pytest.mark.slow
def test_embeddings_next_to_tokens_give_the_bits_of_single_operators(path: Path) -> None:
    wanted = params(20)

    def given(llm: LLM) -> list[Any]:
        runner: Any = llm._runner()
        mixed: list[Any] = list(prompts())
        for index in range(0, len(mixed), 2):
            ids = torch.tensor(mixed[index], device=runner.ops.device)
            with runner.entered(), torch.inference_mode():
                rows = runner.model.embed(ids).cpu()
            mixed[index] = {"prompt_embeds": rows}
        return mixed

    with eager(path) as llm:
        expected = answers(llm, prompts(), wanted)
    with on_a_card(path, **SMALL, enable_prompt_embeds=True) as (llm, _):
        assert answers(llm, given(llm), wanted) == expected
        assert answers(llm, given(llm)[:1], wanted) == expected[:1]


@pytest.mark.slow
def test_prompts_of_more_than_512_tokens_are_replayed_with_the_same_bits(
    path: Path, replayed: Replayed
) -> None:
    large: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 700, "max_num_seqs": 4}
    asked = [[(7 * n + 13 * i) % 300 + 4 for i in range(n)] for n in (400, 401, 490)]
    with on_a_card(path, **large, kv_cache_memory_bytes="8MiB") as (llm, _):
        assert llm._runner().strategy.most_tokens_in_pieces == 700
        found = answers(llm, asked, params(3, logprobs=1))
    with LLM(path, enforce_eager=True, **large) as llm:
        assert answers(llm, asked, params(3, logprobs=1)) == found
    counts = {batch.num_tokens for batch in replayed.batches}
    assert 700 in counts and any(512 < count <= 640 for count in counts)
    assert {640, 700} <= set(replayed.captured)


@pytest.mark.slow
def test_a_step_of_more_tokens_than_the_largest_bucket_runs_operator_by_operator(
    path: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.kernels.sized_graphs.MOST_TOKENS", 16)
    with on_a_card(path, **SMALL) as (llm, _):
        found = answers(llm, prompts(), params())
        assert "up to 16 tokens replayed in pieces" in llm.explain()
    with eager(path) as llm:
        assert answers(llm, prompts(), params()) == found
    assert max(replayed.captured) <= 16 and replayed.captured


def test_rows_that_fill_a_bucket_would_be_somebody_s_if_they_were_not_nobody_s(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake card does show a wrong filling: the keys of others are written over."""
    with eager(path) as llm:
        wanted = answers(llm, prompts(), params(logprobs=1))
    view = StepInputs.view

    def wrongly(self: StepInputs, tokens: int, requests: int) -> AttentionBatch:
        before = self._starts.copy()
        self._buffers.send = lambda *_: None  # type: ignore[method-assign]
        batch = view(self, tokens, requests)
        self._starts[requests + 1 :] = before[requests + 1 :]
        del self._buffers.send
        self._buffers.send()
        return batch

    monkeypatch.setattr(StepInputs, "view", wrongly)
    with on_a_card(path, **SMALL) as (llm, _):
        assert answers(llm, prompts(), params(logprobs=1)) != wanted


@pytest.mark.slow
def test_attentions_are_given_the_prefix_that_all_requests_share(
    path: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_SHARED_REQUESTS", 2)
    monkeypatch.setattr(inputs, "_SHARED_TOKENS", 16)
    shared: list[int] = []
    replay = PieceGraphs.replay

    def looking(graphs: PieceGraphs, batch: AttentionBatch) -> Any:
        if batch.shared_len is not None:
            shared.append(int(batch.shared_len))
        return replay(graphs, batch)

    monkeypatch.setattr(PieceGraphs, "replay", looking)
    beginning = prompts()[2][:48]
    asked = [[*beginning, 5, 6, 7], [*beginning, 9, 9], [*beginning, 8]]
    with on_a_card(path, **SMALL) as (llm, _):
        answers(llm, [beginning], params(1))
        found = answers(llm, asked, params(logprobs=1))
    with eager(path) as llm:
        answers(llm, [beginning], params(1))
        assert answers(llm, asked, params(logprobs=1)) == found
    assert set(shared) == {48}


def test_what_cannot_be_captured_in_pieces_runs_operator_by_operator_and_decoding_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: PieceGraphs, size: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(PieceGraphs, "_capture", capture)
    with on_a_card(path, **SMALL) as (llm, card):
        found = answers(llm, prompts(), params())
        explained = llm.explain()
        assert card.graphs > 0  # of decode steps
    with eager(path) as llm:
        assert answers(llm, prompts(), params()) == found
    assert "decoding: replayed from graphs" in explained
    assert "with prompts: operator by operator: " in explained
    assert "tokens cannot be captured: tried to allocate 2 GiB" in explained


def test_what_was_captured_before_a_failure_stays_in_use(
    path: Path,
    replayed: Replayed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture, tried = PieceGraphs._capture, []

    def failing(self: PieceGraphs, size: int) -> Any:
        tried.append(size)
        if len(tried) == 3:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return capture(self, size)

    monkeypatch.setattr(PieceGraphs, "_capture", failing)
    with on_a_card(path, **SMALL) as (llm, card):
        found = answers(llm, prompts(), params())
        pieces = llm._runner().strategy.pieces
        assert pieces is not None and list(pieces.graphs.sizes) == [40, 32]
        before = card.replays
        llm.reset_prefix_cache()
        assert answers(llm, prompts(), params()) == found
        assert card.replays > before
        explained = llm.explain()
    with eager(path) as llm:
        assert answers(llm, prompts(), params()) == found
    assert len(tried) == 3  # no other size after that
    message = f"{tried[2]} tokens cannot be captured: tried to allocate 2 GiB"
    assert "up to 40 tokens replayed in pieces" in explained
    assert f"except some sizes: {message}" in explained
    said = [record.message for record in caplog.records if "cannot be captured" in record.message]
    rest = "this and other sizes run operator by operator, 2 captured before stay in use"
    assert said == [f"{message}; {rest}"]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", [0, 1])
def test_decode_steps_captured_before_a_failure_stay_in_use_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    capture, tried = StepGraphs._capture, []

    def failing(self: StepGraphs[Any], kind: tuple[int, bool]) -> Any:
        tried.append(kind[0])
        if len(tried) > first:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return capture(self, kind)

    monkeypatch.setattr(StepGraphs, "_capture", failing)
    one = prompts()[:1]
    with on_a_card(path, **SMALL) as (llm, _):
        found = [answers(llm, asked, params(20)) for asked in (one, prompts(), one)]
        explained = llm.explain()
        assert (llm._runner().strategy.steps_ahead == 0) == (first == 0)
    with eager(path) as llm:
        assert [answers(llm, asked, params(20)) for asked in (one, prompts(), one)] == found
    assert len(tried) == first + 1
    assert ("decoding: replayed from graphs" in explained) == (first == 1)
    assert f"a decode step of {tried[-1]} cannot be captured: tried to allocate" in explained


def test_a_model_of_transformers_is_not_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.engine.rank.forward.Decoder", int)  # as if this were none of ours
    with on_a_card(path, **SMALL) as (llm, _):
        assert llm._runner().strategy.most_tokens_in_pieces == 0
        assert "operator by operator: transformers' own code runs between" in llm.explain()


@pytest.mark.slow
def test_graphs_that_are_dropped_are_captured_again(path: Path, replayed: Replayed) -> None:
    with on_a_card(path, **SMALL) as (llm, card):
        found = answers(llm, prompts(), params())
        captured = len(replayed.captured)
        runner = llm._runner()

        def again() -> None:
            with runner.entered():
                runner.record()
                assert card.in_pools() == set()
                runner.capture_all()

        llm._driver.between_steps(again)
        assert len(replayed.captured) == 2 * captured
        llm.reset_prefix_cache()
        assert answers(llm, prompts(), params()) == found


def test_a_closed_engine_holds_nothing_of_the_pool(path: Path) -> None:
    with on_a_card(path, **SMALL) as (llm, card):
        answers(llm, prompts(), params())
        assert card.in_pools()
        llm.close()
        assert card.in_pools() == set()


@pytest.mark.slow
def test_layers_and_buckets_share_the_buffers_between_the_pieces(path: Path) -> None:
    with on_a_card(path, **SMALL) as (llm, _):
        answers(llm, prompts(), params())
        pieces = llm._runner().strategy.pieces
        assert pieces is not None and len(pieces.graphs.sizes) > 2
        assert sorted(key[0] for key in pieces._buffers) == ["hidden", "queries", "results"]
        assert {len(buffer) for buffer in pieces._buffers.values()} == {40}


def test_buckets_of_tokens_are_powers_of_two_and_then_multiples_of_64() -> None:
    assert token_buckets(1) == [1]
    assert token_buckets(40) == [1, 2, 4, 8, 16, 32, 40]
    assert token_buckets(64) == [1, 2, 4, 8, 16, 32, 64]
    assert token_buckets(200) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 200]
    assert token_buckets(512) == [1, 2, 4, 8, 16, 32, *range(64, 513, 64)]
    assert token_buckets(700) == [*token_buckets(512), 640, 700]
    sizes = token_buckets(2048)
    assert len(sizes) == 26 and sizes[14:] == list(range(640, 2049, 128))
    above = [next(size for size in sizes if size >= n) / n for n in range(513, 2049)]
    assert max(above) < 1.25 and max(above[512:]) < 1.125
    graphs = PieceGraphs(lambda size, cut, exchange: torch.empty(size), 4096, None)  # type: ignore[arg-type]
    assert graphs.most_tokens == 2048
    batch = AttentionBatch(*[torch.zeros(0)] * 5, 16, 1, 1)
    object.__setattr__(batch, "positions", torch.zeros(2049))
    with pytest.raises(KernelError, match="at most 2048 rows, found 2049"):
        graphs.replay(batch)
