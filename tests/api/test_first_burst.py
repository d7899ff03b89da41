"""The first requests come from many threads at one time: what they need is made once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, LoRARequest, RequestError, SamplingParams
from sdk.loaders.templates import chat_template
from sdk.quant.once import Once
from sdk.requests.prompts import reader
from sdk.structured import compiler
from sdk.testing import tiny_adapter

THREADS = 8


def burst(work: Callable[[], Any]) -> None:
    """``work`` on many threads, which begin at one time."""
    gate = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def run() -> None:
        gate.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_one_thread_makes_a_value_and_the_others_wait() -> None:
    made, once = Counter[str](), Once[int]()
    inside = threading.Event()

    def make() -> int:
        made["value"] += 1
        inside.wait(0.1)  # time for the others
        return 7

    burst(lambda: once(make))
    assert made["value"] == 1 and once(make) == 7


def test_a_failure_is_tried_again() -> None:
    once = Once[int]()
    with pytest.raises(ZeroDivisionError):
        once(lambda: 1 // 0)
    assert not once.made and once(lambda: 3) == 3 and once.made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is constructed; a construction lets other threads run."""
    counts: Counter[str] = Counter()
    pause = threading.Event()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def construct(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            pause.wait(0.05)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, construct)

    counted(compiler, "Vocabulary")
    counted(compiler, "TokenShapes")
    counted(compiler.GrammarCompiler, "_compile")
    counted(reader, "TokenPrefixes")
    counted(chat_template, "ChatTemplate")
    counted(chat_template, "ControlTextGuard")
    return counts


def test_the_first_structures_read_the_vocabulary_once(smollm2: Path, made: Counter[str]) -> None:
    params = SamplingParams(max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    with LLM(smollm2, max_model_len=64, max_num_seqs=8) as llm:
        held = []
        hold = llm._job_maker.before_structures
        llm._job_maker.before_structures = lambda: (held.append(1), hold())
        burst(lambda: llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False))
        assert dict(made) == {
            "Vocabulary": 1, "TokenShapes": 1, "_compile": 1, "ChatTemplate": 1,
            "ControlTextGuard": 1,
        }  # fmt: skip
        assert held == [1]


def test_a_structure_that_is_refused_is_refused_for_all(smollm2: Path, made: Counter[str]) -> None:
    params = SamplingParams(max_tokens=8, structured_outputs={"regex": "[z-a]"})
    with LLM(smollm2, max_model_len=64) as llm:
        refused: list[str] = []

        def ask() -> None:
            with pytest.raises(RequestError, match="regex: it cannot be enforced") as found:
                llm.generate("Hi", params, use_tqdm=False)
            refused.append(str(found.value))

        burst(ask)
        assert len(refused) == THREADS and len(set(refused)) == 1
        assert made["Vocabulary"] == 1


def test_the_first_healed_prompts_sort_the_vocabulary_once(
    smollm2: Path, made: Counter[str]
) -> None:
    with LLM(smollm2, max_model_len=64) as llm:
        healed = SamplingParams(max_tokens=1, token_healing=True)
        burst(lambda: llm.generate("The capi", healed, use_tqdm=False))
    assert dict(made) == {"TokenPrefixes": 1}


def test_the_first_requests_of_an_adapter_open_its_file_once(golden: Path, tmp_path: Path) -> None:
    model = golden / "gguf-Q8_0" / "model.gguf"
    request = LoRARequest("a", 1, str(tiny_adapter(tmp_path / "a", model)))
    with LLM(model, max_model_len=32, enable_lora=True) as llm:
        adapters, opened = llm._job_maker.adapters, Counter[str]()
        assert adapters._open is not None
        original, pause = adapters._open, threading.Event()

        def opening(given: LoRARequest) -> Any:
            opened[given.lora_name] += 1
            pause.wait(0.05)
            return original(given)

        adapters._open = opening
        params = SamplingParams(max_tokens=1)
        burst(lambda: llm.generate([[5, 9]], params, lora_request=request, use_tqdm=False))
    assert opened == {"a": 1}
