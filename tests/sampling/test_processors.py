"""Each processor against transformers or against its definition written out in plain Python."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as hf

from sdk.api.errors import RequestError
from sdk.api.logprobs import Sampled
from sdk.api.params import SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.sampling.draws import Draw
from sdk.sampling.processors import process
from sdk.sampling.resolved import ResolvedParams, resolve
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import SamplerState

V = 12
INF = float("inf")
tokens = st.lists(st.integers(0, V - 1), max_size=25)


def row() -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(4)) * 2


def processed(params: SamplingParams, prompt=(), output=(), resolved=None) -> torch.Tensor:
    return process(row(), SamplerState(params, resolved or ResolvedParams(), prompt, output))


def drawn(params: SamplingParams) -> Draw:
    return Draw(SamplerState(params, ResolvedParams(), (), ()))


def banned(result: torch.Tensor) -> set[int]:
    return set((result == -INF).nonzero()[:, 0].tolist())


@settings(max_examples=60, deadline=None)
@given(tokens.filter(bool), st.floats(0.5, 2))
def test_repetition_penalty_is_transformers(ids: list, penalty: float) -> None:
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), row()[None])[0]
    half = len(ids) // 2
    got = processed(SamplingParams(repetition_penalty=penalty), ids[:half], ids[half:])
    torch.testing.assert_close(got, expected)


@settings(max_examples=60, deadline=None)
@given(tokens, st.integers(1, 4))
def test_no_repeat_ngram_is_transformers(ids: list, size: int) -> None:
    got = processed(SamplingParams(no_repeat_ngram_size=size), ids[:5], ids[5:])
    if ids:
        expected = hf.NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), row()[None])[0]
        assert torch.equal(got, expected)
    else:
        assert torch.equal(got, row())


@settings(max_examples=60, deadline=None)
@given(tokens, tokens)
def test_frequency_and_presence_count_the_output_only(prompt: list, output: list) -> None:
    got = processed(SamplingParams(frequency_penalty=0.5, presence_penalty=-0.7), prompt, output)
    for token, value in enumerate(row().tolist()):
        count = output.count(token)
        assert got[token] == pytest.approx(value - 0.5 * count + 0.7 * (count > 0), abs=1e-5)


def naive_dry(ids: list, allowed: int, breakers: set, window: int) -> dict[int, float]:
    """For each token: the longest suffix of the text that was followed by it before."""
    ids = ids if window < 0 else ids[len(ids) - min(window, len(ids)) :]
    penalties: dict[int, float] = {}
    for end in range(len(ids) - 1):
        for length in range(1, end + 2):
            there = ids[end + 1 - length : end + 1]
            if there != ids[len(ids) - length :] or breakers & {*there, ids[end + 1]}:
                continue
            if length >= allowed:
                value = 0.8 * 1.75 ** (length - allowed)
                penalties[ids[end + 1]] = max(value, penalties.get(ids[end + 1], 0))
    return penalties


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=25),
    st.integers(0, 4),
    st.sets(st.integers(0, 3), max_size=1),
    st.sampled_from([-1, 0, 3, 10]),
)
def test_dry_penalizes_what_continues_a_repetition(ids, allowed, breakers, window) -> None:
    params = SamplingParams(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=window
    )
    resolved = ResolvedParams(dry_breakers=frozenset(breakers))
    got = processed(params, ids[:7], ids[7:], resolved)
    expected = naive_dry(ids, allowed, breakers, window)
    for token, value in enumerate(row().tolist()):
        assert got[token].item() == pytest.approx(value - expected.get(token, 0), rel=1e-5)


def test_dry_stays_bounded_on_a_long_repetition() -> None:
    got = processed(SamplingParams(dry_multiplier=100, dry_base=100), [3] * 500, [3] * 100)
    assert got[3].item() == pytest.approx(row()[3].item() - 1e4)


def test_logit_bias_and_allowed_ids() -> None:
    got = processed(SamplingParams(logit_bias={2: 1.5, 5: -2.0}))
    expected = row()
    expected[2] += 1.5
    expected[5] -= 2.0
    assert torch.equal(got, expected)
    got = processed(SamplingParams(allowed_token_ids=[1, 9]))
    assert banned(got) == set(range(V)) - {1, 9} and got[9] == row()[9]


def test_a_bad_word_is_forbidden_only_at_its_last_token() -> None:
    resolved = ResolvedParams(bad_words=((7,), (1, 2, 3)))
    params = SamplingParams(bad_words=["x"])
    assert banned(processed(params, (1, 2), (), resolved)) == {7}
    assert banned(processed(params, (), (0, 1), resolved)) == {7}
    assert banned(processed(params, (), (0, 1, 2), resolved)) == {3, 7}


def test_min_tokens_forbids_every_end_until_reached() -> None:
    resolved = ResolvedParams(end_ids=(4, 6))
    params = SamplingParams(min_tokens=2)
    assert banned(processed(params, (1,), (1,), resolved)) == {4, 6}
    assert banned(processed(params, (1,), (1, 1), resolved)) == set()


def test_a_spent_thinking_budget_forces_the_end_of_thinking(ops: Ops) -> None:
    resolved = ResolvedParams(think_start_id=8, think_end_id=9)
    params = SamplingParams(thinking_token_budget=2, temperature=0)
    for output, forced in [
        ((), False),
        ((8, 1), False),
        ((8, 1, 2), True),
        ((8, 1, 9, 2, 3), False),
    ]:
        result = processed(params, (), output, resolved)
        assert (banned(result) == set(range(V)) - {9}) is forced
    sampler = Sampler(V, ops)
    state = SamplerState(params.clone(thinking_token_budget=0), resolved, (8,), ())
    assert sampler.sample(row()[None], [Draw(state)]) == [Sampled(9)]


def test_user_processors_see_the_output_and_run_in_order(ops: Ops) -> None:
    seen = []

    def first(output, logits):
        seen.append(output)
        return logits + 1

    def second(output, logits):
        logits[5] = 100.0
        return logits

    sampler = Sampler(V, ops)
    params = SamplingParams(logits_processors=[first, second], temperature=0)
    state = SamplerState(params, ResolvedParams(), (1,), (2, 3))
    assert sampler.sample(row()[None], [Draw(state)]) == [Sampled(5)] and seen == [(2, 3)]


def test_a_user_processor_may_return_what_autograd_tracks(ops: Ops) -> None:
    weight = torch.ones(V, requires_grad=True)
    sampler = Sampler(V, ops)
    draws = [
        drawn(SamplingParams(logits_processors=[lambda _, x: x * weight], seed=3)),
        drawn(SamplingParams(seed=3)),
    ]
    results = sampler.sample(torch.stack([row(), row()]), draws)
    assert isinstance(results[0], Sampled) and results[0] == results[1]


def broken(output, logits):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (broken, "broken raised KeyError"),
        (lambda output, logits: None, "must return a tensor of shape .12,., got NoneType"),
        (lambda output, logits: logits[:3], r"got \(3,\)"),
        (lambda output, logits: logits * float("nan"), "not finite after"),
        (lambda output, logits: logits - INF, "forbid every token"),
    ],
)
def test_a_misbehaving_user_processor_fails_its_request_alone(ops: Ops, processor, message) -> None:
    sampler = Sampler(V, ops)
    draws = [
        drawn(SamplingParams(logits_processors=[processor])),
        drawn(SamplingParams(temperature=0)),
    ]
    bad, good = sampler.sample(torch.stack([row(), row()]), draws)
    assert isinstance(good, Sampled) and isinstance(bad, str)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad)


def test_parameters_that_leave_no_token_fail_the_request(ops: Ops) -> None:
    sampler = Sampler(V, ops)
    resolved = ResolvedParams(end_ids=(3,))
    state = SamplerState(SamplingParams(allowed_token_ids=[3], min_tokens=1), resolved, (), ())
    assert sampler.sample(row()[None], [Draw(state)]) == [
        "the request's parameters forbid every token"
    ]


class Letters:
    """One token per byte, and " a" as token 256."""

    vocab_size = 257
    eos_token_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [256, *text.encode()[2:]] if text.startswith(" a") else list(text.encode())

    def id_to_bytes(self, token_id: int) -> bytes:
        return b" a" if token_id == 256 else bytes([token_id])


def test_resolving_turns_words_into_ids_once() -> None:
    params = SamplingParams(
        stop_token_ids=[9], bad_words=["ab"], dry_multiplier=1, dry_sequence_breakers=["a", "\n"]
    )
    resolved = resolve(params, Letters(), 257)
    assert resolved.end_ids == (0, 9)
    assert resolved.bad_words == ((97, 98), (256, 98))
    assert resolved.dry_breakers == {10, 97, 256}
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    assert resolve(params.clone(ignore_eos=True), Letters(), 257).end_ids == (9,)
    assert resolve(SamplingParams(), None, 10, eos_token_ids=[2]).end_ids == (2,)


@pytest.mark.parametrize(
    "values",
    [
        {"stop_token_ids": [257]},
        {"allowed_token_ids": [1, 300]},
        {"logprob_token_ids": [257]},
        {"logit_bias": {257: 1.0}},
        {"thinking_token_budget": 4},
    ],
)
def test_resolving_refuses_what_the_model_does_not_have(values: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        resolve(SamplingParams(**values), Letters(), 257)


@pytest.mark.parametrize("values", [{"bad_words": ["x"]}, {"dry_multiplier": 1.0}])
def test_words_without_a_tokenizer_are_refused(values: dict) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(values))} needs a tokenizer"):
        resolve(SamplingParams(**values), None, 257)
