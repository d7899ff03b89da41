"""Programmatic dependent launch is safe if a kernel waits before it reads or writes what others may
write."""

from __future__ import annotations

import ast
from pathlib import Path

from sdk.kernels import gpu

FOLDER = Path(gpu.__file__).parent
#: Kernels that load weights first, and the functions they may call for that.
LOADS_WEIGHTS = {"product_one.product_one": {"tile_rows", "load_planes"}}


def functions() -> dict[str, ast.FunctionDef]:
    """Triton's functions, by name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(one) for one in node.decorator_list
            ):
                found[f"{path.stem}.{node.name}"] = node
    return found


def called(node: ast.AST) -> set[str]:
    return {
        one.func.id
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
    }


def test_every_kernel_waits_for_earlier_ones_first() -> None:
    found = functions()
    parts = set().union(*map(called, found.values()))  # what other functions call is no kernel
    kernels = {name: node for name, node in found.items() if node.name not in parts}
    assert len(kernels) >= 32
    for name, node in kernels.items():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        at = [ast.unparse(one) for one in body].index("after_earlier()")
        before = set().union(*map(called, body[:at]))
        assert before == LOADS_WEIGHTS.get(name, set()) and (at == 0) == (not before), name
        assert "after_earlier" not in set().union(*map(called, body[at + 1 :])), name
        early = {x.attr for one in body[:at] for x in ast.walk(one) if isinstance(x, ast.Attribute)}
        assert early <= {"program_id", "minimum"}, name  # no loads and stores but those of weights
    assert {name for name, node in found.items() if "after_earlier" in called(node)} == {*kernels}


def test_kernels_are_launched_in_one_place() -> None:
    for path in FOLDER.glob("*.py"):
        launches = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and not isinstance(node.func.slice, ast.Constant)
        ]
        assert len(launches) == (path.stem == "launch"), path
