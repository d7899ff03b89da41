"""Steps of two ranks over loopback TCP, recorded and operator by operator, in turn:
``python tests/cluster/executors/measure_remote.py MODEL [ROUNDS]``.

Each rank has one thread. Also prints the time of a sum, as rank 0 sees it: it includes waiting for
the other rank. Two local ranks, which share memory, are for comparison.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from sdk import LLM, RemoteWorkers, SamplingParams
from sdk.cluster.executors.remote.tcp_group import TcpGroup

TOKEN = "0123456789abcdef-of-these-tests"
#: Requests, tokens of each prompt and of each answer.
LOADS = {
    "decode, 1 request": (1, 8, 65),
    "decode, 8 requests": (8, 8, 33),
    "prompt of 500": (1, 500, 1),
}


class Sums:
    """The sums of this process: how many, and how long they took."""

    count = 0
    seconds = 0.0


def timed(sum_up):
    def run(group: TcpGroup, x) -> None:
        began = time.perf_counter()
        sum_up(group, x)
        Sums.seconds += time.perf_counter() - began
        Sums.count += 1

    return run


@contextlib.contextmanager
def engine(model: str, *, remote: bool, eager: bool) -> Iterator[LLM]:
    options = {"tensor_parallel_size": 2, "num_threads": 1, "max_model_len": 1024}
    options |= {"enforce_eager": eager, "enable_prefix_caching": False}
    if not remote:
        with LLM(model, **options) as llm:
            yield llm
        return
    with socket.socket() as probe, tempfile.NamedTemporaryFile("w") as token:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        token.write(TOKEN)
        token.flush()
        command = [sys.executable, "-m", "sdk", "worker", model, "--connect", address]
        command += ["--token-file", token.name, "--num-threads", "1", "--once"]
        worker = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        workers = RemoteWorkers(listen=address, token=TOKEN, timeout=60)
        with LLM(model, remote_workers=workers, **options) as llm:
            yield llm
        worker.wait()


def speed(llm: LLM, load: str, seed: int) -> tuple[float, float]:
    """Tokens per second (of the prompts, if they are long), and microseconds of a sum."""
    requests, prompt, answer = LOADS[load]
    made = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [made.randrange(10, 40_000) for _ in range(prompt)]}
        for _ in range(requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    Sums.count, Sums.seconds = 0, 0.0
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = requests * (answer if answer > 1 else prompt)
    return tokens / seconds, Sums.seconds / max(Sums.count, 1) * 1e6


def main(model: str, rounds: int = 5) -> None:
    TcpGroup.all_reduce = timed(TcpGroup.all_reduce)  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(engine(model, remote=remote, eager=eager))
            for name, remote, eager in (
                ("TCP, one by one", True, True),
                ("TCP, recorded", True, False),
                ("memory, recorded", False, False),
            )
        }
        for name, llm in engines.items():
            assert ("one recorded graph" in llm.explain()) == ("recorded" in name)
        for load in LOADS:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for turn in range(-1, rounds):  # the first one warms up
                for name, llm in engines.items():
                    found[name].append(speed(llm, load, turn))
            for name, all_rounds in found.items():
                speeds, sums = zip(*all_rounds[1:], strict=True)
                print(
                    f"{load:<20} {name:<18} {statistics.median(speeds):7.1f} tokens/s "
                    f"({min(speeds):.1f} to {max(speeds):.1f}), "
                    f"{statistics.median(sums):7.0f} us per sum",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
