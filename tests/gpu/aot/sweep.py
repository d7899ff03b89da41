"""Compile every GPU kernel for a card that is not here, and say what is wrong with the code.

    python tests/gpu/aot/sweep.py sm_90 gfx942 [--seconds 90] [--accept] [--ir "product.*"]

``make aot`` runs it for all cards. Kernels whose code is right stand in ``compiled/<card>.txt``
(``records.py``): after a change only those that do something else than before are compiled, and a
run may stop (``--seconds``) and the next one goes on. The files are committed, so that a change
shows what it does to registers and instructions, and a test finds kernels that are not in them. A
kernel that became worse is reported and not written down, unless with ``--accept``
(``make aot-sm_90 ACCEPT=1``). Exit status: 0 all are, 1 something is wrong, 3 there is more to do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.gpu.aot.records import LIMITS, Compiled, Record

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "compiled"
#: Processes that compile at a time; each takes about a gigabyte.
WORKERS = min(8, len(os.sched_getaffinity(0)))
#: Variants that a process compiles: at most, and at least where only a few are left.
CHUNK, LEAST_CHUNK = 60, 10
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
#: Of these also attention over latents, and attention with biases by distance.
LATENT = ("float16", "int8")
BIASED = ("float16", "bfloat16", "int8", "int4")
#: Attention of encoders, whose pages have the type of activations: that, the width of heads, and
#: what else there is. 32: MiniLM; 64: BERT, ModernBERT; 128: llama-embed; 256: EmbeddingGemma.
BOTH_WAYS = (
    *(("float32", 64, ""), ("bfloat16", 32, ""), ("bfloat16", 128, "")),
    ("bfloat16", 256, "window"),
    *((dtype, 64, more) for dtype in ("float16", "bfloat16") for more in ("", "window", "biased")),
)
#: Of these weights also the product of one token in layers on the host, whose loads wait as all
#: others do.
OFFLOADED = ("int4-g128-zeros", "q4_0", "q4_k", "q6_k")
#: Tokens for which tiles of 128 x 128 and of 256 x 128 fill the card of ``compile_kernels.py``.
MANY = (4224, 8192)
Job = tuple[str, str, int, str, str, Any]


def linear_jobs(card: str) -> list[Job]:
    """``compile_kernels.py``'s: every weight, for one token, few and many, for experts."""
    target = CARDS[card]
    old = card == "sm_75"
    short = ["float16"] if old else ["float16", "bfloat16"]
    jobs: list[Job] = [("int4-g128-zeros", "add_chunks", 16, "float16", *target)]
    if not old:  # see bytes_of_card
        weights = ["int8-g1024-zero"]
        if target[0] == "cuda" and target[1] >= 89:
            weights += ["fp8-channel", "fp8-blocks"]
        for weight in weights:
            jobs.append((weight, "round_rows", 16, short[-1], *target))
            for tokens in (16, 32, 64, 128, *MANY):
                names = ("product_bytes", "product_bytes experts")
                jobs += [(weight, name, tokens, short[-1], *target) for name in names]
    jobs += [
        (dtype, "product_dense experts", tokens, dtype, *target)
        for dtype in short
        for tokens in (1, 64, 512)
    ]
    jobs += [
        (dtype, "product_dense", tokens, "float32", *target)
        for dtype in ("float32", *short)
        for tokens in (1, 64)
    ]
    for weight in WEIGHTS:
        ones = ("product_one", "product_one experts", "product_one silu")
        ones += ("product_one offloaded",) if weight in OFFLOADED else ()
        jobs += [(weight, name, 1, short[-1], *target) for name in ones]
        jobs += [(weight, "decode_rows", 16, dtype, *target) for dtype in short]
        jobs.append((weight, "decode_rows experts", 16, short[-1], *target))
        jobs.append((weight, "product experts", 16, short[-1], *target))
        jobs.append((weight, "product silu", 16, short[-1], *target))
        for tokens, dtype in itertools.product((2, 64), (*short, "float32")):
            jobs.append((weight, "product", tokens, dtype, *target))
    return jobs


