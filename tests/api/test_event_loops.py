"""A call that waits, made by a coroutine, says once which call does not stop its event loop."""

from __future__ import annotations

import asyncio
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from sdk import LLM, BeamSearchParams, SamplingParams
from sdk.testing import FakeLLM

SHORT = SamplingParams(temperature=0, max_tokens=2)
CHAT = [{"role": "user", "content": "the cat"}]


def said(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings of a coroutine that runs ``call``."""

    async def main() -> None:
        call()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(main())
    return [one for one in found if one.category is RuntimeWarning]


def test_the_first_waiting_call_names_its_twin_and_its_own_line() -> None:
    with FakeLLM("yes") as llm:
        [warning] = said(lambda: [llm.generate("a"), llm.chat(CHAT), list(llm.stream("b"))])
    text = str(warning.message)
    assert text.startswith("generate() was called in a running event loop")
    assert "await llm.agenerate(...)" in text
    assert warning.filename == __file__


def test_a_call_while_another_thread_imports_asyncio_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeLLM("yes") as llm:
        monkeypatch.setitem(sys.modules, "asyncio", types.ModuleType("asyncio"))
        assert llm.generate("a")[0].text


def shout(text: str) -> str:
    """In capitals."""
    return text.upper()


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "chat": (lambda llm: llm.chat(CHAT), "await llm.achat"),
    "run_tools": (lambda llm: llm.run_tools(CHAT, [shout]), "await llm.arun_tools"),
    "stream": (lambda llm: list(llm.stream("a")), "async for piece in llm.astream"),
    "as_completed": (lambda llm: list(llm.as_completed(["a"])), "async for index, output in llm"),
    "embed": (lambda llm: llm.embed("a"), "await llm.aembed"),
    "rerank": (lambda llm: llm.rerank("a", ["a"]), "await llm.arerank"),
    "wait_for_completion": (
        lambda llm: [llm.enqueue("a"), llm.wait_for_completion()],
        "await llm.agenerate",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_waiting_call_says_it(name: str) -> None:
    call, twin = CALLS[name]
    with FakeLLM("yes") as llm:
        [warning] = said(lambda: call(llm))
    assert str(warning.message).startswith(f"{name}() was called") and twin in str(warning.message)


def test_what_has_no_twin_is_called_in_a_thread(llm: LLM) -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=1)
    prompt = {"prompt_token_ids": list(range(3, 40))}
    [warning] = said(lambda: llm.beam_search(prompt, beams))
    assert "await AsyncLLM(llm).beam_search(...)" in str(warning.message)
    with llm.fork() as other:
        [warning] = said(lambda: [other.pin(prompt), other.unpin(prompt)])
    assert "asyncio.to_thread(llm.pin, ...)" in str(warning.message)


def test_nobody_is_told_without_a_reason() -> None:
    """Threads, async calls and steps by hand stop no loop."""
    with FakeLLM("yes") as llm:

        async def main() -> None:
            await llm.agenerate("a")
            await asyncio.to_thread(llm.generate, "a")
            async for _ in llm.as_completed(["a"]):
                pass
            llm.enqueue("a")
            while llm.has_unfinished_requests:
                llm.step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(main())
            llm.generate("a")


def test_a_warning_that_is_an_error_stops_the_call_and_comes_once() -> None:
    with FakeLLM("yes") as llm:

        async def main() -> None:
            with pytest.raises(RuntimeWarning, match="agenerate"):
                llm.generate("a")
            assert llm.generate("a")[0].text == "yes"

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(main())


def test_a_cell_of_a_notebook_calls_as_usual() -> None:
    """IPython's kernel runs cells in its event loop; a task in that loop is not a cell."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    with FakeLLM("yes") as llm:
        shell.user_ns.update(llm=llm, said=[])

        async def kernel() -> None:
            cell = "await __import__('asyncio').sleep(0)\nsaid.append(llm.generate('a')[0].text)"
            done = await shell.run_cell_async(cell, transformed_cell=cell)
            done.raise_error()

        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            asyncio.run(kernel())
        assert shell.user_ns["said"] == ["yes"]
        [warning] = said(lambda: llm.generate("a"))
        assert "agenerate" in str(warning.message)
