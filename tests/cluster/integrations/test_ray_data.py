"""Ray Data: a model in every actor of ``map_batches``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from sdk import LLM, SamplingParams
from sdk.cluster.integrations.ray import Embed, Generate

pytestmark = pytest.mark.slow

WORDS = ["the cat", "the dog said", "hello", "a small text", "in the world", "and write"]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def rows(data: Any) -> list[dict[str, Any]]:
    return sorted(data.take_all(), key=lambda row: row["id"])


def source(cells: list[Any], column: str = "prompt") -> Any:
    return ray.data.from_items([{"id": i, column: cell} for i, cell in enumerate(cells)])


@pytest.fixture(scope="module", autouse=True)
def quiet(cluster: Cluster) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False


def test_answers_are_those_of_generate_with_two_actors_and_keep_their_rows(tiny: Path) -> None:
    prompts = [f"{word} {i}" for i in range(8) for word in WORDS]
    with LLM(tiny, max_model_len=256) as llm:
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
    options = {"model": str(tiny), "sampling_params": PARAMS, "max_model_len": 256}
    found = rows(
        source(prompts).map_batches(
            Generate, fn_constructor_kwargs=options, concurrency=2, batch_size=4
        )
    )
    assert [row["prompt"] for row in found] == prompts
    assert [row["generated_text"] for row in found] == [one.outputs[0].text for one in expected]
    assert [row["finish_reason"] for row in found] == [
        one.outputs[0].finish_reason for one in expected
    ]
    assert [row["num_input_tokens"] for row in found] == [
        len(one.prompt_token_ids) for one in expected
    ]
    assert [row["num_generated_tokens"] for row in found] == [
        len(one.outputs[0].token_ids) for one in expected
    ]
    assert "error" not in found[0]


def test_conversations_go_through_the_chat_template(tiny: Path) -> None:
    chats = [[{"role": "user", "content": word}] for word in WORDS[:3]]
    # another key in one row: Arrow fills it up with nulls in the others
    chats.append([{"role": "assistant", "content": "hello", "reasoning_content": "so"}])
    with LLM(tiny, max_model_len=256) as llm:
        expected = llm.chat(chats, PARAMS, use_tqdm=False)
    found = rows(
        source(chats, "messages").map_batches(
            Generate,
            fn_constructor_kwargs={
                "model": str(tiny),
                "sampling_params": PARAMS,
                "column": "messages",
                "max_model_len": 256,
            },
            concurrency=1,
            batch_size=2,
        )
    )
    assert [row["generated_text"] for row in found] == [one.outputs[0].text for one in expected]


def test_rows_that_fail_have_an_error_and_the_others_an_answer(tiny: Path) -> None:
    long = "the cat " * 200
    data = source(["hello", long, "the dog", "", "the cat"]).map_batches(
        Generate,
        fn_constructor_kwargs={
            "model": str(tiny),
            "sampling_params": PARAMS,
            "on_error": "column",
            "max_model_len": 64,
        },
        concurrency=1,
        batch_size=1,  # so every row is a batch, and some batches have no error and some no text
    )
    found = rows(data)
    assert [row["error"] is not None for row in found] == [False, True, False, True, False]
    assert found[1]["error"].startswith("RequestError: ") and "64" in found[1]["error"]
    assert [row["generated_text"] is None for row in found] == [False, True, False, True, False]
    assert found[1]["finish_reason"] == "error" and found[1]["num_generated_tokens"] == 0


def test_structured_answers_are_values(tiny: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = rows(
        source(WORDS).map_batches(
            Generate,
            fn_constructor_kwargs={
                "model": str(tiny),
                "sampling_params": SamplingParams(temperature=0, max_tokens=24),
                "returns": schema,
                "on_error": "column",
                "max_model_len": 256,
            },
            concurrency=1,
            batch_size=3,
        )
    )
    for row in found:
        if row["error"] is None:
            assert row["parsed"] == json.loads(row["generated_text"])
            assert set(row["parsed"]) == {"name", "age"}
        else:  # a random model may count without end
            assert row["parsed"] is None and "not complete" in row["error"]


def test_embeddings_are_one_array_and_chains_need_a_prefix(tiny: Path) -> None:
    with LLM(tiny, max_model_len=256) as llm:
        expected = [one.embedding for one in llm.embed(WORDS, use_tqdm=False)]
    options = {"model": str(tiny), "max_model_len": 256, "on_error": "column"}
    data = source([*WORDS, ""], "text").map_batches(
        Embed, fn_constructor_kwargs=options, concurrency=1, batch_size=2
    )
    found = rows(data)
    assert np.array_equal([row["embedding"] for row in found[:-1]], np.float32(expected))
    assert np.isnan(found[-1]["embedding"]).all() and found[-1]["error"].startswith("RequestError")
    assert found[0]["embedding"].dtype == np.float32


class Counting(Generate):
    """Adds how many requests the engine had at most, and what it was given."""

    async def __call__(self, batch: Any) -> dict[str, Any]:
        found = await super().__call__(batch)
        stats, config = self.llm.stats(), self.llm.config
        found["most"] = [stats.step_tokens.quantile(1.0)] * len(found["id"])
        found["threads"] = [config.num_threads] * len(found["id"])
        found["memory"] = [config.memory or 0] * len(found["id"])
        return found


def test_batches_of_one_actor_run_together_with_its_cpus_and_memory(tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    data = source(["a"] * 16).repartition(1).materialize()  # before the actor takes both CPUs
    data = data.map_batches(
        Counting,
        fn_constructor_kwargs={
            "model": str(tiny),
            "sampling_params": params,
            "max_model_len": 128,
            "max_num_seqs": 8,
        },
        concurrency=1,
        batch_size=1,
        num_cpus=2,
        memory=2**30,
    )
    found = rows(data)
    assert {row["threads"] for row in found} == {2}
    assert {row["memory"] for row in found} == {2**30 - 2**29}
    assert max(row["most"] for row in found) > 2  # batches of one row, steps of several


def test_an_error_of_a_row_names_the_row_and_ends_the_data_set(tiny: Path) -> None:
    data = source(["hello", ""]).map_batches(
        Generate,
        fn_constructor_kwargs={"model": str(tiny), "max_model_len": 64},
        concurrency=1,
    )
    with pytest.raises(Exception, match="prompt"):
        data.take_all()


class Dying(Generate):
    """Its first actor is killed while answers are being written."""

    def __init__(self, died: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.died = Path(died)

    async def __call__(self, batch: Any) -> dict[str, Any]:
        found = await super().__call__(batch)
        if not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def test_an_actor_that_dies_is_replaced_and_no_row_is_lost(tiny: Path, tmp_path: Path) -> None:
    with LLM(tiny, max_model_len=256) as llm:
        expected = llm.generate(WORDS, PARAMS, use_tqdm=False)
    options = {"model": str(tiny), "sampling_params": PARAMS, "max_model_len": 256}
    data = source(WORDS).map_batches(
        Dying,
        fn_constructor_kwargs={"died": str(tmp_path / "died"), **options},
        concurrency=1,
        batch_size=2,
    )
    found = rows(data)
    assert (tmp_path / "died").exists()
    assert [row["generated_text"] for row in found] == [one.outputs[0].text for one in expected]
