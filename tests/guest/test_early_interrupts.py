"""Ctrl-C while a program starts: an ordinary KeyboardInterrupt, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.scripts import ROOT, run_python

_BEGIN = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
    def press_at(module):
        def hook(event, args):
            if event == "import" and args[0] == module and not pressed:
                pressed.append(module)
                os.kill(os.getpid(), signal.SIGINT)
        pressed = []
        sys.addaudithook(hook)
"""
_USE = """
    from sdk import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with LLM(sys.argv[1], max_model_len=64) as llm:
        print("loaded", flush=True)
        while True:
            llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
"""


def _start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _assert_interrupted(process: subprocess.Popen[str]) -> str:
    """It ended by the interrupt, not by an abort; its last words."""
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()  # no effect on one that has ended
    assert process.returncode in (-2, 130, 1), (process.returncode, errors)
    last = errors.strip().rpartition("\n")[2]
    # Python before 3.12 wraps whatever is raised while a class is made
    wrapped = last.startswith("RuntimeError: Error calling __set_name__")
    assert last == "KeyboardInterrupt" or (wrapped and "\nKeyboardInterrupt\n" in errors), errors
    assert "terminate called" not in errors and "ignored" not in errors, errors
    return errors


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("module", "model"),
    [
        ("numpy", "gguf-Q8_0/model.gguf"),
        ("torch._C", "gptoss-mxfp4"),  # transformers completes the config, and needs torch
        ("torch.nn.functional", "gptoss-mxfp4"),
    ],
)
def test_an_interrupt_is_not_raised_inside_of_torch(golden: Path, module: str, model: str) -> None:
    """Its C++ parts would abort the process, and weakref callbacks of the import drop it."""
    process = _start(f"{_BEGIN}\n    press_at({module!r})\n{_USE}", golden / model)
    assert "site-packages/torch" not in _assert_interrupted(process)


@pytest.mark.parametrize("package", ["vllm", "llama_cpp"])
def test_an_interrupt_while_a_compatible_interface_is_imported(package: str) -> None:
    """These modules are imported first by programs that were written for the originals."""
    code = f"""
    press_at("numpy")
    import sdk.compat.{package}
    """
    process = _start(_BEGIN + code)
    assert "site-packages/torch" not in _assert_interrupted(process)


def test_a_program_is_interrupted_whenever_ctrl_c_comes(golden: Path) -> None:
    model = golden / "gguf-Q8_0" / "model.gguf"
    code = f"{_BEGIN}\n    print('begun', flush=True)\n{_USE}"
    processes = [_start(code, model) for _ in range(4)]
    for delay, process in zip((0.05, 0.4, 1.0, 2.0), processes, strict=True):
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
    for process in processes:
        _assert_interrupted(process)


@pytest.mark.slow
def test_after_an_interrupted_import_the_next_one_works(golden: Path) -> None:
    code = """
        press_at("torch.nn.functional")
        try:
            from sdk import quantize
            print("not interrupted")
        except KeyboardInterrupt:
            from sdk import LLM, quantize
        with LLM(sys.argv[1], max_model_len=64) as llm:
            assert llm.generate({"prompt_token_ids": [5, 6, 7]})[0].finished
        import threading
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        print("fine")
    """
    code = textwrap.dedent(_BEGIN) + textwrap.dedent(code)
    assert run_python(code, golden / "gguf-Q8_0" / "model.gguf") == "fine\n"


@pytest.mark.slow
def test_an_import_in_a_thread_or_without_threads_works_too(golden: Path) -> None:
    code = """
        import sys, threading
        def use():
            from sdk import LLM
            with LLM(sys.argv[1], max_model_len=64) as llm:
                assert llm.generate({"prompt_token_ids": [5, 6, 7]})[0].finished
        if sys.argv[2] == "thread":
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        else:
            before = threading.stack_size(1 << 47)  # more than the system can give
            from sdk import LLM
            threading.stack_size(before)
            use()
        print("fine")
    """
    for how in ("thread", "none"):
        assert run_python(code, golden / "gguf-Q8_0" / "model.gguf", how) == "fine\n"


def test_public_names_that_are_not_said_to_need_torch_do_not_import_it() -> None:
    code = """
        import sys
        import sdk
        for name, module in sdk._EXPORTS.items():
            if module not in sdk._NEED_TORCH:
                getattr(sdk, name)
        print("torch" in sys.modules)
    """
    assert run_python(code) == "False\n"
