"""The engines that the bench measures, each in its own process, including this package's.

Every engine is a worker that exchanges JSON lines (``peers/worker.py`` has the protocol), so that
all of them start, run and are timed in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sdk.api.errors import RequestError, SdkError
from sdk.bench.peers.opening import Opening
from sdk.kernels.system import SYSTEM

OURS = "embedlm"
#: The same with weights in 8 bits, in the embed suite.
OURS_INT8 = "embedlm-int8"
#: Another installation of this package: an older release, or another build of the native module.
OTHER = "embedlm-other"
#: Peer -> the module it needs.
PEERS = {
    "llama.cpp": "llama_cpp",
    "openvino": "openvino_genai",
    "openvino-f32": "openvino_genai",
    "mistral.rs": "mistralrs",
    "vllm": "vllm",
    "vllm-bf16": "vllm",
    "transformers": "transformers",
    "transformers-bf16": "transformers",
    "peft": "peft",
    "sentence-transformers": "sentence_transformers",
    "fastembed": "fastembed",
    OTHER: "sdk",
}
#: Peers that only one suite measures.
OF_ONE_SUITE = ("peft", "sentence-transformers", "fastembed")
#: Peers of the embed suite.
EMBEDDING = (OTHER, "llama.cpp", "sentence-transformers", "fastembed")
#: Those that read the same GGUF file as we do; the others get its weights unpacked.
READ_GGUF = (OTHER, "llama.cpp", "openvino", "openvino-f32", "mistral.rs")
#: Those of them that do not open a file without a vocabulary.
NEED_VOCABULARY = ("openvino", "openvino-f32", "mistral.rs")
#: Characters of a peer's problem that are shown: Rust's and C++'s can be pages.
_SHOWN = 300
#: Threads of an OpenMP runtime go on spinning after their last work, up to 0.2 s in Intel's.
_SETTLE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts to answer concurrently, each with ``output_len`` greedy tokens."""

    prompts: tuple[tuple[int, ...], ...]
    output_len: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one load: until every request has its first token, then while all decode.

    ``bubble``: the share of decoding in which a stage of a pipeline did not compute.
    """

    prefill_s: float
    decode_s: float
    decode_tokens: int
    bubble: float | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all requests together; 0 if nothing was decoded."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with, and the interpreter that has it."""

    engine: str
    python: str = sys.executable


def parse_peers(text: str, known: Collection[str] = PEERS) -> tuple[Peer, ...]:
    """``"llama.cpp=/venv/bin/python,vllm"``, each engine once."""
    peers: dict[str, Peer] = {}
    for piece in text.split(","):
        engine, named, python = piece.partition("=")
        if engine not in known or bool(named) > bool(python) or engine in peers:
            raise argparse.ArgumentTypeError(
                f"expected NAME or NAME=PYTHON, each of {', '.join(known)} at most once; "
                f"found {piece!r}"
            )
        peers[engine] = Peer(engine, python or sys.executable)
    return tuple(peers.values())


def check_peer(peer: Peer) -> None:
    """:raises RequestError: no interpreter was named, and this one does not have the peer."""
    module = PEERS[peer.engine]
    if peer.python == sys.executable and importlib.util.find_spec(module) is None:
        raise RequestError(
            f"--against {peer.engine}: {module} is not installed here; install it, or name an "
            f"interpreter that has it: --against {peer.engine}=/path/to/python"
        )


class PeerError(SdkError):
    """Another engine failed. The message is one line that begins with its name."""

    def __init__(self, engine: str, problem: str) -> None:
        super().__init__(f"{engine}: {textwrap.shorten(problem, _SHOWN, placeholder=' ...')}")
        self.engine = engine


