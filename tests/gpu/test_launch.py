"""Programmatic dependent launch is safe if a kernel waits before it reads or writes what others may
write."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels import gpu
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import launch

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
    parts = set().union(*map(called, found.values()))  # what other functions call is not a kernel
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


class _Kernel:
    """Keeps the options of its launches."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **named: self.options.append(named)


def options_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> _Kernel:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return _Kernel()


def test_dependent_launch_is_on_until_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = options_on(monkeypatch, (9, 0))
    launch.run_kernel(kernel, (1,))
    with launch.dependent_launch(False):
        launch.run_kernel(kernel, (1,))
        with launch.dependent_launch(True):
            launch.run_kernel(kernel, (1,))
    with pytest.raises(ZeroDivisionError), launch.dependent_launch(False):
        raise ZeroDivisionError
    launch.run_kernel(kernel, (1,))
    assert [x["launch_pdl"] for x in kernel.options] == [True, False, True, True]


def test_cards_without_dependent_launch_never_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = options_on(monkeypatch, (8, 9))
    for wanted in (True, False):
        with launch.dependent_launch(wanted):
            launch.run_kernel(kernel, (1,))
    assert [x["launch_pdl"] for x in kernel.options] == [False, False]


def test_the_environment_turns_dependent_launch_off() -> None:
    assert launch._Dependent("1").wanted and not launch._Dependent("0").wanted
    with pytest.raises(KernelError, match=r"EMBEDLM_GPU_PDL: expected 0 .* found 'off'"):
        launch._Dependent("off")


def test_fusing_is_said_and_not_left_to_triton_s_default(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = options_on(monkeypatch, (9, 0))
    launch.run_kernel(kernel, (1,))
    launch.run_kernel(kernel, (1,), enable_fp_fusion=False)
    assert [x["enable_fp_fusion"] for x in kernel.options] == [True, False]
