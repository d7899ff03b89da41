"""List and compile what a task launches on an sm_90: a process of ``cache.py``.

    python -O tests/gpu/aot/cache_listing.py tests|engines|bench --library SHA256 --workers N

``tests``: the kernels' tests of ``tests/card``; ``engines``: its engines, on the fake card
(``tests/engine/fake_card.py``); ``bench``: the rows of ``embedlm bench gpu``. All with real shapes
and nothing computed. Prints a line of JSON per kernel: its key for that ``libtriton.so`` and where
its files are, or ``error``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "engine"), str(ROOT)]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from fake_card import _Backend  # noqa: E402
from fake_cuda import CardTensor, without_a_gpu  # noqa: E402
from listed_card import LIBRARIES, ListedCard, _opened, on_card  # noqa: E402
from machine_code import _named, _OnlyATarget, all_launches  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton import compiler  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend  # noqa: E402
from triton.runtime import cache as triton_cache  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from sdk import LLM, kernels  # noqa: E402
from sdk.bench.gpu import attention, engine, libraries, products, rows, weights  # noqa: E402
from sdk.kernels import context  # noqa: E402
from sdk.kernels.gpu import dense, tuning  # noqa: E402
from sdk.kernels.gpu.cache_keys import settle_cache_keys  # noqa: E402
from sdk.kernels.self_check import SelfCheck  # noqa: E402
from sdk.loading import load  # noqa: E402
from sdk.memory import planning  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
#: Of an H100 and an H200; numbers of programs decide which tiles are used.
PROCESSORS = 132
#: Rows of the bench that launch none of this package's kernels, or those of an earlier row.
NO_KERNELS = ("limits", "generate", "generate-batch", "flex", "idle", "step")
#: A kernel with options and facts: what Triton compiles once.
Wanted = tuple[ASTSource, Any]


@contextmanager
def listing() -> Iterator[list[Wanted]]:
    """Inside, every launch is listed once and nothing runs."""
    found: list[Wanted] = []
    run = JITFunction.run
    done = SimpleNamespace(
        launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
    )

    def note(
        kernel: Any, key: str, signature: Any, device: Any, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> None:  # fmt: skip
        found.append((ASTSource(kernel, signature, constants, attributes), options))
        kernel.device_caches[device][0][key] = done

    with all_launches(TARGET), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)  # whose arguments are not kept
        patch.setattr(JITFunction, "_do_compile", note)
        yield found


def files_of(kernel: Any) -> list[str]:
    """The sources of a kernel and of what it calls, below the repository."""
    seen: set[str] = set()
    files: set[Path] = set()
    left = [kernel]
    while left:
        function = left.pop()
        name = f"{function.module}.{function.__name__}"
        if name in seen or function.module.startswith("triton."):
            continue
        seen.add(name)
        files.add(Path(function.fn.__code__.co_filename).resolve())
        for node in ast.walk(function.parse()):
            called = _named(node, function.__globals__)
            if isinstance(called, JITFunction):
                left.append(called)
    return sorted(str(file.relative_to(ROOT.resolve())) for file in files)


# Compiling


@cache
def _own_library() -> str:
    file = Path(triton_cache.__file__).parents[1] / "_C" / "libtriton.so"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def key_of(source: ASTSource, options: Any, library: str) -> str:
    """Triton's key where ``libtriton.so`` has that hash and everything else is as here."""
    own = triton_cache.triton_key()
    if own.count(_own_library()) != 1:
        raise SystemExit(f"Triton {own[:8]}: its keys do not hold the hash of libtriton.so")
    there = own.replace(_own_library(), library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_cache, "triton_key", lambda: there)
        key = triton_cache.get_cache_key(
            source, make_backend(TARGET), options, get_cache_invalidating_env_vars()
        )
    return hashlib.sha256(key.encode()).hexdigest()


