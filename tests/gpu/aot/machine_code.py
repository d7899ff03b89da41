"""Kernels compiled for cards that are not here, and what there is to say of their machine code.

A launcher runs on tensors of the CPU with a driver that knows a target and nothing else; what it
would launch is listed (:func:`all_launches`) with the types and facts that Triton finds in the
arguments, and may be compiled. Triton must not interpret here, so the programs beside this file do
it in processes of their own; :func:`answer` is their protocol.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import sass
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sdk.kernels.gpu import launch

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Source:
    """One kernel as it would be compiled for a target."""

    code: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.code.name)

    @property
    def constants(self) -> dict[str, Any]:
        names = self.code.fn.arg_names
        return {names[i]: x for (i, *_), x in self.code.constants.items()}

    @cached_property
    def key(self) -> str:
        """Of all that the machine code depends on; words about code and places of files are not."""
        constants = [
            (i, written(x) if isinstance(x, JITFunction) else str(x))
            for i, x in sorted(self.code.constants.items())
        ]
        facts = sorted(self.code.attrs.items()), sorted(self.code.signature.items())
        return _hash([*self._compiler, constants, facts, written(self.code.fn)])

    @cached_property
    def ir(self) -> str:
        """Of what the compiler's second half gets: Triton's IR, functions inlined and constants
        folded, without places in files. It takes a tenth of compiling (0.1 to 0.4 s).

        Equal for another key, the machine code is the same: what changed is not reached with these
        constants.
        """
        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, self.code.language)
        with self._asked():
            functions = backend.get_codegen_implementation(options)
            modules = backend.get_module_map()
            module = self.code.make_ir(self.target, options, functions, modules, context)
            text = stages["ttir"](module, {}).str_nodebug()
        return _hash([*self._compiler, text])

    def compile(self) -> Any:
        with self._asked():
            return triton.compile(self.code, target=self.target, options=self.options)

    @property
    def _compiler(self) -> list[Any]:
        options = sorted((k, x) for k, x in self.options.items() if k != "extern_libs")
        return [triton.__version__, self.target, options]

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Kernels ask what they are compiled for."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "_active", _OnlyATarget(self.target))
            yield


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@cache
def written(kernel: Any) -> list[str]:
    """What a kernel and all that it calls do, and the constants they see."""
    constants: set[str] = set()
    done: dict[str, str] = {}
    left = [kernel]
    while left:
        function = left.pop()
        _ = function.cache_key  # looks up its constants, those of what it calls only sometimes
        for (name, _), (value, where) in function.used_global_vals.items():
            if not where["__name__"].startswith("triton."):
                constants.add(f"{where['__name__']}.{name} = {value}")
        tree = function.parse()
        body = tree.body[0].body
        if ast.get_docstring(tree.body[0]) is not None:
            body[:1] = [ast.Pass()] if len(body) == 1 else []
        done[f"{function.module}.{function.__name__}"] = ast.unparse(tree)
        for node in ast.walk(tree):
            found = _named(node, function.__globals__)
            own = isinstance(found, JITFunction) and not found.module.startswith("triton.")
            if own and f"{found.module}.{found.__name__}" not in done:
                left.append(found)
    return [*sorted(constants), *(done[name] for name in sorted(done))]


def _named(node: ast.AST, names: dict[str, Any]) -> Any:
    """The global that ``name`` or ``module.name`` stands for."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_named(node.value, names), node.attr, None)
    return None


