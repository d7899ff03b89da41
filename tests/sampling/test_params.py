"""SamplingParams accepts what it documents and refuses the rest by name."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from sdk.errors import RequestError
from sdk.params import RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD = {
    "n": [0, 65, 1.5, True, "1", None],
    "best_of": [0, 65],
    "presence_penalty": [-2.1, 2.1, NAN, INF, None, "1"],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "repetition_penalty": [0, -1, 101, NAN],
    "temperature": [-0.1, NAN, INF, "hot", None, True],
    "top_p": [0, 1.01, NAN],
    "top_k": [-2, 2**31, 1.0],
    "min_p": [-0.1, 1.1, NAN],
    "typical_p": [0, 1.1],
    "seed": [2**64, -(2**63) - 1, 0.5],
    "max_tokens": [0, -1, 2**31],
    "min_tokens": [-1, None],
    "logprobs": [-2, 1025, True],
    "prompt_logprobs": [-2, 1025],
    "truncate_prompt_tokens": [0, -2],
    "dry_multiplier": [-1, 101],
    "dry_base": [0.9, NAN],
    "dry_allowed_length": [-1],
    "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": ["a", [""], [1], ["x"] * 65],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 1.1],
    "mirostat_mode": [1, 3],
    "mirostat_tau": [-1, 101],
    "mirostat_eta": [-1, 1.1],
    "no_repeat_ngram_size": [-1, 1025],
    "thinking_token_budget": [-1],
    "priority": [2**31, 1.5],
    "deadline": [0, -1, NAN, INF],
    "guidance_scale": [-0.1, 1001, NAN],
    "ignore_eos": [1, None],
    "detokenize": ["yes"],
    "output_kind": [0, "DELTA"],
    "stop": ["", [""], [3], 3, {"a": 1}, ["x"] * 65, ["x" * 1025]],
    "stop_token_ids": [[-1], [2**31], ["a"], 5, [0] * 4097],
    "logprob_token_ids": [[-1], [1.0]],
    "allowed_token_ids": [[], [-1], 7],
    "bad_words": ["word", [""], ["x"] * 1025, ["x" * 257]],
    "stop_regex": ["(", "", 3, "x" * 1025],
    "logit_bias": [{-1: 1.0}, {1: 101}, {1: NAN}, {"a": 1}, [1], dict.fromkeys(range(4097), 0.0)],
    "logits_processors": [[3], 3, [len] * 17],
    "structured_outputs": [{"json": {}}],
    "guided_decoding": [{"regex": "a"}],
    "extra_args": [[1]],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_bad_value_is_refused_by_the_name_of_its_parameter(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_the_message_names_parameter_value_and_allowed_range() -> None:
    with pytest.raises(RequestError, match=r"top_p must be a number in \(0, 1\], got 1\.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"integer equal to 4 or 8 or 16 or None, got 12"):
        SamplingParams(kv_min_bits=12)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"detokenize": False, "stop": "x"}, "detokenize"),
        ({"detokenize": False, "stop_regex": "x"}, "detokenize"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**values)


def test_an_unknown_keyword_names_the_nearest_parameter() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match=r"no parameter 'zzzz'$"):
        SamplingParams(zzzz=1.0)
    with pytest.raises(TypeError, match="top_k"):
        SamplingParams().clone(topk=3)


def test_defaults_are_the_documented_ones() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert params.max_tokens is None and params.stop == () and params.seed is None
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.num_answers == 1 and not params.greedy


def test_values_are_normalized_and_lists_copied() -> None:
    stops = [7]
    params = SamplingParams(stop="end", stop_token_ids=stops, seed=-1, temperature=np.float32(0.5))
    stops.append(8)
    assert params.stop == ("end",) and params.stop_token_ids == (7,)
    assert params.seed is None and type(params.temperature) is float
    assert SamplingParams(top_k=np.int64(5)).top_k == 5
    assert SamplingParams(stop=None, bad_words=None, logits_processors=None).stop == ()


def test_params_are_frozen_comparable_and_picklable() -> None:
    params = SamplingParams(temperature=0, stop=["a"], logit_bias={3: 1.0}, extra_args={"a": 1})
    assert pickle.loads(pickle.dumps(params)) == params == params.clone()
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]


def test_clone_checks_again_and_with_seed_fills_only_a_missing_seed() -> None:
    params = SamplingParams(n=2, best_of=4)
    assert params.clone(n=3).n == 3 and params.num_answers == 4
    with pytest.raises(RequestError, match="best_of"):
        params.clone(n=5)
    assert params.with_seed(2**64 + 5).seed == 5
    assert SamplingParams(seed=1).with_seed(5).seed == 1


def test_from_optional_takes_none_for_the_default_and_json_keys() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, logit_bias={"12": 3})
    assert params == SamplingParams(top_p=0.5, logit_bias={12: 3.0})


def test_importing_params_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, sdk.params, sdk.engine.plan; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
