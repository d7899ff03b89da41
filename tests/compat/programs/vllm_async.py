"""Answers piece by piece in an event loop, one of them stopped early."""

import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

MODEL = sys.argv[1]

RESULTS = {}


async def main():
    args = AsyncEngineArgs(model=MODEL, max_model_len=256, enforce_eager=True)
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        deltas = SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        pieces = []
        async for output in engine.generate("the cat sat", deltas, request_id="first"):
            pieces += output.outputs[0].token_ids
            last = output
        assert last.finished
        assert len(pieces) == 8
        whole = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        async for output in engine.generate("the cat sat", whole, request_id="second"):
            final = output
        assert list(final.outputs[0].token_ids) == pieces
        RESULTS.update(delta=last, final=final)

        long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        reasons = []
        async for output in engine.generate("the dog", long, request_id="third"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 2:
                await engine.abort("third")
        assert len(reasons) < 150
        await engine.check_health()
    finally:
        engine.shutdown()


asyncio.run(main())
