"""Two engines and what hands over between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sdk import LLM, RequestOutput, SamplingParams
from sdk.cluster.transfer import (
    EnginePages,
    HandedOver,
    HandOverReceiver,
    HandOverSender,
    KVConnector,
    KVListener,
    SharedMemoryConnector,
    SharedMemoryListener,
    TcpConnector,
    TcpListener,
)

TOKEN = "a token of the tests"
LIMIT = 60  # seconds after which a wait that should be over has failed
PROMPT = [3 + 7 * i % 400 for i in range(70)]
USABLE = 64  # tokens of it in whole pages of 16
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=20, logprobs=2, ignore_eos=True)
PREFILL = SamplingParams(temperature=0, max_tokens=1)


def tcp(timeout: float = 30.0) -> tuple[KVConnector, KVListener]:
    return TcpConnector(TOKEN, timeout=timeout), TcpListener(TOKEN, timeout=timeout)


def shared_memory(timeout: float = 30.0) -> tuple[KVConnector, KVListener]:
    return SharedMemoryConnector(timeout=timeout), SharedMemoryListener(timeout=timeout)


CONNECTORS = {"tcp": tcp, "shared memory": shared_memory}


def facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


def answer(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> RequestOutput:
    [output] = llm.generate([prompt], params)
    return output


def check(llm: LLM) -> None:
    """Nothing runs and no page is held."""
    scheduler = llm._driver.engine.scheduler
    with llm._driver._step_lock:
        scheduler.check()
        assert scheduler.pool.num_available == scheduler.pool.capacity


class Pair:
    """A sender and a receiver, each with its engine."""

    def __init__(
        self, a: LLM, b: LLM, connector: KVConnector, listener: KVListener, **options: Any
    ) -> None:
        self.a, self.b = a, b
        self.listener = listener
        self.sender = HandOverSender(EnginePages.of(a), connector)
        self.receiver = HandOverReceiver(EnginePages.of(b), listener, **options)
        self._count = 0

    def begin(self, prompt: list[int] = PROMPT, **options: Any) -> str:
        """Begin to hand a prompt over; returns the id."""
        self._count += 1
        transfer_id = f"transfer-{self._count}"
        self.last = self.sender.hand_over(transfer_id, self.listener.address, prompt, **options)
        return transfer_id

    def end(self, transfer_id: str) -> HandedOver:
        """How it ended at the receiver."""
        return self.receiver.result(transfer_id).result(LIMIT)

    def hand_over(self, prompt: list[int] = PROMPT) -> HandedOver:
        """Compute a prompt at the sender while it is handed over."""
        [request_id] = self.a.enqueue([prompt], PREFILL)
        transfer_id = self.begin(prompt, request_id=request_id)
        self.a.wait_for_completion()
        problem = self.last.result(LIMIT).problem
        assert problem is None, problem
        return self.end(transfer_id)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for llm in (self.a, self.b):
            check(llm)


@contextmanager
def pair(
    path: Path,
    connect: Callable[[], tuple[KVConnector, KVListener]] = shared_memory,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Pair]:
    """Two engines of one model; ``first`` and ``second``: their own options."""
    with ExitStack() as stack:
        both = {"max_model_len": 128, **options}
        llms = [stack.enter_context(LLM(path, **(both | (own or {})))) for own in (first, second)]
        made = Pair(*llms, *connect())
        stack.callback(made.close)
        yield made
