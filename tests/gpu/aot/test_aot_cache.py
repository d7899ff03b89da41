"""Compiled kernels that travel: found where they were unpacked and fit, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.gpu.aot import cache

OWN = hashlib.sha256(
    (Path(triton.__file__).parent / "_C" / "libtriton.so").read_bytes()
).hexdigest()
#: Lists the kernels of an operator with several experts, as the tasks of ``make`` do.
LISTED = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    import cache_listing as made
    import torch
    from sdk.kernels.operators.ops import Ops

    def listed():
        with made.listing() as found, made.zeros(), made.kernels_on_cpu_tensors():
            ops = Ops("cpu", backends=("gpu", "reference"))
            for experts in (8, 128):
                logits = torch.zeros(3, experts, dtype=ops.activations)
                ops.moe.route(logits, 2)
            ops.close()
            return list(found)
"""
COMPILE = """
    made.compile_all(listed(), sys.argv[2], 2)
"""
#: Looks the same kernels up where compiling is an error, and one whose source is another.
LOOK_UP = """
    from triton.compiler import ASTSource
    def refused(*args, **kwargs):
        raise SystemError("compiled")
    ASTSource.make_ir = refused
    found = listed()
    results = [made.compiled(one, sys.argv[2]).get("error", "found") for one in found]
    kernel = found[0][0].fn
    kernel._unsafe_update_src(kernel.src.replace("tl.store(", "tl.store( "))
    changed = made.compiled(found[0], sys.argv[2]).get("error", "found")
    print(json.dumps({"results": results, "changed": changed}))
"""


def run(code: str, folder: Path, library: str = OWN) -> list[dict[str, Any]]:
    """Lines of JSON of a process in which Triton does not interpret, with that cache."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    lines = [line.removeprefix("    ") for line in (LISTED + code).splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(Path(cache.__file__).parent), library],
        cwd=cache.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(COMPILE, tmp_path_factory.mktemp("store"))


@pytest.mark.slow
def test_another_process_finds_the_kernels_elsewhere_and_no_others(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    archive, out = tmp_path / "made.tar.xz", tmp_path / "elsewhere"
    cache.write(archive, OWN, lines)
    said = cache.unpack(archive, out)
    count = len(lines)
    assert count >= 2 and said.startswith(f"{count} of {count} compiled kernels for Triton ")
    assert OWN in said
    (found,) = run(LOOK_UP, out)
    assert found["results"] == ["found"] * count
    assert "SystemError: compiled" in found["changed"]
    (found,) = run(LOOK_UP, tmp_path / "empty")
    assert all("SystemError: compiled" in result for result in found["results"])


@pytest.mark.slow
def test_keys_do_not_depend_on_which_kernel_is_used_first(tmp_path: Path) -> None:
    keys = """
    found = listed()
    made.settle_cache_keys()
    for one in found if sys.argv[2] == "first" else found[::-1]:
        print(json.dumps({"name": one[0].name, "key": one[0].hash()}))
"""
    first, last = run(keys, tmp_path, "first"), run(keys, tmp_path, "last")
    assert first == last[::-1] and len(first) >= 4
    # as Triton has it: the first of two kernels lacks the constants of what both call
    unsettled = (
        keys.replace("made.settle_cache_keys()", "")
        + """
