"""The workers of ``embedlm bench``: their protocol, their order, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import bench
from sdk.api.errors import SdkError
from sdk.bench import engines as bench_engines, structured, suites
from sdk.bench.engines import Engines, Load, PeerError, Sample, Worker
from sdk.bench.peers.opening import Opening
from sdk.bench.peers.worker import answers, open_peer
from sdk.cli import main

Captured = pytest.CaptureFixture[str]
HELLO = "{'name': 'peer %(requests)d %(context)d %(kv)s' % hello, 'kv': 'f16', 'open_s': 1.5, "
HELLO += "'vocab_size': 448}"
#: Answers every load alike, and notes in a file what it was asked.
FAKE = f"""
import json, sys
def say(reply):
    print(json.dumps(reply), flush=True)
hello = json.loads(sys.stdin.readline())
say({HELLO})
for line in sys.stdin:
    n = len(json.loads(line)['prompts'])
    with open(sys.argv[0] + '.log', 'a') as log:
        log.write('asked\\n')
    say({{'prefill_s': 2.0, 'decode_s': 4.0, 'decode_tokens': 8 * n}})
with open(sys.argv[0] + '.log', 'a') as log:
    log.write('ended\\n')
"""


def fake_python(folder: Path, code: str) -> str:
    """An "interpreter" that runs ``code`` instead of the worker script."""
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(0o755)
    return str(python)


def opening(engine: str = "llama.cpp", model: str = "m.gguf", **changed: Any) -> Opening:
    return Opening(
        **{"engine": engine, "model": model, "threads": 2, "requests": 8, "context": 192, **changed}
    )


def test_a_peer_is_asked_in_json_lines(tmp_path: Path) -> None:
    with Engines() as engines:
        peer = engines.open(opening(kv="int8"), fake_python(tmp_path, FAKE))
        assert (peer.name, peer.kv, peer.open_s) == ("peer 8 192 int8", "f16", 1.5)
        assert engines.vocab_size == 448
        sample = peer.measure(Load(((1, 2, 3), (4, 5, 6)), 9))
        assert sample == Sample(prefill_s=2.0, decode_s=4.0, decode_tokens=16)
    assert (tmp_path / "worker.py.log").read_text() == "asked\nended\n"


def test_every_other_round_runs_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "_SETTLE", 0)
    engines = Engines()
    engines.opened = ["a", "b"]  # type: ignore[list-item]
    assert [list(engines.interleaved(i)) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('print(\'{"error": "no such model"}\', flush=True)', "the worker failed: no such model"),
        ("raise SystemExit(3)", "ended without a reply, exit code 3"),
        ("import os; os.abort()", "ended without a reply, killed by SIGABRT"),
        (
            "import sys; print('a\\nlast words\\n', file=sys.stderr); raise SystemExit(3)",
            "ended without a reply, exit code 3: last words",
        ),
        (
            "print('{\"error\": \"first\\\\nsecond' + 1000 * ' word' + '\"}', flush=True)",
            r"the worker failed: first second( word)+ \.\.\.$",
        ),
    ],
)
def test_a_peer_that_fails_is_an_error_that_names_it(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(PeerError, match=rf"^llama\.cpp: .*{message}") as caught:
        Worker(opening(), fake_python(tmp_path, code))
    assert len(str(caught.value)) < 320


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SdkError, match=r"llama\.cpp: /nowhere/python cannot be started"):
        Worker(opening(), "/nowhere/python")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("engine", "module"),
    [
        ("llama.cpp", "llama_cpp"),
        ("openvino", "openvino"),
        ("mistral.rs", "mistralrs"),
        ("vllm", "vllm"),
        ("transformers", "transformers"),
    ],
)
def test_a_worker_without_its_engine_answers_with_an_error(
    tmp_path: Path, engine: str, module: str
) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('stand-in without a library')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SdkError, match="ImportError: stand-in without a library"):
        Worker(opening(engine), str(python))


def test_an_environment_without_the_package_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    with pytest.raises(PeerError, match=f"mistralrs is not installed for {sys.executable}"):
        Worker(opening("mistral.rs"), str(python))


def test_what_a_worker_prints_does_not_disturb_its_answers(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from sdk.bench.peers.worker import serve\n"
        "class Loud:\n"
        "    hello = {'name': 'loud', 'kv': '', 'open_s': 0, 'vocab_size': 1}\n"
        "    def __init__(self, opening):\n"
        "        print('from Python', flush=True)\n"
        "        os.write(1, b'from C\\n')\n"
        "serve(Loud)\n"
    )
    with Engines() as engines:
        assert engines.open(opening(), fake_python(tmp_path, code)).name == "loud"


#: What a worker does to press Ctrl-C in the process that waits for it, and then never to answer.
CTRL_C = "import os, signal; os.kill(os.getppid(), signal.SIGINT)\nwhile True: pass\n"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_every_worker_at_once(tmp_path: Path) -> None:
    stuck = FAKE.partition("for line")[0] + "sys.stdin.readline()\n" + CTRL_C
    with pytest.raises(KeyboardInterrupt), Engines() as engines:
        first = engines.open(opening(), fake_python(tmp_path / "a", FAKE))
        second = engines.open(opening(), fake_python(tmp_path / "b", stuck))
        second.measure(Load(((1,),), 2))
    processes = [worker._process for worker in (first, second)]
    assert all(process.poll() is not None for process in processes)
    assert processes[1].returncode == -signal.SIGKILL


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_opening_ends_that_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        Worker(opening(), fake_python(tmp_path, "import sys\nsys.stdin.readline()\n" + CTRL_C))
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_the_tests_of_ctrl_c_pass_where_sigint_is_ignored() -> None:
    # as under nohup: the disposition is inherited
    code = (
        "import pytest, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.exit(pytest.main(['-q', '--timeout', '60', *sys.argv[1:]]))"
    )
    both = (
        test_ctrl_c_ends_every_worker_at_once,
        test_ctrl_c_in_the_middle_of_opening_ends_that_worker,
    )
    tests = [f"{__file__}::{test.__name__}" for test in both]
    done = subprocess.run([sys.executable, "-c", code, *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def ask(engine: Any, *questions: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answers([json.dumps(question) for question in questions], engine))


def test_our_worker_decodes_all_requests_together(golden: Path) -> None:
    first = {"engine": "embedlm", "model": str(golden / "gguf-Q4_1" / "model.gguf"), "threads": 1}
    first |= {"requests": 3, "context": 64, "kv": "float32", "prefix_cache": False}
    load = {"prompts": [[5 + i] * 10 for i in range(3)], "output_len": 6}
    hello, sample = ask(open_peer, first, load)
    assert hello["kv"] == "float32" and hello["vocab_size"] > 0
    assert sample["decode_tokens"] == 15
    assert sample["prefill_s"] > 0 and sample["decode_s"] > 0


def test_an_error_of_our_worker_is_its_last_answer(golden: Path) -> None:
    first = {"engine": "embedlm", "model": str(golden / "gguf-Q4_1" / "model.gguf"), "threads": 1}
    first |= {"requests": 1, "context": 64, "kv": "float3", "prefix_cache": False}
    (reply,) = ask(open_peer, first, {"prompts": [[1]], "output_len": 1})
    assert "kv_cache_dtype" in reply["error"]


@pytest.mark.parametrize(
    ("engine", "kv", "message"),
    [
        ("transformers", "int8", "--kv-dtype: expected one of auto, found 'int8'"),
        ("transformers-bf16", "float16", "--kv-dtype: expected one of auto, found 'float16'"),
        (
            "llama.cpp",
            "fp8",
            "expected one of auto, float16, bfloat16, float32, int16, int8, int4, found",
        ),
        (
            "openvino",
            "fp8",
            "expected one of auto, float16, bfloat16, float32, int16, int8, int4, found",
        ),
        ("mistral.rs", "int8", "expected one of auto, float16, float32, found 'int8'"),
        ("nonsense", "auto", "KeyError: 'nonsense'"),
    ],
)
def test_a_peer_refuses_what_it_cannot_do(engine: str, kv: str, message: str) -> None:
    first = {"engine": engine, "model": "m", "threads": 1, "requests": 1, "context": 64}
    (reply,) = ask(open_peer, {**first, "kv": kv, "prefix_cache": False})
    assert message in reply["error"]


@pytest.mark.slow
def test_transformers_runs_beside_us_on_the_unpacked_weights(
    golden: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "bench.json"
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--threads", "1", "--rounds", "1"]
    argv += ["--suite", "decode", "--streams", "2", "--output-len", "4", "--json", str(file)]
    assert main([*argv, "--against", "transformers"]) == 0
    ours, theirs = json.loads(file.read_text())["results"]["decode"]
    assert theirs["engine"].startswith("transformers ") and theirs["kv"] == "float32"
    assert ours["median"]["decode_tok_s"] > 0 and theirs["median"]["decode_tok_s"] > 0
    assert "embedlm / it" in capsys.readouterr().out


#: Notes which engine was asked what, in the order of asking. A prompt takes a millisecond for each
#: token it does not share with the one before, decoding as long for each token.
LOGGED = """
import json, sys
def say(reply):
    print(json.dumps(reply), flush=True)
