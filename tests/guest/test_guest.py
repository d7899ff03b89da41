"""A guest changes nothing of its host and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from sdk import LLM, EngineClosedError, SamplingParams
from tests.scripts import ROOT, run_python

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def _host_state() -> dict[str, object]:
    process = psutil.Process()
    return {
        "environment": dict(os.environ),
        "signals": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ],
        "root handlers": list(logging.getLogger().handlers),
        "log level": logging.getLogger().level,
        "warning filters": list(warnings.filters),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch defaults": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.initial_seed(),
        ),
        "torch random state": torch.random.get_rng_state().tolist(),
        "random state": random.getstate(),
        "directory": Path.cwd(),
        "children": process.children(),
        "sockets": process.net_connections(),
        "recursion limit": sys.getrecursionlimit(),
        "standard streams": (sys.stdout, sys.stderr),
    }


@pytest.mark.model
def test_using_the_sdk_changes_nothing_of_the_host(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(smollm2, max_model_len=256) as llm:  # first use: imports have happened
        llm.generate("warm up", SHORT)
    before = _host_state()
    threads = set(threading.enumerate())
    with LLM(smollm2, max_model_len=256) as llm:
        llm.generate(["Hello", "Hi there"], SamplingParams(max_tokens=8, seed=1))
        list(llm.stream("Hello", SHORT))
        llm.chat([{"role": "user", "content": "Hi"}], SHORT)
        during = _host_state()
    after = _host_state()
    for name, value in before.items():
        assert during[name] == value, name
        assert after[name] == value, name
    assert set(threading.enumerate()) == threads
    assert capfd.readouterr() == ("", "")


@pytest.mark.model
def test_a_fresh_process_sees_no_output_no_files_and_no_leftover_threads(
    smollm2: Path, tmp_path: Path
) -> None:
    code = """
        import os, sys, threading
        os.chdir(sys.argv[2]); sys.path.insert(0, sys.argv[3])
        from sdk import LLM, SamplingParams
        llm = LLM(sys.argv[1], max_model_len=256)
        llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0))
        llm.close()
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        tasks = len(os.listdir("/proc/self/task"))
    """
    assert run_python(code, smollm2, tmp_path, ROOT) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_opening_a_model_does_not_import_the_compiler_of_torch(golden: Path) -> None:
    code = """
        import sys
        from sdk import LLM
        with LLM(sys.argv[1], max_model_len=64) as llm:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}])
        print(sorted({"torch._dynamo", "sympy", "transformers"} & set(sys.modules)))
    """
    assert run_python(code, golden / "gguf-Q4_1" / "model.gguf") == "[]\n"


@pytest.mark.model
@pytest.mark.slow
def test_200_engines_in_a_row_leave_memory_and_descriptors_where_they_were(golden: Path) -> None:
    model = golden / "gguf-Q4_K_M" / "model.gguf"
    process = psutil.Process()

    def once() -> None:
        with LLM(model, max_model_len=64) as llm:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SHORT)

    for _ in range(20):
        once()
    gc.collect()
    rss, descriptors, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    for _ in range(180):
        once()
    gc.collect()
    grown = process.memory_info().rss - rss
    assert grown < model.stat().st_size * 0.01 + 5 * 2**20, f"{grown / 2**20:.1f} MiB"
    assert process.num_fds() == descriptors
    assert process.num_threads() == threads


@pytest.mark.model
@pytest.mark.slow
def test_close_gives_the_memory_of_a_real_model_back(smollm2: Path) -> None:
    # In a process of its own: what another test leaves in the allocator would blur the sums. The
    # first rounds load what Python and torch load on first use and fill the allocators' own caches.
    code = """
        import gc, sys
        from sdk import LLM, SamplingParams
        for _ in range(14):
            with LLM(sys.argv[1], max_model_len=1024) as llm:
                llm.generate("word " * 800, SamplingParams(temperature=0, max_tokens=4))
            del llm
            gc.collect()
            with open("/proc/self/statm") as sizes:
                print(int(sizes.read().split()[1]) * 4096)
    """
    rss = [int(line) for line in run_python(code, smollm2).split()][6:]
    allowed = smollm2.stat().st_size * 0.01 + 5 * 2**20
    grown = [after - before for before, after in itertools.pairwise(rss)]
    assert max(grown) < allowed, [f"{size / 2**20:.1f} MiB" for size in grown]
    assert rss[-1] - rss[0] < 2 * allowed, f"{(rss[-1] - rss[0]) / 2**20:.1f} MiB in 7 rounds"


@pytest.mark.slow
@pytest.mark.model
def test_loading_takes_the_file_and_120_mib_beyond_what_torch_takes(smollm2: Path) -> None:
    # Importing torch takes 230 MiB with its CPU build, 710 MiB with that for CUDA 13.
    code = """
        import sys
        from sdk import LLM
        import torch
        def peak():
            with open("/proc/self/status") as lines:
                return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
        before = peak()
        llm = LLM(sys.argv[1])
        print(peak() - before)
    """
    taken = int(run_python(code, smollm2)) * 1024
    assert taken < smollm2.stat().st_size + 120 * 2**20, f"{taken / 2**20:.0f} MiB"


@pytest.mark.model
def test_a_forgotten_engine_is_closed_when_it_is_collected(golden: Path) -> None:
    threads = threading.active_count()
    llm = LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=64)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SHORT)
    assert threading.active_count() > threads
    del llm
    gc.collect()
    assert threading.active_count() == threads


@pytest.mark.slow
@pytest.mark.model
def test_two_engines_of_different_models_live_side_by_side(smollm2: Path, golden: Path) -> None:
    tiny = golden / "gguf-Q8_0" / "model.gguf"
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    with LLM(smollm2, max_model_len=256) as one:
        expected = one.generate("The sky is", SHORT)[0].outputs[0].token_ids
    with LLM(tiny, max_model_len=64) as two:
        tiny_expected = two.generate([prompt], SHORT)[0].outputs[0].token_ids
    with LLM(smollm2, max_model_len=256) as one, LLM(tiny, max_model_len=64) as two:
        found: dict[str, list[object]] = {"one": [], "two": []}

        def ask(name: str) -> None:
            for _ in range(5):
                output = (
                    one.generate("The sky is", SHORT)
                    if name == "one"
                    else two.generate([prompt], SHORT)
                )
                found[name].append(output[0].outputs[0].token_ids)

        callers = [threading.Thread(target=ask, args=(name,)) for name in found]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert found == {"one": [expected] * 5, "two": [tiny_expected] * 5}


@pytest.mark.model
def test_a_forked_child_is_refused_and_the_parent_goes_on(golden: Path) -> None:
    code = """
        import os, sys
        from sdk import LLM, SamplingParams, EngineClosedError
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompt = [{"prompt_token_ids": [1, 2, 3]}]
        llm = LLM(sys.argv[1], max_model_len=64)
        first = llm.generate(prompt, params)[0].outputs[0].token_ids
        child = os.fork()
        if child == 0:
            try:
                llm.generate(prompt, params)
            except EngineClosedError as error:
                llm.close()
                os._exit(0 if "forked child" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == first
        llm.close()
        print("fine")
    """
    assert run_python(code, golden / "gguf-Q8_0" / "model.gguf") == "fine\n"


@pytest.mark.model
def test_a_script_that_forgets_to_close_ends_by_itself(golden: Path) -> None:
    code = """
        import sys
        from sdk import LLM, SamplingParams
        llm = LLM(sys.argv[1], max_model_len=64)
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, params)
        next(stream)
        print("done")
    """
    assert run_python(code, golden / "gguf-Q8_0" / "model.gguf") == "done\n"


@pytest.mark.model
def test_the_sdk_opens_no_socket(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=64) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SHORT)


@pytest.mark.model
def test_use_after_close_is_refused(golden: Path) -> None:
    llm = LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=64)
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate([{"prompt_token_ids": [1]}], SHORT),
        lambda: llm.stream({"prompt_token_ids": [1]}, SHORT),
        lambda: llm.embed([{"prompt_token_ids": [1]}]),
        lambda: llm.generate("a text, whose tokenizer is gone too"),
        lambda: llm.chat([{"role": "user", "content": "a message"}]),
        lambda: llm.snapshot("a prefix"),
        llm.explain,
        llm.get_metrics,
        llm.step,
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
