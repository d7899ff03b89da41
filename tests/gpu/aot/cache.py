"""Compiled kernels for a card that is not here yet: a cache of Triton's that travels.

    python tests/gpu/aot/cache.py make [--library SHA256]    # `make aot-cache`
    python tests/gpu/aot/cache.py unpack [--out FOLDER]      # where the card is

``make`` runs what is going to run on the card, the card tests and the rows of ``embedlm bench
gpu``, where launches are listed and neither compiled nor run (``machine_code.py``), and compiles
each kernel for sm_90 with the facts that Triton found in its arguments. What a later run has
compiled already stays in ``build/aot-cache``. ``unpack`` writes the entries as Triton itself would
have, below ``TRITON_CACHE_DIR``, and says in one line how many, or why none.

Triton's key of a kernel holds its own version and files, sources of the kernel, facts, options, and
ptxas, but no path and no Python. Only ``libtriton.so`` differs between the wheels of 3.6.0 for
Python 3.11 and 3.12 (all other files that the key holds are the same bytes), so its hash is put in
the place of this one's. The archive is not committed: a change of a kernel outdates its entries,
and machine code holds the paths of the sources it was made from.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "aot-cache"
ARCHIVE = FOLDER / "sm_90.tar.xz"
#: ``libtriton.so`` of triton 3.6.0 for Python 3.12 (cp312-manylinux_2_27_x86_64), on PyPI.
LIBRARY = "28daaa70a904e4f8add754e518533e8a69b94ab8b16431ce77d45f1f25282b87"
#: What is listed, each in a process of its own: see ``cache_listing.py``.
TASKS = ("tests", "engines", "bench")
_MANIFEST = "manifest.json"
_DEBUGGING = (b".nv_debug_ptx_txt", b".debug_line", b".nv_debug_line_sass")


# Making


def make(library: str, archive: Path, tasks: Sequence[str], workers: int) -> int:
    """List, compile, pack; the exit status."""
    store = FOLDER / "store"
    store.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, dict[str, Any]] = {}
    for task in tasks:  # one after another: what one has compiled the next one finds in the store
        kernels |= {line["key"]: line for line in _listed(task, library, store, workers)}
    wrong = [line for line in kernels.values() if "error" in line]
    for line in wrong:
        print(f"{line['name']}: {line['error']}")
    write(archive, library, (line for line in kernels.values() if "error" not in line))
    size = archive.stat().st_size / 1e6
    print(f"{archive}: {len(kernels) - len(wrong)} kernels for libtriton {library}, {size:.2f} MB")
    return 1 if wrong else 0


def _listed(task: str, library: str, store: Path, workers: int) -> list[dict[str, Any]]:
    """What a task launches, compiled; one line of JSON per kernel."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(store), "TRITON_STORE_BINARY_ONLY": "1"}
    program = Path(__file__).with_name("cache_listing.py")
    # -O: nothing is computed, so what a test asserts is not true, and it has to go on
    command = [sys.executable, "-O", program, task, "--library", library, "--workers", workers]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        end = (done.stdout + done.stderr)[-6000:]
        raise SystemExit(f"{task}: the listing failed with status {done.returncode}:\n{end}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]


def write(archive: Path, library: str, lines: Iterable[dict[str, Any]]) -> None:
    """Pack what :func:`_listed` returns."""
    lines = sorted(lines, key=lambda line: (line["name"], line["key"]))
    sources = {path: _digest(ROOT / path) for line in lines for path in line["files"]}
    manifest = {
        "triton": importlib.metadata.version("triton"),
        "library": library,
        "sources": sources,
        "kernels": {line["key"]: {"name": line["name"], "files": line["files"]} for line in lines},
    }
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:xz", preset=9) as tar:
        _add(tar, _MANIFEST, json.dumps(manifest).encode())
        for line in lines:
            metadata = json.loads(Path(line["json"]).read_text())
            # a place of this machine, which nothing reads again
            metadata |= {"hash": line["key"], "extern_libs": []}
            name = f"{line['key']}/{line['name']}"
            _add(tar, f"{name}.json", json.dumps(metadata).encode())
            _add(tar, f"{name}.cubin", without_debugging(Path(line["cubin"]).read_bytes()))
    part.replace(archive)


def without_debugging(cubin: bytes) -> bytes:
    """The same ELF file with zeros in place of its PTX and of its tables of source lines.

    Only debuggers, profilers and sanitizers read them. Of the kernels of sm_90 the PTX is 30 of
    46 MB, packed 2.4 of 5.3; the tables are packed 1.0 of what is left.
    """
    if not cubin.startswith(b"\x7fELF\x02\x01"):
        raise ValueError(f"expected a 64-bit ELF file, found {cubin[:6]!r}")
    (first,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, first + i * size) for i in range(count)]
    found = bytearray(cubin)
    for name, *_, offset, length in headers:
        at = headers[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] in _DEBUGGING:
            found[offset : offset + length] = bytes(length)
    return bytes(found)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _digest(path: Path) -> str | None:
    """None: there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# Unpacking, with nothing but the standard library


def unpack(archive: Path, out: Path) -> str:
    """What was done, in one line."""
    if not archive.is_file():
        return f"no compiled kernels are used: {archive} does not exist (make aot-cache)"
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "no compiled kernels are used: triton is not installed"
    version = importlib.metadata.version("triton")
    library = _digest(Path(found.origin).parent / "_C" / "libtriton.so")
    here = f"Triton {version}, libtriton {library}"
    try:
        with tarfile.open(archive) as tar:
            members = iter(tar)
            manifest = json.loads(_read(tar, next(members)))
            made = f"Triton {manifest['triton']}, libtriton {manifest['library']}"
            if made != here:
                return f"no compiled kernels are used: they were made for {made}, here is {here}"
            sources = manifest["sources"]
            changed = {path for path, was in sources.items() if _digest(ROOT / path) != was}
            kernels = manifest["kernels"]
            fits = {key for key, line in kernels.items() if changed.isdisjoint(line["files"])}
            if fits:
                _write_entries(tar, members, out, fits)
    except (OSError, EOFError, tarfile.TarError, StopIteration, ValueError, KeyError) as error:
        return f"no compiled kernels are used: {archive} cannot be read: {error!r}"
    where = f"{len(fits)} of {len(kernels)} compiled kernels for {here} in {out}"
    if changed:
        where += f"; the others are of sources that changed: {', '.join(sorted(changed))}"
    return where


def _write_entries(
    tar: tarfile.TarFile, members: Iterator[tarfile.TarInfo], out: Path, fits: set[str]
) -> None:
    """Files as ``triton/runtime/cache.py`` has them; groups name their files by absolute paths."""
    for member in members:
        key, name = member.name.split("/")
        if key not in fits:
            continue
        bytes.fromhex(key)
        folder = out.resolve() / base32(key)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / Path(name).name, _read(tar, member))
        if name.endswith(".cubin"):  # the last file of its entry
            names = [name, name.removesuffix("cubin") + "json"]
            group = {"child_paths": {one: str(folder / one) for one in names}}
            _write(folder / f"__grp__{names[1]}", json.dumps(group).encode())


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is not a file")
    return file.read()


def _write(path: Path, data: bytes) -> None:
    """At once, because other processes may compile already."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def base32(key: str) -> str:
    """The name of a key's folder in Triton's cache."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    parts = parser.add_subparsers(dest="part", required=True)
    making = parts.add_parser("make")
    making.add_argument("--library", default=LIBRARY, help="sha256 of the libtriton.so there")
    making.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    making.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    unpacking = parts.add_parser("unpack")
    default = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    unpacking.add_argument("--out", type=Path, default=Path(default))
    options = parser.parse_args()
    if options.part == "make":
        sys.exit(make(options.library, options.archive, options.tasks, options.workers))
    print(unpack(options.archive, options.out), flush=True)


if __name__ == "__main__":
    main()
