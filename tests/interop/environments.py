"""The virtual environments of tests/interop: one for each set of libraries that can live together.

``python tests/interop/environments.py build/interop`` makes what is missing. Every step that is
done is noted, so a stopped run goes on where it was, and an environment is made anew when its
steps have changed. ``--only NAME`` makes one, ``--pip-flags`` go into every pip call.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: The release of torch that has a CPU build; the constraint keeps others out.
CONSTRAINTS = ROOT / ".ci" / "constraints-cpu.txt"
LLAMA_CPP = "llama-cpp-python==0.3.36"
OLLAMA = "ollama==0.6.3"


class Sources(NamedTuple):
    """Files of a source distribution that the tests read: those with ``part`` in their names."""

    environment: str
    package: str
    part: str


SOURCES = {
    # llama.cpp's vocabularies with their vectors
    "vocabularies": Sources("llama-cpp", LLAMA_CPP, "/vendor/llama.cpp/models/ggml-vocab-"),
    "ollama-examples": Sources("clients", OLLAMA, "/examples/"),
}


@dataclass(frozen=True)
class Environment:
    """``steps``: the arguments of one ``pip install`` each; torch and numpy come before them."""

    steps: tuple[str, ...]
    #: The first Python that a package of it does not have.
    before: tuple[int, int] = (4, 0)
    torch: bool = True


ENVIRONMENTS = {
    # this package with its extras: auto-gptq and autoawq beside transformers 5
    "extras": Environment((f"-C wheel.cmake=false -e {ROOT}[gptq,awq]",), before=(3, 12)),
    "gptqmodel": Environment(
        (
            "transformers==5.23.0 accelerate datasets pypcre logbar tokenicer device-smi "
            "threadpoolctl dill torchao==0.18.0 ninja pillow requests sentencepiece protobuf "
            "setuptools wheel",
            "--no-deps defuser optimum==2.3.0",
            "--no-deps --no-build-isolation gptqmodel==7.7.0",
        )
    ),
    "compressed-tensors": Environment(("llmcompressor==0.14.0.1 sentencepiece protobuf",)),
    "llama-cpp": Environment((LLAMA_CPP,), torch=False),
    # clients of the APIs of OpenAI, Ollama, Anthropic; instructor 1.17.0 wants an older openai than
    # the others
    "clients": Environment(
        (f"openai==3.54.0 litellm langchain-openai {OLLAMA} anthropic==2.14.0",), torch=False
    ),
    "instructor": Environment(
        (f"-C wheel.cmake=false {ROOT}[server,structured]", "instructor==1.17.0 pytest"),
        torch=False,
    ),
    "langchain": Environment(
        (
            f"-C wheel.cmake=false {ROOT}[structured]",
            "langchain-core==1.8.3 langchain-tests==1.1.9",
        ),
        torch=False,
    ),
    # what takes an OpenAI client
    "frameworks": Environment(
        (
            f"-C wheel.cmake=false {ROOT}[server,structured]",
            "openai==2.54.0 pydantic-ai-slim==2.68.0 llama-index-llms-openai-like==0.8.1 "
            "haystack-ai==3.4.1 pytest",
        ),
        torch=False,
    ),
    "dspy": Environment(
        (f"-C wheel.cmake=false {ROOT}[server,structured]", "dspy==3.4.1 pytest"), torch=False
    ),
    "llm": Environment(
        (f"-C wheel.cmake=false {ROOT}[structured]", "llm==0.36 pytest"), torch=False
    ),
    "mcp": Environment(
        (f"-C wheel.cmake=false {ROOT}[structured]", "mcp==2.3.0 pytest"), torch=False
    ),
    # guidance would ask for an older llguidance
    "outlines": Environment(
        (
            f"-C wheel.cmake=false {ROOT}[server,structured]",
            "outlines==1.3.3 openai==2.54.0 pytest",
        ),
        torch=False,
    ),
    # its own transformers model asks for them; lm-eval alone does not
    "lm-eval": Environment(
        (f"-C wheel.cmake=false -e {ROOT}[lm-eval]", "transformers==5.23.0 accelerate")
    ),
}


def python_of(root: Path, name: str) -> Path:
    """The interpreter of an environment under ``root``."""
    return root / name / "bin" / "python"


def make(root: Path, name: str, pip_flags: list[str]) -> None:
    """Make or finish one environment.

    :raises SystemExit: there is no Python old enough, or pip fails.
    """
    wanted = ENVIRONMENTS[name]
    steps = [*(["torch numpy"] if wanted.torch else []), *wanted.steps]
    note = root / f"{name}.json"
    done = json.loads(note.read_text()) if note.is_file() else []
    if done != steps[: len(done)]:
        shutil.rmtree(root / name, ignore_errors=True)
        done = []
    python = python_of(root, name)
    if not python.exists():
        subprocess.run([_interpreter(name, wanted), "-m", "venv", str(root / name)], check=True)
    for step in steps[len(done) :]:
        print(f"{name}: pip install {step}", flush=True)
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run = subprocess.run([*command, "-c", str(CONSTRAINTS), *pip_flags, *shlex.split(step)])
        if run.returncode:
            raise SystemExit(f"{name}: pip install {step} failed; run it again to go on")
        done.append(step)
        note.write_text(json.dumps(done))


def unpack(root: Path, name: str, pip_flags: list[str]) -> None:
    """Files out of a source distribution, into the folder ``name``."""
    folder, wanted = root / name, SOURCES[name]
    if folder.is_dir():
        return
    print(f"{name}: out of the sources of {wanted.package}", flush=True)
    sources = root / f"{name}-sources"
    command = [str(python_of(root, wanted.environment)), "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-binary", ":all:", "-d", str(sources)]
    subprocess.run([*command, *pip_flags, wanted.package], check=True)
    part = root / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
        for member in archive:
            if wanted.part in member.name and member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                (part / Path(member.name).name).write_bytes(content.read())
    part.rename(folder)
    shutil.rmtree(sources)


def _interpreter(name: str, wanted: Environment) -> str:
    """This Python, or one on the path that is old enough."""
    if sys.version_info < wanted.before:
        return sys.executable
    for minor in range(wanted.before[1] - 1, 9, -1):
        found = shutil.which(f"python3.{minor}")
        if found is not None:
            return found
    version = ".".join(map(str, wanted.before))
    raise SystemExit(f"{name}: needs a Python from 3.10 to below {version}; none is on the path")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="where they are made")
    parser.add_argument("--only", choices=[*ENVIRONMENTS, *SOURCES], help="one of them")
    parser.add_argument("--pip-flags", default="", help="for every pip call")
    args = parser.parse_args()
    root = args.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    flags = shlex.split(args.pip_flags)
    for name in ENVIRONMENTS:
        if args.only in (None, name):
            make(root, name, flags)
    for name in SOURCES:
        if args.only in (None, name):
            unpack(root, name, flags)


if __name__ == "__main__":
    main()