hello = json.loads(sys.stdin.readline())
def note(what):
    with open(sys.argv[1], 'a') as log:
        log.write(hello['engine'] + ' ' + what + chr(10))
note('open %(requests)d %(context)d %(prefix_cache)s' % hello)
if hello['engine'] == 'vllm':
    say({'error': 'ValueError: cannot read it'})
    sys.exit()
say({'name': hello['engine'], 'kv': hello['kv'], 'open_s': 0.5, 'vocab_size': 448})
last = []
for line in sys.stdin:
    load = json.loads(line)
    if 'one' in load:
        kind = 'schema' if load['schema'] else 'drafts' if load['drafts'] else 'plain'
        note('one ' + kind)
        if 'properties' in (load['schema'] or {}):
            say({'error': 'ValueError: no such repetition'})
            break
        say({'seconds': {'schema': 2.0, 'drafts': 0.5, 'plain': 1.0}[kind], 'tokens': [5] * 101})
        continue
    prompts, count = load['prompts'], load['output_len']
    if hello['engine'] == 'mistral.rs' and len(prompts) > 1:
        sys.exit(3)
    note('%d x %d + %d' % (len(prompts), len(prompts[0]), count))
    known = 0
    if hello['prefix_cache']:
        while known < min(len(last), len(prompts[0])) and last[known] == prompts[0][known]:
            known += 1
    last = prompts[0]
    new = (len(prompts[0]) - known) * len(prompts)
    decoded = (count - 1) * len(prompts)
    say({'prefill_s': new / 1000, 'decode_s': decoded / 1000, 'decode_tokens': decoded})
