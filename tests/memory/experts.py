"""Decoding with experts that do not all fit, beside llama.cpp's mapping, in control groups.

``python tests/memory/experts.py random-30b-a3b-6 --memory 1100MiB --limit 1250MiB --disk 1e9
--peer-python PYTHON`` takes root, cgroup v1's controllers of memory and block devices, and for
llama.cpp an interpreter that has llama-cpp-python. Both get one limit of memory and one of reads
of the disk, which are the same whatever else the machine does. llama.cpp maps the file as it is,
does not repack, and begins without it in the page cache. Tokens are drawn (ours at temperature 1,
which for random weights is about evenly), after some that are not counted. A line of JSON each:
tokens per second, CPU seconds, megabytes from the disk for a token, and what the opening took. The
first opening, which packs the model into the cache of weights, has a line of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_VOCAB = 150_000
_PROMPT = 16


def _io() -> int:
    """Bytes that this process has had read from disks, also by touching mapped pages."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _state() -> tuple[float, float, int]:
    return time.perf_counter(), time.process_time(), _io()


def _row(
    count: int, begin: tuple[float, float, int], end: tuple[float, float, int]
) -> dict[str, Any]:
    seconds, cpu, read = (after - before for before, after in zip(begin, end, strict=True))
    return {
        "tokens_per_second": round(count / seconds, 3),
        "cpu_seconds_per_token": round(cpu / count, 3),
        "megabytes_read_per_token": round(read / count / 1e6, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def ours(args: argparse.Namespace) -> dict[str, Any]:
    from sdk import LLM, SamplingParams
    from sdk.kernels.cpu.probe import read_bandwidth

    opening, seen = _state(), [time.perf_counter()]
    with LLM(
        args.file,
        memory=args.memory,
        weight_cache="64GiB",
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        num_threads=args.threads,
        skip_tokenizer_init=True,
        on_progress=lambda *_: seen.append(time.perf_counter()),
    ) as llm:
        opened = [after - before for before, after in zip(opening, _state(), strict=True)]
        silent = max(map(float.__sub__, [*seen[1:], time.perf_counter()], seen))
        first = 7919 * args.seed
        prompt = {"prompt_token_ids": [(first + i * 7919) % _VOCAB for i in range(_PROMPT)]}

        def run(count: int, seed: int) -> None:
            params = SamplingParams(
                temperature=1, seed=seed, max_tokens=count, min_tokens=count, ignore_eos=True
            )
            llm.generate([prompt], params, use_tqdm=False)

        run(max(args.warm, 1), 2 * args.seed)
        begin, before = _state(), llm.get_metrics()
        run(args.tokens, 2 * args.seed + 1)
        after, found = llm.get_metrics(), _row(args.tokens, begin, _state())
        for name in ("hits", "guesses", "misses", "wait_seconds"):
            found[name] = round(after[f"expert_{name}"] - before[f"expert_{name}"], 2)
        plan, memory = llm.memory_plan, read_bandwidth(args.threads)
        return {
            **found,
            "predicted": round(plan.tokens_per_second(memory, disk=args.disk), 2),
            "predicted_megabytes": round(plan.experts.usual / 1e6, 1) if plan.experts else 0,
            "gigabytes_per_second": round(memory / 1e9, 1),
            "planned_mib": plan.total >> 20,
            "open_seconds": round(opened[0], 2),
            "open_cpu_seconds": round(opened[1], 2),
            "longest_without_progress": round(silent, 2),
        }


def llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    import llama_cpp
    import numpy as np

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def mapped() -> Any:
        params = defaults()
        params.use_extra_bufts = False  # repacked weights are not mapped
        return params

    llama_cpp.llama_cpp.llama_model_default_params = mapped
    llama_cpp.llama_model_default_params = mapped
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    model = llama_cpp.Llama(args.file, n_ctx=1024, verbose=False, **threads)
    drawn = np.random.default_rng(3).integers(0, _VOCAB, _PROMPT + args.warm + args.tokens).tolist()
    model.eval(drawn[:_PROMPT])
    for token in drawn[_PROMPT : _PROMPT + args.warm]:
        model.eval([token])
    begin = _state()
    for token in drawn[_PROMPT + args.warm :]:
        model.eval([token])
    return _row(args.tokens, begin, _state())


@contextlib.contextmanager
def _group(limit: int, disk: float) -> Iterator[list[Path]]:
    """Control groups with these limits, for one process."""
    groups = [_GROUPS / kind / f"embedlm-{os.getpid()}" for kind in ("memory", "blkio")]
    for group in groups:
        group.mkdir()
    try:
        (groups[0] / "memory.limit_in_bytes").write_text(str(limit))
        device = Path.home().stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)} {int(disk)}"
        (groups[1] / "blkio.throttle.read_bps_device").write_text(number)
        yield groups
    finally:
        for group in groups:
            group.rmdir()


def _in_group(python: str, which: str, args: argparse.Namespace) -> None:
    from sdk.api.sizes import parse_bytes

    names = ("memory", "disk", "threads", "tokens", "warm", "seed")
    own = [f"--{name}={getattr(args, name)}" for name in names]
    command = [python, __file__, args.file, f"--child={which}", *own]
    with _group(parse_bytes(args.limit, "limit"), args.disk) as groups:

        def enter() -> None:
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True)
    said = done.stdout.strip().splitlines()
    print(f"{which:<10} {said[-1] if said else done.stderr[-300:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", help="a model of embedlm bench, or a file")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--limit", help="of the control group")
    parser.add_argument("--disk", type=float, default=1e9, help="bytes per second")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--warm", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1, help="of the tokens, another in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    parser.add_argument("--child", choices=("ours", "llama.cpp"))
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps((ours if args.child == "ours" else llama_cpp)(args)))
        return
    from sdk.bench.models import ModelFiles

    with ModelFiles(args.file) as files:
        args.file = files.path
        warm, args.warm, args.tokens, count = args.warm, 1, 1, args.tokens
        _in_group(sys.executable, "ours", args)  # fills the cache of weights
        args.warm, args.tokens = warm, count
        for _ in range(args.rounds):
            _in_group(sys.executable, "ours", args)
            if args.peer_python is not None:
                with open(args.file, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                _in_group(args.peer_python, "llama.cpp", args)
            args.seed += 1


if __name__ == "__main__":
    main()
