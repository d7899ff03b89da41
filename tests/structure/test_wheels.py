"""The files of a release, installed where nothing else is: no checkout, no compiler."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import sdk
from sdk import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 200, 31, 77]
NATIVE = "sdk/kernels/cpu/_native.so"
PIPED: dict[str, Any] = {"capture_output": True, "text": True}
#: The newest versions of symbols on a system of manylinux_2_28.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def native_module() -> Path:
    spec = find_spec("sdk.kernels.cpu._native")
    assert spec is not None and spec.origin is not None, "not built: run `make build`"
    return Path(spec.origin)


def test_the_native_module_loads_on_every_system_that_manylinux_2_28_means() -> None:
    command = ["objdump", "-p", str(native_module())]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"0x\w+ 0x\w+ \d+ ([A-Z]+)_([\d.]+)$", text, re.MULTILINE)
    assert {name for name, _ in needed} <= {*NEWEST} and ("GLIBC", "2.27") in needed
    too_new = [
        f"{name}_{version}"
        for name, version in needed
        if tuple(map(int, version.split("."))) > NEWEST[name]
    ]
    assert too_new == []  # kernels/cpu/native/old_symbols.hpp
    libraries = set(re.findall(r"NEEDED +(\S+)", text))
    assert libraries <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}


LEVELS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(library.embedlm_levels())
"""


@pytest.mark.slow
def test_a_library_for_this_machine_has_the_best_level_alone(tmp_path: Path) -> None:
    """`make run`: a third of the compiler's work."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DSKBUILD=ON"]
    bad = subprocess.run(
        [*configure, "-DEMBEDLM_LEVELS=some"], capture_output=True, text=True, timeout=120
    )
    message = " ".join(bad.stderr.split())
    assert bad.returncode
    assert re.search(r"EMBEDLM_LEVELS: expected all, host, portable.*, found some", message)
    subprocess.run([*configure, "-DEMBEDLM_LEVELS=portable"], check=True, capture_output=True)
    targets = ["cmake", "--build", str(tmp_path), "--target", "help"]
    listed = subprocess.run(targets, check=True, capture_output=True, text=True).stdout
    assert {*re.findall(r"^\.\.\. (kernels_\w+)$", listed, re.MULTILINE)} == {"kernels_portable"}
    subprocess.run([*configure, "-DEMBEDLM_LEVELS=host"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path), "-j", "2"], check=True, capture_output=True)
    masks = [
        int(subprocess.run([sys.executable, "-c", LEVELS, path], **PIPED, check=True).stdout)
        for path in (tmp_path / "_native.so", native_module())
    ]
    host, built = masks
    assert host == 1 << built.bit_length() - 1


GENERATE = f"""
import json, sys, sdk
with sdk.LLM(sys.argv[1], max_model_len=32, compute="exact") as llm:
    params = sdk.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate({{"prompt_token_ids": {PROMPT}}}, params)
answer = {{"file": sdk.__file__, "tokens": output.outputs[0].token_ids,
          "warnings": llm.load_warnings}}
