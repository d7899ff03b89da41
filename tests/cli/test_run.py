"""``embedlm run``: what it asks of the engine, and what the user sees."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sdk import LLM
from sdk.api.errors import CheckpointError, RequestError
from sdk.api.params import SamplingParams
from sdk.cli import build_parser, main, run
from sdk.cli.engine_arguments import engine_options
from sdk.testing import FakeLLM
from tests.models.tiny_mmproj import save_both
from tests.models.tiny_vision import vision_model

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", *argv])


def piece(text: str, ids: list[int], reason: str | None = None) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(text=text, token_ids=ids, finish_reason=reason)],
        prompt_token_ids=[1, 2, 3],
        num_cached_tokens=2,
    )


class ScriptedLLM:
    """Answers every prompt with the same pieces; keeps what it was asked."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.asked: list[Any] = []
        self.closed = 0
        self.max_model_len = 100
        self._reader = SimpleNamespace(images=None)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            chat_template="{{ messages }}", apply_chat_template=lambda turn, **given: [1, 2, 3]
        )

    def stream(self, prompt: Any, params: Any) -> Iterator[Any]:
        self.asked.append(prompt)
        try:
            for item in self.pieces:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed += 1


def answers(*texts: str) -> list[Any]:
    pieces = [piece(text, [i]) for i, text in enumerate(texts[:-1])]
    return [*pieces, piece(texts[-1], [9], "stop")]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    waiting = iter(lines)

    def read(prompt: str) -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_only_the_answer_goes_to_stdout(capsys: Captured) -> None:
    answer = run.write_answer(ScriptedLLM(answers("Hel", "lo")), "Hi", SamplingParams())
    assert capsys.readouterr().out == "Hello\n"
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("Hello", 2, "stop")
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (3, 2)
    assert answer.started <= answer.first <= answer.last


def test_ctrl_c_ends_the_answer_and_keeps_what_there_is(capsys: Captured) -> None:
    llm = ScriptedLLM([piece("Hel", [1]), KeyboardInterrupt()])
    answer = run.write_answer(llm, "Hi", SamplingParams())
    assert (answer.text, answer.finish_reason, llm.closed) == ("Hel", None, 1)
    assert capsys.readouterr().out == "Hel\n"
    assert "interrupted" in answer.summary()


def test_the_summary_counts_decoding_from_the_first_token() -> None:
    answer = run.Answer("x", 42, 16, 11, "length", started=10.0, first=10.5, last=11.5)
    assert answer.summary() == (
        "11 tokens, 10.0 tokens/s; 42 prompt tokens, first token after 0.50 s (16 cached); length"
    )


def test_the_summary_of_one_token_names_no_speed() -> None:
    assert run.Answer("x", 4, 0, 1, "stop", 1.0, 1.5, 1.5).summary().startswith("1 tokens, - tok")


def test_a_chat_keeps_its_history(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    llm = ScriptedLLM(answers("Fine", "."))
    typed(monkeypatch, "How are you?", "", "And now?")
    assert run.chat(llm, parse("--system", "Be brief"), SamplingParams()) == 0
    assert llm.asked[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And now?"},
    ]
    assert capsys.readouterr().out == "Fine.\nFine.\n"


@pytest.mark.parametrize("leave", ["/exit", EOFError(), KeyboardInterrupt()])
def test_a_chat_ends(leave: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM([])
    typed(monkeypatch, leave, "never asked")
    assert run.chat(llm, parse(), SamplingParams()) == 0
    assert llm.asked == []


def test_a_chat_that_outgrows_the_context_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    llm = ScriptedLLM([RequestError("the prompt is too long")])
    typed(monkeypatch, "one", "two")
    assert run.chat(llm, parse(), SamplingParams()) == 0
    assert [len(asked) for asked in llm.asked] == [1, 1]
    assert capsys.readouterr().err.count("embedlm: the prompt is too long") == 2


def test_statistics_go_to_stderr_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "Hi")
    run.chat(ScriptedLLM(answers("a", "b")), parse("--stats"), SamplingParams())
    captured = capsys.readouterr()
    assert "2 tokens" in captured.err
    assert captured.out == "ab\n"


def test_piped_text_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" Hello\n"))
    assert run.read_prompt(parse()) == "Hello"
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert run.read_prompt(parse("--prompt", "named")) == "named"
    assert run.read_prompt(parse("--prompt", "-")) == "piped"


