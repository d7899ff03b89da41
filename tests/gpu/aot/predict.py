"""Predict what cards would measure, from what is launched and its machine code.

    python tests/gpu/aot/predict.py                 # the table, and predicted.json written anew
    python tests/gpu/aot/predict.py --cards T4      # of some cards
    python tests/gpu/aot/predict.py --step "H100 SXM" llama-1b-q4_0    # where a step's time goes

The rows are those of ``embedlm bench gpu``: the same code runs, on a card that answers with the
model of ``sdk/bench/gpu/roofline.py`` where another is timed. Kernels are compiled for the
card's target, about 1 s each, once (``build/aot-findings.json``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from listed_card import DecodeStep, ListedCard, TorchLaunch, TorchLaunches, decode_step, on_card  # noqa: E402
from machine_code import Source, Started, findings  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from work import step_seconds, torch_seconds, weight_bytes, work_of  # noqa: E402

from sdk.bench.gpu import attention, libraries, products, roofline, weights  # noqa: E402
from sdk.bench.gpu.engine import request_lengths  # noqa: E402
from sdk.bench.gpu.models import llama_config, qwen3_config, small_llama_config  # noqa: E402
from sdk.bench.gpu.roofline import DEVICES, HIGH, LOW, PREDICTED, USUAL, Assumptions, Device  # noqa: E402
from sdk.bench.tune.cases import Case  # noqa: E402
from sdk.bench.tune.libraries import Contest  # noqa: E402

FOUND = ROOT / "build" / "aot-findings.json"
#: Rows that run through ``Card.time`` alone, and the cards for which they are predicted.
ROWS = (
    *(("products", "measure_w4"), ("products", "measure_large"), ("products", "measure_fp8")),
    *(("products", "measure_formats"), ("attention", "measure_decode")),
    *(("attention", "measure_few_heads"), ("attention", "measure_prefill")),
    *(("libraries", f"measure_{name}") for name in ("grouped", "cudnn", "humming")),
)
ALL_ROWS = ("H100 SXM", "H200")
#: Model -> its config, the kind of its weights, and the name of its row.
MODELS: dict[str, tuple[Callable[[Any], dict[str, Any]], str, str]] = {
    "llama-1b-q4_0": (
        lambda card: small_llama_config(card) | {"tie_word_embeddings": True},
        "q4_0",
        "one request, random-1b shapes Q4_0",
    ),
    "llama-7b-int4g128": (
        lambda card: (
            llama_config(card)
            | {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
        ),
        "int4g128",
        "one request, Llama-2-7B shapes W4",
    ),
    "qwen3-0.6b-bfloat16": (qwen3_config, "bfloat16", "one request, Qwen3-0.6B shapes bf16"),
    "llama-8b-int4g128": (llama_config, "int4g128", "one request, 8B shapes W4"),
    "llama-8b-bfloat16": (llama_config, "bfloat16", "one request, 8B shapes bf16"),
}
#: Requests of decode steps between which others are interpolated.
BATCHES = (1, 16, 64, 128, 256)
ON_ALL = ("llama-1b-q4_0", "llama-7b-int4g128")
#: Cards of which several requests at a time are predicted, and how many: without matrix
#: instructions they gain least.
SEVERAL = {"T4": (2, 4, 8, 16)}
#: Tokens that a request of a row has read and written on average while it is timed.
CONTEXT = 256 + 16 + 32


class Found:
    """What was found of kernels, by key; compiled when asked for the first time."""

    def __init__(self) -> None:
        self._known = json.loads(FOUND.read_text()) if FOUND.is_file() else {}

    def of(self, source: Source) -> Mapping[str, float]:
        if source.key not in self._known:
            print(f"  {source.target.arch} {source.name}", file=sys.stderr)
            self._known[source.key] = findings(source, read=source.target.backend == "cuda")
            FOUND.parent.mkdir(exist_ok=True)
            FOUND.write_text(json.dumps(self._known))
        known: Mapping[str, float] = self._known[source.key]
        return known


def target_of(device: Device) -> GPUTarget:
    amd = not device.target.startswith("sm_")
    return (
        GPUTarget("hip", device.target, 64)
        if amd
        else GPUTarget("cuda", int(device.target[3:]), 32)
    )


class PredictingCard(ListedCard):
    """Answers with the model's seconds where another card is timed."""

    device_model: Device
    given: Assumptions = USUAL
    known: Found
    started: list[Started]
    torch: list[TorchLaunch]

    def assume(self, given: Assumptions) -> None:
        self.given = given
        d = self.device_model
        self.measured["copy"] = d.bandwidth * given.bandwidth
        self.measured["gemm"] = d.tflops * given.library

    @property
    def copy(self) -> float:
        return self.measured["copy"]

    @property
    def gemm(self) -> float:
        return self.measured["gemm"]

    def time(self, calls: Sequence[Callable[[], Any]], *, graph: bool = True) -> float:
        self.started.clear()
        self.torch.clear()
        calls[0]()
        works = [work_of(x, self.known.of(x.source)) for x in self.started]
        own = sum(roofline.seconds(self.device_model, x, self.given) for x in works)
        device = own + sum(torch_seconds(self.device_model, x, self.given) for x in self.torch)
        # the host launches one while the card runs another
        host = 0.0 if graph else (len(works) + len(self.torch)) * self.given.eager_launch
        return max(device, host)