class _OnlyATarget:
    """What a launch asks a driver for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> GPUTarget:
        return self._target  # Triton keeps what it compiled by device

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True)
class Started:
    """A launch: what would be compiled, the grid, and all arguments by name."""

    source: Source
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


@contextmanager
def all_launches(target: GPUTarget) -> Iterator[list[Started]]:
    """Every launch inside, in order, for that target; nothing is compiled or run."""
    listed: list[Started] = []
    given: list[tuple[Any, dict[str, Any]]] = []
    run = JITFunction.run

    def run_later(kernel: Any, *arguments: Any, grid: Any, **named: Any) -> Any:
        given.append((grid, {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}))
        return run(kernel, *arguments, grid=grid, **named)

    def compile_later(
        kernel: Any, key: str, signature: Any, device: Any, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> None:  # fmt: skip
        code = ASTSource(kernel, signature, constants, attributes)
        grid, arguments = given.pop()
        shape = (*grid, 1, 1)[:3]
        listed.append(Started(Source(code, target, options.__dict__), shape, arguments))

    patch = pytest.MonkeyPatch()
    patch.setattr(JITFunction, "run", run_later)
    patch.setattr(JITFunction, "_do_compile", compile_later)
    patch.setattr(driver, "_active", _OnlyATarget(target))
    patch.setattr(launch, "REACHED", "cpu")
    capability = divmod(target.arch, 10) if target.backend == "cuda" else (9, 4)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.version, "hip", "7" if target.backend == "hip" else None)
    try:
        yield listed
    finally:
        patch.undo()


@contextmanager
def launches(target: GPUTarget) -> Iterator[list[Source]]:
    """What would be compiled for the launches inside, each once."""
    found: list[Source] = []
    with all_launches(target) as listed:
        yield found
    found += {started.source.key: started.source for started in listed}.values()


#: Of how many numbers a loop of a kernel makes use in a turn, as a product of constants: weights,
#: or numbers of keys and values.
_OF_A_TURN = {
    "product": ("BLOCK_N", "UNIT"),
    "product_one": ("BLOCK_N", "UNIT"),
    "product_dense": ("BLOCK_N", "BLOCK_K"),
    "decode_kernel": ("BLOCK_N", "BLOCK_D"),
    "prefill_kernel": ("BLOCK_N", "BLOCK_D"),
    "shared_kernel": ("BLOCK_N", "BLOCK_D"),
}
_KEYS_AND_VALUES = ("decode_kernel", "prefill_kernel", "shared_kernel")


def of_a_turn(source: Source) -> int:
    """See :data:`_OF_A_TURN`; 0 for other kernels."""
    names = _OF_A_TURN.get(source.name)
    if names is None:
        return 0
    count = math.prod(source.constants[name] for name in names)
    return 2 * count if source.name in _KEYS_AND_VALUES else count


def findings(source: Source, *, read: bool | None = None) -> dict[str, Any]:
    """Compile. ``stack`` in bytes, where spilled registers lie too.

    ``read``: also the numbers of ``sass.py``, which takes half as long as compiling (0.4 s); by
    default for Hopper, whose code is judged by them. ``per_number``: instructions of a thread of
    the main loop for each weight, or number of keys and values, as if each was one thread's.
    """
    made = source.compile()
    warps = source.options["num_warps"]
    found = {"shared": made.metadata.shared, "warps": warps}
    if source.target.backend != "cuda":
        code = made.asm["amdgcn"]
        names = {
            "registers": "vgpr_count",
            "stack": "private_segment_fixed_size",
            "spills": "vgpr_spill_count",
        }
        numbers = {key: re.search(rf"\.{name}:\s*(\d+)", code) for key, name in names.items()}
        return found | {key: int(number[1]) for key, number in numbers.items() if number}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        wanted = source.target.arch == 90 if read is None else read
        code = _tool("nvdisasm", "-c", file.name) if wanted else None
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    found |= {"registers": int(registers[1]), "stack": int(registers[2])}
    if code is None:
        return found
    found |= sass.facts(code)
    if numbers_of_a_turn := of_a_turn(source):
        threads = warps * source.target.warp_size
        found["per_number"] = round(found["loop"] * threads / numbers_of_a_turn, 2)
    return found


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def answer(sources: Callable[[Any], Sequence[Source]]) -> None:
    """Read ``{"jobs": [...], "wanted": [keys] or null}``, write a line of JSON per kernel of a job.

    A kernel that is not wanted is not compiled: its line has the job, the kernel's name and the
    key. One that is has :attr:`Source.ir` too. One that fails to compile has ``error``; the others
    go on. ``"known": {key: ir}``: of a wanted kernel with that IR everything else is known, so it
    is not compiled; ``""`` stands for whatever IR it has. ``"read": true``: the instructions of
    every NVIDIA card are read (:func:`findings`).
    """
    request = json.load(sys.stdin)
    wanted, known, read = request["wanted"], request.get("known", {}), request.get("read")
    for job in request["jobs"]:
        for source in sources(job):
            line = {"job": job, "kernel": source.name, "key": source.key}
            if wanted is None or source.key in wanted:
                try:
                    line["ir"] = source.ir
                    if known.get(source.key) not in ("", source.ir):
                        line |= findings(source, read=read)
                except Exception as error:  # whatever a compiler raises is a result
                    line["error"] = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps(line), flush=True)