def test_the_prompt_may_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    args = parse("m.gguf", "Name three rivers.")
    assert (run.named_model(args), run.read_prompt(args)) == ("m.gguf", "Name three rivers.")
    with pytest.raises(RequestError, match=r"--prompt: expected one prompt, found 'b' and 'a'"):
        run.read_prompt(parse("m.gguf", "a", "--prompt", "b"))
    with pytest.raises(RequestError, match="a prompt is --prompt TEXT"):
        run.named_model(parse("hi", "--model", "m.gguf"))


def test_a_terminal_without_a_prompt_is_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run.read_prompt(parse()) is None


def test_an_empty_pipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(RequestError, match="expected a prompt, found nothing"):
        run.read_prompt(parse())


def test_raw_needs_a_prompt_and_no_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    for argv in [["--raw"], ["--raw", "-p", "x", "--system", "y"]]:
        with pytest.raises(RequestError, match="--raw"):
            run.run(parse(*argv))


def test_the_model_is_named_once_or_is_the_demo_model() -> None:
    assert run.named_model(parse("a.gguf")) == "a.gguf"
    assert run.named_model(parse("--model", "a.gguf")) == "a.gguf"
    with pytest.raises(RequestError, match="model: expected one, found"):
        run.named_model(parse("a.gguf", "--model", "b.gguf"))
    assert run.named_model(parse()) is None
    with pytest.raises(CheckpointError, match="embedlm fetch-demo"), run.opened(parse()):
        pass


def test_the_engine_is_for_one_user_and_gets_the_options_given(
    golden: Path,
) -> None:
    model = golden / "gguf-Q8_0" / "model.gguf"
    argv = (str(model), "--memory", "60MiB", "--threads", "1", "--max-model-len", "64")
    with run.opened(parse(*argv)) as llm:
        assert llm.config.max_num_seqs == 1 and llm.config.num_threads == 1
        assert llm.memory_plan.budget == 60 << 20
        assert llm.max_model_len == 64
        with LLM(model, max_model_len=64) as many:
            assert llm.memory_plan.workspace < many.memory_plan.workspace


def test_given_parameters_lie_on_top_of_the_models_own() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=40)
    llm: Any = SimpleNamespace(get_default_sampling_params=lambda: defaults)
    args = parse("a.gguf", "--max-tokens", "5", "--top-p", "0.9", "--seed", "7")
    params = run.sampling_params(args)(llm)
    assert (params.max_tokens, params.top_p, params.seed) == (5, 0.9, 7)
    assert (params.temperature, params.top_k) == (0.6, 40)


def test_every_model_is_sampled_by_its_own_defaults_unless_told_otherwise() -> None:
    defaults = SamplingParams(temperature=0.6)
    llm: Any = SimpleNamespace(get_default_sampling_params=lambda: defaults)
    for argv in ([], ["other.gguf"]):
        assert run.sampling_params(parse(*argv))(llm) == defaults
        assert run.sampling_params(parse(*argv, "--temperature", "0.7"))(llm).temperature == 0.7


@pytest.fixture(scope="module")
def chatty(golden: Path) -> Iterator[LLM]:
    """A tiny random model with a chat template, and a context of a few short turns."""
    with LLM(golden / "arch-llama3" / "hf", max_model_len=96, max_num_seqs=1) as llm:
        yield llm


