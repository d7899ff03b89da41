"""``embedlm bench serve`` on the command line: options, reports, servers that it starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from argparse import Namespace
from asyncio import StreamWriter
from pathlib import Path

import pytest

from sdk.api.errors import RequestError, SdkError
from sdk.bench.engines import Peer
from sdk.bench.serve import cases_of, results, servers
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.runs import Case
from sdk.bench.serve.servers import Launch, ServerProcess, command, free_port
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.summary import Summary
from sdk.bench.serve.sweep import sweep
from sdk.cli import build_parser, main
from sdk.testing import tiny_model
from tests.bench.serve.fake_server import Asked, FakeServer, running

Captured = pytest.CaptureFixture[str]


def parse(*argv: str) -> Namespace:
    return build_parser("bench serve").parse_args(["bench serve", *argv])


def test_the_two_words_are_one_command_wherever_options_stand(capsys: Captured) -> None:
    for argv in (["bench", "serve", "--help"], ["-v", "bench", "serve", "-h"]):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0
        out = capsys.readouterr().out
        assert "usage: embedlm bench serve" in out and "--slo" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--qps", "0"], "expected a positive number, found '0'"),
        (["--qps", "1,x"], "expected a positive number, found 'x'"),
        (["--concurrency", "0"], "expected numbers in 1..4096"),
        (["--slo", "x=1"], "such as ttft=0.5,itl=50ms"),
        (["--input-len", "many"], "expected N, LOW-HIGH"),
        (["--goodput", "2"], "expected a share"),
        (["--body", "[1]"], "expected a JSON object"),
        (["--on-off", "3"], "expected ON,OFF in seconds"),
        (["--turns", "0"], "expected an integer in 1..1000"),
        (["--burstiness", "-1"], "expected a positive number"),
        (["--against", "exllama"], "each of llama.cpp"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected(
    argv: list[str], said: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*argv)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--sweep"], "--sweep needs an --slo"),
        (["--sweep", "--slo", "ttft=1", "--qps", "3"], "--sweep chooses the rates"),
        (["--trace", "t", "--qps", "3"], "--trace has its own times"),
        (["--trace", "t", "--seconds", "3"], "--seconds: a trace has its own times"),
        (["--seconds", "3", "--num-requests", "3"], "give one of them"),
        (["--burstiness", "2"], "they need --qps"),
        (["--on-off", "1,1"], "they need --qps"),
        (["--url", "http://x", "--memory", "1GiB"], "leave out options of engines"),
        (["--url", "http://x", "--http"], "leave out options of engines"),
        (["--url", "http://x", "--header", "nonsense"], "--header: expected 'Name: value'"),
        (["--url", "x"], "--url: expected http://HOST:PORT"),
        (["--header", "A: b"], "--header and --body need --url"),
        (["m.gguf", "--http", "--kv-cache-dtype", "int8"], "start servers for comparisons"),
        (["--think", "-1"], "--think: expected seconds"),
        (["--trace", "t", "--turns", "3"], "leave out --turns"),
        (["--trace", "/nowhere/t.jsonl"], "No such file"),
        (["--options", "/nowhere/t.json", "m.gguf"], "No such file"),
    ],
)
def test_options_that_do_not_fit_together_are_one_line(
    argv: list[str], said: str, golden: Path, capsys: Captured
) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    argv = [model if word == "m.gguf" else word for word in argv]
    assert main(["bench", "serve", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_options_become_cases() -> None:
    assert cases_of(parse()) == [Case(concurrency=8)]
    assert cases_of(parse("--concurrency", "1,4")) == [Case(concurrency=1), Case(concurrency=4)]
    found = cases_of(parse("--qps", "2,3", "--burstiness", "0.5", "--concurrency", "9"))
    assert found == [Case(Arrivals(2.0, 0.5), 9), Case(Arrivals(3.0, 0.5), 9)]


def test_the_command_in_a_report_repeats_the_run_without_paths_and_keys() -> None:
    args = parse("/models/m.gguf", "--qps", "2,2.5", "--slo", "ttft=0.5,itl=50ms", "--json", "x",
                 "--input-len", "exp:50", "--chat", "--seed", "3", "--trace", "/a/t.jsonl",
                 "--header", "Authorization: secret", "--against", "llama.cpp=/py")  # fmt: skip
    found = results.command(args)
    assert found.startswith("embedlm bench serve m.gguf ")
    for piece in ("--qps 2,2.5", "--slo ttft=0.5,itl=0.05", "--input-len exp:50", "--chat",
                  "--seed 3", "--trace t.jsonl", "--against llama.cpp"):  # fmt: skip
        assert piece in found
    assert "secret" not in found and "/a/" not in found and "--json" not in found


def test_a_run_against_a_server_writes_all_its_reports(tmp_path: Path, capsys: Captured) -> None:
    names = {name: tmp_path / name for name in ("r.json", "r.md", "records.jsonl", "plots")}
    with running(FakeServer()) as server:
        argv = ["bench", "serve", "--url", server.url, "--qps", "50,100", "--num-requests", "6"]
        argv += ["--input-len", "5", "--output-len", "4", "--slo", "ttft=60"]
        argv += ["--json", str(names["r.json"]), "--markdown", str(names["r.md"])]
        argv += ["--records", str(names["records.jsonl"]), "--plots", str(names["plots"])]
        assert main(argv) == 0
    out = capsys.readouterr().out
    assert "50 per second" in out and "good %" in out
    data = json.loads(names["r.json"].read_text())
    assert [run["rate"] for run in data["runs"]] == [50, 100]
    assert all(run["completed"] == 6 and run["good_share"] == 1 for run in data["runs"])
    assert data["slo"] == "ttft=60" and "load_average" in data["machine"]
    assert "| engine | load |" in names["r.md"].read_text()
    records = [json.loads(line) for line in names["records.jsonl"].read_text().splitlines()]
    assert len(records) == 12 and {one["run"] for one in records} == {0, 1}
    assert all(one["output_tokens"] == 4 and len(one["gaps"]) == 3 for one in records)
    assert sorted(path.name for path in names["plots"].iterdir()) == ["latencies.png", "rates.png"]


def test_one_run_shows_everything_about_it(capsys: Captured) -> None:
    with running(FakeServer()) as server:
        argv = ["bench", "serve", "--url", server.url, "--concurrency", "2", "--num-requests", "4"]
        assert main([*argv, "--output-len", "3", "--slo", "e2e=60"]) == 0
    out = capsys.readouterr().out
    assert "4 completed, 0 failed" in out and "goodput     100.0 %" in out
    for name in ("time to first token", "inter-token latency", "end-to-end latency", "sent late"):
        assert name in out


def test_a_server_that_only_fails_is_one_line(capsys: Captured) -> None:
    async def broken(server: FakeServer, asked: Asked, writer: StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops")

    with running(FakeServer(broken)) as server:
        argv = ["bench", "serve", "--url", server.url, "--num-requests", "3"]
        assert main(argv) == 2
        assert "a first request failed: HTTP 500: oops" in capsys.readouterr().err
        assert main([*argv, "--warm-up", "0"]) == 2
        assert "all requests failed: HTTP 500: oops" in capsys.readouterr().err


def test_an_engine_in_this_process_is_measured(tmp_path: Path, capsys: Captured) -> None:
    model = tiny_model(tmp_path)
    options = tmp_path / "options.json"
    options.write_text('{"max_num_seqs": 2}')
    argv = ["bench", "serve", str(model), "--concurrency", "3", "--num-requests", "4"]
    argv += ["--input-len", "4", "--output-len", "3", "--json", "-", "--options", str(options)]
    assert main(argv) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["completed"], run["output_tokens"]) == (4, 12)
    assert run["queue_s"]["count"] == 4
    options.write_text('{"max_num_sequences": 2}')
    assert main(argv) == 2
    assert "did you mean 'max_num_seqs'?" in capsys.readouterr().err


def summary(good: int, requests: int = 100) -> Summary:
    return Summary(requests, 1.0, 0, 0, {}, good=good)


@pytest.mark.parametrize("limit", [0.3, 1.0, 3.7, 100.0])
def test_a_sweep_finds_the_highest_rate_within_its_resolution(limit: float) -> None:
    offered: list[float] = []

    def offer(rate: float) -> Summary:
        offered.append(rate)
        return summary(100 if rate <= limit else 50)

    found, probes = sweep(offer, 0.99, resolution=1.05)
    assert limit / 1.05 <= found <= limit
    assert [probe.rate for probe in probes] == offered
    assert len(offered) < 30


def test_a_rate_fails_only_twice_in_a_row() -> None:
    outcomes = {1.0: [50, 100], 2.0: [98, 98]}
    found, probes = sweep(
        lambda rate: summary(outcomes[rate].pop(0) if rate in outcomes else 0), 0.99, resolution=2.0
    )
    assert found == 1.0
    assert [(probe.rate, probe.passed) for probe in probes] == [
        (1.0, False),
        (1.0, True),
        (2.0, False),
        (2.0, False),
    ]


def test_a_target_that_no_rate_suits_has_rate_zero() -> None:
    found, probes = sweep(lambda rate: summary(0), 0.99)
    assert found == 0.0 and probes[-1].rate == 1 / 16


def test_a_sweep_of_a_server_reports_its_rate(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FIRST_RATE", 200.0)
    with running(FakeServer()) as server:
        argv = ["bench", "serve", "--url", server.url, "--sweep", "--slo", "ttft=0.000001"]
        argv += ["--num-requests", "1", "--json", str(tmp_path / "s.json"), "--warm-up", "0"]
        assert main(argv) == 0
    assert (
        "there is no rate at which 99 % of the requests keep ttft=1e-06" in capsys.readouterr().out
    )
    (found,) = json.loads((tmp_path / "s.json").read_text())["sweeps"].values()
    assert found["rate"] == 0
    assert [probe["rate"] for probe in found["probes"][::2]] == [200, 100, 50, 25, 12.5]


def test_servers_are_started_with_their_own_commands() -> None:
    launch = Launch("m.gguf", 2, 32, 2048)
    ours = command(Peer("embedlm", "py"), launch, 80)
    assert ours[:5] == ["py", "-m", "sdk", "serve", "m.gguf"] and "80" in ours
    llama = command(Peer("llama.cpp", "py"), launch, 80)
    assert llama[2] == "llama_cpp.server" and llama[llama.index("--n_ctx") + 1] == "2048"
    vllm = command(Peer("vllm-bf16", "py"), launch, 80)
    assert vllm[vllm.index("--dtype") + 1] == "bfloat16"
    assert "float32" in command(Peer("vllm", "py"), launch, 80)


LISTENS = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_started_server_is_awaited_and_ended() -> None:
    port = free_port()
    argv = [sys.executable, "-c", LISTENS, str(port)]
    with ServerProcess("other", argv, dict(os.environ), port) as process:
        assert servers.server_at("other", process.address, None, {}, {}).model == "m"
    assert process._process.poll() is not None


def test_a_server_that_ends_or_never_answers_shows_its_output() -> None:
    argv = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(SdkError, match="other: the server ended with code 3: no such model"):
        ServerProcess("other", argv, dict(os.environ), free_port())
    argv = [sys.executable, "-c", "print('hm', flush=True); import time; time.sleep(60)"]
    with pytest.raises(SdkError, match="other: the server does not answer"):
        ServerProcess("other", argv, dict(os.environ), free_port(), start_s=0.5)
    with pytest.raises(SdkError, match=r"ended with code 127: .*No such file"):
        ServerProcess("other", ["/nowhere/python"], dict(os.environ), free_port())


def test_a_server_ends_with_a_command_that_is_killed() -> None:
    port = free_port()
    code = (
        "import os, sys\n"
        "from sdk.bench.serve.servers import ServerProcess\n"
        f"argv = [sys.executable, '-c', {LISTENS!r}, '{port}']\n"
        f"ServerProcess('other', argv, dict(os.environ), {port})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=100).returncode == -9
    for _ in range(1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.02)
    raise AssertionError("the server still listens")


def test_lengths_and_slos_show_themselves_as_they_were_written() -> None:
    assert str(parse_lengths("lognormal:9:0.5")) == "lognormal:9:0.5"
    assert str(Slo(ttft=0.25)) == "ttft=0.25"
    assert issubclass(RequestError, SdkError)
