"""The native library as a guest: found or explained, threads that come and go, engines apart."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sdk.kernels import cpu
from sdk.kernels.cpu import library, page_args, runtime
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.llm import LLM
from tests.kernels.plain_kernels import plain_kernels


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compile_library(folder: Path, source: str) -> str:
    path = folder / "other.so"
    code = folder / "other.c"
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, code], check=True)
    return str(path)


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    reason = cpu.available("cpu")
    assert reason == (
        "native module not built: install a C++ compiler and run `make build`; "
        "`pip install -v --no-deps -e .` shows why one fails"
    )
    assert cpu.levels() == ()
    assert cpu.simd_level() is None
    with pytest.raises(KernelError, match="native module not built"):
        cpu.open_backend("cpu", 1)


def test_a_stale_library_is_refused(tmp_path: Path) -> None:
    path = compile_library(tmp_path, "int embedlm_abi_version(void) { return 0; }")
    found = library.load_library(path)
    assert isinstance(found, str)
    assert found.startswith("native module is stale: interface 0 in ")
    assert found.endswith(f"expected {library.ABI_VERSION}: run `make build`")


@pytest.mark.parametrize("kind", library.OpKind)
def test_arguments_have_the_size_the_library_reads(kind: library.OpKind) -> None:
    native = library.find_library()
    assert not isinstance(native, str), native
    name = f"{kind.name.title().replace('_', '')}Args"
    arguments = getattr(page_args, name, None) or getattr(library, name)
    assert ctypes.sizeof(arguments) == native.embedlm_args_size(kind)
    assert native.embedlm_args_size(len(library.OpKind)) == 0


def test_a_foreign_or_broken_library_is_refused(tmp_path: Path) -> None:
    foreign = library.load_library(compile_library(tmp_path, "int something;"))
    assert isinstance(foreign, str) and foreign.startswith("native module cannot be loaded: ")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    found = library.load_library(str(broken))
    assert isinstance(found, str) and found.startswith("native module cannot be loaded: ")


def test_other_devices_are_declined() -> None:
    assert cpu.available("cuda:0") == "runs on the CPU only, not on cuda:0"
    assert cpu.available("cpu") is None


def test_ops_prefer_the_native_kernels(cases: Any) -> None:
    ops = Ops("cpu", num_threads=1)
    assert ops.context.backend_names == ("cpu", "reference")
    assert ops.linear(cases.affine(16, 32)).choice.name == "cpu.linear"
    exact = Ops("cpu", num_threads=1, compute="exact")
    choice = exact.linear(cases.affine(16, 32)).choice
    assert choice.name == "cpu.linear_exact"
    assert choice.declined == (
        ("cpu.linear", "quantizes activations to 8 bits, compute is exact"),
        ("cpu.linear_a16", "quantizes activations to 16 bits, compute is exact"),
    )
    wide = ops.linear(cases.affine(16, 32), activation_bits=16).choice
    assert wide.name == "cpu.linear_a16"
    assert wide.declined == (
        ("cpu.linear", "quantizes activations to 8 bits, 16 bits were requested"),
    )
    dense = ops.linear(cases.dense(16, 32, torch.float16), activation_bits=16).choice
    assert dense.name == "cpu.linear"
    ops.close()
    exact.close()


def test_the_best_level_is_the_default_and_unknown_ones_raise() -> None:
    assert cpu.simd_level() == cpu.levels()[-1]
    backend = cpu.open_backend("cpu", 1)
    assert backend.runtime.level == cpu.simd_level()
    backend.close()
    with pytest.raises(KernelError, match=r"SIMD level: expected one of .* found 'mmx'"):
        cpu.open_backend("cpu", 1, "mmx")


def test_closing_gives_every_thread_back_and_may_be_repeated() -> None:
    before = thread_count()
    backends = [cpu.open_backend("cpu", 4) for _ in range(3)]
    assert thread_count() == before + 9
    for backend in backends:
        backend.close()
        backend.close()
    assert thread_count() == before
    cpu.open_backend("cpu", 4)  # dropped without close: the finaliser stops its threads
    assert thread_count() == before


def test_a_closed_engine_says_so(cases: Any) -> None:
    backend = cpu.open_backend("cpu", 2)
    kernel = plain_kernels(backend, "linear")[0]
    packed = kernel.pack(cases.affine(16, 32))
    backend.close()
    with pytest.raises(KernelError, match="linear: the engine is closed"):
        kernel.matmul(packed, torch.zeros(1, 32), torch.zeros(1, 16))


def test_weights_are_packed_after_the_call_and_their_sources_are_kept(cases: Any) -> None:
    backend = cpu.open_backend("cpu", 3)
    kernel = plain_kernels(backend, "linear")[0]
    kinds = ("q4_0", "q8_0", "q6_k")
    packed = [kernel.pack(cases.blocks(1024, 512, kind)) for kind in kinds]
    gc.collect()
    again = torch.full((1024, 544), 255).to(torch.uint8)  # in the place of a source that is freed
    for kind, weight in zip(kinds, packed, strict=True):
        assert cases.same(kernel.unpack(weight), cases.blocks(1024, 512, kind)), kind
    assert int(again.sum()) == 1024 * 544 * 255
    backend.finish_packing()
    backend.close()


@pytest.mark.parametrize("end", ["finish", "close", "drop"])
def test_what_was_begun_is_packed_in_the_end(cases: Any, end: str) -> None:
    weight = cases.blocks(2048, 1024, "q4_k")
    expected = cpu.open_backend("cpu", 1)  # has no other thread: packs during the call
    codes = plain_kernels(expected, "linear")[0].pack(weight).codes
    backend = cpu.open_backend("cpu", 2)
    packed = plain_kernels(backend, "linear")[0].pack(weight)
    if end == "finish":
        backend.finish_packing()
    elif end == "close":
        backend.close()
    del backend
    assert torch.equal(packed.codes, codes)
    expected.close()


def test_nothing_of_a_loaded_model_is_still_being_packed(golden: Path) -> None:
    """A forked child would miss what other threads pack after the fork."""
    with LLM(golden / "gguf-Q4_1" / "model.gguf", device="cpu") as llm:
        (native,) = (one for one in llm._runner().ops.context.backends if one.name == "cpu")
        assert native.runtime._packing == ()  # type: ignore[attr-defined]


def test_running_out_of_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="attention: out of memory"):
        runtime.check(1, "attention")

    class Full:
        def embedlm_levels(self) -> int:
            return 1

        def embedlm_runtime_create(self, threads: int, level: int) -> None:
            return None

    monkeypatch.setattr(runtime, "find_library", Full)
    with pytest.raises(KernelError, match="CPU kernels with 8 threads: out of memory"):
        cpu.open_backend("cpu", 8)


def test_a_library_for_another_cpu_alone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMBEDLM_LEVELS=host, and then another machine."""
    found = library.find_library()
    assert not isinstance(found, str)
    none = Mock(
        embedlm_abi_version=lambda: library.ABI_VERSION, embedlm_levels=Mock(return_value=0)
    )
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: none)
    assert library.load_library("there.so") == (
        "native module was compiled for another CPU alone (there.so): run `make build`"
    )


