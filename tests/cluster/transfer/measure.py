"""Measures hand-overs of two processes; no test. ``python -m tests.cluster.transfer.measure``.

Numbers are medians of ``ROUNDS`` rounds, and percentiles over all of them; with and without a
hand-over take turns. Each process has one thread, so that two cores are enough for both.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from sdk import LLM, SamplingParams, demo_model
from sdk.cluster.transfer import EnginePages, HandOverReceiver, HandOverSender, KVConnector
from sdk.cluster.transfer.connector import End, Offer, Part, Rows
from sdk.engine.pages.page_pool import PageKey
from tests.cluster.transfer.pairs import CONNECTORS, PREFILL

ROUNDS = 5
TOKENS = 2001
PROMPT = [3 + 7 * i % 40000 for i in range(TOKENS)]
OPTIONS = {"max_model_len": 2304, "max_num_batched_tokens": 512, "num_threads": 1}


# ---- the other process ---------------------------------------------------------------------------


def sink(name: str) -> None:
    """Takes what comes and throws it away."""
    _, listener = CONNECTORS[name]()
    print(listener.address, flush=True)
    while (receiving := listener.accept()) is not None:
        with contextlib.closing(receiving):
            offer = receiving.offer()
            receiving.accept(0, offer.spec.page_size, 8 << 20)
            layers = 0
            while not isinstance(part := receiving.receive(), End):
                layers += 1
                if layers % offer.spec.num_layers == 0:
                    receiving.release()
            receiving.done(part.num_tokens)


def receive(name: str) -> None:
    """An engine that receives; says for each hand-over when it had ended and how."""
    _, listener = CONNECTORS[name]()
    with (
        LLM(demo_model(), **OPTIONS) as llm,
        HandOverReceiver(EnginePages.of(llm), listener) as receiver,
    ):
        print(listener.address, flush=True)
        for line in sys.stdin:
            result = receiver.result(line.strip()).result(600)
            print(time.monotonic(), result.num_tokens, flush=True)
            llm.reset_prefix_cache()


def send(name: str, destination: str) -> None:
    """An engine that has a prompt and sends it for each line."""
    connector, listener = CONNECTORS[name]()
    listener.close()
    with (
        LLM(demo_model(), **OPTIONS) as llm,
        HandOverSender(EnginePages.of(llm), connector) as sender,
    ):
        llm.generate([PROMPT], PREFILL)
        print("ready", flush=True)
        for line in sys.stdin:
            outcome = sender.hand_over(line.strip(), destination, PROMPT).result(600)
            print(outcome.num_tokens, outcome.problem, flush=True)


class Other:
    """Another process of this script."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.cluster.transfer.measure", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def other(*arguments: str) -> Iterator[Other]:
    made = Other(*arguments)
    try:
        yield made
    finally:
        made._process.kill()
        made._process.communicate()


# ---- what is measured ----------------------------------------------------------------------------


def throughput(name: str) -> None:
    """Bytes per second without engines."""
    with LLM(demo_model(), **OPTIONS) as llm:
        offer = EnginePages.of(llm).offer("x", PROMPT, None, None)
    connector, listener = CONNECTORS[name]()
    listener.close()
    with other("sink", name) as process:
        address = process.hear()
        found = [_rate(connector, address, offer) for _ in range(ROUNDS)]
    rates, cpu = ([one[i] for one in found] for i in (0, 1))
    print(f"{name}: {statistics.median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}),")
    print(f"    {statistics.median(cpu):.2f} s of a CPU per GB at the sender")


def _rate(connector: KVConnector, address: str, offer: Offer) -> tuple[float, float]:
    """GB per second, and seconds of a CPU per GB in this process."""
    rows = np.random.default_rng(0).integers(0, 256, (320, 3, 256), dtype=np.uint8)
    sending = connector.open(offer, address)
    begin, count = time.monotonic(), 0
    cpu = time.process_time()
    for _ in range(60):
        for layer in range(offer.spec.num_layers):
            sending.send(Part(layer, 0, rows, bytes(32)))
            count += rows.nbytes
    sending.finish(0)
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    sending.close()
    return count / seconds / 1e9, cpu / count * 1e9


