"""Count what a decode step launches, without a card.

    python tests/gpu/aot/step_launches.py           # the table, compared with launches.txt
    python tests/gpu/aot/step_launches.py --write   # and launches.txt written anew

A step is a replayed graph of a real engine on sm_90 with random weights of real shapes
(``listed_card.py``). Between two kernels of a graph pass 1 to 2 us, and most kernels of a small
model's token are shorter, so it is as fast as its launches are few: :data:`GOAL` for a model of 1B.
``torch:`` launches are torch's, ``outside:`` those between two graphs, copies to and from the host
included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_name("launches.txt")
#: Layers of the two engines from which the launches of one layer follow.
FEW, MORE = 1, 3
#: Launches in a graph: 8 of each of 16 layers, and 12 for embedding, head and sampling.
GOAL = 140
#: Of an H100 SXM.
PROCESSORS = 132
#: Kernel -> launches of a layer, and of everything else in a step.
Counts = dict[str, tuple[int, int]]


def read_record(path: Path = RECORD) -> dict[str, Counts]:
    """By model and type of weights."""
    found: dict[str, Counts] = {}
    for line in path.read_text().splitlines():
        model, kernel, layer, rest = line.split()
        found.setdefault(model, {})[kernel] = int(layer), int(rest)
    return found


def write_record(found: dict[str, Counts], path: Path = RECORD) -> None:
    lines = [
        f"{model} {kernel} {layer} {rest}\n"
        for model, counts in found.items()
        for kernel, (layer, rest) in sorted(counts.items())
    ]
    path.write_text("".join(lines))


def of_step(counts: Counts, layers: int) -> int:
    """Launches of a step in a graph of this many layers."""
    inside = [count for kernel, count in counts.items() if not kernel.startswith("outside:")]
    return sum(layer * layers + rest for layer, rest in inside)


def compared(found: dict[str, Counts], record: dict[str, Counts], layers: dict[str, int]) -> str:
    """A table of what each model launches, and where the record has another number."""
    lines = []
    for model, counts in found.items():
        known = record.get(model, {})
        before, now = of_step(known, layers[model]), of_step(counts, layers[model])
        word = "worse" if now > before else "better"
        verdict = "" if now == before else f", {word} than {before}"
        goal = f" (goal {GOAL})" if "-1b-" in model else ""
        lines += ["", f"{model}: {now} launches with {layers[model]} layers{goal}{verdict}"]
        lines.append(f"  {'kernel':24} {'a layer':>8} {'the rest':>8}")
        for kernel in sorted({*counts, *known}):
            layer, rest = counts.get(kernel, (0, 0))
            old = known.get(kernel, (0, 0))
            change = "" if (layer, rest) == old else f"   recorded: {old[0]} and {old[1]}"
            lines.append(f"  {kernel:24} {layer:8} {rest:8}{change}")
    return "\n".join(lines)


def count(only: str = "") -> tuple[dict[str, Counts], dict[str, int]]:
    """What the steps launch now, and how many layers the models have; of one model or of all."""
    from listed_card import decode_step, on_card
    from triton.backends.compiler import GPUTarget

    from sdk.bench.gpu.models import llama_config, qwen3_config, small_llama_config

    found: dict[str, Counts] = {}
    layers = {}
    with on_card(GPUTarget("cuda", 90, 32), PROCESSORS) as (card, listed):
        small, large, qwen = small_llama_config(card), llama_config(card), qwen3_config(card)
        models = {
            "llama-1b-q4_0": (small | {"tie_word_embeddings": True}, "q4_0"),
            "llama-1b-int4g128": (small, "int4g128"),
            "llama-8b-int4g128": (large, "int4g128"),
            "qwen3-0.6b-bfloat16": (qwen, "bfloat16"),
        }
        for model, (config, kind) in models.items():
            if only and model != only:
                continue
            each = []
            for number in (FEW, MORE):
                step = decode_step(card, listed, config | {"num_hidden_layers": number}, kind)
                counts = Counter(started.source.name for started in step.kernels)
                counts.update(f"torch:{launch.name}" for launch in step.torch)
                counts.update(f"outside:{launch.name}" for launch in step.outside)
                each.append(counts)
            layers[model] = config["num_hidden_layers"]
            found[model] = {}
            for kernel in +each[1]:
                layer, odd = divmod(each[1][kernel] - each[0][kernel], MORE - FEW)
                assert odd == 0, f"{model}: {kernel} is not launched in every layer"
                found[model][kernel] = layer, each[0][kernel] - FEW * layer
    return found, layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what is found to launches.txt")
    parser.add_argument("--json", action="store_true", help="print the counts for a program")
    parser.add_argument("--only", default="", help="one model")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    found, layers = count(options.only)
    if options.json:
        print(json.dumps({"found": found, "layers": layers}))
        return
    print(compared(found, read_record() if RECORD.is_file() else {}, layers))
    if options.write:
        write_record(found)


if __name__ == "__main__":
    main()
