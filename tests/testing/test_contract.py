"""contract_check: a tiny LLM keeps the contract, and every broken copy of a fake is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sdk import EngineClosedError, RequestError
from sdk.testing import FakeLLM, contract_check

ANSWER = "one two three four five six seven eight"


def test_a_real_engine_keeps_the_contract(tiny_llm: Any) -> None:
    checks = contract_check(tiny_llm(max_model_len=256, num_threads=1))
    assert "deltas_add_up" in checks and "aborts" in checks


class Reversed(FakeLLM):
    def generate(self, *args: Any, **options: Any) -> Any:
        return super().generate(*args, **options)[::-1]


class LosesPieces(FakeLLM):
    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        return iter([*super().stream(*args, **options)][1:])


class LosesAsyncAnswers(FakeLLM):
    async def agenerate(self, *args: Any, **options: Any) -> Any:
        return (await super().agenerate(*args, **options))[:1]


class ReturnsTwice(FakeLLM):
    def wait_for_completion(self) -> Any:
        self.last = super().wait_for_completion() or getattr(self, "last", [])
        return self.last


class NeverAborts(FakeLLM):
    def abort(self, request_id: Any) -> None:
        pass


class AcceptsEverything(FakeLLM):
    def pump(self, max_ms: float) -> Any:
        return super().pump(abs(max_ms))


class RunsBeforeItChecks(FakeLLM):
    def generate(self, prompts: Any, *args: Any, **options: Any) -> Any:
        try:
            return super().generate(prompts, *args, **options)
        except RequestError:
            super().generate("x")
            raise


class LongVectors(FakeLLM):
    def embed(self, *args: Any, **options: Any) -> Any:
        found = super().embed(*args, **options)
        for one in found:
            one.embedding[:] = [2 * value for value in one.embedding]
        return found


class NeverCloses(FakeLLM):
    def close(self) -> None:
        pass


class ClosesOnce(FakeLLM):
    def close(self) -> None:
        if self._driver._closed:
            raise EngineClosedError("closed twice")
        super().close()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Reversed, "outputs for .* in this order"),
        (LosesPieces, "pieces that add up to"),
        (LosesAsyncAnswers, "agenerate to return"),
        (ReturnsTwice, "each output only once"),
        (NeverAborts, "one aborted and one complete request"),
        (AcceptsEverything, "expected a RequestError, found"),
        (RunsBeforeItChecks, "no step for invalid requests"),
        (LongVectors, "an embedding of length 1"),
        (NeverCloses, "an EngineClosedError after close"),
    ],
)
def test_a_broken_one_is_found(broken: Callable[..., Any], message: str) -> None:
    llm = broken(ANSWER)
    with pytest.raises(AssertionError, match=message):
        contract_check(llm)
    FakeLLM.close(llm)


def test_closing_twice_must_not_raise() -> None:
    with pytest.raises(EngineClosedError, match="closed twice"):
        contract_check(ClosesOnce(ANSWER))