note('end')
"""
Run = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def run_with_fakes(tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(*options)``: results and log of a run in which every engine is a stand-in.

    ``code``: the exit code that is expected.
    """
    script, log, report = (tmp_path / name for name in ("worker.py", "log", "report.json"))
    script.write_text(LOGGED)

    def command(python: str) -> list[str]:
        return [sys.executable, "-S", str(script), str(log)]

    monkeypatch.setattr(bench_engines, "command", command)
    monkeypatch.setattr(bench_engines, "_SETTLE", 0)
    limits = bench.Limits("avx2", 50.0, 2.0, 30.0)
    monkeypatch.setattr(bench, "machine_limits", lambda threads: limits)

    def run(*options: str, code: int = 0) -> tuple[dict[str, Any], list[str]]:
        model = str(golden / "gguf-Q4_1" / "model.gguf")
        assert main(["bench", model, "--rounds", "2", *options, "--json", str(report)]) == code
        return json.loads(report.read_text())["results"], log.read_text().splitlines()

    return run


def test_engines_are_opened_once_and_take_turns(run_with_fakes: Run) -> None:
    options = "--suite prefill,decode --streams 2 --prompt-len 300 --output-len 5"
    results, log = run_with_fakes(*options.split(), "--against", "llama.cpp=py")
    one, two = ("embedlm", "llama.cpp")
    assert log == [
        *(f"{name} open 2 308 False" for name in (one, two)),
        *(f"{name} 1 x 300 + 2" for name in (one, two)),
        *(f"{name} 1 x 300 + 1" for name in (one, two, two, one)),
        *(f"{name} 2 x 128 + 2" for name in (one, two)),
        *(f"{name} 2 x 128 + 5" for name in (one, two, two, one)),
        *(f"{name} end" for name in (one, two)),
    ]
    for row in results["prefill"]:
        assert row["samples"] == {"prefill_tok_s": [1000.0, 1000.0]}
    for row in results["decode"]:
        assert row["samples"] == {"decode_tok_s": [1000.0, 1000.0]}