def compiled(wanted: Wanted, library: str) -> dict[str, Any]:
    """The line of a kernel: see the module."""
    source, options = wanted
    line: dict[str, Any] = {"name": source.name, "key": key_of(source, options, library)}
    try:
        with pytest.MonkeyPatch.context() as patch:  # kernels ask what they are compiled for
            patch.setattr(driver, "_active", _OnlyATarget(TARGET))
            made = compiler.compile(source, target=TARGET, options=options.__dict__)
    except Exception as error:  # whatever a compiler raises is a result
        return line | {"error": f"{type(error).__name__}: {error}"[:2000]}
    files = {name.rpartition(".")[2]: path for name, path in made.metadata_group.items()}
    return line | {
        "json": str(files["json"]), "cubin": str(files["cubin"]), "files": files_of(source.fn)
    }  # fmt: skip


def compile_all(found: Sequence[Wanted], library: str, workers: int) -> None:
    """Each key once, in processes that know the kernels already."""
    global _FOUND, _LIBRARY  # what children of a fork share
    settle_cache_keys()
    _FOUND, _LIBRARY = [*{key_of(*one, library): one for one in found}.values()], library
    print(f"{len(_FOUND)} kernels", file=sys.stderr, flush=True)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for line in pool.imap_unordered(_compile_one, range(len(_FOUND))):
            print(json.dumps(line), flush=True)


_FOUND: Sequence[Wanted] = ()
_LIBRARY = ""


def _compile_one(index: int) -> dict[str, Any]:
    return compiled(_FOUND[index], _LIBRARY)


# The tests of tests/card


@contextmanager
def zeros() -> Iterator[None]:
    """All memory begins as zeros, which cost nothing until they are written."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(
                torch, name, _named_as(getattr(torch, name.replace("empty", "zeros")), name)
            )
        patch.setattr(Tensor, "new_empty", Tensor.new_zeros)
        yield


def _named_as(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    made.__name__ = name
    return made


@contextmanager
def kernels_on_cpu_tensors() -> Iterator[None]:
    """The backend as on the card. A self-check launches what it would, and finds nothing wrong."""
    reason = SelfCheck._reason

    def passed(*arguments: Any) -> None:
        with contextlib.suppress(Exception):
            reason(*arguments)

    tiles = tuning.Tuning(4 * PROCESSORS, doubled=kernels.gpu.tuning.DOUBLED[9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.gpu, "available", lambda device: None)
        patch.setattr(kernels.gpu, "tuning_of", lambda device: tiles)
        patch.setattr(kernels.gpu, "matrix_type", lambda device: torch.bfloat16)
        patch.setattr(dense, "wide_sums", lambda device, dtype: True)
        patch.setattr(SelfCheck, "_reason", passed)
        yield


class NoProducts(TorchDispatchMode):
    """torch's own products are not computed; some exist on cards alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        if f"aten.{name}" in LIBRARIES and name != "index_select":
            return LIBRARIES[f"aten.{name}"]([], name, *args, **kwargs)
        if name not in ("mm", "_scaled_mm") or any(isinstance(x, CardTensor) for x in args):
            return func(*args, **kwargs)
        (m, _), n = args[0].shape, args[1].shape[1]
        dtype = kwargs.get("out_dtype") or args[0].dtype
        out = kwargs.get("out")
        return torch.zeros(m, n, dtype=dtype) if out is None else out


class Listed:
    """A plugin of pytest: which tests run, and engines on the fake card."""

    def __init__(self, *, engines: bool) -> None:
        self._engines = engines

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [x for x in items if ("engine_device" in x.fixturenames) == self._engines]

    @pytest.fixture(autouse=True)
    def _on_the_card(self) -> Iterator[None]:
        if not self._engines:
            yield
            return
        with fake_engines():
            yield