def prefill(name: str) -> None:
    """Steps of a sender that computes a prompt in chunks of 512 tokens, and how long after its end
    the receiver has all of it."""
    connector, listener = CONNECTORS[name]()
    listener.close()
    with (
        other("receive", name) as process,
        LLM(demo_model(), **OPTIONS) as llm,
        HandOverSender(EnginePages.of(llm), connector) as sender,
    ):
        address = process.hear()
        plain, sent, after, read = [], [], [], _timed_reads(sender)
        for index in range(ROUNDS):
            plain.append(_prefill(llm)[0])

            def begin(request_id: str, index: int = index) -> None:
                sender.hand_over(str(index), address, PROMPT, request_id=request_id)

            seconds, end = _prefill(llm, begin)
            sent.append(seconds)
            process.say(str(index))
            then, tokens = process.hear().split()
            assert tokens == "2000", tokens
            after.append(float(then) - end)
    a, b = statistics.median(plain), statistics.median(sent)
    print(f"{name}: {TOKENS} tokens in {a:.2f} s, handed over {b:.2f} s ({b / a - 1:+.1%}); pairs:")
    print("   ", ", ".join(f"{y / x - 1:+.1%}" for x, y in zip(plain, sent, strict=True)))
    longest = max(read) * 1e3
    print(
        f"    steps waited {sum(read) / ROUNDS * 1e3:.0f} ms for reading, {longest:.0f} ms at most"
    )
    print(f"    after the end of the prefill: {statistics.median(after) * 1e3:.0f} ms")


def _timed_reads(sender: HandOverSender) -> list[float]:
    """The seconds of each reading of pages between two steps, from now on."""
    kept, found = sender._pages.kept, []
    read_pages = kept.read_pages

    def timed(keys: list[PageKey]) -> list[Rows] | None:
        begin = time.monotonic()
        rows = read_pages(keys)
        found.append(time.monotonic() - begin)
        return rows

    kept.read_pages = timed  # type: ignore[method-assign]
    return found


def _prefill(llm: LLM, begin: Callable[[str], None] = lambda name: None) -> tuple[float, float]:
    llm.reset_prefix_cache()
    start = time.monotonic()
    [request_id] = llm.enqueue([PROMPT], PREFILL)
    begin(request_id)
    llm.wait_for_completion()
    end = time.monotonic()
    return end - start, end


def decode(name: str) -> None:
    """Time between tokens of 8 requests, idle and while prompts of 2,000 tokens arrive."""
    _, listener = CONNECTORS[name]()
    with (
        LLM(demo_model(), **OPTIONS) as llm,
        HandOverReceiver(EnginePages.of(llm), listener) as receiver,
        other("send", name, listener.address) as process,
    ):
        assert process.hear() == "ready"
        idle, busy, taken = [], [], []
        for index in range(ROUNDS):
            idle += _between_tokens(llm, lambda: time.sleep(3))

            def arrive(index: int = index) -> None:
                begin = time.monotonic()
                process.say(str(index))
                assert receiver.result(str(index)).result(600).num_tokens == 2000
                taken.append(time.monotonic() - begin)

            busy += _between_tokens(llm, arrive)
            llm.reset_prefix_cache()
            assert process.hear() == "2000 None"
    print(f"{name}: a prompt of 2,000 tokens arrives in {statistics.median(taken):.2f} s")
    for share in (50, 99):
        x, y = (float(np.percentile(side, share)) * 1e3 for side in (idle, busy))
        print(f"    p{share} between tokens: {x:.1f} ms idle, {y:.1f} ms meanwhile ({y / x:.2f}x)")


def _between_tokens(llm: LLM, arrive: Callable[[], None]) -> list[float]:
    """The times between the tokens of a request while ``arrive`` runs."""
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    times: list[float] = []
    streams = [llm.stream({"prompt_token_ids": [9 + i] * 8}, params) for i in range(8)]
    for stream in streams:
        next(stream)
    drains = [threading.Thread(target=lambda s=s: list(s), daemon=True) for s in streams[1:]]
    for thread in drains:
        thread.start()
    for _ in range(10):
        next(streams[0])
    arriving = threading.Thread(target=arrive)
    arriving.start()
    while arriving.is_alive():
        next(streams[0])
        times.append(time.monotonic())
    arriving.join()
    llm.abort([info.request_id for info in llm.list_requests()])
    for thread in drains:
        thread.join()
    return list(np.diff(times))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"sink": sink, "receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
    else:
        for measure in (throughput, prefill, decode):
            if sys.argv[1:] in ([], [measure.__name__]):
                for connector in CONNECTORS:
                    measure(connector)
