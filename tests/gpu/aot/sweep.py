"""Compile every GPU kernel for a card that is not here, and say what is wrong with the code.

    python tests/gpu/aot/sweep.py sm_90 gfx942 [--seconds 90]

``make aot`` runs it for all cards. Kernels whose code is right stand in ``compiled/<card>.txt`` by
their keys (``machine_code.py``): after a change only those that do something else than before are
compiled, and a run may stop (``--seconds``) and the next one goes on. The files are committed, so
that a change shows what it does to registers, and a test finds kernels that are not in them.
Exit status: 0 all are, 1 something is wrong, 3 there is more to do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "compiled"
#: Processes that compile at a time; each takes about a gigabyte.
WORKERS = min(8, len(os.sched_getaffinity(0)))
#: Jobs of a process.
CHUNK = 60
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
#: Bytes: one number that the compiler itself stores and loads again, so that more threads fit
#: (q2_k for one token: 168 registers, of 255 that it might take).
ONE_NUMBER = 8
Job = tuple[str, str, int, str, str, Any]


def linear_jobs(card: str) -> list[Job]:
    """``compile_kernels.py``'s: every weight, for one token, few and many, for experts."""
    target = CARDS[card]
    old = card == "sm_75"
    short = ["float16"] if old else ["float16", "bfloat16"]
    jobs: list[Job] = [("int4-g128-zeros", "add_chunks", 16, "float16", *target)]
    if not old:  # see bytes_of_card
        names = ("round_rows", "product_bytes", "product_bytes experts", "product_bytes silu")
        weights = ["int8-g1024-zero"]
        if target[0] == "cuda" and target[1] >= 89:
            weights.append("fp8-channel")
        pairs = itertools.product(weights, names)
        jobs += [(weight, name, 16, "float16", *target) for weight, name in pairs]
    jobs += [
        (dtype, "product_dense", tokens, dtype, *target)
        for dtype in short
        for tokens in (1, 64, 512)
    ]
    for weight in WEIGHTS:
        ones = ("product_one", "product_one experts", "product_one silu")
        jobs += [(weight, name, 1, short[-1], *target) for name in ones]
        jobs += [(weight, "decode_rows", 16, dtype, *target) for dtype in short]
        jobs.append((weight, "decode_rows experts", 16, short[-1], *target))
        jobs.append((weight, "product experts", 16, short[-1], *target))
        jobs.append((weight, "product silu", 16, short[-1], *target))
        for tokens, dtype in itertools.product((2, 64), (*short, "float32")):
            jobs.append((weight, "product", tokens, dtype, *target))
    return jobs


def attention_cases() -> list[str]:
    """The names of ``compile_attention.py``'s."""
    cases = ["rows", "sampling", "experts", "adapters", "attention exact"]
    for dtype, head_dim in itertools.product(PAGES, (64, 80, 96, 128, 256)):
        cases += [
            f"attention {dtype} {head_dim}{rich}" for rich in ("", " window cap sinks cascade")
        ]
    return cases + [f"rope {dtype}" for dtype in PAGES]