def test_an_engine_that_fails_is_a_line_and_the_others_have_their_rows(
    run_with_fakes: Run, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sdk.bench.models.ModelFiles.unpacked", lambda self: "unpacked")
    options = "--suite prefill,decode,startup --streams 1,2,4 --output-len 5"
    peers = "vllm=py,mistral.rs=py,llama.cpp=py"
    results, _ = run_with_fakes(*options.split(), "--against", peers, code=1)
    rows = [(row["requests"], row["engine"]) for row in results["decode"]]
    assert rows == [
        *((1, name) for name in ("embedlm", "mistral.rs", "llama.cpp")),
        *((count, name) for count in (2, 4) for name in ("embedlm", "llama.cpp")),
    ]
    assert all(len(row["samples"]["decode_tok_s"]) == 2 for row in results["decode"])
    names = ["embedlm", "mistral.rs", "llama.cpp"]
    assert [row["engine"] for row in results["startup"]] == names
    lines = [line for line in capsys.readouterr().out.splitlines() if "Not measured" in line]
    assert lines == [
        "Not measured: vllm: the worker failed: ValueError: cannot read it",
        "Not measured: mistral.rs: the worker ended without a reply, exit code 3 (requests 2)",
        "Not measured: vllm: the worker failed: ValueError: cannot read it (start-up)",
    ]


def test_a_failure_of_our_own_is_no_peers(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "raise SystemExit(3)")
    engines = Engines()
    with pytest.raises(SdkError, match=r"^embedlm: .* exit code 3") as caught, engines.sparing():
        engines.open(opening("embedlm"), python)
    assert not isinstance(caught.value, PeerError)


def test_requests_that_do_not_decode_together_have_no_speed(tmp_path: Path) -> None:
    code = FAKE.replace("8 * n", "0")
    with Engines() as engines:
        peer = engines.open(opening(), fake_python(tmp_path, code))
        with pytest.raises(PeerError, match="no time at which all requests decoded: --output-len"):
            suites.decode_rate(peer, Load(((1,), (2,)), 2))


def test_a_prefix_hit_computes_only_what_is_new(run_with_fakes: Run) -> None:
    results, log = run_with_fakes("--suite", "prefix", "--against", "llama.cpp=py,transformers=py")
    assert [line for line in log if "open" in line] == [
        "embedlm open 1 1120 True",
        "llama.cpp open 1 1120 True",
    ]
    for row in results["prefix"]:
        assert row["median"] == {"cold_ms": 1100.0, "hit_ms": 100.0, "gain": 11.0}


def test_every_start_up_is_a_fresh_process_and_the_first_does_not_count(
    run_with_fakes: Run,
) -> None:
    results, log = run_with_fakes("--suite", "startup", "--against", "llama.cpp=py")
    opened = [line.split()[0] for line in log if "open" in line]
    assert opened == ["llama.cpp", "embedlm", "embedlm", "llama.cpp", "llama.cpp", "embedlm"]
    for row in results["startup"]:
        assert row["samples"]["open_s"] == [0.516, 0.516]
        assert all(seconds > 0.016 for seconds in row["samples"]["process_s"])


def test_llama_cpp_drafts_in_turn_with_plain_decoding(run_with_fakes: Run) -> None:
    options = "--suite speculative --streams 1 --output-len 4 --against llama.cpp=py"
    results, log = run_with_fakes(*options.split())
    theirs = [row for row in results["speculative"] if row["engine"] == "llama.cpp"]
    assert [row["work"] for row in theirs] == ["quote", "edit", "json", "prose"]
    assert all(
        row["median"] == {"plain_tok_s": 100.0, "draft_tok_s": 200.0, "gain": 2.0} for row in theirs
    )
    ways = ["one drafts", "one plain"]  # one round warms up
    assert [line.split(" ", 1)[1] for line in log[1:7]] == ways[::-1] + ways + ways[::-1]


def test_a_schema_that_llama_cpp_cannot_compile_has_no_numbers(
    run_with_fakes: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: structured.STRUCTURES[name] for name in ("report", "any json", "regex")}
    monkeypatch.setattr(structured, "STRUCTURES", known)
    options = "--suite structured --streams 1 --against llama.cpp=py"
    results, log = run_with_fakes(*options.split())
    theirs = [row for row in results["structured"] if row["engine"] == "llama.cpp"]
    assert [(row["structure"], row["median"]) for row in theirs] == [
        ("report", {}),
        ("any json", {"free_tok_s": 100.0, "structured_tok_s": 50.0, "share": 0.5}),
    ]
    assert sum("open" in line for line in log) == 2


def test_the_context_suite_opens_one_stream_of_the_longest(run_with_fakes: Run) -> None:
    options = "--suite context --context 64,200 --output-len 3 --kv-dtype float32"
    results, log = run_with_fakes(*options.split())
    assert log[0] == "embedlm open 1 203 False"
    assert [(row["context"], row["kv"]) for row in results["context"]] == [
        (64, "float32"),
        (200, "float32"),
    ]