def test_a_chat_drops_the_oldest_turns_and_says_so(
    chatty: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, *(f"This is message number {i}" for i in range(6)), "/clear", "Hi")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert run.chat(chatty, parse("--system", "Be brief"), params) == 0
    err = capsys.readouterr().err
    assert "the context of 96 tokens is full: this answer does not see the oldest turns" in err
    assert "/clear starts over" in err
    end = err.partition("the conversation is forgotten\n")[2]
    assert "does not see the oldest turns" not in end and "Traceback" not in err
    assert "too long" not in err and "the context holds" not in err


def test_an_answer_that_fills_the_context_says_so(
    chatty: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "Hi")
    assert run.chat(chatty, parse(), SamplingParams(temperature=0, ignore_eos=True)) == 0
    assert "the answer ends here because the context is full" in capsys.readouterr().err
    typed(monkeypatch, "Hi")
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
    assert run.chat(chatty, parse(), params) == 0
    assert "the answer ends here because of --max-tokens 3" in capsys.readouterr().err


def test_a_message_longer_than_the_context_is_told_and_the_chat_goes_on(
    chatty: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "word " * 200, "Hi")
    assert run.chat(chatty, parse(), SamplingParams(max_tokens=3, ignore_eos=True)) == 0
    captured = capsys.readouterr()
    assert captured.err.count("embedlm: ") == 2  # the refusal, and the end of the second answer
    assert "start with a larger --max-model-len" in captured.err
    assert "max_model_len" not in captured.err
    assert captured.out.count("\n") >= 1


def test_ctrl_c_during_an_answer_keeps_the_chat_and_what_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    llm = ScriptedLLM([piece("Hel", [1]), KeyboardInterrupt()])
    typed(monkeypatch, "one", "two")
    assert run.chat(llm, parse(), SamplingParams()) == 0
    assert llm.asked[1][1] == {"role": "assistant", "content": "Hel"}
    assert capsys.readouterr().out == "Hel\nHel\n"


def test_commands_of_a_chat_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "/help", "/nonsense", "/exit")
    assert run.chat(ScriptedLLM([]), parse(), SamplingParams()) == 0
    err = capsys.readouterr().err
    assert err.count("/clear   forget the conversation") == 2
    assert "no such command: /nonsense" in err


def test_clear_forgets_all_but_the_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    llm = ScriptedLLM(answers("Fine", "."))
    typed(monkeypatch, "one", "/clear", "two")
    assert run.chat(llm, parse("--system", "Be brief"), SamplingParams()) == 0
    assert llm.asked[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "two"},
    ]


def test_a_model_without_a_chat_template_names_raw(
    golden: Path, tmp_path: Path, capsys: Captured
) -> None:
    model = tmp_path / "model"
    shutil.copytree(golden / "arch-llama3" / "hf", model)
    (model / "chat_template.jinja").unlink()
    assert main(["run", str(model), "-p", "Hi"]) == 2
    err = capsys.readouterr().err
    assert "no chat template" in err and "--raw --prompt TEXT" in err and err.count("\n") == 1
    assert main(["run", str(model), "-p", "Hi", "--raw", "--max-tokens", "2"]) == 0


