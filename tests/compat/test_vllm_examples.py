"""Programs with the imports and calls of vLLM's own examples run here.

``examples/`` has short ones of ours; docs/compat/compat.md says which of vLLM's files run.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdk import RequestError, SamplingParams as Ours
from sdk.compat.vllm import LLM, SamplingParams
from sdk.compat.vllm._logits import processors_of
from sdk.compat.vllm.config import ProfilerConfig, VllmConfig
from sdk.compat.vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from tests.compat.run_program import with_our_import

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "arch-llama3" / "hf")


def run(name: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With our import lines, in this process."""
    path = EXAMPLES / f"{name}.py"
    code = with_our_import(path.read_text(encoding="utf-8"))
    assert "from vllm" not in code
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


def test_classes_change_logits_of_their_own_requests_only(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("logits_processors", [model], monkeypatch)


def test_an_installed_package_runs_a_program_without_a_changed_line(
    model: str, tmp_path: Path
) -> None:
    code = (
        "import runpy, sys; from sdk.compat import install; install('vllm')\n"
        "path, sys.argv = sys.argv[1], sys.argv[1:]; runpy.run_path(path, run_name='__main__')"
    )
    path = str(EXAMPLES / "engine_arguments.py")
    command = [sys.executable, "-c", code, path, "--model", model, "--folder", str(tmp_path / "p")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.count("Embeddings: [") == 2
    [trace] = (tmp_path / "p").iterdir()
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


# ---- errors --------------------------------------------------------------------------------------


class Broken(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:
        raise OSError("no room")

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        return None


def test_processors_are_classes_or_their_names() -> None:
    assert processors_of(None) == ()
    assert processors_of([Broken, f"{__name__}:Broken"]) == (Broken, Broken)
    for wrong, why in (
        ("a:b", "expected a list, found 'a:b'"),
        (3, "expected a list, found 3"),
        (["broken"], "expected 'module:Class', found 'broken'"),
        (["no.such.module:Broken"], "'no.such.module:Broken' not found: No module named 'no'"),
        ([f"{__name__}:Missing"], "not found: module .* has no attribute 'Missing'"),
        ([len], "expected subclasses of .*; functions go into sdk.SamplingParams"),
        ([str], "expected subclasses of"),
    ):
        with pytest.raises(RequestError, match=f"logits_processors: .*{why}"):
            processors_of(wrong)


def test_an_error_in_a_processor_ends_its_request_alone(model: str) -> None:
    with LLM(model, max_model_len=64, num_threads=1, logits_processors=[Broken]) as llm:
        [output] = llm.generate("the cat", SamplingParams(max_tokens=2))
        [answer] = output.outputs
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert "logits processor Broken raised OSError: no room" in str(answer.stop_reason)
        assert llm.embed("the cat")


def test_a_callback_is_asked_once_for_each_answer(model: str) -> None:
    class Counts:
        def __init__(self) -> None:
            self.prompts: list[tuple[int, ...]] = []

        def __call__(self, output: Any, row: Any) -> Any:
            raise AssertionError("for_answer's function is called instead")

        def for_answer(self, prompt: Any) -> Any:
            self.prompts.append(prompt)
            if len(self.prompts) > 2:
                raise OSError("three")
            return lambda output, row: row

    counts = Counts()
    with LLM(model, max_model_len=64, num_threads=1) as llm:
        [output] = llm.llm.generate("the cat", Ours(n=2, max_tokens=3, logits_processors=[counts]))
        assert counts.prompts == [tuple(output.prompt_token_ids or ())] * 2
        [output] = llm.llm.generate("the cat", Ours(max_tokens=3, logits_processors=[counts]))
        assert "logits processor Counts raised OSError: three" in str(output.outputs[0].stop_reason)


@pytest.mark.parametrize(
    ("direction", "expected"),
    [(MoveDirectionality.UNIDIRECTIONAL, {1: "a"}), (MoveDirectionality.SWAP, {0: "b", 1: "a"})],
)
def test_states_of_requests_follow_their_places(
    direction: MoveDirectionality, expected: dict[int, str]
) -> None:
    entries: dict[int, str] = {}
    params = SamplingParams()
    added = [(0, params, None, []), (1, params, None, []), (2, params, None, [])]
    states = iter(["a", "b", None])
    first = BatchUpdate(3, (), added, ())
    assert process_dict_updates(entries, first, lambda *given: next(states))
    assert entries == {0: "a", 1: "b"}
    assert not process_dict_updates(entries, None, lambda *given: "x")
    assert process_dict_updates(
        entries, BatchUpdate(2, (), (), [(0, 1, direction)]), lambda *given: "x"
    )
    assert entries == expected
    assert process_dict_updates(entries, BatchUpdate(1, [1], (), ()), lambda *given: "x")
    assert 1 not in entries
    assert not process_dict_updates(entries, BatchUpdate(1, [7], (), ()), lambda *given: "x")


def test_a_profile_needs_a_folder_and_an_order(model: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="profiler_config: torch_profiler_dir is missing"):
        LLM(model, profiler_config={"profiler": "torch"})
    with pytest.raises(RequestError, match="profiler_config: expected a ProfilerConfig, found 3"):
        LLM(model, profiler_config=3)
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path))
    with LLM(model, max_model_len=64, num_threads=1, profiler_config=config) as llm:
        with pytest.raises(RequestError, match="stop_profile: call start_profile first"):
            llm.stop_profile()
        with pytest.raises(RequestError, match="max_iterations are not supported: call"):
            llm.start_profile(max_iterations=2)
    with (
        LLM(model, max_model_len=64, num_threads=1) as llm,
        pytest.raises(RequestError, match="start_profile: pass profiler_config="),
    ):
        llm.start_profile()
