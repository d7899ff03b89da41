"""Encoders in an engine: vectors of transformers, refusals by name, every way to load them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk import LLM, AsyncLLM, OutOfMemoryError, RequestError, UnsupportedError, quantize
from sdk.engine.plan import Pooling
from tests.models.conftest import expected_states, prompt, tiny, tiny_encoder

LENGTHS = (5, 61, 1, 33, 150)
IDS = [prompt(length, length) for length in LENGTHS]
PROMPTS = [{"prompt_token_ids": ids} for ids in IDS]
OPTIONS: dict[str, Any] = {"num_threads": 2, "compute": "exact", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def oracle() -> Any:
    return tiny_encoder("bert")


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    oracle.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as found:
        yield found


def means(llm: LLM, prompts: Any = PROMPTS) -> np.ndarray[Any, Any]:
    found = llm.encode(prompts, pooling="mean", normalize=False)
    return np.array([one.outputs.data.tolist() for one in found])


def expected(oracle: Any) -> np.ndarray[Any, Any]:
    return np.array([expected_states(oracle, ids).double().mean(0).numpy() for ids in IDS])


def cosines(a: Any, b: Any) -> Any:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_vectors_are_those_of_transformers_and_steps_are_recorded(llm: LLM, oracle: Any) -> None:
    assert np.abs(means(llm) - expected(oracle)).max() < 1e-5
    assert "replayed from one recorded graph" in str(llm.explain())
    assert llm.load_warnings == ()


def test_a_text_has_the_same_vector_alone_and_in_any_batch(llm: LLM, folder: Path) -> None:
    together = means(llm)
    alone = np.array([means(llm, [one])[0] for one in PROMPTS])
    assert np.array_equal(together, alone)
    with LLM(
        folder, **{**OPTIONS, "num_threads": 1, "max_num_seqs": 2, "enforce_eager": True}
    ) as x:
        assert np.array_equal(means(x), together)


def test_every_token_has_a_state(llm: LLM, oracle: Any) -> None:
    [found] = llm.encode(PROMPTS[1:2], pooling="token", normalize=False)
    states = torch.as_tensor(found.outputs.data)
    assert (states - expected_states(oracle, IDS[1])).abs().max() < 1e-4


def test_a_step_grows_to_the_longest_text_and_keeps_the_pages_of_one_step(llm: LLM) -> None:
    plan = LLM.plan(llm.config.model, **OPTIONS, max_num_batched_tokens=64)
    assert plan.fits and plan.max_model_len == 256
    assert plan.num_pages == 256 // 16 + 64
    layer = 2 * 4 * 16 * 16 * 4  # keys and values, heads, slots, dimensions, bytes
    assert plan.page_bytes == layer and plan.kv_dtype == "float32"
    short = LLM.plan(llm.config.model, **OPTIONS, max_model_len=100, max_num_batched_tokens=64)
    assert short.num_pages == -(-100 // 16) + 64


def test_less_memory_means_shorter_texts_until_it_is_too_little(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 8192}
    tiny_encoder("bert", **wide).save_pretrained(tmp_path)
    whole = LLM.plan(tmp_path, **OPTIONS, memory="400MiB")
    less = LLM.plan(tmp_path, **OPTIONS, memory="80MiB")
    assert whole.max_model_len == 8192 and less.fits and 512 <= less.max_model_len < 8192
    with LLM(tmp_path, **OPTIONS, memory="80MiB") as llm:
        assert llm.max_model_len == less.max_model_len
        assert means(llm).shape == (5, 256)
    with pytest.raises(OutOfMemoryError, match="the model does not fit"):
        LLM(tmp_path, **OPTIONS, memory="20MiB")


def test_an_encoder_is_not_asked_to_continue_a_text(llm: LLM) -> None:
    words = r"this model \(bert\) is an encoder: .* does not continue a text.* use embed"
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=words):
            list(call(PROMPTS[0]))
    for chat in (llm.chat, llm.stream):  # before anybody looks for a chat template
        with pytest.raises(RequestError, match=words):
            list(chat([{"role": "user", "content": "hi"}]))


def test_a_text_beyond_the_positions_of_the_model_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="257 tokens, but the context holds 256"):
        llm.embed({"prompt_token_ids": [5] * 257})
    with pytest.raises(RequestError, match="max_model_len: expected at most 256"):
        LLM(llm.config.model, **OPTIONS, max_model_len=257)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}),
        ("pipeline_parallel_size", 2),
        ("kv_policy", "fp16>int8"),
        ("kv_cache_dtype", "int8"),
        ("swap_space", "1GiB"),
        ("enable_prompt_embeds", True),
    ],
)
def test_an_option_without_a_use_is_refused_by_name(option: str, value: Any, llm: LLM) -> None:
    words = rf"{option}: expected .*, found .*: this model \(bert\) is an encoder"
    with pytest.raises(RequestError, match=words):
        LLM.plan(llm.config.model, **{**OPTIONS, option: value})


def test_weights_in_8_bits_keep_directions(llm: LLM, folder: Path) -> None:
    with LLM(folder, num_threads=2, skip_tokenizer_init=True, quantization="int8") as short:
        assert cosines(means(short), means(llm)).min() > 0.999


def test_files_of_encoders_are_not_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"bert is an encoder, and only decoders can be"):
        quantize(folder, tmp_path / "out", "rtn-w8g64")


def test_ranks_share_the_heads(llm: LLM, folder: Path) -> None:
    with LLM(folder, **OPTIONS, tensor_parallel_size=2) as split:
        assert np.abs(means(split) - means(llm)).max() < 1e-5


def test_a_fork_has_the_same_weights(llm: LLM) -> None:
    with llm.fork(max_num_seqs=3) as second:
        assert np.array_equal(means(second), means(llm))


def test_calls_of_an_event_loop_run_in_the_same_steps(folder: Path, llm: LLM) -> None:
    async def run() -> Any:
        async with AsyncLLM(folder, **OPTIONS) as found:
            parts = await asyncio.gather(*(found.embed(one) for one in PROMPTS))
            return np.array([part.embedding for [part] in parts])

    wanted = np.array([one.embedding for one in llm.embed(PROMPTS)])
    assert np.array_equal(asyncio.run(run()), wanted)


def test_token_types_tell_a_second_text_apart(llm: LLM, oracle: Any) -> None:
    jobs = llm._job_maker.make(
        [llm._reader.read(PROMPTS[1], llm._default_params, room=0)],
        [llm._default_params],
        kind="embed",
        pooling=Pooling("mean", False, second_text=20),
    )
    [output] = llm._job_runner.do("encode", _batch(jobs))
    types = torch.tensor([[0] * 20 + [1] * 41])
    with torch.no_grad():
        states = oracle(input_ids=torch.tensor(IDS[1:2]), token_type_ids=types)
    wanted = states.last_hidden_state[0].double().mean(0).numpy()
    assert np.abs(np.array(output) - wanted).max() < 1e-5


def _batch(jobs: Any) -> Any:
    from sdk.requests.job_runner import JobBatch

    outputs = yield JobBatch(jobs, "encode")
    return [output.outputs.data for output in outputs]


def test_a_decoder_that_sees_both_ways_gives_vectors(tmp_path: Path) -> None:
    oracle = tiny("qwen3", is_causal=False, head_dim=24)
    oracle.save_pretrained(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert np.abs(means(llm) - expected(oracle)).max() < 1e-4
        with pytest.raises(RequestError, match=r"this model \(qwen3\) is an encoder"):
            llm.generate(PROMPTS[0])


def test_an_activation_that_is_not_known_is_refused(oracle: Any, tmp_path: Path) -> None:
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["position_embedding_type"] = "relative_key"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="position_embedding_type: expected absolute"):
        LLM(tmp_path, **OPTIONS)
