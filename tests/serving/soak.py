"""Requests over HTTP and in the process at the same time: ``python -m tests.serving.soak``.

One engine with few pages, bounded queue, fair tenants and more adapters than slots. Threads send
requests with keys to its server, other threads and an event loop call its methods; some leave in
the middle, some are invalid. Every complete answer must be the one that the same request got alone.
At the end every request has exactly one result, and no page is held. Prints one JSON object with
the counts and the memory of the process over time (MiB, resident).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdk import LLM, QueueFullError, SamplingParams
from sdk.serving import create_app
from sdk.serving.guard import ByKey, GuardedAccess, KeyFile, protected
from sdk.serving.guard.key_file import add_key
from sdk.serving.guard.keys import KeyHolder
from sdk.testing import tiny_adapter, tiny_model
from tests.api.engines import settle
from tests.serving.guard.serving import serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
PROMPTS = ["Hello", "Once upon a time", "The quick brown fox jumps over the lazy dog. " * 3]
ADAPTERS = ("red", "green", "blue", "grey")
TENANTS = {"gold": 4.0, "silver": 2.0, "iron": 1.0}
#: Threads that send HTTP requests, threads that call methods, and seats in the event loop.
HTTP_THREADS, THREADS, SEATS = 16, 4, 6
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A request whose answer is always the same. ``params``: of a call of a method, if it has
    one."""

    path: str
    body: dict[str, Any]
    params: SamplingParams | None = None

    @property
    def key(self) -> str:
        return json.dumps([self.path, self.body], sort_keys=True)