def run(
    program: str, jobs: Sequence[Any], wanted: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """What one of the programs beside this one says of ``jobs``, compiled without a cache.

    ``wanted``: the keys of the kernels that are compiled; all where it is None.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, FOLDER / program],
            input=json.dumps({"jobs": jobs, "wanted": None if wanted is None else list(wanted)}),
            capture_output=True,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{program} failed on {jobs[:3]} ...: {done.stderr[-3000:]}")
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
    if found["stack"] > ONE_NUMBER and found["kernel"] not in ON_THE_STACK:
        return f"{found['stack']} bytes on the stack"
    if not found["kernel"].startswith("product"):
        return None
    name, _, _, dtype, *_ = found["job"]
    if not found["wide"]:
        return "no load of 16 bytes"
    plain = dtype == "float32" or found["kernel"] == "product_one"
    if not plain and not found["matrix"]:
        return f"no matrix instructions for {name}"
    return None


class Compiled(NamedTuple):
    """A kernel whose code is right: registers of a thread, bytes of shared memory and stack."""

    kernel: str
    registers: int
    shared: int
    stack: int


class Record:
    """The kernels of a card that were compiled, by their keys: ``FOLDER/<card>.txt``."""

    def __init__(self, folder: Path, card: str) -> None:
        self._card = card
        self._path = folder / f"{card}.txt"
        self.kernels: dict[str, Compiled] = {}
        self.triton = triton.__version__
        if self._path.is_file():
            first, *lines = self._path.read_text().splitlines()
            self.triton = first.removeprefix("triton ")
            for key, kernel, *numbers in map(str.split, lines):
                self.kernels[key] = Compiled(kernel, *map(int, numbers))

    def keep(self, keys: Collection[str]) -> None:
        """Forget all others."""
        self.kernels = {key: found for key, found in self.kernels.items() if key in keys}
        self.triton = triton.__version__

    def add(self, lines: Sequence[dict[str, Any]]) -> list[str]:
        """Keep what is right of what was compiled; what is wrong with the rest, which will be
        compiled again by the next run.
        """
        wrong = []
        for line in lines:
            if why := complaint(self._card, line):
                wrong.append(f"{self._card}: {line['kernel']} of {line['job']}: {why}")
            else:
                numbers = (line[name] for name in Compiled._fields)
                self.kernels[line["key"]] = Compiled(*numbers)
        rows = sorted((found, key) for key, found in self.kernels.items())
        text = "".join(" ".join((key, *map(str, found))) + "\n" for found, key in rows)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"triton {self.triton}\n{text}")
        temporary.replace(self._path)
        return wrong


def sweep(card: str, folder: Path, until: float) -> int:
    """Go on with a card until a moment of the clock; the exit status."""
    record = Record(folder, card)
    keys = kernels_of([card])[card]
    record.keep(keys)
    wrong = record.add(())
    with ThreadPoolExecutor(WORKERS) as pool:
        work = _without(record.kernels, keys)
        for done in pool.map(lambda some: _compile(some, until), _in_chunks(work)):
            wrong += record.add(done)
    left = len(keys) - len(record.kernels) - len(wrong)
    print("\n".join([table(record.kernels.values()), *wrong]))
    print(f"{card}: {len(keys)} kernels, {len(wrong)} wrong, {left} left", flush=True)
    return 1 if wrong else 3 if left else 0


def kernels_of(cards: Sequence[str]) -> dict[str, dict[str, tuple[str, Any]]]:
    """Of each card all keys, each with the first job that needs it, as (program, job)."""
    jobs: dict[str, list[Any]] = {
        "compile_kernels.py": [job for card in cards for job in linear_jobs(card)],
        "compile_attention.py": [(card, case) for card in cards for case in attention_cases()],
    }
    names = {target: card for card, target in CARDS.items()}
    found: dict[str, dict[str, tuple[str, Any]]] = {card: {} for card in cards}
    with ThreadPoolExecutor(WORKERS) as pool:
        listed = pool.map(lambda program: run(program, jobs[program], wanted=()), jobs)
        for program, lines in zip(jobs, listed, strict=True):
            for line in lines:
                job = line["job"]
                card = job[0] if len(job) == 2 else names[job[4], job[5]]
                found[card].setdefault(line["key"], (program, job))
    return found


def _without(
    done: Collection[str], keys: dict[str, tuple[str, Any]]
) -> list[tuple[str, Any, list[str]]]:
    """The jobs (program, job, keys) that make the keys which are not done."""
    jobs: dict[str, tuple[str, Any, list[str]]] = {}
    for key, (program, job) in keys.items():
        if key not in done:
            jobs.setdefault(json.dumps(job), (program, job, []))[2].append(key)
    return list(jobs.values())


def _in_chunks(work: Sequence[tuple[str, Any, list[str]]]) -> Iterator[list[Any]]:
    """Jobs of one program that share a process, whose start takes as long as one of them."""
    for _, some in itertools.groupby(work, lambda item: item[0]):
        jobs = list(some)
        yield from (jobs[i : i + CHUNK] for i in range(0, len(jobs), CHUNK))


def _compile(chunk: Sequence[tuple[str, Any, list[str]]], until: float) -> list[dict[str, Any]]:
    """What was found of the keys of these jobs."""
    if time.monotonic() > until:
        return []
    wanted = {key for *_, keys in chunk for key in keys}
    found = run(chunk[0][0], [job for _, job, _ in chunk], wanted)
    return list({line["key"]: line for line in found if line["key"] in wanted}.values())


def table(found: Collection[Compiled]) -> str:
    """Of each kernel: how many variants, the range of their registers, the most of all else."""
    head = ("kernel", "variants", "registers", "shared KiB", "stack", "with a stack")
    rows = [head, ("---",) * len(head)]
    for kernel, group in itertools.groupby(sorted(found), lambda x: x.kernel):
        lines = list(group)
        registers = [line.registers for line in lines]
        span = f"{min(registers)} to {max(registers)}"
        shared = f"{max(line.shared for line in lines) / 1024:.1f}"
        stack = str(max(line.stack for line in lines))
        stacks = str(sum(line.stack > 0 for line in lines))
        rows.append((kernel, str(len(lines)), span, shared, stack, stacks))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # argparse before Python 3.12 wants a default of "*" to be one of the choices
    parser.add_argument("cards", nargs="*", default=[], choices=[*CARDS, []], metavar="CARD")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=COMPILED)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    statuses = [sweep(card, options.out, until) for card in options.cards or CARDS]
    sys.exit(1 if 1 in statuses else max(statuses))


if __name__ == "__main__":
    main()