def attention_cases(card: str) -> list[str]:
    """The names of ``compile_attention.py``'s. AMD's cards decline latents."""
    cases = ["rows", "sampling", "experts", "adapters", "states", "attention exact"]
    for dtype, head_dim in itertools.product(PAGES, (64, 80, 96, 128, 256)):
        cases += [
            f"attention {dtype} {head_dim}{rich}" for rich in ("", " window cap sinks cascade")
        ]
    cases += ["one head", "one head window cap sinks cascade"]
    if card.startswith("sm_"):
        cases += [f"latent {dtype}{more}" for dtype in LATENT for more in ("", " exact")]
    cases += [f"attention {dtype} biased" for dtype in BIASED]
    cases += [" ".join(("both ways", d, str(n), more)).strip() for d, n, more in BOTH_WAYS]
    return cases + [f"rope {dtype}" for dtype in PAGES]


def run(
    program: str,
    jobs: Sequence[Any],
    wanted: Collection[str] | None = None,
    *,
    known: Mapping[str, str] | None = None,
    read: bool = False,
) -> list[dict[str, Any]]:
    """What one of the programs beside this one says of ``jobs``, compiled without a cache.

    ``wanted``: the keys of the kernels that are compiled; all where it is None. ``known``: of these
    keys the IR that needs no compiling, see ``machine_code.answer``. ``read``: with the
    instructions of every NVIDIA card, not of Hopper alone.
    """
    request: dict[str, Any] = {"jobs": jobs, "wanted": None if wanted is None else list(wanted)}
    request["known"] = dict(known or {})
    if read:
        request["read"] = True
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, FOLDER / program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{program} failed on {jobs[:3]} ...: {done.stderr[-3000:]}")
    # The compiler itself may print beside it.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


class Variant(NamedTuple):
    """A kernel that a job makes: the program that compiles it, the job, the key, and the IR that
    needs no compiling (``Record.known``)."""

    program: str
    job: Any
    key: str
    known: str | None = None


def sweep(
    card: str,
    folder: Path,
    until: float,
    *,
    accept: bool = False,
    with_ir: str | None = None,
    sample: bool = False,
) -> int:
    """Go on with a card until a moment of the clock; the exit status.

    ``with_ir``: a pattern of kernels whose IR is found too where it is not known yet. ``sample``:
    of the variants those of :func:`sampled` alone.
    """
    record = Record(folder, card)
    variants = variants_of([card])[card]
    if sample:
        variants = sampled(variants)
    record.keep(variants)
    wrong = record.add({})
    left = {
        case: v._replace(known=record.known(case, v.key))
        for case, v in variants.items()
        if not record.has(case, v.key) or _wanted(record.variants[case], with_ir)
    }
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in pool.map(lambda some: _compile(some, until), _in_chunks(left)):
            wrong += record.add(done, accept=accept)
    missing = sum(not record.has(case, v.key) for case, v in variants.items()) - len(wrong)
    print("\n".join([table(record.variants.values()), *wrong]))
    if any(": worse: " in text for text in wrong):
        print(f"as meant? make aot-{card} ACCEPT=1")
    print(f"{card}: {len(variants)} kernels, {len(wrong)} wrong, {missing} left", flush=True)
    return 1 if wrong else 3 if missing else 0


def _wanted(found: Compiled, with_ir: str | None) -> bool:
    return with_ir is not None and not found.ir and re.fullmatch(with_ir, found.kernel) is not None


def variants_of(cards: Sequence[str]) -> dict[str, dict[str, Variant]]:
    """Of each card all variants by name, each key once: under the first job that needs it."""
    jobs: dict[str, list[Any]] = {
        "compile_kernels.py": [job for card in cards for job in linear_jobs(card)],
        "compile_attention.py": [(card, case) for card in cards for case in attention_cases(card)],
    }
    names = {target: card for card, target in CARDS.items()}
    found: dict[str, dict[str, Variant]] = {card: {} for card in cards}
    with ThreadPoolExecutor(WORKERS) as pool:
        listed = pool.map(lambda program: run(program, jobs[program], wanted=()), jobs)
        for program, lines in zip(jobs, listed, strict=True):
            keys: set[tuple[str, str]] = set()
            for case, line in _named(lines):
                job = line["job"]
                card = job[0] if len(job) == 2 else names[job[4], job[5]]
                if (card, line["key"]) not in keys:
                    keys.add((card, line["key"]))
                    found[card][case] = Variant(program, job, line["key"])
    return found