def test_a_bad_parameter_is_refused_before_the_model_is_loaded(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "opened", None)  # a call would be a TypeError
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    assert main(["run", model, "-p", "x", "--temperature", "-1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("embedlm: ")
    assert "temperature" in err and err.count("\n") == 1


def test_a_missing_demo_model_is_one_line(capsys: Captured) -> None:
    assert main(["run", "-p", "x"]) == 2
    err = capsys.readouterr().err
    assert "embedlm fetch-demo" in err and err.count("\n") == 1


def test_the_real_model_answers_greedily_the_same_twice(smollm2: Path, capsys: Captured) -> None:
    argv = ["run", str(smollm2), "-p", "Name the capital of France.", "--temperature", "0"]
    argv += ["--max-tokens", "24", "--stats", "--memory", "1GiB"]
    assert main(argv) == 0
    first = capsys.readouterr()
    assert "Paris" in first.out
    assert "tokens/s" in first.err
    assert main(argv) == 0
    assert capsys.readouterr().out == first.out


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_during_an_answer_of_the_real_model_leaves_quietly(smollm2: Path) -> None:
    command = [sys.executable, "-m", "sdk", "run", str(smollm2), "-p", "Count to a thousand."]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


# ---- images --------------------------------------------------------------------------------------


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "my photo.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


def test_images_of_the_command_line_come_before_the_prompt(
    photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    llm = FakeLLM("Red.", images=True)
    monkeypatch.setattr(run, "opened", lambda args, adapters: llm)
    args = parse("m.gguf", "What is it?", "--image", str(photo), "--image", str(photo))
    assert run.run(args) == 0
    assert capsys.readouterr().out == "Red.\n"
    image = {"type": "image", "image": photo}
    content = [image, image, {"type": "text", "text": "What is it?"}]
    assert llm.requests[0].prompt == [{"role": "user", "content": content}]


def test_images_in_a_chat(photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    llm = FakeLLM("Red.", images=True)
    typed(
        monkeypatch,
        "And this?",
        "/image",
        f"/image {photo}",
        "/image nowhere.png",
        "Now?",
        "And without?",
        f"/image {photo}",
        "/clear",
        "Again",
    )
    args = parse("--image", str(photo))
    assert run.chat(llm, args, SamplingParams(max_tokens=9)) == 0
    images = [
        [isinstance(one["content"], list) for one in request.prompt if one["role"] == "user"]
        for request in llm.requests
    ]
    assert images == [[True], [True, True], [True, True, False], [False]]
    err = capsys.readouterr().err
    assert "with the next message: no image" in err
    assert f"with the next message: {photo}" in err
    assert "/image: expected an image, found 'nowhere.png', which" in err
    assert "does not see the oldest turns" not in err
    llm.close()


def test_a_chat_with_images_that_outgrows_the_context_says_so(
    photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with FakeLLM("Red.", images=True, max_model_len=24) as llm:
        typed(monkeypatch, *[f"/image {photo}", "one"] * 3)
        assert run.chat(llm, parse(), SamplingParams(max_tokens=2)) == 0
    assert "does not see the oldest turns" in capsys.readouterr().err


def test_images_that_cannot_be_used_are_refused(
    photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(run, "opened", lambda args, adapters: FakeLLM("Red."))
    with pytest.raises(RequestError, match="--image: this model reads text only"):
        run.run(parse("m.gguf", "What?", "--image", str(photo)))
    with pytest.raises(RequestError, match=r"--image: expected an image, found .nowhere.png."):
        run.run(parse("m.gguf", "What?", "--image", "nowhere.png"))
    with pytest.raises(RequestError, match="--image: expected a conversation, found --raw"):
        run.run(parse("m.gguf", "What?", "--raw", "--image", str(photo)))
    typed(monkeypatch, f"/image {photo}")
    with FakeLLM("Red.") as llm:
        assert run.chat(llm, parse(), SamplingParams()) == 0
    assert "this model reads text only" in capsys.readouterr().err


def test_an_mmproj_of_another_folder_is_named(tmp_path: Path, capsys: Captured) -> None:
    """``plan``, ``run`` and ``serve`` have the option from one table."""
    beside = save_both(vision_model("qwen3_vl"), "qwen3_vl", tmp_path)
    model = tmp_path / "text" / "model.gguf"
    model.parent.mkdir()
    beside.rename(model)
    images = tmp_path / "mmproj-model-f32.gguf"
    assert engine_options(parse(str(model), "--mmproj", str(images))) == {"mmproj": str(images)}

    def planned(*more: str) -> Any:
        words = ["plan", str(model), "--skip-tokenizer-init", "--json", *more]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)

    assert planned()["images"] is None
    with_images = planned("--mmproj", str(images))
    parts = [with_images["images"][name] for name in ("weights", "workspace", "cache")]
    assert all(parts) and with_images["total"] == planned()["total"] + sum(parts)
    assert main(["run", str(model), "--prompt", "a", "--mmproj", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err
