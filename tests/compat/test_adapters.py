"""Adapters through the interfaces of vLLM and llama-cpp-python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sdk
from sdk.api.errors import RequestError
from sdk.compat.llama_cpp import Llama
from sdk.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from sdk.testing import tiny_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "gguf-Q8_0" / "model.gguf")


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_adapter(tmp_path_factory.mktemp("adapter"), model, rank=8))


@pytest.fixture(scope="module")
def expected(model: str, adapter: str) -> Iterator[tuple[list[int], list[int]]]:
    """What ``sdk`` answers to "the cat" with the adapter, and without."""
    params = sdk.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with sdk.LLM(model, max_model_len=96, enable_lora=True) as llm:
        llm.add_lora("a", adapter)
        outputs = llm.generate(["the cat"] * 2, params, lora_request=["a", None], use_tqdm=False)
        first, second = (output.outputs[0].token_ids for output in outputs)
        assert first != second
        yield first, second


def test_vllms_requests_name_an_adapter(
    model: str, adapter: str, expected: tuple[list[int], list[int]]
) -> None:
    lora = LoRARequest("a", 3, adapter)
    with LLM(model, max_model_len=96, enable_lora=True, max_loras=2) as llm:
        found = llm.generate(["the cat"] * 2, GREEDY, lora_request=[lora, None])
        assert tuple(output.outputs[0].token_ids for output in found) == expected
        assert found[0].lora_request.lora_int_id == 3 and found[1].lora_request is None
        llm.enqueue(["the cat"], GREEDY, lora_request=lora)
        assert llm.wait_for_completion()[0].outputs[0].token_ids == expected[0]
        vectors = [
            llm.embed("the cat", lora_request=one)[0].outputs.embedding for one in (lora, None)
        ]
        assert vectors[0] != vectors[1]
        [pooled] = llm.encode("the cat", PoolingParams(task="embed"), lora_request=lora)
        assert pooled.outputs.data.tolist() == vectors[0]
        assert llm.score("a", "b", lora_request=lora)[0].outputs.score != (
            llm.score("a", "b")[0].outputs.score
        )
        beams = llm.beam_search(["the cat"] * 2, BeamSearchParams(2, 3), [lora, None])
        assert beams[0].sequences[0].tokens != beams[1].sequences[0].tokens
        assert beams[0].sequences[0].lora_request.lora_name == "a"


def test_vllms_async_engine_adds_and_removes(
    model: str, adapter: str, expected: tuple[list[int], list[int]]
) -> None:
    args: Any = AsyncEngineArgs(model, max_model_len=96, enable_lora=True, max_loras=1)
    engine = AsyncLLMEngine.from_engine_args(args)

    async def run() -> None:
        lora = LoRARequest("a", 3, adapter)
        assert await engine.add_lora(lora)
        assert await engine.list_loras() == {3}
        assert await engine.pin_lora(3)
        pieces = [one async for one in engine.generate("the cat", GREEDY, "r", lora_request=lora)]
        assert pieces[-1].outputs[0].token_ids == expected[0]
        assert await engine.remove_lora(3) and not await engine.remove_lora(3)
        assert await engine.list_loras() == set()

    asyncio.run(run())
    engine.shutdown()


def test_llamas_adapter_applies_to_everything(
    model: str, adapter: str, expected: tuple[list[int], list[int]]
) -> None:
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "logprobs": None}
    with Llama(model, n_ctx=96) as plain, Llama(model, n_ctx=96, lora_path=adapter) as adapted:
        prompt = plain.tokenize(b"the cat")
        texts = [
            one.create_completion(prompt, **how)["choices"][0]["text"] for one in (plain, adapted)
        ]
        assert texts[0] != texts[1]
        state = adapted.save_state()
        adapted.load_state(state)
        assert adapted.create_completion(prompt, **how)["choices"][0]["text"] == texts[1]
    with Llama(model, n_ctx=96, lora_path=adapter, lora_scale=0.0) as off:
        assert off.create_completion(prompt, **how)["choices"][0]["text"] == texts[0]


def test_llamas_bad_adapters_are_errors(model: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="lora_path: expected a LoRA adapter, found"):
        Llama(model, n_ctx=64, lora_path=str(tmp_path / "none"))
    with pytest.raises(RequestError, match=r"lora_base=.* is not supported: leave it out"):
        Llama(model, n_ctx=64, lora_base="base.gguf")
