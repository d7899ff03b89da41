"""A text that cannot be made ends its request; closing closes everything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from sdk import LLM, CheckpointError, EngineClosedError, EngineDeadError, SamplingParams
from sdk.api.memory_pool import MemoryPool
from tests.api.engines import Caller, Gate, ask, ids, tokens


@pytest.fixture
def folder_llm(golden: Path) -> Iterator[LLM]:
    """An engine whose decoder panics on the token "a", as a damaged tokenizer.json can make it."""
    with LLM(golden / "arch-llama3" / "hf", max_model_len=128) as llm:
        tokenizer: Any = llm._reader.tokenizer
        tokenizer._backend.decoder = decoders.Strip("a", 0, 5)
        tokenizer._kind, tokenizer.bytewise = "other", False
        yield llm


@pytest.mark.parametrize("kind", ["at the end", "streamed"])
def test_a_panic_in_one_requests_text_ends_that_request_alone(folder_llm: LLM, kind: str) -> None:
    llm, tokenizer = folder_llm, folder_llm._reader.tokenizer
    assert tokenizer is not None
    letter = tokenizer.token_to_id("a")
    others = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    expected = ask(llm, 1, 2, params=others)
    panics = others.clone(detokenize=True, allowed_token_ids=[letter])
    if kind == "streamed":
        *_, bad = llm.stream(ids(3), panics)
        good = llm.generate([ids(1), ids(2)], others)
    else:
        first, bad, second = llm.generate([ids(1), ids(3), ids(2)], [others, panics, others])
        good = [first, second]
    assert bad.outputs[0].finish_reason == "error"
    assert "tokenizer.json" in str(bad.outputs[0].stop_reason)
    assert [tokens(output) for output in good] == expected
    assert ask(llm, 1, 2, params=others) == expected
    settle_without_text(llm)


def test_a_panic_in_the_text_of_a_logprob_is_raised_to_who_reads_it(folder_llm: LLM) -> None:
    tokenizer = folder_llm._reader.tokenizer
    assert tokenizer is not None
    letter = tokenizer.token_to_id("a")
    params = SamplingParams(max_tokens=2, detokenize=False, logprobs=1, allowed_token_ids=[letter])
    [output] = folder_llm.generate(ids(1), params)
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = output.outputs[0].logprobs[0][letter].decoded_token  # type: ignore[index]
    settle_without_text(folder_llm)


def settle_without_text(llm: LLM) -> None:
    llm.generate(ids(0), SamplingParams(max_tokens=1, detokenize=False))
    with llm._driver._step_lock:
        llm._driver._engine.scheduler.check()


class Panic(BaseException):
    """As the tokenizers library raises it: no Exception."""


def test_close_closes_everything_after_a_step_that_broke_off(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MemoryPool("400MiB")
    llm = LLM(tiny_path, max_model_len=128, memory=pool)
    engine: Any = llm._driver._engine
    executor, closed = engine._executor, []
    close = executor.close

    def counted() -> None:
        closed.append(True)
        close()

    def broken(*_: Any) -> None:
        raise Panic("in the middle of the books")

    def contradicted(*_: Any) -> None:
        raise KeyError("a request that is nowhere")

    executor.close = counted
    gate = Gate()
    params = SamplingParams(max_tokens=20, logits_processors=[gate])
    caller = Caller(lambda: llm.generate(ids(1), params))
    gate.wait()
    engine._apply, engine.scheduler.queues.finish, engine.scheduler.queues.abort = (
        broken,
        contradicted,
        contradicted,
    )
    gate.open()
    assert isinstance(caller.get(), EngineDeadError)
    with caplog.at_level(logging.WARNING, "sdk"):
        llm.close()
    assert closed == [True]
    assert pool.used == 0
    with pytest.raises(EngineClosedError):
        llm.generate(ids(1))
    llm.close()


def test_closing_gives_the_lease_back_though_the_executor_cannot_be_closed(tiny_path: Path) -> None:
    pool = MemoryPool("400MiB")
    llm = LLM(tiny_path, max_model_len=128, memory=pool)
    executor: Any = llm._driver._engine._executor
    close = executor.close

    def failing() -> None:
        close()
        raise OSError("a pipe is gone")

    executor.close = failing
    with pytest.raises(OSError, match="a pipe is gone"):
        llm.close()
    assert pool.used == 0
    llm.close()