"""
    )
    patched = (
        "    import sdk.kernels.gpu.cache_keys as k; k.settle_cache_keys = lambda: None" + unsettled
    )
    assert run(patched, tmp_path, "first") != run(patched, tmp_path, "last")[::-1]


@pytest.mark.slow
def test_keys_for_another_library_differ_in_that_alone(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = run(COMPILE, tmp_path, "ab" * 32)
    assert {x["name"] for x in other} == {x["name"] for x in lines}
    assert {x["key"] for x in other}.isdisjoint(x["key"] for x in lines)
    files = [Path(x["cubin"]).relative_to(tmp_path) for x in other]
    assert {str(f.parent) for f in files} == {cache.base32(x["key"]) for x in lines}


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file: its header, the sections, their names, their headers."""
    names = b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body, headers, at = b"", b"", 0
    for name, data in [*sections.items(), (".shstrtab", names)]:
        headers += struct.pack("<2I4Q2I2Q", at, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        body, at = body + data, at + len(name) + 1
    count = len(sections) + 1
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack(
        "<2HI3QI6H", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, count, count - 1
    )
    return head + body + headers


def archive_of(folder: Path, library: str, files: list[str]) -> Path:
    (folder / "k.json").write_text('{"extern_libs": [["libdevice", "/somewhere"]], "shared": 4}')
    (folder / "k.cubin").write_bytes(elf({".text.k": b"code"}))
    line = {"name": "k", "key": "0f" * 32, "files": files}
    line |= {end: str(folder / f"k.{end}") for end in ("json", "cubin")}
    cache.write(folder / "k.tar.xz", library, [line])
    return folder / "k.tar.xz"


def test_what_debuggers_read_does_not_travel() -> None:
    debugging = {".nv_debug_ptx_txt": b".version 8.7" * 9, ".debug_line": b"lines"}
    debugging |= {".nv_debug_line_sass": b"more lines"}
    others = {".text.k": b"code", ".debug_frame": b"frames"}
    stripped = cache.without_debugging(elf(others | debugging))
    assert stripped == elf(others | {name: bytes(len(was)) for name, was in debugging.items()})
    with pytest.raises(ValueError, match="expected a 64-bit ELF file, found b'code'"):
        cache.without_debugging(b"code")


SOURCES = ["kernels/gpu/norm.py", "kernels/gpu/launch.py"]


def test_entries_are_as_triton_s_own(tmp_path: Path) -> None:
    said = cache.unpack(archive_of(tmp_path, OWN, SOURCES), tmp_path / "out")
    assert said.startswith("1 of 1 compiled kernels for Triton ")
    folder = tmp_path / "out" / cache.base32("0f" * 32)
    group = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert group == {name: str(folder / name) for name in ("k.cubin", "k.json")}
    assert Path(group["k.cubin"]).read_bytes() == elf({".text.k": b"code"})
    metadata = json.loads(Path(group["k.json"]).read_text())
    assert metadata == {"extern_libs": [], "shared": 4, "hash": "0f" * 32}


def test_kernels_of_sources_that_changed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_of(tmp_path, OWN, SOURCES)
    checkout = tmp_path / "checkout"
    for name in SOURCES:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((cache.ROOT / name).read_bytes())
    monkeypatch.setattr(cache, "ROOT", checkout)
    assert cache.unpack(archive, tmp_path / "out").startswith("1 of 1 ")
    with (checkout / SOURCES[0]).open("a") as file:
        file.write("\n")
    said = cache.unpack(archive, tmp_path / "changed")
    assert said.startswith("0 of 1 ") and said.endswith(f"sources that changed: {SOURCES[0]}")
    assert not (tmp_path / "changed").exists()


def test_what_does_not_fit_is_not_used_and_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    said = [cache.unpack(tmp_path / "none.tar.xz", out)]
    assert "does not exist" in said[0]
    said.append(cache.unpack(archive_of(tmp_path, "ab" * 32, SOURCES), out))
    assert f"made for Triton {triton.__version__}, libtriton {'ab' * 32}, here is" in said[1]
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(archive_of(tmp_path, OWN, SOURCES).read_bytes()[:90])
    said.append(cache.unpack(broken, out))
    assert "cannot be read" in said[2]
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "9.9.9")
    said.append(cache.unpack(archive_of(tmp_path, "cd" * 32, SOURCES), out))
    assert "9.9.9" in said[3]
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: None)
    said.append(cache.unpack(broken, out))
    assert "triton is not installed" in said[4]
    assert all("\n" not in one and one.startswith("no compiled kernels are used") for one in said)
    assert not out.exists()
