"""Measures speeds as shares of this machine's limits."""

from __future__ import annotations

import time

from sdk.bench.engines import OURS, Engines
from sdk.bench.models import work_of
from sdk.bench.report import Result
from sdk.bench.settings import DECODE_PROMPT, Settings, make_load

#: A large layer of a 1B model under a full prefill step.
GEMM_TOKENS, GEMM_OUT, GEMM_IN, GEMM_GROUP = 512, 8192, 2048, 32


def measure_roofline(settings: Settings, engines: Engines) -> list[Result]:
    """Decode speed, compared with reading the file's bytes at the read bandwidth right before and
    after each run.

    A shared host's bandwidth changes by a factor of two within a second. So neither one number for
    the whole suite would mean anything, nor the best tenth of a second next to a run's average.
    """
    from sdk.kernels.cpu.probe import read_bandwidth

    def bandwidth() -> float:
        return read_bandwidth(settings.threads, seconds=0.4, tries=1)

    load = make_load(engines.vocab_size, 1, DECODE_PROMPT, settings.output_len, seed=1)
    results = {e.name: Result(e.engine, e.name, e.kv, {}) for e in engines.opened}
    for engine in engines.opened:
        engine.measure(load)
    nbytes = work_of(settings.model).bytes_per_token
    before = bandwidth()
    for number in range(settings.rounds):
        for engine in engines.interleaved(number):
            rate = engine.measure(load).decode_rate
            after = bandwidth()
            limit = (before + after) / 2 / nbytes
            results[engine.name].add(decode_tok_s=rate, limit_tok_s=limit, share=100 * rate / limit)
            before = after
        settings.progress(f"roofline: round {number + 1} of {settings.rounds}")
    return list(results.values())


def measure_gemm(settings: Settings, engines: Engines) -> list[Result]:
    """Only the kernel, from float activations to float results, in this process."""
    import torch

    from sdk import __version__
    from sdk.kernels.cpu import simd_level
    from sdk.kernels.cpu.probe import int8_peak
    from sdk.kernels.operators.ops import Ops
    from sdk.kernels.weights.layouts import Affine

    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (GEMM_OUT, GEMM_IN // 2), dtype=torch.uint8, generator=draw)
    scale = torch.full((GEMM_OUT, GEMM_IN // GEMM_GROUP), 0.01, dtype=torch.float16)
    x = torch.randn(GEMM_TOKENS, GEMM_IN, generator=draw)
    ops = Ops(num_threads=settings.threads)
    level = simd_level() or "portable"
    result = Result(OURS, f"{OURS} {__version__}", "", {})
    operations = 2 * GEMM_TOKENS * GEMM_OUT * GEMM_IN
    try:
        weight = ops.linear(Affine((GEMM_OUT, GEMM_IN), 4, GEMM_GROUP, codes, scale, zero=8))
        weight.matmul(x)
        for _ in range(settings.rounds):
            peak = int8_peak(settings.threads, level, bits=4)
            start = time.perf_counter()
            for _ in range(4):
                weight.matmul(x)
            rate = 4 * operations / (time.perf_counter() - start)
            result.add(tops=rate / 1e12, peak_tops=peak / 1e12, share=100 * rate / peak)
    finally:
        ops.close()
    return [result]
