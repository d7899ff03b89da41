"""The speed of each KV cache type: decoding after a long context.

One engine per type is open, and they are measured in turn. The context is computed once and comes
from the prefix cache afterwards, so that a round is short and the machine in the same state for all
types.
"""

from __future__ import annotations

from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings, make_load
from sdk.kernels.kv import kv_types
from sdk.quant.spec import KVTypes

_CODES = [kind.name for kind in kv_types.KV_TYPES.values() if kind.scale]
#: The baseline, then all types with scales, the largest first.
KV_TYPES = (
    "float16",
    *sorted([*_CODES, "k8v4"], key=lambda text: -KVTypes.parse(text).bytes_per_value),
)


def measure_kv(settings: Settings, engines: Engines) -> list[Result]:
    """One row for each type; with ``--kv-dtype`` only that type and float16."""
    from sdk.llm import LLM

    context = max(settings.contexts)
    asked = KV_TYPES if settings.kv == "auto" else (KV_TYPES[0], settings.kv)
    plans = [LLM.plan(settings.model, kv_cache_dtype=kv) for kv in asked]
    sizes = {str(plan.kv_dtype): plan.page_bytes for plan in plans}
    with Engines() as opened:
        results = {}
        for kv in sizes:
            settings.progress(f"opening {OURS} with {kv}")
            opening = settings.opening(OURS, 1, context + settings.output_len, kv=kv, prefix=True)
            name = opened.open(opening).name
            results[kv] = Result(OURS, name, kv, {"context": context})
        load = make_load(opened.vocab_size, 1, context, settings.output_len, seed=context)
        for number in range(-1, settings.rounds):
            rates = {x.kv: x.measure(load).decode_rate for x in opened.interleaved(number)}
            for kv, rate in rates.items() if number >= 0 else ():
                results[kv].add(
                    decode_tok_s=rate,
                    speed=rate / rates[KV_TYPES[0]],
                    page_bytes=sizes[kv],
                    pages=2**30 / sizes[kv],
                )
            settings.progress(f"KV types: round {number + 1} of {settings.rounds}")
    return list(results.values())
