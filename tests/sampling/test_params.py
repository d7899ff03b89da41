"""SamplingParams accepts what it documents and refuses the rest by name."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from sdk.api.errors import RequestError
from sdk.api.params import RequestOutputKind, SamplingParams
from tests.counted import lines_run

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
    "tenant": ["", 3, b"a", "x" * 257],
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
    "structured_outputs": [3, "json", {}, {"json": {}, "regex": "a"}, {"jsn": {}}, {"json": bytes}],
    "guided_decoding": [3, {"regex": ""}, {"choice": []}, {"choice": "a"}, {"json": "{"}],
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
    modules = "sys, sdk.api.params, sdk.engine.plan"
    code = f"import {modules}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Reluctant(int):
    """An integer that refuses to be compared."""

    def __le__(self, other: object) -> bool:
        raise OSError

    __lt__ = __ge__ = __gt__ = __eq__ = __le__
    __hash__ = int.__hash__


class Endless(dict):
    """A mapping that says it is small and never ends."""

    def __len__(self) -> int:
        return 1

    def items(self):
        return ((i, 0.0) for i in itertools.count())


class Raising:
    def __iter__(self):
        raise OSError

    __index__ = __float__ = __len__ = __repr__ = __iter__


class Shy(str):
    """Text that has no length of its own."""

    def __len__(self) -> int:
        raise OSError

    __bool__ = __len__


HOSTILE = [
    ("allowed_token_ids", range(10**12)),
    ("stop", itertools.repeat("a")),
    ("bad_words", ("a" for _ in itertools.count())),
    ("logit_bias", Endless()),
    ("extra_args", Endless()),
    ("n", 10**5000),
    ("temperature", 10**5000),
    ("logit_bias", {10**5000: 1}),
    ("allowed_token_ids", [10**5000]),
    *((name, Raising()) for name in ("n", "top_p", "stop", "allowed_token_ids", "logit_bias")),
    ("stop_token_ids", [Raising()]),
    ("stop", [Raising()]),
    ("logits_processors", [Raising()]),
    ("stop_regex", Raising()),
    ("output_kind", Raising()),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(*case, id=f"{case[0]} {index}") for index, case in enumerate(HOSTILE)],
)
def test_values_that_are_endless_huge_or_raise_are_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 400


def test_subclasses_become_plain_values() -> None:
    params = SamplingParams(
        n=Reluctant(3),
        stop=[Shy("ab")],
        stop_token_ids=[Reluctant(5)],
        stop_regex=Shy("a+"),
        logit_bias={Reluctant(7): 1},
    )
    assert type(params.n) is int and type(params.stop_token_ids[0]) is int
    assert type(params.stop[0]) is str and type(params.stop_regex) is str
    assert params.stop == ("ab",) and params.logit_bias == {7: 1.0}


def test_what_does_not_change_is_checked_once_for_all_clones() -> None:
    large = {"allowed_token_ids": range(2**20), "stop_regex": "(?:.?){200}x"}
    params = SamplingParams(n=64, **large)
    small = SamplingParams(n=64, allowed_token_ids=[1], stop_regex="x")
    assert lines_run(lambda: params.clone(seed=1)) == lines_run(lambda: small.clone(seed=1))
    clones = [params.clone(n=1, seed=seed) for seed in range(64)]
    assert all(one.allowed_token_ids is params.allowed_token_ids for one in clones)
    assert [one.seed for one in clones] == list(range(64)) and params.seed is None
