#!/usr/bin/env python3
"""Everything that needs a GPU, from a bare checkout: nothing is installed, nothing is fetched.

    .ci/gpu.py [PART ...]      all parts by default; A, B and C stand for the parts of a call

    A  tests     kernels and engines against references, in a process for each core
       first     the first rows of the benchmark
    B  bench     embedlm bench gpu: the table for docs/bench/benchmarks.md, with predictions
       ncu       Nsight Compute on four kernels, where it is installed
    C  sanitize  compute-sanitizer on the tests that failed, where it is installed
       tune      embedlm tune: tuned/<card>.json for kernels/tuned

``PARTS`` in the environment names them too (``make gpu PARTS=A``). ``GPU_SECONDS`` is what all of
them may take together (from 60; by default what their seconds below add up to, 780 for all). A part
gets its share of what is left; it ends in time, and what it has found by then is in ``OUT``
(``build/gpu``), at most eight files; logs are in ``GPU_LOGS`` (``build/gpu-logs``). A part that
fails, hangs or loses the card does not keep the next from running. ``ROWS`` names rows for
``bench``, ``TESTS`` tests for ``sanitize``. ``PYTHON`` is the interpreter that has torch, triton,
safetensors and numpy, for the tests pytest, and for peers transformers; this script itself needs
nothing. Exit status: 0, 1 (something failed), 2 (not asked as above), 130 (Ctrl-C).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Part -> its seconds; with more or less time they are its share.
SECONDS = {"tests": 195, "first": 95, "bench": 280, "ncu": 50, "sanitize": 100, "tune": 60}
CALLS = {"A": ("tests", "first"), "B": ("bench", "ncu"), "C": ("sanitize", "tune")}
#: The rows of the part ``first``.
FIRST_ROWS = "w4,attention"
#: The least budget, and the least seconds with which a part, or another try of one, begins.
LEAST_BUDGET, LEAST_PART, LEAST_TRY = 60, 15, 40
#: Processes of tests at most; each has a context on the card (0.5 GiB).
MOST_PROCESSES = 15
#: A test process stops by itself this many seconds before it would be ended, and a benchmark or a
#: search these: a test, a row or an entry may be under way, and Python starts and stops.
TESTS_STOP, BENCH_STOP, TUNE_STOP = 25, 18, 25
#: Tests that the sanitizer looks at: under it a test takes 10 to 50 times as long.
MOST_SANITIZED = 3
#: Bytes of one process's output in a report, so that fifteen stay below 16 MiB.
MOST_BYTES = 900_000
#: Modules without which nothing runs.
NEEDED = ("torch", "triton", "safetensors", "numpy")
MODULES = (*NEEDED, "transformers", "pytest")
#: What the interpreter has, without importing torch, which takes ten seconds.
FACTS = f"""
import hashlib, importlib.metadata, importlib.util, pathlib, platform
names = {MODULES!r}
specs = {{name: importlib.util.find_spec(name) for name in names}}
print("missing:", *(name for name in names if specs[name] is None))
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
print("python", platform.python_version(), *(f"{{n}} {{version(n)}}" for n in names if specs[n]))
if specs["triton"] is not None and specs["triton"].origin:
    file = pathlib.Path(specs["triton"].origin).parent / "_C" / "libtriton.so"
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "not there"
    print("libtriton.so", found)