def humming_contest(
    listed: list[TorchLaunch], card: ListedCard, case: Case, measured: Any
) -> Contest:
    """The package is not here. It is taken to be as good as a library's product of 16-bit weights,
    and to read 4-bit ones."""

    def calls(tokens: int) -> Any:
        (n, k), w = case.shape, case.packed[0]
        x, out = card.normal(tokens, k), card.normal(tokens, n)
        nbytes, macs = w.nbytes + x.nbytes + out.nbytes, float(tokens * n * k)
        launch = TorchLaunch("humming-kernels", nbytes, macs=macs)
        return [lambda: case.kernel.matmul(w, x, out)], [lambda: listed.append(launch)]

    return Contest("humming", {}, (), lambda: None, calls)


@contextmanager
def predicting(device: Device, known: Found) -> Iterator[PredictingCard]:
    """The card, where nothing is compared with a reference and no peer of unknown cost runs."""
    patch = pytest.MonkeyPatch()
    for module, name in (
        (products, "_against_int4pack"),
        (attention, "_against_sdpa"),
    ):
        patch.setattr(module, name, lambda *_: iter(()))
    patch.setattr(weights.Weights, "_check", lambda *_: None)
    patch.setattr(attention, "check_case", lambda *_: None)
    patch.setattr(attention, "_fill", lambda *_: None)
    listed: list[TorchLaunch] = []
    patch.setattr(libraries, "checked", lambda contest: None)
    patch.setattr(libraries, "humming_contest", lambda *given: humming_contest(listed, *given))
    try:
        with on_card(target_of(device), device.processors, PredictingCard) as (card, started):
            assert isinstance(card, PredictingCard)
            card.device_model, card.known = device, known
            card.started, card.torch = started, listed
            with TorchLaunches(listed):
                yield card
    finally:
        patch.undo()


def row(card: PredictingCard, module: str, function: str) -> dict[str, list[float]]:
    """A row that runs through ``Card.time``, with usual, low and high assumptions."""
    found: dict[str, list[float]] = {}
    for given in (USUAL, LOW, HIGH):
        card.assume(given)
        made = getattr(import_module(f"sdk.bench.gpu.{module}"), function)(card)
        for finding in made:
            if finding.value is not None:
                found.setdefault(f"{finding.what}|{finding.against}", []).append(finding.value)
    return found


def steps_of(
    card: PredictingCard, model: str, requests: int = 1
) -> tuple[DecodeStep, DecodeStep, int]:
    """A decode step of two engines with one layer and with two, and the model's layers."""
    config, kind, _ = MODELS[model]
    whole = config(card)
    one, two = (
        decode_step(
            card,
            card.started,
            whole | {"num_hidden_layers": n},
            kind,
            prompt=CONTEXT,
            requests=requests,
        )
        for n in (1, 2)
    )
    return one, two, whole["num_hidden_layers"]


def of_all_layers(one: float, two: float, layers: int) -> float:
    return one + (two - one) * (layers - 1)


