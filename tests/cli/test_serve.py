"""``embedlm serve``: names, options, the socket, signals and exit codes."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk.api.errors import RequestError
from sdk.api.memory_pool import MemoryPool
from sdk.cli import build_parser, main
from sdk.cli.text_file import read_options
from sdk.serving.serve_command import (
    bound,
    check_adapters,
    kept_bytes,
    named_models,
    with_options,
)
from sdk.testing import tiny_model

Captured = pytest.CaptureFixture[str]


def test_models_have_the_names_of_their_files_or_those_given(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert named_models(["a/small.gguf", "fast=b.gguf", "org/name-GGUF:Q4_K_M", str(folder)]) == {
        "small": "a/small.gguf",
        "fast": "b.gguf",
        "org/name-GGUF:Q4_K_M": "org/name-GGUF:Q4_K_M",
        "folder": str(folder),
    }
    assert named_models(["./a=b.gguf"]) == {"a=b": "./a=b.gguf"}
    with pytest.raises(RequestError, match="two have the name 'a'"):
        named_models(["a.gguf", "x/a.gguf"])
    with pytest.raises(RequestError, match="expected NAME=MODEL, found 'a='"):
        named_models(["a="])


def test_one_model_may_have_several_names(tmp_path: Path) -> None:
    assert named_models(["a.gguf"], ["x", "y/z"]) == {"x": "a.gguf", "y/z": "a.gguf"}
    with pytest.raises(RequestError, match="--served-model-name: expected one model, found 2"):
        named_models(["a.gguf", "b.gguf"], ["x"])
    for names in (["x", "x"], [""]):
        with pytest.raises(RequestError, match="expected different names, found '"):
            named_models(["a.gguf"], names)
    path = tmp_path / "a.gguf"
    path.touch()
    named = named_models([f"x={path}", f"y={tmp_path}/./a.gguf"])
    args = build_parser("serve").parse_args(["serve", str(path)])
    assert list(named) == ["x", "y"] and list(with_options(named, args)) == [str(path)]
    check_adapters({"l": "path"}, named)


@pytest.mark.parametrize(("given", "count"), [([], 2**26), (["1MiB"], 2**20), (["0"], 0)])
def test_how_many_responses_are_kept(given: list[str], count: int) -> None:
    words = ["serve", "a.gguf", *(["--kept-responses", *given] if given else [])]
    assert kept_bytes(build_parser("serve").parse_args(words)) == count


def test_adapters_need_one_model_and_names_of_their_own(tmp_path: Path) -> None:
    args = build_parser("serve").parse_args(["serve", "a.gguf", "--lora", "x=org/name"])
    [options] = with_options({"a": "a.gguf"}, args, {"x": "org/name"}).values()
    assert options["enable_lora"] is True and options["max_loras"] == 1
    check_adapters({}, {"a": "a.gguf", "b": "b.gguf"})
    with pytest.raises(RequestError, match="--lora: expected one model, found 2"):
        check_adapters({"x": "path"}, {"a": "a.gguf", "b": "b.gguf"})
    with pytest.raises(RequestError, match="'a' is the name of the model"):
        check_adapters({"a": "path"}, {"a": "a.gguf"})


def test_options_of_a_file_and_of_arguments(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"max_num_seqs": 4, "kv_cache_dtype": "int8"}')
    words = ["serve", "a.gguf", "--options", str(path), "--max-num-seqs", "8", "--memory", "1GiB"]
    args = build_parser("serve").parse_args(words)
    [options] = with_options({"a": "a.gguf"}, args).values()
    assert options == {
        "model": "a.gguf",
        "max_num_seqs": 8,
        "kv_cache_dtype": "int8",
        "memory": "1GiB",
    }
    both = with_options({"a": "a.gguf", "b": "b.gguf"}, args)
    assert both["a.gguf"]["memory"] is both["b.gguf"]["memory"]
    assert isinstance(both["a.gguf"]["memory"], MemoryPool)
    assert with_options({"a": "a.gguf", "b": "a.gguf"}, args)["a.gguf"]["memory"] == "1GiB"
    images = build_parser("serve").parse_args([*words, "--mmproj", "m.gguf"])
    assert with_options({"a": "a.gguf"}, images)["a.gguf"]["mmproj"] == "m.gguf"
    with pytest.raises(RequestError, match="mmproj: expected one model, found 2"):
        with_options({"a": "a.gguf", "b": "b.gguf"}, images)
    for text, message in (("[]", "found \\[\\]"), ("{", "expected a JSON object")):
        path.write_text(text)
        with pytest.raises(RequestError, match=message):
            read_options(path)


def test_an_address_that_cannot_be_used_is_an_error_before_loading(
    golden: Path, capsys: Captured
) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")

    def refused(*options: str) -> str:
        assert main(["serve", model, *options]) == 2
        err = capsys.readouterr().err
        assert "loading" not in err
        return err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refused("--port", str(port))
    host = "no.such.host.invalid"
    assert f"--host {host}" in refused("--host", host)
    assert "70000" in refused("--port", "70000")
    assert "--drain-seconds: expected at least 0" in refused("--drain-seconds", "-1")
    assert "--kept-responses: expected a size" in refused("--kept-responses", "much")


def test_nobody_can_connect_before_the_model_is_loaded() -> None:
    with bound("127.0.0.1", 0) as made, pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.getsockname(), timeout=5)


def test_a_missing_extra_says_how_to_install_it(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(golden / "gguf-Q8_0" / "model.gguf")]) == 2
    assert 'pip install "embedlm[server]"' in capsys.readouterr().err


class Serving:
    """A server process, once it listens."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "sdk", "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                self.port = int(found[1])
                return
        raise AssertionError(f"it did not start: {self.said}")

    def ask(self, **more: object) -> http.client.HTTPResponse:
        """A long answer; the response when its first part is here."""
        body = {"prompt": "a", "max_tokens": 10_000, "ignore_eos": True, "stream": True, **more}
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        kind = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", json.dumps(body), kind)
        return self.connection.getresponse()

    def end(self) -> int:
        """The exit code; what was said is in ``said``."""
        _, rest = self.process.communicate(timeout=60)
        self.said += rest or ""
        return self.process.returncode


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    yield tiny_model(tmp_path / "tiny.gguf")


def test_a_server_answers_and_drains_after_a_signal(tiny: Path) -> None:
    serving = Serving(str(tiny), f"other={tiny}", "--threads", "1")
    assert serving.said.count("loading") == 1  # both names are one model
    with serving.ask(max_tokens=40, model="other") as response:
        assert response.status == 200
        response.read(10)
        serving.process.send_signal(signal.SIGTERM)
        rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
    assert serving.end() == 0
    assert "loading" in serving.said and serving.said.endswith("embedlm: stopped\n")
    assert "Traceback" not in serving.said


@pytest.mark.slow
def test_requests_that_do_not_end_in_time_are_aborted(smollm2: Path) -> None:
    serving = Serving(str(smollm2), "--threads", "1", "--drain-seconds", "0.3")
    with serving.ask() as response:
        response.read(10)
        serving.process.send_signal(signal.SIGINT)
        rest = response.read()
    assert b'"code": "stopping"' in rest
    assert serving.end() == 0
    assert "may end within 0.3 s" in serving.said and "Traceback" not in serving.said


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(smollm2: Path) -> None:
    serving = Serving(str(smollm2), "--threads", "1", "--drain-seconds", "1000")
    with serving.ask() as response:
        response.read(10)
        serving.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        serving.process.send_signal(signal.SIGINT)
        assert serving.end() == 130
    assert "aborted" in serving.said and "Traceback" not in serving.said