def sampled(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """Of every kernel with every format of weights or type of pages one variant, each time another
    one of those that differ in tokens, types and widths."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for case, variant in variants.items():
        format_or_card, name, *linear = variant.job
        if linear:
            kind = (format_or_card, name.split()[0])
        else:
            kind = (case.split("/")[1], *name.split()[:2])
        groups.setdefault(kind, []).append(case)
    chosen = (cases[i % len(cases)] for i, cases in enumerate(groups.values()))
    return {case: variants[case] for case in chosen}


def _named(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a program with the names of their variants: job, and number within the job."""
    seen: Counter[str] = Counter()
    for line in lines:
        if len(line["job"]) == 2:  # compile_attention.py's
            card, name = line["job"]
            case = f"{name}/{line['kernel']}"
        else:
            weight, kernel, tokens, dtype, *target = line["job"]
            card, case = str(target), f"{kernel}/{weight}/{tokens}/{dtype}"
        case = case.replace(" ", "+")
        number = seen[f"{card} {case}"]
        seen[f"{card} {case}"] += 1
        yield f"{case}/{number}" if number else case, line


def _in_chunks(left: dict[str, Variant]) -> Iterator[dict[str, Variant]]:
    """Variants of one program that share a process; a few are divided among all processes."""
    for _, some in itertools.groupby(left.items(), lambda item: item[1].program):
        variants = list(some)
        size = min(CHUNK, max(LEAST_CHUNK, -(-len(variants) // WORKERS)))
        for i in range(0, len(variants), size):
            yield dict(variants[i : i + size])


def _compile(chunk: dict[str, Variant], until: float) -> dict[str, dict[str, Any]]:
    """What was found of these variants."""
    if time.monotonic() > until:
        return {}
    cases = {variant.key: case for case, variant in chunk.items()}
    jobs = {json.dumps(variant.job): variant.job for variant in chunk.values()}
    program = next(iter(chunk.values())).program
    known = {v.key: v.known for v in chunk.values() if v.known is not None}
    lines = run(program, list(jobs.values()), wanted=cases, known=known)
    return {cases[line["key"]]: line for line in lines if line["key"] in cases}


def table(found: Collection[Compiled]) -> str:
    """Of each kernel: how many variants, the range of their registers, the most of all else."""
    head = ("kernel", "variants", "registers", "shared KiB", "stack", "with a stack", "per number")
    rows = [head, ("---",) * len(head)]
    for kernel, group in itertools.groupby(
        sorted(found, key=lambda x: x.kernel), lambda x: x.kernel
    ):
        lines = [line.numbers for line in group]
        shared = max(line["shared"] for line in lines) / 1024
        stacks = [line["stack"] for line in lines]
        each = [line["per_number"] for line in lines if "per_number" in line]
        rows.append(
            (
                kernel,
                str(len(lines)),
                _span([line["registers"] for line in lines]),
                f"{shared:.1f}",
                f"{max(stacks):g}",
                str(sum(stack > 0 for stack in stacks)),
                _span(each),
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _span(numbers: Sequence[float]) -> str:
    return f"{min(numbers):g} to {max(numbers):g}" if numbers else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # argparse before Python 3.12 wants a default of "*" to be one of the choices
    parser.add_argument("cards", nargs="*", default=[], choices=[*CARDS, []], metavar="CARD")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=COMPILED)
    parser.add_argument("--accept", action="store_true", help="write down what became worse too")
    parser.add_argument(
        "--ir",
        metavar="KERNELS",
        help="a pattern of kernels whose IR is found too where a line lacks it, so that a change "
        "to their source compiles only those that it reaches",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="one variant of every kernel with every format: for another Triton (other_triton.py)",
    )
    options = parser.parse_args()
    if options.sample and options.out == COMPILED:
        parser.error("--sample: expected another folder (--out), or the other records are lost")
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    cards = options.cards or CARDS
    statuses = [
        sweep(
            card,
            options.out,
            until,
            accept=options.accept,
            with_ir=options.ir,
            sample=options.sample,
        )
        for card in cards
    ]
    sys.exit(1 if 1 in statuses else max(statuses))


if __name__ == "__main__":
    main()