def one_request(card: PredictingCard, model: str) -> dict[str, list[float]]:
    """Tokens per second, and bytes of weights as a share of the copy bandwidth."""
    one, two, layers = steps_of(card, model)
    known = {x.source.key: card.known.of(x.source) for step in (one, two) for x in step.kernels}
    nbytes = of_all_layers(weight_bytes(one), weight_bytes(two), layers)
    name = MODELS[model][2]
    found: dict[str, list[float]] = {f"{name}|copy bandwidth": [], f"{name}|tokens/s": []}
    for given in (USUAL, LOW, HIGH):
        each = [step_seconds(card.device_model, step, known, given) for step in (one, two)]
        seconds = of_all_layers(*each, layers)
        copy = card.device_model.bandwidth * given.bandwidth
        found[f"{name}|copy bandwidth"].append(100 * nbytes / seconds / copy)
        found[f"{name}|tokens/s"].append(1 / seconds)
    return found


def several_requests(card: PredictingCard, model: str, requests: int) -> dict[str, list[float]]:
    """Tokens per second of this many requests together."""
    one, two, layers = steps_of(card, model, requests)
    known = {x.source.key: card.known.of(x.source) for step in (one, two) for x in step.kernels}
    name = MODELS[model][2].replace("one request", f"{requests} requests")
    found: list[float] = []
    for given in (USUAL, LOW, HIGH):
        each = [step_seconds(card.device_model, step, known, given) for step in (one, two)]
        found.append(requests / of_all_layers(*each, layers))
    return {f"{name}|tokens/s": found}


def many_requests(card: PredictingCard) -> dict[str, list[float]]:
    """The load of ``measure_requests``: prompts at the library's speed, then decode steps of those
    requests that are not done, all in contexts of the average length. The host costs nothing."""
    lengths = request_lengths(card)
    config = qwen3_config(card)
    context = round(statistics.mean(prompt + output / 2 for prompt, output in lengths))
    steps = {}
    for requests in BATCHES:
        steps[requests] = [
            decode_step(
                card,
                card.started,
                config | {"num_hidden_layers": n},
                "bfloat16",
                prompt=context,
                requests=requests,
                max_num_batched_tokens=8192,
            )
            for n in (1, 2)
        ]
    known = {
        x.source.key: card.known.of(x.source)
        for both in steps.values()
        for step in both
        for x in step.kernels
    }
    layers, device = config["num_hidden_layers"], card.device_model
    weights = of_all_layers(*map(weight_bytes, steps[1]), layers)
    outputs = [output for _, output in lengths]
    found: list[float] = []
    for given in (USUAL, LOW, HIGH):
        times = [
            of_all_layers(*(step_seconds(device, x, known, given) for x in both), layers)
            for both in steps.values()
        ]
        operations = weights * sum(prompt for prompt, _ in lengths)  # 2 of each weight of 2 bytes
        seconds = operations / (device.tflops * given.library)
        for step in range(max(outputs)):
            running = sum(output > step for output in outputs)
            seconds += float(np.interp(running, BATCHES, times))
        found.append(sum(outputs) / seconds)
    return {f"{len(lengths)} requests, Qwen3-0.6B shapes|": found}


def idle(card: PredictingCard) -> dict[str, list[float]]:
    """Gaps between a graph, what follows it on the stream, and the next one: the host is ahead."""
    one, two, layers = steps_of(card, "qwen3-0.6b-bfloat16")
    known = {x.source.key: card.known.of(x.source) for step in (one, two) for x in step.kernels}
    found = []
    for given in (USUAL, LOW, HIGH):
        each = [step_seconds(card.device_model, step, known, given) for step in (one, two)]
        gaps = (len(one.outside) + 1) * given.graph_launch
        found.append(100 * gaps / (of_all_layers(*each, layers) + gaps))
    return {"GPU idle between decode steps, Qwen3-0.6B shapes|profiler": found}


def dependent_launch(card: PredictingCard) -> dict[str, list[float]]:
    """What programmatic dependent launch gains: the gap between kernels. That products load
    weights before the kernel in front of them has ended is not counted."""
    one, two, layers = steps_of(card, "qwen3-0.6b-bfloat16")
    known = {x.source.key: card.known.of(x.source) for step in (one, two) for x in step.kernels}
    found = []
    for given in (USUAL, LOW, HIGH):
        alike = replace(given, overlapped_launch=given.graph_launch)
        without, with_it = (
            of_all_layers(
                *(step_seconds(card.device_model, step, known, each) for step in (one, two)), layers
            )
            for each in (alike, given)
        )
        found.append(without / with_it)
    return {f"{MODELS['qwen3-0.6b-bfloat16'][2]}|no dependent launch": found}


