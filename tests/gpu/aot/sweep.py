"""Compile every GPU kernel for a card that is not here, and say what is wrong with the code.

    python tests/gpu/aot/sweep.py sm_90 gfx942 [--seconds 90] [--out build/aot]

``make aot`` runs it for all cards. What is done stands in ``OUT/<card>.jsonl``, so that a run may
stop (``--seconds``) and the next one goes on; it begins anew where the kernels or Triton changed.
Exit status: 0 all compiled, 1 something is wrong, 3 there is more to do.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parents[2] / "kernels" / "gpu"
#: KiB of shared memory a program may have.
LIMITS = {
    "sm_75": 64, "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64,
}  # fmt: skip
CARDS = {
    card: ("cuda", int(card[3:])) if card.startswith("sm_") else ("hip", card) for card in LIMITS
}
WEIGHTS = [
    *("int4-g32-minus", "int4-g64-zero", "int4-g128-zeros", "int4-g1024-zero"),
    *("int2-g32-zeros", "int3-g128-zero", "int5-g64-zeros", "int6-g64-zeros", "int7-g64-zero"),
    *("int8-g128-zeros", "int8-g1024-zero", "nf4-g64", "mxfp4", "nvfp4"),
    *("fp8-channel", "fp8-blocks", "fp8-e5m2"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs"),
]
PAGES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
#: The exact sine of a large angle needs a table, on the stack.
ON_THE_STACK = {"angles_kernel"}
Job = tuple[str, str, int, str, str, Any]


def linear_jobs(card: str) -> list[Job]:
    """``compile_kernels.py``'s: every weight, for one token, few and many, for experts."""
    target = CARDS[card]
    old = card == "sm_75"
    short = ["float16"] if old else ["float16", "bfloat16"]
    names = ("add_up", "add_chunks")
    jobs: list[Job] = [("int4-g128-zeros", name, 16, "float16", *target) for name in names]
    if not old:  # see bytes_of_card
        names = ("round_rows", "product_bytes", "product_bytes experts")
        weights = ["int8-g1024-zero"]
        if target[0] == "cuda" and target[1] >= 89:
            weights.append("fp8-channel")
        pairs = itertools.product(weights, names)
        jobs += [(weight, name, 16, "float16", *target) for weight, name in pairs]
    jobs += [
        (dtype, "product_dense", tokens, dtype, *target) for dtype in short for tokens in (1, 64)
    ]
    for weight in WEIGHTS:
        ones = ("product_one", "product_one experts")
        jobs += [(weight, name, 1, "float32", *target) for name in ones]
        jobs += [(weight, "decode_rows", 16, dtype, *target) for dtype in short]
        jobs.append((weight, "product experts", 16, short[-1], *target))
        for tokens, dtype in itertools.product((2, 64), (*short, "float32")):
            jobs.append((weight, "product", tokens, dtype, *target))
    return jobs


def attention_cases() -> list[str]:
    """The names of ``compile_attention.py``'s."""
    cases = ["rows", "sampling", "experts", "attention exact"]
    for dtype, head_dim in itertools.product(PAGES, (64, 80, 96, 128, 256)):
        cases += [
            f"attention {dtype} {head_dim}{rich}" for rich in ("", " window cap sinks cascade")
        ]
    return cases + [f"rope {dtype}" for dtype in PAGES]


def run(program: str, jobs: Sequence[Any]) -> list[dict[str, Any]]:
    """What one of the programs beside this one says of ``jobs``, compiled without a cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, FOLDER / program],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{program} failed on {jobs}: {done.stderr[-3000:]}")
    # The compiler itself may print beside it.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def complaint(card: str, found: dict[str, Any]) -> str | None:
    """What is wrong with the code of a kernel."""
    if "error" in found:
        return str(found["error"])
    if found["shared"] > LIMITS[card] * 1024:
        return f"{found['shared']} bytes of shared memory"
    if card != "sm_90":
        return None
    if found["stack"] and found.get("kernel") not in ON_THE_STACK:
        return f"{found['stack']} bytes on the stack"
    name, kernel, _, dtype, *_ = found.get("job", ("", "", 0, ""))
    if kernel.startswith("product") and not found["wide"]:
        return "no load of 16 bytes"
    if kernel.startswith("product") and dtype != "float32" and not found["matrix"]:
        return f"no matrix instructions for {name}"
    return None


def fingerprint() -> str:
    """Of everything the code depends on."""
    digest = hashlib.sha256(version("triton").encode())
    for path in sorted((*KERNELS.glob("*.py"), *FOLDER.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sweep(card: str, out: Path, until: float) -> int:
    """Go on with a card until a moment of the clock; the exit status."""
    path, state = out / f"{card}.jsonl", json.dumps({"state": fingerprint()})
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines or lines[0] != state:
        lines = [state]
        path.write_text(state + "\n")
    results = [json.loads(line) for line in lines[1:]]
    done = {json.dumps(found["job"]) if "job" in found else found["case"] for found in results}
    linear = [job for job in linear_jobs(card) if json.dumps(job) not in done]
    cases = [case for case in attention_cases() if case not in done]
    chunks: list[tuple[str, list[Any]]] = [
        ("compile_kernels.py", linear[i : i + 12]) for i in range(0, len(linear), 12)
    ]
    chunks += [
        ("compile_attention.py", [(card, case) for case in cases[i : i + 2]])
        for i in range(0, len(cases), 2)
    ]

    def work(chunk: tuple[str, list[Any]]) -> list[dict[str, Any]] | None:
        return run(*chunk) if time.monotonic() < until else None

    left = 0
    with path.open("a") as file, ThreadPoolExecutor(2) as pool:
        for chunk, found in zip(chunks, pool.map(work, chunks), strict=True):
            if found is None:
                left += len(chunk[1])
                continue
            file.writelines(json.dumps(line) + "\n" for line in found)
            file.flush()
            results += found
    wrong = [(found, why) for found in results if (why := complaint(card, found))]
    for found, why in wrong:
        print(f"{card}: {found.get('job') or (found['case'], found['kernel'])}: {why}")
    print(f"{card}: {len(results)} kernels, {len(wrong)} wrong, {left} jobs left", flush=True)
    return 3 if left else 1 if wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cards", nargs="*", default=list(CARDS), choices=list(CARDS), metavar="CARD"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("build/aot"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    statuses = [sweep(card, options.out, until) for card in options.cards]
    sys.exit(1 if 1 in statuses else max(statuses))


if __name__ == "__main__":
    main()
