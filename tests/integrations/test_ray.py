"""What needs no cluster of Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from sdk import LLM, SamplingParams
from sdk.errors import EngineClosedError, RequestError
from sdk.integrations.ray import Embed, Generate

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


@pytest.fixture(scope="module")
def generate(tiny: Path) -> Iterator[Generate]:
    """Outside of Ray it is an ordinary object."""
    params = SamplingParams(temperature=0, max_tokens=4)
    made = Generate(str(tiny), params, max_model_len=64)
    yield made
    made.llm.close()


def cells(*values: object) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_texts_and_token_ids_as_ray_data_gives_them_are_prompts(generate: Generate) -> None:
    ids = generate.llm.get_tokenizer().encode("the cat")
    found = asyncio.run(generate({"prompt": cells("the cat", np.array(ids))}))
    assert found["generated_text"][0] == found["generated_text"][1]
    assert found["num_input_tokens"] == [len(ids)] * 2
    assert asyncio.run(generate({"prompt": cells()})).keys() == {"prompt"}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": cells("a")}, r"column='prompt': the data has the columns 'text'"),
        ([{"prompt": "a"}], r"batches as dicts of arrays \(batch_format='numpy'\), found a list"),
        ({"prompt": cells(["a", "b"])}, "expected one in each row, found a list of 2"),
        ({"prompt": cells(None)}, "prompt: expected text"),
        (
            {"prompt": cells("a"), "finish_reason": cells("stop")},
            "has a column 'finish_reason' already: pass another prefix than ''",
        ),
    ],
)
def test_what_ray_data_cannot_mean_is_named(
    generate: Generate, batch: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        asyncio.run(generate(batch))


def test_arguments_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(RequestError, match=r"n: expected 1, found 2: a row has one answer"):
        Generate("nowhere", SamplingParams(n=2))
    with pytest.raises(RequestError, match=r"on_error: expected 'raise' or 'column', found 'x'"):
        Embed("nowhere", on_error="x")


def test_a_dead_engine_is_no_error_of_a_row(tiny: Path) -> None:
    rows = Generate(str(tiny), on_error="column", max_model_len=64)
    rows.llm.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(rows({"prompt": cells("a")}))