def products(backend: Any, weights: list[Any], x: Any, rounds: int, out: list[Any]) -> None:
    kernel = plain_kernels(backend, "linear")[0]
    packed = [kernel.pack(weight) for weight in weights]
    for _ in range(rounds):
        for weight in packed:
            y = torch.empty(x.shape[0], weight.facts.shape[0])
            kernel.matmul(weight, x, y)
            out.append(y)


@pytest.mark.parametrize("shared", [False, True], ids=["two engines", "one engine"])
def test_two_threads_compute_what_one_does(cases: Any, shared: bool) -> None:
    weights = [cases.affine(320, 256, 4, seed=i) for i in range(4)]
    x = cases.activations(5, 256)
    first = cpu.open_backend("cpu", 2)
    second = first if shared else cpu.open_backend("cpu", 3)
    expected: list[Any] = []
    products(first, weights, x, 1, expected)
    found: list[list[Any]] = [[], []]
    threads = [
        threading.Thread(target=products, args=(backend, weights, x, 50, out))
        for backend, out in zip((first, second), found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in found:
        assert len(out) == 200
        assert all(torch.equal(y, expected[i % 4]) for i, y in enumerate(out))
    first.close()
    second.close()


def test_a_forked_child_can_close_what_it_inherited(cases: Any) -> None:
    backend = cpu.open_backend("cpu", 3)
    child = os.fork()
    if child == 0:
        backend.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    backend.close()


def level_of(function: str) -> str:
    """The namespace of a kernel; of what native/kernels.hpp declares, the end of its name."""
    named = [level for level in library.LEVELS if function.endswith(f"_{level}")]
    return named[0] if named else function.partition("::")[0]


def test_the_baseline_holds_no_wide_instructions() -> None:
    """Only the kernel tables may differ by level: anything else the linker could merge would bring
    AVX code, or ARM's dot products, to a CPU without them."""
    spec = library.find_spec("sdk.kernels.cpu._native")
    assert spec is not None and spec.origin is not None
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", spec.origin],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    function, wide = "", set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.split("<")[1]
        elif function.startswith("(anonymous namespace)::loop_"):
            continue  # the peak probe: assembly of one level each, chosen at run time
        elif re.search(r"%[yz]mm|\t(s|us?)dot\b|mmla\b", line):
            wide.add(level_of(function.removeprefix("void ").removesuffix(">:")))
    compiled = {level for level in library.LEVELS if f"{level}::" in listing}
    assert compiled >= {*cpu.levels()}
    assert wide == compiled - {"portable", "neon"}