def cases() -> list[Case]:
    """Every kind of request with each prompt, on the model and on each adapter."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
        for model in ("base", *ADAPTERS):
            text = {"model": model, "prompt": prompt, "temperature": 0}
            talk = {"model": model, "messages": chat, "temperature": 0}
            most = 8 + 8 * number
            free = SamplingParams(temperature=0, max_tokens=most)
            form = free.clone(structured_outputs={"regex": "[a-f]{3,9}"})
            found += [
                Case(COMPLETIONS, {**text, "max_tokens": most}, free),
                Case(COMPLETIONS, {**text, "max_tokens": most, "guided_regex": "[a-f]{3,9}"}, form),
                Case(COMPLETIONS, {**text, "n": 2, "seed": 5, "temperature": 1, "max_tokens": 8}),
                Case(CHAT, {**talk, "max_tokens": 40, "response_format": wanted}),
                Case(CHAT, {**talk, "max_tokens": 24, "logprobs": True}),
                Case("/v1/embeddings", {"model": model, "input": [prompt, "x"]}),
            ]
        found.append(
            Case(CHAT, {**talk, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60})
        )
    return found


#: Requests that are refused, and with which status.
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (COMPLETIONS, {"model": "nobody", "prompt": "x"}, 404),
    (COMPLETIONS, {"model": "base", "prompt": "x", "temperature": -1}, 400),
    (COMPLETIONS, {"model": "base", "prompt": "x " * 5000}, 400),
    (CHAT, {"model": "base", "messages": []}, 400),
    (CHAT, {"model": "base", "messages": "x", "response_format": {"type": "json_schema"}}, 400),
]


def facts(path: str, status: int, data: bytes, streamed: bool) -> Any:
    """What of a response must always be the same."""
    if status != 200:
        return status
    if not streamed:
        value = json.loads(data)
        if path == "/v1/embeddings":
            return [one["embedding"] for one in value["data"]]
        if path == COMPLETIONS:
            return [(one["text"], one["finish_reason"]) for one in value["choices"]]
        [choice] = value["choices"]
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        return message["content"] or "", calls, choice["finish_reason"]
    events = [line[6:] for line in data.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1:]
    return _merged(path, [json.loads(event) for event in events[:-1]])


def _merged(path: str, events: list[Any]) -> Any:
    """The whole answers of a stream, as :func:`facts` has them."""
    texts: dict[int, str] = {}
    calls: dict[int, dict[str, str]] = {}
    ends: dict[int, str] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta", choice)
            assert index not in ends, "news of an answer that has ended"
            text = delta.get("text") or delta.get("content") or ""
            texts[index] = texts.get(index, "") + text
            for call in delta.get("tool_calls") or ():
                whole = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for name, piece in call["function"].items():
                    whole[name] += piece or ""
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    if path == COMPLETIONS:
        return [(texts[i], ends[i]) for i in sorted(texts)]
    return texts[0], [calls[i] for i in sorted(calls)], ends[0]


@dataclass
class Soak:
    """The requests on one engine and its server. ``ended``: how often each did, which must be once;
    a byte per request, so that the memory of the process shows what the engine and server keep."""

    llm: LLM
    port: int
    keys: dict[str, str]
    total: int
    seed: int
    cases: list[Case] = field(default_factory=cases)
    alone: dict[str, Any] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    ended: bytearray = field(default_factory=bytearray)
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> dict[str, Any]:
        """Every request; what there is to say about it."""
        self.ended = bytearray(self.total)
        for case in self.cases:
            self.alone[case.key] = self._ask(case, random.Random(0), streamed=False)
            if case.params is not None:
                self.alone["call " + case.key] = self._called(case)
        settle(self.llm)
        begin = time.perf_counter()
        threads = [
            *(threading.Thread(target=self._work, args=(self._http,)) for _ in range(HTTP_THREADS)),
            *(threading.Thread(target=self._work, args=(self._call,)) for _ in range(THREADS)),
            threading.Thread(target=lambda: asyncio.run(self._loop())),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        self.llm.wait_for_completion()
        settle(self.llm)
        self._check_ends()
        return {
            "requests": self.total,
            "lost": self.ended.count(0),
            "results": dict(sorted(self.results.items())),
            "errors": self.errors[:20],
            "seconds": round(seconds, 1),
            "resident_mib": [round(one, 1) for one in self.memory],
            "preemptions": self.llm.get_metrics()["num_preemptions"],
        }

    def _check_ends(self) -> None:
        left = {one.name: one.num_requests for one in self.llm.list_loras() if one.num_requests}
        if left:
            self.errors.append(f"adapters are still used: {left}")

    # ---- the work of a thread --------------------------------------------------------------------

    def _take(self) -> int | None:
        with self._lock:
            if self._next == self.total:
                return None
            number = self._next
            self._next += 1
        if number % max(self.total // 40, 1) == 0:
            self.memory.append(_resident())
        return number

    def _end(self, number: int, result: str) -> None:
        with self._lock:
            if self.ended[number]:
                self.errors.append(f"request {number} ended twice")
            self.ended[number] = 1
            self.results[result] += 1

    def _work(self, do: Any) -> None:
        while (number := self._take()) is not None:
            rng = random.Random(f"{self.seed} {number}")
            try:
                self._end(number, do(rng))
            except Exception as error:
                self.errors.append(f"request {number}: {type(error).__name__}: {error}")

    def _compare(self, key: str, found: Any, how: str) -> str:
        if found != self.alone[key]:
            raise AssertionError(f"{key}: expected {self.alone[key]}, found {found}")
        return how

    # ---- over HTTP -------------------------------------------------------------------------------

    def _http(self, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.05:
            path, body, status = rng.choice(REFUSED)
            found = self._send(path, body, rng)[0]
            assert found == status, (path, body, found)
            return f"HTTP {status}"
        if kind < 0.07:
            found = self._send(COMPLETIONS, {"prompt": "x"}, rng, key="sk-wrong")[0]
            assert found == 401, found
            return "HTTP 401"
        case = rng.choice(self.cases)
        if kind < 0.17:
            return self._leave(case, rng)
        streamed = case.path != "/v1/embeddings" and rng.random() < 0.5
        found = self._ask(case, rng, streamed)
        if found == 429:
            return "HTTP 429"
        return self._compare(case.key, found, "HTTP stream" if streamed else "HTTP")

    def _ask(self, case: Case, rng: random.Random, streamed: bool) -> Any:
        """The facts of an answer; 429 if the queue was full again and again."""
        body = {**case.body, **({"stream": True} if streamed else {})}
        for _ in range(20):
            status, data = self._send(case.path, body, rng)
            if status != 429:
                break
            time.sleep(rng.uniform(0, 0.1))
        return facts(case.path, status, data, streamed)

    def _send(
        self, path: str, body: Any, rng: random.Random, key: str | None = None
    ) -> tuple[int, bytes]:
        with self._sent(path, body, rng, key) as connection:
            response = connection.getresponse()
            return response.status, response.read()

    @contextmanager
    def _sent(
        self, path: str, body: Any, rng: random.Random, key: str | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        key = key or self.keys[rng.choice(list(TENANTS))]
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("POST", path, json.dumps(body), headers)
            yield connection

    def _leave(self, case: Case, rng: random.Random) -> str:
        """Close the connection before the answer, or in the middle of it."""
        body = {**case.body, "stream": True, "max_tokens": 200, "ignore_eos": True}
        with self._sent(case.path, case.body if "input" in body else body, rng) as connection:
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.05))
            else:
                connection.getresponse().read(rng.randrange(1, 400))
        return "HTTP left"

    # ---- in the process --------------------------------------------------------------------------

    def _call(self, rng: random.Random) -> str:
        case = rng.choice([case for case in self.cases if case.params is not None])
        kind = rng.random()
        try:
            if kind < 0.2:
                return self._abandoned(case, rng)
            if kind < 0.3:
                vector = self.llm.embed(case.body["prompt"], tenant="iron")[0].embedding
                assert len(vector) == self.llm.model_config.hidden_size
                return "embed"
            return self._compare("call " + case.key, self._called(case, rng), "generate")
        except QueueFullError:
            return "QueueFullError"

    def _called(self, case: Case, rng: random.Random | None = None) -> Any:
        params, lora = _params(case, rng), _lora(case)
        [output] = self.llm.generate(case.body["prompt"], params, lora_request=lora, use_tqdm=False)
        return [(one.text, one.finish_reason) for one in output.outputs]

    def _abandoned(self, case: Case, rng: random.Random) -> str:
        params = _params(case, rng).clone(max_tokens=200, ignore_eos=True)
        stream = self.llm.stream(case.body["prompt"], params, lora_request=_lora(case))
        for _ in range(rng.randrange(4)):
            next(stream, None)
        del stream
        return "left"

    async def _loop(self) -> None:
        async def seat() -> None:
            while (number := self._take()) is not None:
                rng = random.Random(f"{self.seed} {number}")
                try:
                    self._end(number, await self._acall(rng))
                except Exception as error:
                    self.errors.append(f"request {number}: {type(error).__name__}: {error}")

        await asyncio.gather(*(seat() for _ in range(SEATS)))

    async def _acall(self, rng: random.Random) -> str:
        case = rng.choice([case for case in self.cases if case.params is not None])
        params = _params(case, rng)
        stream = self.llm.astream(case.body["prompt"], params, lora_request=_lora(case))
        text, reason = "", None
        try:
            if rng.random() < 0.2:
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(rng.uniform(0, 0.02))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stream.aclose()
                return "cancelled"
            async for piece in stream:
                text += piece.outputs[0].text
                reason = piece.outputs[0].finish_reason
        except QueueFullError:
            return "QueueFullError"
        return self._compare("call " + case.key, [(text, reason)], "astream")


def _params(case: Case, rng: random.Random | None) -> SamplingParams:
    assert case.params is not None
    return case.params.clone(tenant=None if rng is None else rng.choice([*TENANTS, None]))


def _lora(case: Case) -> str | None:
    model: str = case.body["model"]
    return None if model == "base" else model


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / _MIB


def soak(folder: Path, total: int, seed: int, *, max_waiting: int = 24) -> dict[str, Any]:
    """Run ``total`` requests on a tiny model in ``folder``; the report."""
    model = tiny_model(folder / "model")
    page = LLM.plan(model, max_model_len=512, enable_lora=True).page_bytes
    file = folder / "keys.json"
    keys = {name: add_key(file, KeyHolder(name, weight=TENANTS[name])) for name in TENANTS}
    with ExitStack() as stack:
        access = GuardedAccess(ByKey(file=KeyFile(file)))
        stack.callback(access.close)
        llm = stack.enter_context(
            LLM(
                model,
                max_model_len=512,
                max_num_seqs=12,
                max_num_batched_tokens=64,
                kv_cache_memory_bytes=56 * page,
                scheduling_policy="fair",
                max_waiting=max_waiting,
                enable_lora=True,
                max_loras=2,
                max_lora_rank=4,
                num_threads=2,
            )
        )
        for number, name in enumerate(ADAPTERS):
            llm.add_lora(name, tiny_adapter(folder / name, model, seed=number, scale=4.0))
        app = protected(create_app({"base": llm}, access=access), access=access)
        port = stack.enter_context(serving(app))
        return Soak(llm, port, keys, total, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(soak(Path(folder), args.requests, args.seed), indent=2))


if __name__ == "__main__":
    main()
