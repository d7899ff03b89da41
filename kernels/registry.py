"""Selects the kernel for each operator and weight.

``choose`` asks the implementations of an op in order, fastest backend first, and selects the first
whose ``reject`` returns ``None``, once, at load. It keeps the reasons of the others, so that
``llm.explain()`` can show why a layer runs where it does. ``kernels/reference`` rejects nothing:
every format runs on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from sdk.kernels.backend import Backend, BackendFacts, Choice, Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.host.torch_import import torch_module
from sdk.kernels.packages import check_installed
from sdk.kernels.weights.layouts import Affine, Blocks, Dense, Float8, Layout, inputs_of
from sdk.kernels.weights.offload import OnDisk

#: Backends, best first. A backend is a folder here with ``available``, ``open_backend`` and
#: ``ACTIVATIONS``, the activation types of its operators. Memory plans use a device's best backend
#: through :class:`sdk.kernels.backend.BackendFacts`.
BACKENDS = ("gpu", "cpu", "reference")
_BEST = {"cuda": "gpu", "cpu": "cpu"}


def facts_of(device: str) -> BackendFacts:
    """The facts of the best backend for ``device``, whether or not it can run here."""
    return cast("BackendFacts", import_module(f"sdk.kernels.{_BEST[device.partition(':')[0]]}"))


def open_backends(
    device: str,
    num_threads: int,
    only: Sequence[str] | None = None,
    *,
    fixed: bool = False,
    activations: str = "float32",
    offload: OnDisk | None = None,
) -> tuple[list[Backend], tuple[tuple[str, str], ...]]:
    """Open every backend that runs here: ``(backends, ((name, why not available), ...))``.

    ``fixed``, ``activations`` and ``offload``: see :class:`sdk.kernels.operators.ops.Ops`.
    """
    opened: list[Backend] = []
    missing: list[tuple[str, str]] = []
    for name in only or BACKENDS:
        module = import_module(f"sdk.kernels.{name}")
        reason = module.available(device)
        if reason is None and activations not in module.ACTIVATIONS:
            reason = f"its operators do not support {activations} activations"
        if reason is None:
            opened.append(module.open_backend(device, num_threads, fixed=fixed, offload=offload))
        else:
            missing.append((name, reason))
    if [backend.name for backend in opened] == ["reference"]:
        why = "; ".join(reason for name, reason in missing if name != "gpu" or device != "cpu")
        torch_module("the reference backend, which runs everything here" + (why and f" ({why}),"))
    return opened, tuple(missing)


def choose(
    backends: Sequence[Backend],
    problem: Problem,
    check: Callable[[Any], str | None] = lambda implementation: None,
) -> Choice:
    """The first implementation that accepts ``problem`` and for which ``check`` finds no reason.

    :raises KernelError: there is none.
    :raises MissingPackageError: only a reference kernel does, and torch is not installed.
    """
    declined: list[tuple[str, str]] = []
    for backend in backends:
        for implementation in backend.implementations(problem.op):
            if getattr(implementation, "rounds_inputs", False) and not problem.rounded:
                continue
            reason = implementation.reject(problem)
            if reason is None:
                reason = check(implementation)
            if reason is None:
                if backend.name == "reference":  # not by the first request, which needs it
                    check_installed("torch", _on_reference(problem, declined))
                return Choice(implementation, tuple(declined))
            declined.append((implementation.name, reason))
    why = "; ".join(f"{name}: {reason}" for name, reason in declined) or "no backend has this op"
    raise KernelError(f"no kernel runs {problem}: {why}")


def _on_reference(problem: Problem, declined: Sequence[tuple[str, str]]) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in declined)
    return f"{problem} runs on the reference backend only{why and f' ({why})'}, which needs"


def linear_problem(layout: Layout, compute: str, activation_bits: int) -> Problem:
    """The problem of multiplying with a weight."""
    match layout:
        case Dense() | Float8():
            fields: dict[str, Any] = {
                "layout": "dense" if isinstance(layout, Dense) else "float8",
                "format": str(layout.values.dtype).removeprefix("torch."),
                "group": layout.block[1] if isinstance(layout, Float8) else 0,
            }
        case Affine():
            kind = "" if layout.table is None else "table"
            fields = {"layout": "affine", "format": kind}
            fields |= {"bits": layout.bits, "group": layout.group}
            if layout.scale_table is None:  # else super groups cross row ends
                fields["super_group"] = layout.super_group
        case Blocks():
            fields = {"layout": "blocks", "format": layout.type}
    out_features, in_features = layout.shape
    scheme = None if compute == "exact" else inputs_of(layout)
    return Problem(
        "linear",
        compute=compute,
        in_features=in_features,
        out_features=out_features,
        activation_bits=activation_bits,
        inputs="" if scheme is None else str(scheme),
        **fields,
    )
