"""What the bench drives: this package in this process, or a peer in another one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from sdk.errors import SdkError


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: all prompts at once, each answered with ``output_len`` tokens, greedy."""

    prompts: tuple[tuple[int, ...], ...]
    output_len: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens per second of one measurement, all streams together."""

    prefill: float
    decode: float


class BenchEngine(Protocol):
    name: str

    def measure(self, load: Load) -> Sample: ...

    def close(self) -> None: ...


class OurEngine:
    """An ``LLM`` stepped by hand, prefix cache off: every round computes everything."""

    name = "embedlm"

    def __init__(self, model: str, threads: int, streams: int, context: int) -> None:
        from sdk.llm import LLM

        # Twice the seats, so twice the pages: with none to spare the scheduler holds the last
        # prompts back until others end, and the streams would not run together.
        self._llm = LLM(
            model,
            num_threads=threads,
            max_num_seqs=2 * streams,
            max_model_len=context,
            enable_prefix_caching=False,
        )
        self.vocab_size = self._llm.model_config.vocab_size

    def measure(self, load: Load) -> Sample:
        """Decode is measured from the first token of the last stream to the end of the first."""
        from sdk.params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=load.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        waiting = set(
            self._llm.enqueue([{"prompt_token_ids": list(p)} for p in load.prompts], params)
        )
        left = set(waiting)
        start = time.perf_counter()
        prefilled = ended = start
        tokens = 0
        while left:
            outputs = self._llm.step()
            now = time.perf_counter()
            all_run = not waiting and len(left) == len(load.prompts)
            made = 0
            for output in outputs:
                made += len(output.outputs[0].token_ids)
                waiting.discard(output.request_id)
                if output.finished:
                    left.discard(output.request_id)
            if all_run:
                tokens += made
                ended = now
            elif not waiting and prefilled == start:
                prefilled = ended = now
        decode = tokens / (ended - prefilled) if ended > prefilled else 0.0
        return Sample(load.prompt_tokens / (prefilled - start), decode)

    def close(self) -> None:
        self._llm.close()


class PeerEngine:
    """A worker script in another interpreter, spoken to in JSON lines (see bench_peer.py)."""

    def __init__(self, python: str, model: str, threads: int, streams: int, context: int) -> None:
        script = Path(__file__).with_name("bench_peer.py")
        try:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise SdkError(f"--peer-python {python}: cannot be started: {error}") from error
        try:
            hello = self._ask(
                {"model": model, "threads": threads, "streams": streams, "context": context}
            )
        except BaseException:
            self.close()
            raise
        self.name = str(hello["name"])

    def measure(self, load: Load) -> Sample:
        reply = self._ask({"prompts": load.prompts, "output_len": load.output_len})
        decode = reply["decode_tokens"] / reply["decode_s"] if reply["decode_tokens"] else 0.0
        return Sample(load.prompt_tokens / reply["prefill_s"], decode)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; what it said last is read below
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in reply:
            raise SdkError(f"the peer failed: {reply['error']}")
        return reply

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Engines:
    """Several engines opened together and closed together."""

    def __init__(self) -> None:
        self.opened: list[BenchEngine] = []

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self.opened:
            engine.close()

    def interleaved(self, round_number: int) -> Sequence[BenchEngine]:
        """All engines; every other round in reverse, so that none always runs on a warm machine."""
        return self.opened if round_number % 2 == 0 else self.opened[::-1]
