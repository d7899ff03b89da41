"""How a request's logits change in the draw: step by step as all at once, as processors do it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from sdk.api.logprobs import Sampled
from sdk.api.params import SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import SampleBuffers, Shape, join_draws
from sdk.sampling.draws import Draw
from sdk.sampling.processors import process
from sdk.sampling.resolved import ResolvedParams, resolve
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import TOKEN
from tests.shaping import changed

V = 40
RESOLVED = ResolvedParams(
    end_ids=(4, 6),
    bad_words=((7,), (1, 2, 3), (9, 8)),
    dry_breakers=frozenset({5}),
    think_start_id=10,
    think_end_id=11,
)
KINDS: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": [0, 1, 2, 7, 11, 33]},
    "bad words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 5},
    "bias": {"logit_bias": {2: 1.5, 39: -2.0}},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2},
    "thinking": {"thinking_token_budget": 2},
}
tokens = st.lists(st.integers(0, 11), max_size=12)
kinds = st.sets(st.sampled_from(sorted(KINDS)), max_size=4)


def params_of(names: set[str], **more: Any) -> SamplingParams:
    return SamplingParams(
        **{k: v for name in sorted(names) for k, v in KINDS[name].items()}, **more
    )


def resolved_for(params: SamplingParams) -> ResolvedParams:
    """Without the bad words nobody asked for."""
    words = RESOLVED.bad_words if params.bad_words else ()
    return ResolvedParams((4, 6), words, RESOLVED.dry_breakers, 10, 11)


def row(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def result(shape: Shape | None) -> list[float]:
    return changed(row().numpy(), shape, None).tolist()


@settings(max_examples=150, deadline=None)
@given(kinds, tokens, tokens, st.lists(tokens, max_size=4), st.integers(0, 3))
def test_token_by_token_the_shape_becomes_that_of_the_whole_text(
    names: set[str], prompt: list, output: list, later: list, forked: int
) -> None:
    params = params_of(names)
    resolved = resolved_for(params)
    state, fork, stays = SamplerState(params, resolved, prompt, output), None, []
    for i, ids in enumerate(later):
        if i == forked:
            fork, stays = state.fork(), result(state.shape())
            fork.append([1, 2])
            assert result(state.shape()) == stays
            whole = SamplerState(params, resolved, prompt, [*state.output, 1, 2])
            assert result(fork.shape()) == result(whole.shape())
            elsewhere = result(fork.shape())
        state.append(ids)
        if i % 2:
            state.shape()  # asking changes nothing
        if fork is not None:
            assert result(fork.shape()) == elsewhere
    whole = SamplerState(params, resolved, prompt, [*output, *(x for ids in later for x in ids)])
    assert result(state.shape()) == result(whole.shape())
    assert result(state.shape()) == process(row(), state).tolist()


def drawn_by(params: SamplingParams, prompt: Sequence[int] = ()) -> Draw:
    return Draw(SamplerState(params, ResolvedParams(), prompt, ()))


def write(draws: Sequence[Draw], buffers: SampleBuffers) -> None:
    for row, draw in enumerate(draws):
        draw.write(row, buffers)


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("name", [*KINDS, "all"])
@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"top_k": 9}, {"mirostat_mode": 2}])
def test_the_draw_is_that_of_a_processed_row(ops: Ops, name: str, drawn: dict) -> None:
    """To the bit: tokens and what mirostat learns from their probabilities, beside other rows."""
    names = set(KINDS) - {"allowed"} if name == "all" else {name}
    for seed in range(8):
        params = params_of(names, seed=seed, **drawn)
        resolved = resolved_for(params)
        text = np.random.default_rng(seed).integers(0, 12, 30).tolist()
        sampler = Sampler(V, ops)
        plain = drawn_by(SamplingParams(seed=seed))
        draws = [plain, Draw(SamplerState(params, resolved, text[:9], text[9:]))]
        logits = torch.stack([row(seed), row(seed)])
        buffers = SampleBuffers(2)
        write(draws, buffers)
        ops.sampling.sample_into(logits, buffers)
        found = buffers.read(2)
        state = SamplerState(params, resolved, text[:9], text[9:])
        processed = process(row(seed), state)[None]
        uniform = 0.0 if state.greedy else state.uniform(TOKEN)
        wanted = ops.sampling.sample(processed, join_draws([state.draw()], [uniform]))
        assert [column[1] for column in found] == [column[0] for column in wanted]
        assert torch.equal(logits, torch.stack([row(seed), row(seed)]))
        results = sampler.collect(logits, draws, found)
        alone = sampler.sample(row(seed)[None], [plain])
        assert results[0] == alone[0] and results[1].token_id == wanted.tokens[0]
        if state.mirostat:
            state.learn(wanted.probabilities[0])
            assert results[1].mirostat_mu == state.next_mu


def test_callbacks_see_what_is_forbidden_and_come_before_penalties(ops: Ops) -> None:
    seen: list[torch.Tensor] = []

    def callback(output: tuple, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return torch.where(logits > -1e9, 3.0, logits)

    params = params_of({"allowed", "bias", "penalties"}, logits_processors=[callback])
    state = SamplerState(params, ResolvedParams(), [1], [2, 2])
    assert state.shape() is None and not state.foreseeable
    after = process(row(), state)
    before = row()
    before[2] += 1.5
    allowed = [0, 1, 2, 7, 11, 33]
    assert torch.equal(seen[0][allowed], before[allowed])
    assert torch.isneginf(seen[0]).sum() == V - 6
    assert after[1] == pytest.approx(3 / 1.3) and after[0] == 3
    assert after[2] == pytest.approx(3 / 1.3 - 1.0 + 0.2)


@pytest.mark.parametrize("name", KINDS)
def test_draws_are_foreseen_only_where_later_tokens_change_nothing(name: str) -> None:
    params = params_of({name}, seed=1)
    state = SamplerState(params, resolved_for(params), (), ())
    assert state.foreseeable == (name in ("allowed", "bias"))
    state.append([20] * 5)  # of which min_tokens are 5
    assert state.foreseeable == (name in ("allowed", "bias", "min_tokens"))


def test_single_bad_tokens_are_foreseen() -> None:
    resolved = ResolvedParams(bad_words=((7,), (8,)))
    assert SamplerState(SamplingParams(bad_words=["x"]), resolved, (), ()).foreseeable
    state = SamplerState(SamplingParams(bad_words=["x"]), resolved, [], [])
    shape = state.shape()
    state.append([7, 8, 9])
    assert state.shape() is shape and np.isneginf(result(shape)).sum() == 2


def test_tokens_of_a_rewind_are_forbidden_at_one_position() -> None:
    state = SamplerState(SamplingParams(temperature=0), ResolvedParams(), [1], [2, 3], None, [5, 8])
    assert not state.foreseeable
    assert np.flatnonzero(np.isneginf(result(state.shape()))).tolist() == [5, 8]
    ahead = Draw.behind(state, [4]).state
    assert ahead.shape() is None and ahead.foreseeable
    state.append([4])
    assert state.shape() is None and state.foreseeable


def test_another_process_makes_the_same_shape_of_what_it_is_sent() -> None:
    params = params_of({"allowed", "bias", "penalties", "min_tokens"}, stop_token_ids=[7])
    resolved = resolve(params, None, V)
    there = pickle.loads(pickle.dumps(resolved))
    shapes = [SamplerState(params, x, [1, 2], [2]).shape() for x in (resolved, there)]
    assert result(shapes[0]) == result(shapes[1]) != row().tolist()


def test_a_row_is_drawn_as_its_next_request_wants(ops: Ops) -> None:
    buffers = SampleBuffers(2)
    biased = drawn_by(SamplingParams(temperature=0, logit_bias={5: 100}))
    plain = drawn_by(SamplingParams(temperature=0))
    logits = torch.stack([row(), row()])
    best = int(row().argmax())
    for draws, wanted in (([biased, plain], [5, best]), ([plain, biased], [best, 5])):
        write(draws, buffers)
        ops.sampling.sample_into(logits, buffers)
        assert buffers.read(2).tokens == wanted


def test_what_overflows_as_it_changes_is_not_the_model_s(ops: Ops) -> None:
    sampler = Sampler(V, ops)
    params = SamplingParams(repetition_penalty=0.01, seed=1)
    draws = [drawn_by(one, [3]) for one in (params, params, SamplingParams(seed=1))]
    logits = torch.stack([row(), row(), row()])
    logits[:2, 3] = 3e38
    logits[1, 4] = float("nan")
    a, b, c = sampler.sample(logits, draws)
    assert a == "logits are not finite after the request's processors: their maximum is inf"
    assert b == "the model's logits are not finite: their maximum is nan"
    assert isinstance(c, Sampled)