class Worker:
    """One opened engine.

    It reports its ``name`` and ``kv``; ``open_s`` is the time that its constructor took.
    ``failed``: it has ended with an error.
    """

    def __init__(self, opening: Opening, python: str = sys.executable) -> None:
        self.engine = opening.engine
        self.failed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command(python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment(opening),
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
            )
        except OSError as error:
            raise self.error(f"{python} cannot be started: {error}") from error
        try:
            hello = self._ask(asdict(opening))
        except BaseException:
            self.close(now=True)
            raise
        self.name = str(hello["name"])
        self.kv = str(hello["kv"])
        self.open_s = float(hello["open_s"])
        self.vocab_size = int(hello["vocab_size"])

    def measure(self, load: Load) -> Sample:
        return Sample(**self._ask({"prompts": load.prompts, "output_len": load.output_len}))

    def peak_bytes(self) -> int:
        """The largest resident memory of its process so far."""
        return SYSTEM.peak_memory(self._process.pid)

    def logits(self, prompt: Sequence[int], path: Path) -> None:
        """Write float32 ``[len(prompt), vocab_size]``, row-major without a header, to ``path``."""
        self._ask({"logits_of": prompt, "path": str(path)})

    def run_one(
        self,
        prompt: Sequence[int],
        output_len: int,
        *,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        drafts: bool = False,
    ) -> tuple[float, list[int]]:
        """Tokens per second after the first one of a single request, and the tokens."""
        found = self._ask(
            {
                "one": prompt,
                "output_len": output_len,
                "temperature": temperature,
                "schema": schema,
                "drafts": drafts,
            }
        )
        tokens: list[int] = found["tokens"]
        return (len(tokens) - 1) / found["seconds"] if len(tokens) > 1 else 0.0, tokens

    def embed(self, texts: Sequence[str], path: Path | None = None) -> float:
        """The seconds that the vectors of ``texts`` took. They are written to ``path``."""
        question = {"texts": list(texts), "path": None if path is None else str(path)}
        return float(self._ask(question)["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended; its last reply is read below
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            how = f"the worker ended without a reply, {_exit(self._process.wait())}"
            raise self.error(f"{how}: {said}" if (said := self._said()) else how)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self.error(f"the worker failed: {reply['error']}")
        return reply

    def error(self, problem: str) -> SdkError:
        """The exception to raise: its process answers nothing more."""
        self.failed = True
        return (
            SdkError(f"{OURS}: {problem}")
            if self.engine in (OURS, OURS_INT8)
            else PeerError(self.engine, problem)
        )

    def _said(self) -> str:
        """The last line that it wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def close(self, *, now: bool = False) -> None:
        """End the process: let it exit when it is idle; kill it ``now`` or after ten seconds."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()
        try:
            self._process.wait(timeout=0 if now else 10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def command(python: str) -> list[str]:
    """The command of a worker. The first line that it reads names the engine."""
    return [python, str(Path(__file__).with_name("peers"))]


def own_environment() -> dict[str, str]:
    """Environment of a process that runs this package, which may not be installed."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def environment(opening: Opening) -> dict[str, str]:
    """Environment of a worker: tells peers the number of threads, and to use one process."""
    if opening.engine in (OURS, OURS_INT8):
        return own_environment()
    found = dict(os.environ)
    found["OMP_NUM_THREADS"] = found["RAYON_NUM_THREADS"] = str(opening.threads)
    found["TOKENIZERS_PARALLELISM"] = "false"
    found["MISTRALRS_CPU_KV_F32"] = "1" if opening.kv == "float32" else "0"
    if opening.engine.startswith("vllm"):
        cpus = sorted(SYSTEM.cpus())[: opening.threads]
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        found["VLLM_CPU_KVCACHE_SPACE"] = "4"
        found["VLLM_NO_USAGE_STATS"] = "1"
    return found


class Engines:
    """Several workers that are opened and closed together.

    ``failures``: the messages of peers that failed, which the report shows.
    """

    def __init__(self, failures: list[str] | None = None) -> None:
        self.opened: list[Worker] = []
        self._failures = [] if failures is None else failures

    def open(self, opening: Opening, python: str = sys.executable) -> Worker:
        worker = Worker(opening, python)
        self.opened.append(worker)
        return worker

    @contextmanager
    def sparing(self, what: str = "") -> Iterator[None]:
        """A peer that fails inside, at ``what``, is left out from then on; the others go on."""
        try:
            yield
        except PeerError as error:
            self._failures.append(f"{error} ({what})" if what else str(error))
            for worker in self.opened:
                if worker.failed:
                    worker.close(now=True)
            self.opened = [worker for worker in self.opened if not worker.failed]

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary: engines pad theirs differently, and all get the same ids."""
        return min(worker.vocab_size for worker in self.opened)

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self.opened:
            engine.close(now=error is not None)

    def interleaved(self, round_number: int) -> Iterator[Worker]:
        """All engines; every other round in reverse, so that no engine always runs first.

        If there are several, each waits until the last one's threads have gone to sleep.
        """
        for worker in self.opened[:: 1 if round_number % 2 == 0 else -1]:  # a copy: some may fail
            if len(self.opened) > 1:
                time.sleep(_SETTLE)
            yield worker
