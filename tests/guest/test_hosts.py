"""Hosts with timers, exits at any moment, no files to write and few descriptors."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.scripts import run_python

_BEGIN = """
    import os, signal, sys, threading, time
    from sdk import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    llm = LLM(sys.argv[1], max_model_len=64)
    def ask():
        return llm.generate(prompt, params)[0].outputs[0].token_ids
    expected = ask()
"""


@pytest.fixture
def model(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.mark.slow
def test_an_exception_at_any_function_call_leaves_nothing_locked(model: Path) -> None:
    """What a timer hits once in a thousand times, tried at every call and return in this thread."""
    code = """
        params = params.clone(max_tokens=3)
        expected = ask()
        class Late(Exception): pass
        def interrupted(call, at):
            seen = 0
            def trace(frame, event, _):
                nonlocal seen
                if event in ("call", "return"):
                    seen += 1
                    if seen == at:
                        sys.settrace(None)
                        raise Late
                return trace
            sys.settrace(trace)
            try:
                call()
            except Late:
                return True
            finally:
                sys.settrace(None)
        calls = (
            ask,
            lambda: list(llm.stream(prompt, params)),
            lambda: (llm.enqueue(prompt, params), llm.wait_for_completion()),
            llm.reset_prefix_cache,
        )
        for call in calls:
            at = 1
            while interrupted(call, at):
                llm.wait_for_completion()
                assert ask() == expected
                at += 1
            assert at > 10, call
        metrics = llm.get_metrics()
        assert metrics["num_running"] == metrics["num_waiting"] == 0
        assert not llm._driver._sinks and not llm.has_unfinished_requests
        llm.close()
        print("fine")
    """
    assert run_python(textwrap.dedent(_BEGIN) + textwrap.dedent(code), model) == "fine\n"


def test_timers_of_the_host_fire_and_may_raise_out_of_any_call(model: Path) -> None:
    code = """
        ticks = []
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(5):
            assert ask() == expected
        assert [t for p in llm.stream(prompt, params) for t in p.outputs[0].token_ids] == expected
        assert len(ticks) > 3
        signal.setitimer(signal.ITIMER_REAL, 0)
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        calls = (
            ask,
            lambda: list(llm.stream(prompt, params)),
            lambda: (llm.enqueue(prompt, params), llm.wait_for_completion()),
        )
        for call in calls:
            raised = 0
            for delay in range(1, 30, 2):
                signal.setitimer(signal.ITIMER_REAL, delay / 2000)
                try:
                    call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Late:
                    raised += 1
            assert raised, call
        llm.wait_for_completion()
        assert ask() == expected
        assert signal.getsignal(signal.SIGALRM) is late
        metrics = llm.get_metrics()
        assert metrics["num_running"] == metrics["num_waiting"] == 0
        llm.close()
        print("fine")
    """
    assert run_python(textwrap.dedent(_BEGIN) + textwrap.dedent(code), model) == "fine\n"


EXITS: dict[str, tuple[str, int]] = {
    "an error beside a stream": ("s = llm.stream(prompt, params); next(s); 1 / 0", 1),
    "sys.exit in a thread's generate": (
        "threading.Thread(target=lambda: [ask() for _ in range(50)], daemon=True).start()\n"
        "time.sleep(0.05); sys.exit(3)",
        3,
    ),
    "os._exit in a step": (
        "def leave(generated, logits): os._exit(4)\n"
        "llm.generate(prompt, params.clone(logits_processors=[leave]))",
        4,
    ),
    "sys.exit while it loads": (
        "def leave(stage, done, total): sys.exit(5)\n"
        "LLM(sys.argv[1], max_model_len=64, on_progress=leave)",
        5,
    ),
    "a use by atexit": (
        "import atexit\n"
        "def last():\n"
        "    try: ask()\n"
        "    except Exception as error: assert type(error).__module__.startswith('sdk'), error\n"
        "    llm.close(); print('last')\n"
        "atexit.register(last)",
        0,
    ),
    "SIGTERM in a step": (
        "def end(generated, logits):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3); return logits\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))\n"
        "llm.generate(prompt, params.clone(logits_processors=[end]))",
        6,
    ),
}


@pytest.mark.slow
def test_a_host_exits_from_wherever_it_is(model: Path) -> None:
    # forked before there is an engine: torch is imported once
    code = f"""
import os, signal, sys, threading, time, traceback
import sdk.llm
for name, (code, expected_code) in {EXITS!r}.items():
    child = os.fork()
    if child == 0:
        exec({textwrap.dedent(_BEGIN)!r})
        exec(code)
        sys.exit(0)
    end = time.monotonic() + 300
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(name, "hangs")
    elif os.waitstatus_to_exitcode(done[1]) != expected_code:
        print(name, os.waitstatus_to_exitcode(done[1]))
print("fine")
"""
    lines = run_python(code, model, timeout=1100).splitlines()
    assert lines == ["last", "fine"]  # "last" is the word of the use by atexit


def test_a_host_that_may_write_no_file_and_has_no_home_is_served(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, "/nonexistent")
    code = """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        llm.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # not a byte to any file
        llm = LLM(sys.argv[1], max_model_len=64, swap_space="1MiB")
        assert ask() == expected
        assert llm.embed(prompt)[0].embedding
        llm.close()
        sys.stdout = None  # a pipe is not a file: this is for the buffer's sake
        os.write(1, b"fine")
    """
    assert run_python(textwrap.dedent(_BEGIN) + textwrap.dedent(code), model) == "fine"


@pytest.mark.slow
def test_with_few_descriptors_nothing_is_left_behind(model: Path, tmp_path: Path) -> None:
    code = """
        import resource, tempfile
        from sdk import SdkError
        from sdk.cluster.executors.grid import Grid
        from sdk.cluster.executors.children import Children
        tempfile.tempdir = sys.argv[2]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        def count():
            return len(os.listdir("/proc/self/fd")) - 1
        def limited(free, use):
            highest = max(map(int, os.listdir("/proc/self/fd")))
            before = count()
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + free, hard))
            try:
                use()
                return True
            except (SdkError, OSError):
                return False
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
                assert count() == before, (free, before, count())
                assert os.listdir(sys.argv[2]) == [], free
        def workers():
            children = Children()
            try:
                children.spawn(Grid(2))
            finally:
                children.stop(0.0)
        def load():
            with LLM(sys.argv[1], max_model_len=64) as other:
                assert other.generate(prompt, params)[0].outputs[0].token_ids == expected
        import torch
        torch.zeros(1).half()  # opens a file when it is first used
        for use in (workers, load):
            results = [limited(free, use) for free in range(0, 16)]
            assert results[-1] and not results[0], results
        assert ask() == expected
        print("fine")
    """
    done = run_python(textwrap.dedent(_BEGIN) + textwrap.dedent(code), model, tmp_path)
    assert done == "fine\n"