@contextmanager
def fake_engines() -> Iterator[None]:
    """Engines for a card are on the fake one, others on the CPU with its own kernels."""
    opened, device_of, init = context.open_backends, load._device, LLM.__init__
    on_the_card = False

    def open_backends(device: str, *args: Any, **kwargs: Any) -> Any:
        if not device.startswith("cuda"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels.gpu, "available", lambda device: "not on a CPU")
                return opened(device, *args, **kwargs)
        backends, missing = opened("cpu", *args, **kwargs)
        return [_Backend(backend, cuda) for backend in backends], missing

    def begin(llm: Any, *args: Any, **options: Any) -> None:
        nonlocal on_the_card
        on_the_card = options.pop("device", "cpu") == "cuda"
        if on_the_card:
            options.pop("gpu_memory_utilization", None)
            options.setdefault("kv_cache_memory_bytes", "4MiB")
        init(llm, *args, **options)

    def activations(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: torch.bfloat16 if on_the_card else of(*args)

    with without_a_gpu() as cuda, pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "open_backends", open_backends)
        patch.setattr(
            load, "_device", lambda config: "cuda:0" if on_the_card else device_of(config)
        )
        patch.setattr(LLM, "__init__", begin)
        for module in (planning, load):
            patch.setattr(module, "activations_of", activations(module.activations_of))
        yield


def run_tests(*, engines: bool) -> list[Wanted]:
    os.environ["CARD_TESTS_LISTED"] = "1"  # see tests/card/conftest.py
    options = ["-q", "-m", "gpu", "--assert=plain", "--tb=short", "--timeout=0"]
    with listing() as found, zeros(), kernels_on_cpu_tensors(), NoProducts():
        with contextlib.redirect_stdout(sys.stderr), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
            patch.setattr(np.testing, "assert_allclose", lambda *_, **__: None)
            pytest.main([*options, str(TESTS / "card")], plugins=[Listed(engines=engines)])
        return list(found)


# The rows of the bench


class RehearsingCard(ListedCard):
    """Runs everything once, as a rehearsal does."""

    def time(self, calls: Sequence[Callable[[], Any]], *, graph: bool = True) -> float:
        for call in calls:
            call()
        return 1.0

    def synchronize(self) -> None:
        pass


def run_bench() -> list[Wanted]:
    """A row that fails here is left out, which costs compiling on the card."""
    with on_card(TARGET, PROCESSORS, RehearsingCard) as (card, _), listing() as found:
        with NoProducts(), pytest.MonkeyPatch.context() as patch:
            for module, name in ((products, "_against_int4pack"), (attention, "_against_sdpa")):
                patch.setattr(module, name, lambda *_: iter(()))
            patch.setattr(weights.Weights, "_check", lambda *_: None)
            patch.setattr(attention, "check_case", lambda *_: None)
            patch.setattr(attention, "_fill", lambda *_: None)
            patch.setattr(libraries, "checked", lambda contest: None)
            patch.setattr(engine, "opened", _opened_here)
            for row in rows.ROWS:
                if row.name not in NO_KERNELS:
                    _run_row(card, row)
        return list(found)


def _run_row(card: ListedCard, row: Any) -> None:
    try:
        module = import_module(f"sdk.bench.gpu.{row.module}")
        for _ in getattr(module, row.function)(card):
            pass
    except Exception:
        print(f"left out: row {row.name}\n{traceback.format_exc()}", file=sys.stderr)


@contextmanager
def _opened_here(card: Any, config: dict[str, Any], kind: str, **options: Any) -> Iterator[Any]:
    """Two layers of a model have the kernels of all."""
    few = config | {"num_hidden_layers": min(2, config["num_hidden_layers"])}
    with _opened(card, few, kind, options) as (made, _):
        executor: Any = made._executor
        facts = SimpleNamespace(model_config=SimpleNamespace(vocab_size=config["vocab_size"]))
        yield SimpleNamespace(engine=made, runner=executor.runner, facts=facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("tests", "engines", "bench"))
    parser.add_argument("--library", required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    if options.task == "bench":
        found = run_bench()
    else:
        found = run_tests(engines=options.task == "engines")
    compile_all(found, options.library, options.workers)


if __name__ == "__main__":
    main()