"""
#: Messages after which every later call in the same process fails.
LOST = re.compile("illegal memory access|unspecified launch failure|device-side assert|misaligned")
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")


class Refused(Exception):
    """Asked for something that there is not: one line, exit status 2."""


@dataclass(frozen=True)
class Command:
    """What to run; its output goes to the file ``log``. ``more``: environment variables."""

    argv: Sequence[str]
    log: Path
    more: Mapping[str, str] = field(default_factory=dict)


class Processes:
    """The real world: processes, a clock and installed tools."""

    #: Every process started here has this variable, so that none is left behind.
    MARK = "EMBEDLM_GPU_RUN"

    def __init__(self, *, stopping: float = 5.0, killing: float = 1.0) -> None:
        self._stopping, self._killing = stopping, killing

    def clock(self) -> float:
        return time.monotonic()

    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def tool(self, name: str) -> str | None:
        """The path of a tool of CUDA's toolkit."""
        found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        others = sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"))
        return found or (str(others[-1]) if others else None)

    def run(
        self, commands: Sequence[Command], seconds: float, tick: Callable[[], None]
    ) -> list[int | None]:
        """The exit codes of ``commands``, which run at the same time; None: ended, being late.

        Ends within ``seconds``, whatever they do. Those that are late get what Ctrl-C sends, so
        that they can write what they have, then SIGKILL. A process that even that does not end (it
        waits for a card that was lost) is left alone. ``tick`` is called every few seconds.
        """
        end = self.clock() + seconds - self._stopping - self._killing
        mark = f"{os.getpid()}.{time.monotonic_ns()}"
        started: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                with command.log.open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            command.argv,
                            cwd=ROOT,
                            env={**os.environ, **command.more, self.MARK: mark},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                            # `nohup ... &` leaves SIGINT ignored, which ends what is late
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                        )
                    )
            self._wait(started, end, tick)
            codes = [process.poll() for process in started]
        finally:
            self._end(started, mark)
        return codes

    def _wait(
        self, started: Sequence[subprocess.Popen[bytes]], end: float, tick: Callable[[], None]
    ) -> None:
        at = self.clock() + 5
        while any(process.poll() is None for process in started) and self.clock() < end:
            time.sleep(0.05)
            if self.clock() > at:
                with suppress(OSError):  # the part's last report tells it
                    tick()
                at = self.clock() + 5

    def _end(self, started: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
        for process in started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
        self._wait(started, self.clock() + self._stopping, lambda: None)
        for pid in marked(f"{self.MARK}={mark}".encode()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._wait(started, self.clock() + self._killing, lambda: None)


def marked(setting: bytes) -> list[int]:
    """The processes with this in their environment: also those whose parents have ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if setting in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


class Kit:
    """One call: some parts, within ``seconds``; ``machine`` is :class:`Processes`, or a test's."""

    def __init__(
        self,
        parts: Sequence[str],
        seconds: float,
        machine: Any,
        *,
        python: str,
        out: Path,
        build: Path,
        rows: str = "",
        tests: Sequence[str] = (),
    ) -> None:
        self.failed: list[str] = []
        self._parts, self._machine, self._python = parts, machine, python
        self._end = machine.clock() + seconds
        self._out, self._build = out, build
        self._rows, self._tests = rows, tests
        self._facts, self._missing = "", ()

    def run(self) -> int:
        """Run all parts. :raises Refused: the interpreter cannot run any."""
        for folder in (self._out, self._build):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Refused(f"expected a folder for results, found {error}") from None
        self._look()
        for number, part in enumerate(self._parts):
            left = self._end - self._machine.clock()
            share = SECONDS[part] / sum(SECONDS[name] for name in self._parts[number:])
            if left * share < LEAST_PART:
                self._fail(f"{part} (no time: {left:.0f} s are left)")
                continue
            say(f"== {part}: {left * share:.0f} of {left:.0f} s")
            try:
                getattr(self, f"_run_{part}")(left * share)
            except Exception as error:  # a full disk, a tool that cannot be started
                self._fail(f"{part} ({type(error).__name__}: {error})")
        for path in self._out.rglob("*.part"):  # of processes that were ended while they wrote
            path.unlink()
        for line in self.failed:
            say(f"== failed: {line}")
        return 1 if self.failed else 0

    def _fail(self, what: str) -> None:
        self.failed.append(what)

    def _ended(self, name: str, code: int | None, seconds: float) -> bool:
        if code is None:
            self._fail(f"{name} (not done after {seconds:.0f} s)")
        elif code:
            self._fail(f"{name} (exit code {code})")
        return code == 0

    def _log(self, name: str) -> Path:
        return self._build / f"{name}.log"

    def _look(self) -> None:
        """What is installed; then a cache of compiled kernels, if one came along."""
        log = self._log("facts")
        try:
            code = self._quickly([self._python, "-c", FACTS], log)
        except OSError as error:
            raise Refused(
                f"PYTHON: expected an interpreter, found {self._python}: {error}"
            ) from None
        text = read(log)
        first, _, rest = text.partition("\n")
        if code or not first.startswith("missing:"):
            last = (text.strip().splitlines() or ["no message"])[-1]
            raise Refused(f"PYTHON: expected an interpreter, found {self._python}: {last[:200]}")
        self._missing = tuple(first.split()[1:])
        lacking = [name for name in NEEDED if name in self._missing]
        if lacking:
            raise Refused(
                f"{self._python}: expected {', '.join(NEEDED)}, found no {', '.join(lacking)}; "
                "name an interpreter that has them: make gpu PYTHON=..."
            )
        self._facts = rest + self._unpacked()
        say(self._facts.rstrip())

    def _quickly(self, argv: Sequence[str], log: Path) -> int | None:
        left = self._end - self._machine.clock()
        (code,) = self._machine.run([Command(argv, log)], min(30, left), idle)
        found: int | None = code
        return found

    def _unpacked(self) -> str:
        program, log = ROOT / "tests" / "gpu" / "aot" / "cache.py", self._log("cache")
        if not program.is_file():
            return "no cache of compiled kernels: everything is compiled here\n"
        argv = [self._python, str(program), "unpack", "--out", os.environ["TRITON_CACHE_DIR"]]
        code = self._quickly(argv, log)
        last = (read(log).strip().splitlines() or ["it said nothing"])[-1]
        return last + "\n" if code == 0 else f"no cache of compiled kernels: {last}\n"

    def _report(self, name: str, *logs: str, head: str = "") -> None:
        """One file for a part: what the machine is, then each process's output."""
        texts = [f"{self._facts}{head}"]
        texts += [f"\n==== {log}\n{read(self._log(log))}" for log in logs]
        write(self._out / f"{name}.txt", "".join(texts))

    # -- the parts ---------------------------------------------------------------------------------

    def _run_tests(self, seconds: float) -> None:
        """Compiling takes most of the time: a process for each core runs its share of the tests
        (tests/card/conftest.py) and stops by itself when the time is over."""
        if "pytest" in self._missing:
            self._fail("tests (no pytest)")
            return
        count = max(1, min(self._machine.cores() - 1, MOST_PROCESSES))
        argv = [self._python, "-m", "pytest", "-v", "-m", "gpu", "--durations=3"]
        argv += ["-o", "console_output_style=classic", "-o", "faulthandler_timeout=60"]
        argv += ["-p", "no:cacheprovider", *test_files()]
        names = [f"tests-{i}" for i in range(count)]
        commands = []
        for i, name in enumerate(names):
            more = {"CARD_TESTS_SHARE": f"{i}/{count}"}
            more["CARD_TESTS_SECONDS"] = f"{max(1, seconds - TESTS_STOP):.0f}"
            commands.append(Command(argv, self._log(name), more))

        def report() -> None:
            tests = [Outcome.of(read(self._log(name))) for name in names]
            lines = [
                f"{n}: {len(t.passed)} passed, {t.last}" for n, t in zip(names, tests, strict=True)
            ]
            bad = [line for t in tests for line in (*t.failed, *t.open)]
            self._report("tests", *names, head="\n".join([*lines, "", *bad, ""]))

        codes = self._machine.run(commands, seconds, report)
        report()
        bad = []
        for name, code in zip(names, codes, strict=True):
            found = Outcome.of(read(self._log(name)))
            if not self._ended(name, code, seconds) and found.lost:
                say(f"-- {name}: the card was lost; what failed after the first may follow from it")
            bad += [*found.failed, *(found.open if code not in (0, 1) else ())]
            say(f"-- {name}: {len(found.passed)} passed, {found.last}")
        for line in bad[:30]:
            say(f"FAILED {line[:200]}")
        write(self._build / "failed-tests.txt", "".join(f"{line}\n" for line in bad))

    def _run_first(self, seconds: float) -> None:
        self._measure("first", seconds, FIRST_ROWS)

    def _run_bench(self, seconds: float) -> None:
        self._measure("bench", seconds, self._rows)

    def _measure(self, name: str, seconds: float, rows: str) -> None:
        argv = [self._python, "-m", "sdk", "bench", "gpu", "--seconds"]
        argv += [f"{max(5, seconds - BENCH_STOP):.0f}", *(["--rows", rows] if rows else [])]
        argv += ["--json", str(self._out / f"{name}.json")]
        argv += ["--markdown", str(self._out / f"{name}.md")]
        argv += ["--log", str(self._log(f"{name}-rows"))]
        self._one(name, argv, seconds, f"{name}-rows")

    def _one(self, name: str, argv: Sequence[str], seconds: float, *more: str) -> bool:
        """One process whose output, and the logs ``more``, make the part's report."""
        for log in more:
            self._log(log).write_bytes(b"")

        def report() -> None:
            self._report(name, name, *more)

        (code,) = self._machine.run([Command(argv, self._log(name))], seconds, report)
        report()
        say("\n".join(read(self._log(name)).splitlines()[-80:]))
        return self._ended(name, code, seconds)

    def _run_ncu(self, seconds: float) -> None:
        tool = self._machine.tool("ncu")
        if tool is None:
            say("ncu is not installed here")
            return
        argv = [tool, "--clock-control", "none", "--target-processes", "all"]
        argv += ["--profile-from-start", "off", "--print-details", "all"]
        argv += [word for section in SECTIONS for word in ("--section", section)]
        self._one("ncu", [*argv, self._python, "-m", "sdk.bench.gpu.profiled"], seconds)

    def _run_sanitize(self, seconds: float) -> None:
        """What failed in the tests of this call, or of an earlier one in this checkout."""
        asked = self._tests or read(self._build / "failed-tests.txt").splitlines()
        if not asked:
            say("no test failed")
            return
        tool = self._machine.tool("compute-sanitizer")
        if tool is None:
            say("compute-sanitizer is not installed here")
            return
        end, names = self._machine.clock() + seconds, ("memcheck", "racecheck")
        for number, name in enumerate(names):
            self._log(name).write_bytes(b"")
            left = (end - self._machine.clock()) / (len(names) - number)
            argv = [tool, "--tool", name, "--target-processes", "all", "--print-limit", "20"]
            argv += [self._python, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
            # torch's cache of memory would hide accesses beyond a tensor's end, and kernels that
            # travelled have no tables of source lines: these are compiled here
            more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            more |= {"TRITON_CACHE_DIR": str(self._build / "sanitized")}
            command = Command([*argv, *asked[:MOST_SANITIZED]], self._log(name), more)
            (code,) = self._machine.run([command], left, idle)
            self._report("sanitize", *names[: number + 1])
            say("\n".join(read(self._log(name)).splitlines()[-20:]))
            self._ended(name, code, left)

    def _run_tune(self, seconds: float) -> None:
        """The table grows in ``build``, where a later call goes on with it. A kernel that makes the
        card unusable ends the process: the next one leaves that entry out."""
        end, names, folder = self._machine.clock() + seconds, [], self._build / "tuned"

        def report() -> None:
            self._report("tune", *names)
            for table in folder.glob("*.json"):
                write(self._out / "tuned" / table.name, table.read_text())

        for number in range(1, 5):
            left = end - self._machine.clock()
            if left < (LEAST_PART if number == 1 else LEAST_TRY):
                break
            names.append(f"tune-{number}")
            argv = [self._python, "-m", "sdk", "tune", "--out", str(folder)]
            argv += ["--seconds", f"{max(1, left - TUNE_STOP):.0f}"]
            (code,) = self._machine.run([Command(argv, self._log(names[-1]))], left, report)
            report()
            say("\n".join(read(self._log(names[-1])).splitlines()[-3:]))
            if self._ended(names[-1], code, left):
                break


@dataclass(frozen=True)
class Outcome:
    """What a process's output says of its tests."""

    passed: list[str]
    failed: list[str]
    #: The one that had begun and not ended, if any.
    open: list[str]
    last: str
    lost: bool

    @classmethod
    def of(cls, text: str) -> Outcome:
        began: dict[str, str] = {}
        for line in text.splitlines():
            found = re.match(
                r"(tests/card/\S+?::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)?\s*$", line
            )
            if found:
                began[found[1]] = found[2] or began.get(found[1], "")
        lines = text.strip().splitlines()
        return cls(
            [name for name, how in began.items() if how == "PASSED"],
            [name for name, how in began.items() if how in ("FAILED", "ERROR")],
            [name for name, how in began.items() if not how],
            lines[-1].strip(" =")[:200] if lines else "it printed nothing",
            LOST.search(text) is not None,
        )


def test_files() -> list[str]:
    """Every operator before whole engines, and those before everything else."""
    first = ("test_card_kernels.py", "test_card_engine.py")
    names = sorted(path.name for path in (ROOT / "tests" / "card").glob("test_*.py"))
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    return [f"tests/card/{name}" for name in names]


def read(path: Path) -> str:
    """A text, of a long one the beginning and the end; empty if there is none."""
    if not path.is_file():
        return ""
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        half = MOST_BYTES // 2
        data = data[:half] + b"\n[...]\n" + data[-half:]
    return data.decode(errors="replace")


def write(path: Path, text: str) -> None:
    """In one step, so that a call that is killed leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def say(text: str) -> None:
    print(text, flush=True)


def idle() -> None:
    """Nothing to write meanwhile."""


def known_rows() -> list[str]:
    """The names of the benchmark's rows; their module needs only the standard library."""
    path = ROOT / "sdk" / "bench" / "gpu" / "rows.py"
    spec = importlib.util.spec_from_file_location("embedlm_bench_gpu_rows", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.BY_NAME)


def chosen_parts(names: Iterable[str]) -> list[str]:
    """Parts in their order. :raises Refused: a name is neither a part nor a call."""
    asked: set[str] = set()
    for name in names:
        if name not in SECONDS and name not in CALLS:
            raise Refused(f"expected parts of {', '.join((*CALLS, *SECONDS))}; found {name!r}")
        asked.update(CALLS.get(name, (name,)))
    return [part for part in SECONDS if part in asked or not asked]


def chosen_seconds(text: str, parts: Sequence[str]) -> float:
    """:raises Refused: it is not a number from 60 on."""
    if not text:
        return max(LEAST_BUDGET, sum(SECONDS[part] for part in parts))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_BUDGET <= seconds < math.inf:
        raise Refused(f"GPU_SECONDS: expected seconds from {LEAST_BUDGET} on, found {text!r}")
    return seconds


def chosen_rows(text: str, parts: Sequence[str]) -> str:
    """:raises Refused: the row does not exist, or nothing measures it."""
    if text and "bench" not in parts:
        raise Refused(f"ROWS: expected the part bench, found {', '.join(parts)}")
    known = known_rows() if text else []
    for name in text.split(",") if text else ():
        if name not in known:
            raise Refused(f"ROWS: expected names of {', '.join(known)}; found {name!r}")
    return text


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    given = os.environ.get
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    os.environ["PYTHONUNBUFFERED"] = "1"
    signal.signal(signal.SIGTERM, stop)
    try:
        parts = chosen_parts(arguments or (given("PARTS") or "").split())
        seconds = chosen_seconds((given("GPU_SECONDS") or "").strip(), parts)
        rows = chosen_rows((given("ROWS") or "").strip(), parts)
        tests = (given("TESTS") or "").split()
        if tests and "sanitize" not in parts:
            raise Refused(f"TESTS: expected the part sanitize, found {', '.join(parts)}")
        if "bench" in parts and "first" in parts:
            parts.remove("first")  # the table begins with the same rows
        kit = Kit(
            parts,
            seconds,
            Processes(),
            python=given("PYTHON") or sys.executable,
            out=Path(given("OUT") or ROOT / "build" / "gpu").absolute(),
            build=Path(os.environ.get("GPU_LOGS") or ROOT / "build" / "gpu-logs"),
            rows=rows,
            tests=tests,
        )
        return kit.run()
    except Refused as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu.py: interrupted; what there is by now stays", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
