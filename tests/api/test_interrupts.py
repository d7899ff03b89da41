"""Ctrl-C: in a step, while loading, in the bookkeeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, EngineDeadError, RequestOutput
from tests.api.engines import SHORT, ask, books, ids, settle, tokens
from tests.scripts import run_python


@pytest.mark.usefixtures("ctrl_c")
def test_a_real_ctrl_c_leaves_an_engine_that_still_answers(tiny_path: Path) -> None:
    code = """
        import os, signal, sys, threading
        from sdk import LLM, SamplingParams
        llm = LLM(sys.argv[1], max_model_len=128)
        short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        expected = llm.generate(prompt, short)[0].outputs[0].token_ids
        inside, go = threading.Event(), threading.Event()
        def hold(tokens, logits):
            inside.set()
            go.wait(30)
            return logits
        def press():
            inside.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            llm.generate([prompt] * 4, short.clone(max_tokens=100, logits_processors=[hold]))
            print("not interrupted")
        except KeyboardInterrupt:
            go.set()
        assert llm.generate(prompt, short)[0].outputs[0].token_ids == expected
        assert llm.get_metrics()["num_running"] == 0
        assert llm.get_metrics()["num_generation_tokens"] < 100
        llm.close()
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        print("fine")
    """
    assert run_python(code, tiny_path) == "fine\n"


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_loading_leaves_nothing_behind(smollm2: Path) -> None:
    code = """
        import os, signal, sys, threading
        from sdk import LLM, SamplingParams
        def left():
            gone = {"/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}
            files = [os.readlink(name) for name in gone if os.path.islink(name)]
            maps = open("/proc/self/maps").read()
            assert sys.argv[1] not in files and sys.argv[1] not in maps
            return len(files), len(os.listdir("/proc/self/task"))
        def press(stage, done, total):
            if done > total / 2:
                os.kill(os.getpid(), signal.SIGINT)
        def interrupted():
            pressed = False
            try:
                LLM(sys.argv[1], max_model_len=64, on_progress=press)
            except KeyboardInterrupt:
                pressed = True
            assert pressed
            return left()
        assert interrupted() == interrupted()
        assert threading.enumerate() == [threading.main_thread()]
        with LLM(sys.argv[1], max_model_len=64) as llm:
            assert llm.generate("Hi", SamplingParams(max_tokens=2))[0].finished
        print("fine")
    """
    assert run_python(code, smollm2) == "fine\n"


def test_an_interrupt_of_a_step_made_by_hand_repeats_the_step(llm: LLM) -> None:
    [expected] = ask(llm, 1)
    calls = iter(range(100))

    def press(generated: Any, logits: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return logits

    llm.enqueue(ids(1), SHORT.clone(logits_processors=[press]))
    outputs: list[RequestOutput] = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs += llm.step()
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert tokens(outputs[-1]) == expected and outputs[-1].finished
    settle(llm)


def test_an_interrupt_of_the_bookkeeping_ends_the_engine_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.enqueue([ids(1), ids(2)], SHORT)
    llm.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(books(llm), "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    for use in (llm.step, llm.wait_for_completion, lambda: ask(llm, 1)):
        with pytest.raises(EngineDeadError, match="a step failed: KeyboardInterrupt"):
            use()