def step_shares(card: PredictingCard) -> dict[str, list[float]]:
    """The shares of our kernels in the time of a step, with the launches of each, and the gaps, as
    in :func:`idle`."""
    model = "llama-8b-int4g128"
    one, two, layers = steps_of(card, model)
    what = "decode step, 8B shapes W4"
    found: dict[str, list[float]] = {}
    for given in (USUAL, LOW, HIGH):
        totals = kernel_times(card, one, two, layers, given)
        gaps = (len(one.outside) + 1) * given.graph_launch * 1e6
        whole = sum(row["us"] for row in totals.values()) + gaps
        found.setdefault(f"{what}|gaps", []).append(100 * gaps / whole)
        for name, row in totals.items():
            if not name.startswith("torch "):
                found.setdefault(f"{what}|{name}", []).append(100 * row["us"] / whole)
    return found


def kernel_times(
    card: PredictingCard, one: DecodeStep, two: DecodeStep, layers: int, given: Assumptions = USUAL
) -> dict[str, Counter[str]]:
    """By kernel: launches and microseconds of a step of all layers, also by what limits them."""
    totals: dict[str, Counter[str]] = {}
    for step, times in ((one, 2 - layers), (two, layers - 1)):
        for started in step.kernels:
            work = work_of(started, card.known.of(started.source))
            seconds = roofline.seconds(card.device_model, work, given)
            row = totals.setdefault(started.source.name, Counter())
            row.update({"launches": times, "us": times * seconds * 1e6})
            for name, bound in roofline.bounds(card.device_model, work, given).items():
                row[name] += times * bound * 1e6
        for launch in (*step.torch, *step.outside):
            row = totals.setdefault(f"torch {launch.name}", Counter())
            us = torch_seconds(card.device_model, launch, given) * 1e6
            row.update({"launches": times, "us": times * us})
    return totals


def explain(card: PredictingCard, model: str) -> str:
    """Where the time of a decode step goes, by kernel: microseconds by what limits them."""
    totals = kernel_times(card, *steps_of(card, model))
    columns = ("launches", "us", "launch", "memory", "matrix", "instructions", "joining")
    lines = [f"{'kernel':24}" + "".join(f"{name:>14}" for name in columns)]
    for name, row in sorted(totals.items(), key=lambda item: -item[1]["us"]):
        lines.append(f"{name:24}" + "".join(f"{row[column]:14.1f}" for column in columns))
    total = sum(row["us"] for row in totals.values())
    return "\n".join([*lines, f"{total:.0f} us, {1e6 / total:.0f} tokens/s (predicted)"])


def of_card(card: PredictingCard, name: str) -> Iterator[dict[str, list[float]]]:
    """All predictions for a card, in parts."""
    if name in ALL_ROWS:
        yield dependent_launch(card)
        yield step_shares(card)
        yield idle(card)
    for model in MODELS if name in ALL_ROWS else ON_ALL:
        yield one_request(card, model)
    for model, requests in product(ON_ALL, SEVERAL.get(name, ())):
        yield several_requests(card, model, requests)
    if name in ALL_ROWS:
        for module, function in ROWS:
            yield row(card, module, function)
        yield many_requests(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", nargs="*", default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--step", nargs=2, metavar=("CARD", "MODEL"))
    options = parser.parse_args()
    known = Found()
    if options.step:
        with predicting(DEVICES[options.step[0]], known) as card:
            print(explain(card, options.step[1]))
        return
    predicted = json.loads(PREDICTED.read_text()) if PREDICTED.is_file() else {}
    for name in options.cards:
        rows: dict[str, list[float]] = {}
        with predicting(DEVICES[name], known) as card:
            for found in of_card(card, name):
                for what, (usual, *ends) in found.items():
                    rows[what] = [
                        float(f"{x:.3g}") for x in (usual, min(usual, *ends), max(usual, *ends))
                    ]
                    print(f"{name:10} {what:70} {rows[what]}", flush=True)
                # a part is written at once; rows that no longer exist leave when all are there
                predicted[name] = predicted.get(name, {}) | rows
                PREDICTED.write_text(json.dumps(predicted, indent=1) + "\n")
        predicted[name] = rows
        PREDICTED.write_text(json.dumps(predicted, indent=1) + "\n")


if __name__ == "__main__":
    main()
