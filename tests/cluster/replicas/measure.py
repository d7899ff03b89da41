"""Measures replicas on a quiet machine: ``python -m tests.cluster.replicas.measure PART [MODEL]``.

``lost``: how long answers and a new replica take after one was killed. ``routing``: times to the
first token with routing by state, by requests, and in turn, on the same requests. ``apart``: times
between the tokens of running requests while long prompts come, with one engine, two replicas, and
one of two that computes the prompts. ``simulated``: times to the first token of two replicas next
to those that the simulator predicts from step costs measured just before. ``experts``: a random
mixture on one engine, two replicas, and two that share its experts.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sdk
import sdk.testing.tiny_models as tiny_models
from sdk import LLM, SamplingParams
from sdk.cluster.simulation.cluster import Scenario, Simulation
from sdk.cluster.simulation.measure import measure_costs
from sdk.cluster.simulation.results import deviation, percentile
from sdk.cluster.simulation.traces import TraceEntry, TraceWorkload
from tests.cluster.replicas.conftest import hurt, replicas

ROUNDS = 3
#: The most tokens of an engine's step: a long prompt is computed in parts of this many.
STEP = 256


def ids(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(100, 40000) for _ in range(length)]


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(
        model,
        max_model_len=4096,
        num_threads=2,
        max_num_batched_tokens=STEP,
        kv_cache_memory_bytes="2GiB",
        **options,
    )


def lost(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids(seed, 64)} for seed in range(8)]
    with open_llm(model, data_parallel_size=2) as llm:
        for _ in range(ROUNDS):
            begin = time.monotonic()
            expected = llm.generate(prompts, params, use_tqdm=False)
            undisturbed = time.monotonic() - begin
            found: list[Any] = []
            thread = threading.Thread(
                target=lambda f=found: f.append(llm.generate(prompts, params, use_tqdm=False))
            )
            begin = time.monotonic()
            thread.start()
            time.sleep(undisturbed / 3)
            killed = time.monotonic()
            hurt(replicas(llm)[0].pid)
            while llm._driver.processes.num_ready == 2:
                time.sleep(0.001)
            noticed = time.monotonic()
            while llm._driver.processes.num_ready < 2:
                time.sleep(0.001)
            ready = time.monotonic()
            thread.join()
            same = [o.outputs[0].token_ids for o in found[0]] == [
                o.outputs[0].token_ids for o in expected
            ]
            print(
                f"all answers {time.monotonic() - begin:.2f} s (undisturbed {undisturbed:.2f} s), "
                f"noticed {noticed - killed:.2f} s after the kill, new replica ready after "
                f"{ready - killed:.2f} s, same tokens: {same}"
            )


def mixed(seed: int, count: int, seconds: float) -> list[TraceEntry]:
    """Chats with one of four system prompts, and one document in ten."""
    drawn, entries = random.Random(seed), []
    for number in range(count):
        arrival = drawn.random() * seconds
        if drawn.random() < 0.1:
            prompt = tuple(ids(1000 + number, 2000))
        else:
            system = ids(drawn.randrange(4), 400)
            prompt = (*system, *ids(2000 + number, drawn.randrange(20, 100)))
        entries.append(TraceEntry(arrival, len(prompt), drawn.randrange(20, 80), prompt))
    return sorted(entries)


def first_tokens(llm: LLM, entries: Sequence[TraceEntry]) -> list[float]:
    """Send each request at its time; the seconds until its first token."""
    names, begin, found = {}, time.monotonic(), {}
    waiting = list(entries)
    while waiting or llm.has_unfinished_requests:
        now = time.monotonic() - begin
        while waiting and waiting[0].arrival <= now:
            entry = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=entry.answer, ignore_eos=True)
            [name] = llm.enqueue([{"prompt_token_ids": list(entry.prompt)}], params)
            names[name] = entry.arrival
        for output in llm.pump(5):
            if output.request_id not in found and output.outputs[0].token_ids:
                found[output.request_id] = time.monotonic() - begin - names[output.request_id]
        if not llm.has_unfinished_requests and waiting:
            time.sleep(min(max(waiting[0].arrival - (time.monotonic() - begin), 0), 0.005))
    return [found[name] for name in names]


def routing(model: Path) -> None:
    for round_ in range(ROUNDS):
        entries = mixed(round_, 60, 30.0)
        for policy in ("state", "requests", "round_robin"):
            with open_llm(model, data_parallel_size=2, replica_routing=policy) as llm:
                llm.generate([{"prompt_token_ids": ids(9, 300)}] * 4, use_tqdm=False)
                times = first_tokens(llm, entries)
                hits = llm.get_metrics()["num_prompt_tokens_cached"]
            chats = [t for t, entry in zip(times, entries, strict=True) if entry.length < 1000]
            print(
                f"{policy:12} all: p50 {percentile(times, 50):.3f} p99 {percentile(times, 99):.3f}"
                f"  chats: p50 {percentile(chats, 50):.3f} p99 {percentile(chats, 99):.3f}"
                f"  cached tokens {hits:.0f}",
                flush=True,
            )


def gaps(
    llm: LLM, prompts: int, round_: int, send: Callable[[list[int]], object] | None = None
) -> list[float]:
    """Seconds between the tokens of four running requests while ``prompts`` long prompts come,
    which are new in each round. ``send``: to another engine."""
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    running = llm.enqueue([{"prompt_token_ids": ids(seed, 32)} for seed in range(4)], params)
    last: dict[str, float] = {}
    found: list[float] = []
    sent, begin = 0, time.monotonic()
    while running and llm.has_unfinished_requests:
        if sent < prompts and len(last) == 4 and time.monotonic() - begin > 0.5 * (sent + 1):
            prompt = ids(5000 + 10 * round_ + sent, 2000)
            if send is None:
                llm.enqueue([{"prompt_token_ids": prompt}], params.clone(max_tokens=2))
            else:
                send(prompt)
            sent += 1
        for output in llm.step():
            if output.request_id in running:
                now = time.monotonic()
                if output.request_id in last and output.outputs[0].token_ids:
                    found.append(now - last[output.request_id])
                last[output.request_id] = now
                if output.finished:
                    running.remove(output.request_id)
    while llm.has_unfinished_requests:
        llm.step()
    return found


def apart(model: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one engine": {},
        "two replicas": {"data_parallel_size": 2},
        "prompts apart": {"data_parallel_size": 2, "prefill_replicas": 1},
    }
    for name, options in ways.items():
        ratios = []
        with open_llm(model, **options) as llm:
            gaps(llm, 1, ROUNDS)
            for round_ in range(ROUNDS):
                idle, busy = gaps(llm, 0, round_), gaps(llm, 3, round_)
                pair = percentile(idle, 99), percentile(busy, 99)
                ratios.append(pair[1] / pair[0])
                print(f"{name}: p99 {1e3 * pair[0]:.1f} -> {1e3 * pair[1]:.1f} ms", flush=True)
            handed = llm.get_metrics().get("num_hand_overs", 0)
        print(f"{name}: median ratio {statistics.median(ratios):.2f}, {handed:.0f} hand-overs")
    elsewhere(model)


def elsewhere(model: Path) -> None:
    """What the machine itself costs: another process computes the prompts, and hands nothing
    over."""
    code = (
        "import sys, json; from sdk import LLM, SamplingParams\n"
        "options = json.loads(sys.argv[1])\n"
        "with LLM(**options) as llm:\n"
        "    for line in sys.stdin:\n"
        "        prompt = {'prompt_token_ids': json.loads(line)}\n"
        "        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)\n"
        "        print('done', flush=True)\n"
    )
    options = {"max_model_len": 4096, "num_threads": 1, "kv_cache_memory_bytes": 2**30}
    given = json.dumps({"model": str(model), "max_num_batched_tokens": STEP, **options})
    command = [sys.executable, "-c", code, given]
    ratios = []
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        LLM(model, **options) as llm,
    ):
        stdin, stdout = other.stdin, other.stdout
        assert stdin is not None and stdout is not None

        def send(prompt: list[int]) -> None:
            stdin.write(json.dumps(prompt).encode() + b"\n")
            stdin.flush()

        send(ids(1, 2000))
        stdout.readline()
        gaps(llm, 0, ROUNDS)
        for round_ in range(ROUNDS):
            idle, busy = gaps(llm, 0, round_), gaps(llm, 3, round_, send)
            for _ in range(3):
                stdout.readline()
            pair = percentile(idle, 99), percentile(busy, 99)
            ratios.append(pair[1] / pair[0])
            print(f"another process: p99 {1e3 * pair[0]:.1f} -> {1e3 * pair[1]:.1f} ms", flush=True)
        stdin.close()
    print(f"another process: median ratio {statistics.median(ratios):.2f}")


def simulated(model: Path) -> None:
    costs = measure_costs(
        str(model),
        lambda text: None,
        max_model_len=4096,
        max_num_batched_tokens=STEP,
        max_num_seqs=64,
        num_threads=1,
        kv_cache_memory_bytes="1GiB",
    )
    for round_ in range(ROUNDS):
        entries = mixed(100 + round_, 40, 30.0)
        with open_llm(model, data_parallel_size=2) as llm:
            llm.generate([{"prompt_token_ids": ids(9, 300)}] * 4, use_tqdm=False)
            real = first_tokens(llm, entries)
        found = Simulation(Scenario(replicas=2, costs=costs), TraceWorkload(entries, 4096)).run()
        print({p: (percentile(real, p), percentile(found.all.ttft, p)) for p in (50, 90, 99)})
        print({name: round(value, 3) for name, value in deviation(found.all.ttft, real).items()})


#: A mixture whose experts are nearly all of its bytes: 110 MiB with 8 bits.
MIXTURE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS = {"count": 16, "per_token": 4}


def experts(model: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one engine": {},
        "two replicas": {"data_parallel_size": 2},
        "sharing experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        tiny_models._EXPERTS.update(EXPERTS)
        tiny_models._SHAPE.update(MIXTURE)
        mixture = tiny_models.tiny_model(Path(folder), "q8_0", "qwen3_moe")
        print(f"{mixture.stat().st_size / 2**20:.0f} MiB; tokens per second by round")
        found: dict[tuple[int, str], list[float]] = {}
        for _ in range(ROUNDS):
            for name, options in ways.items():
                options = {**options, "enable_prefix_caching": False, "max_num_seqs": 32}
                with LLM(mixture, num_threads=2, max_model_len=512, **options) as llm:
                    for streams in (2, 8, 32):
                        seconds = []
                        for round_ in range(2):  # the first one warms up
                            prompts = [
                                {"prompt_token_ids": [5 + one % 370 for one in ids(seed, 24)]}
                                for seed in range(100 * round_, 100 * round_ + streams)
                            ]
                            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
                            begin = time.monotonic()
                            llm.generate(prompts, params, use_tqdm=False)
                            seconds.append(time.monotonic() - begin)
                        found.setdefault((streams, name), []).append(64 * streams / seconds[-1])
    for (streams, name), rates in sorted(found.items()):
        rounds = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{streams:2} requests, {name:16} {rounds}")


PARTS = {
    "experts": experts,
    "lost": lost,
    "routing": routing,
    "apart": apart,
    "simulated": simulated,
}

if __name__ == "__main__":
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else sdk.demo_model()
    PARTS[sys.argv[1]](path)