print(json.dumps(answer, default=list))
"""


class Environment:
    """A new virtual environment, and commands that see nothing but it.

    The packages that embedlm depends on are those of this environment: a .pth file names the
    folders, and Python does not read the .pth files in them, which would bring in this checkout.
    """

    def __init__(self, folder: Path, *tools: str) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        [site] = (folder / "env" / "lib").glob("python*/site-packages")
        others = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (site / "dependencies.pth").write_text("\n".join(others))
        self.bin = folder / "env" / "bin"
        for name in ("home", "tools", "cwd"):
            (folder / name).mkdir()
        for tool in tools:
            found = shutil.which(tool)
            assert found is not None, f"{tool} is missing"
            (folder / "tools" / tool).symlink_to(found)

    def run(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / command, *map(str, arguments)],
            env={"HOME": str(self.folder / "home"), "PATH": f"{self.bin}:{self.folder / 'tools'}"},
            cwd=self.folder / "cwd",
            capture_output=True,
            text=True,
            timeout=600,
        )

    def install(self, path: Path, *options: str) -> None:
        options = ("--no-deps", "--no-index", "--quiet", *options)
        done = self.run("python", "-m", "pip", "install", *options, path)
        assert done.returncode == 0, done.stdout + done.stderr

    def check(self, model: Path, *, native: bool) -> None:
        """`import sdk`, a generation, and the commands; the tokens are those of this checkout."""
        done = self.run("python", "-c", GENERATE, model)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert Path(answer["file"]).is_relative_to(self.folder)
        assert [len(answer["warnings"]), native] in ([0, True], [1, False])
        with LLM(model, max_model_len=32, compute="exact") as llm:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            [output] = llm.generate({"prompt_token_ids": PROMPT}, params)
        assert answer["tokens"] == list(output.outputs[0].token_ids)
        done = self.run("embedlm", "doctor")
        assert done.returncode == (0 if native else 1), done.stdout
        assert ("built, SIMD level" in done.stdout) == native
        done = self.run("embedlm", "run", model, "--raw", "-p", "Hi", "--max-tokens", 3)
        assert done.returncode == 0 and done.stdout, done.stderr
        done = self.run("embedlm", "--version")
        assert sdk.__version__ in done.stdout


@pytest.fixture
def model(golden: Path) -> Path:
    return golden / "gguf-Q4_1" / "model.gguf"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it compiles for each system: 2 to 4 minutes of CPU time each
def test_make_wheels_makes_a_wheel_that_runs_alone(tmp_path: Path, model: Path) -> None:
    dist = tmp_path / "dist"
    make = ["make", "wheels", f"DIST={dist}", f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [archive] = dist.glob("*.tar.gz")
    wheels = by_system(dist)
    # zig, which `make wheels` installs, makes what needs no compiler of this machine's.
    linux = {f"manylinux {platform.machine()}", "manylinux aarch64"}
    assert set(wheels) == {*MAGIC} - {"manylinux x86_64"} | linux
    assert_each_is_for_its_system(wheels)
    wheel = wheels[f"manylinux {platform.machine()}"]
    with zipfile.ZipFile(wheel) as files:
        # From the archive came what the checkout's own build made, bit for bit.
        assert files.read(NATIVE) == native_module().read_bytes()
        assert_same_as_checkout(files)
    for path in wheels.values():
        assert_bill_lists(path)
    sums = subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=dist, **PIPED)
    assert sums.returncode == 0, sums.stderr
    listed = {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    assert_archive_builds_alone(archive)
    environment = Environment(tmp_path / "empty")
    environment.install(wheel)
    environment.check(model, native=True)


#: How a native module of each system begins (ELF, PE, Mach-O), and where it names its processor.
MAGIC = {
    "manylinux x86_64": (b"\x7fELF", 18, b"\x3e\0"),
    "manylinux aarch64": (b"\x7fELF", 18, b"\xb7\0"),
    "musllinux_1_2_x86_64": (b"\x7fELF", 18, b"\x3e\0"),
    "win_amd64": (b"MZ", None, b"\x64\x86"),
    "macosx_11_0_arm64": (b"\xcf\xfa\xed\xfe", 4, b"\x0c\0\0\x01"),
    "macosx_11_0_x86_64": (b"\xcf\xfa\xed\xfe", 4, b"\x07\0\0\x01"),
}


def by_system(dist: Path) -> dict[str, Path]:
    """The wheels by their tag; those for glibc, whose release differs, by their architecture."""
    named = re.compile(rf"embedlm-{sdk.__version__}-py3-none-([\w.]+)\.whl")
    wheels = {}
    for path in dist.glob("*.whl"):
        found = named.fullmatch(path.name)
        assert found is not None, path.name
        glibc = re.match(r"manylinux_2_(\d+)_(\w+?)(\.|$)", found[1])
        assert glibc is None or int(glibc[1]) <= 28, path.name
        tag = f"manylinux {glibc[2]}" if glibc else found[1]
        assert tag not in wheels, path.name
        wheels[tag] = path
    return wheels


def assert_each_is_for_its_system(wheels: dict[str, Path]) -> None:
    """The native module is of the system in the wheel's name, and the metadata have that name."""
    for tag, path in wheels.items():
        with zipfile.ZipFile(path) as files:
            [native] = [name for name in files.namelist() if "/_native." in name]
            [metadata] = [name for name in files.namelist() if name.endswith(".dist-info/WHEEL")]
            data, said = files.read(native), files.read(metadata).decode()
        magic, at, machine = MAGIC[tag]
        if at is None:
            at = int.from_bytes(data[0x3C:0x40], "little") + 4
        assert data.startswith(magic) and data[at:].startswith(machine), tag
        tags = path.stem.rpartition("-")[2].split(".")
        assert {line for line in said.splitlines() if line.startswith("Tag: ")} == {
            f"Tag: py3-none-{one}" for one in tags
        }
        assert native.endswith(".pyd" if tag == "win_amd64" else ".so")


def assert_same_as_checkout(files: zipfile.ZipFile) -> None:
    """Every file of the package stands in the checkout, byte for byte."""
    for name in files.namelist():
        if name == NATIVE or ".dist-info/" in name or name.endswith("/"):
            continue
        top, _, rest = name.partition("/")
        part = rest.partition("/")[0]
        here = ROOT / rest if part in ("quant", "kernels", "models", "loaders") else ROOT / name
        here = ROOT / "sdk" / name if top == "embedlm" else here
        assert files.read(name) == here.read_bytes(), name


def assert_bill_lists(wheel: Path) -> None:
    """The bill of materials has every file with its hash, and what the metadata asks for."""
    bill = json.loads(wheel.with_suffix(".cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    root = bill["metadata"]["component"]
    assert [root["name"], root["version"]] == ["embedlm", sdk.__version__]
    assert root["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    with zipfile.ZipFile(wheel) as files:
        hashes = {
            name: hashlib.sha256(files.read(name)).hexdigest()
            for name in files.namelist()
            if not name.endswith(("/RECORD", "/"))
        }
    assert {one["name"]: one["hashes"][0]["content"] for one in root["components"]} == hashes
    needs = {one["name"]: one.get("scope", "required") for one in bill["components"]}
    systems = {"win": "KERNEL32.dll", "mac": "/usr/lib/libSystem.B.dylib", "mus": "libc.so"}
    library = systems.get(wheel.stem.rpartition("-")[2][:3], "libc.so.6")
    assert needs["numpy"] == needs[library] == "required"
    assert needs["torch"] == needs["pytest"] == "optional"
    [edges] = [one for one in bill["dependencies"] if one["ref"] == root["bom-ref"]]
    assert len(edges["dependsOn"]) == len(needs)


def assert_archive_builds_alone(archive: Path) -> None:
    """The archive has what the wheel is made from, and nothing that git does not know."""
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split("\n")
    assert names - {*tracked} == {"PKG-INFO"}
    sources = {name for name in tracked if name.startswith("kernels/cpu/native/")}
    assert sources and sources <= names and "CMakeLists.txt" in names


@pytest.mark.slow
def test_the_archive_installs_without_a_compiler_and_gives_the_same_answer(
    tmp_path: Path, model: Path
) -> None:
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    environment = Environment(tmp_path / "empty", "cmake", "ninja")
    environment.install(archive, "--no-build-isolation")
    environment.check(model, native=False)
