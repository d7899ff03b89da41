"""What needs no cluster of Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray

from sdk import LLM
from sdk.errors import RequestError

TWO = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 256}
ON_RAY = {**TWO, "distributed_executor_backend": "ray"}


def test_without_a_connection_to_ray_an_llm_says_what_to_call(tiny: Path) -> None:
    assert not ray.is_initialized()
    with pytest.raises(RequestError, match=r"not connected to Ray; call ray\.init\(\) before"):
        LLM(tiny, **ON_RAY)
    assert not ray.is_initialized()


def test_one_rank_needs_no_ray_and_uni_is_one_rank(tiny: Path) -> None:
    with LLM(tiny, distributed_executor_backend="ray", max_model_len=256) as llm:
        assert len(llm.generate("the cat", use_tqdm=False)) == 1
    with pytest.raises(RequestError, match=r"'uni' has one rank: .*tensor_parallel_size=1, found"):
        LLM(tiny, **TWO, distributed_executor_backend="uni")
    with pytest.raises(RequestError, match=r"expected one of None, 'mp', 'uni', 'ray', found 'x'"):
        LLM(tiny, **TWO, distributed_executor_backend="x")


def test_without_the_package_an_llm_names_the_extra(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sdk.executors.ray_ranks", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install \"embedlm\[ray\]\""):
        LLM(tiny, **ON_RAY)
