"""A forked child is told that the engine is not its own, wherever it was when its parent forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_python

_BEGIN = """
    import asyncio, os, sys
    from sdk import LLM, SamplingParams, EngineClosedError
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    def refused(call):
        try:
            call()
        except EngineClosedError as error:
            return "forked child" in str(error)
        return False
    def end(child):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    llm = LLM(sys.argv[1], max_model_len=64)
    expected = llm.generate(prompt, params)[0].outputs[0].token_ids
"""

CASES = {
    "a stream begun before the fork": """
        stream = llm.stream(prompt, params)
        first = next(stream)
        child = os.fork()
        if child == 0:
            stop = refused(lambda: next(stream)) and next(stream, None) is None
            os._exit(0 if stop else 1)
        end(child)
        rest = [token for piece in stream for token in piece.outputs[0].token_ids]
        assert first.outputs[0].token_ids + rest == expected
    """,
    "what was enqueued before the fork": """
        llm.enqueue(prompt, params)
        child = os.fork()
        if child == 0:
            calls = llm.wait_for_completion, llm.step, lambda: llm.pump(1)
            os._exit(0 if all(map(refused, calls)) else 1)
        end(child)
        assert llm.wait_for_completion()[0].outputs[0].token_ids == expected
    """,
    "an event loop that forks while others wait": """
        async def answer():
            return (await llm.agenerate(prompt, params))[0].outputs[0].token_ids
        async def stream():
            pieces = [piece async for piece in llm.astream(prompt, params)]
            return [token for piece in pieces for token in piece.outputs[0].token_ids]
        async def main():
            held = llm._driver._step_lock  # nothing is answered until the child exists
            held.acquire()
            tasks = [asyncio.ensure_future(one()) for one in (answer, stream)]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks)
            child = os.fork()
            if child == 0:
                errors = await asyncio.gather(*tasks, return_exceptions=True)
                os._exit(0 if all("forked child" in str(error) for error in errors) else 1)
            held.release()
            end(child)
            assert await asyncio.gather(*tasks) == [expected] * 2
        asyncio.run(main())
    """,
    "a child that exits in the ordinary way while its parent generates": """
        stream = llm.stream(prompt, params)
        next(stream)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        end(child)
        list(stream)
    """,
}


#: Each takes three seconds; the streams and the event loop are what only these see.
_SLOW = (
    "a child that exits in the ordinary way while its parent generates",
    "what was enqueued before the fork",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(code, id=name, marks=pytest.mark.slow if name in _SLOW else ())
        for name, code in CASES.items()
    ],
)
def test_a_forked_child_is_refused_and_the_parent_goes_on(golden: Path, case: str) -> None:
    code = _BEGIN + case.replace("\n    ", "\n") + "\n    llm.close()\n    print('fine')\n"
    assert run_python(code, golden / "gguf-Q8_0" / "model.gguf") == "fine\n"
