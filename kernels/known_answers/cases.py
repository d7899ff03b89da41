"""The inputs of known-answer checks, one case for each operator: see ``check.py``.

A case runs a kernel at a :class:`Place` and returns what it wrote: ``(what, values, limit)``. It
runs twice, with the same numbers: the kernel that is checked on the card, in the activations' type,
and the reference on the CPU in float32. Inputs are as wide as those that the kernel is chosen for
(``like``), so that the card runs the machine code that the engine will run; there are a few rows
of them, no multiple of a tile. Results are NaN before a kernel runs, so what it does not write is
found.

**Distances.** Values are compared in runs of 32 neighbours: the norm of the difference, as a share
of the run's norm. A value that is missing, or belongs elsewhere, changes its run by 0.18 or more
where it is as large as its neighbours; a scale that is wrong by a tenth changes each run by 0.1.

**Limits.** A number rounded to a type of machine epsilon e is wrong by at most e/2 of itself, and
so is a run. A kernel computes in float32 and rounds once when it writes; its operands may be
rounded once more before a product. That is less than 2 e for 16-bit types (2^-6 for bfloat16, 2^-9
for float16). Sums of n float32 numbers are wrong by sqrt(n) * 2^-24 on average: 2^-18 for 8192,
with elementary functions of a few units in the last place far below 2^-12. :meth:`Place.limit`
allows twice what follows from that, which is a third or less of what a mistake causes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.known_answers.pages import attend, find_places, latent_rope, rope
from sdk.kernels.known_answers.place import PRODUCT, Case, Found, Place, empty_routes, routes_on
from sdk.kernels.known_answers.states import STATE_CASES
from sdk.kernels.operators.low_rank import Factors, Shape, Update
from sdk.kernels.operators.mlp_activations import NUMBERS
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.rounding import Rounded
from sdk.kernels.operators.routes import Routes
from sdk.kernels.operators.sampling import (
    DRAW,
    Change,
    ChangeKind,
    SampleBuffers,
    Shape as RowShape,
    mask_of,
)
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.moe import GroupByExpert

__all__ = ["CASES", "Place", "distance"]

#: Rows of a case: less than a tile, and odd.
_ROWS = 5
_RUN = 32


def distance(found: Tensor, wanted: Tensor) -> float:
    """See the module; of integers the share that differs."""
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.is_floating_point():
        return float((found != wanted).double().mean())
    if not wanted.numel():
        return 0.0
    pairs = [x.double().reshape(-1, x.shape[-1]) for x in (found, wanted)]
    missing = -pairs[0].shape[1] % _RUN
    a, b = (torch.nn.functional.pad(x, (0, missing)).view(-1, _RUN) for x in pairs)
    norms = b.norm(dim=1)
    # a run whose numbers happen to be small has the errors of its row
    least = 0.25 * float(b.norm()) / math.sqrt(b.shape[0])
    away = (a - b).norm(dim=1) / norms.clamp(min=max(least, 1e-30))
    return float(away.max())


def _norm(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """``norm`` and ``add_norm``, and both as codes: like x, norm, what out is, and the
    :class:`Rounding` if it is one."""
    x, norm, out_type, rounding = like
    shape = (_ROWS, *x.shape[1:])
    wide = x.dtype == torch.float32
    mean = 2.0 if norm.centred else 0.0  # something to take away
    rows = (place.floats if wide else place.rows)(*shape, seed=1, mean=mean)
    given: list[Any] = [rows]
    if problem.op == "add_norm":
        given.append(place.floats(*shape, seed=2))
    sums = [("the sum", given[1], place.limit(torch.float32))] if len(given) == 2 else []
    given.append(_norm_like(norm, place))
    if rounding is not None:
        out = _rounded_norm(kernel, place, given, rounding)
        return [("the norm in codes", out, _CODES), *sums]
    out = place.nan(*shape, dtype=place.given(out_type))
    kernel.run(*given, out)
    return [("the norm", out, place.limit(out_type)), *sums]


def _norm_like(norm: Norm, place: Place) -> Norm:
    weight, bias = norm.weight, norm.bias
    return Norm(
        None if weight is None else place.floats(*weight.shape, seed=3),
        1e-5,
        None if bias is None else place.floats(*bias.shape, seed=4),
        norm.centred,
    )


#: A code may be the next one where the norm lies between two: 1/127 or 1/16 of the largest value.
_CODES = 0.1


def _rounded_norm(kernel: Any, place: Place, given: Sequence[Any], rounding: Any) -> Tensor:
    """The values of the codes."""
    width = given[0].shape[-1]
    if not kernel.rounds:
        out = place.nan(_ROWS, width)
        kernel.run(*given, out)
        return fake_quantize(out.to(place.rounded).float(), rounding.scheme)
    codes = torch.zeros(_ROWS, rounding.columns, dtype=rounding.dtype, device=place.device)
    scales = place.nan(rounding.groups, _ROWS)
    rounded = Rounded(codes, scales, width)
    kernel.run_rounded(*given, rounded, rounding.scheme, place.short)
    size = rounding.columns // rounding.groups
    steps = scales.t().cpu().repeat_interleave(size, dim=1)
    return (codes.cpu().float() * steps)[:, :width]


def _gated(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (x,) = like
    given = place.rows(_ROWS, x.shape[1], seed=1) * 2  # exact in every type
    out = place.nan(_ROWS, x.shape[1] // 2, dtype=place.short)
    kernel.run(given, problem.format, out, _numbers(problem.format))
    return [(f"act(gate) * up with {problem.format}", out, place.limit(place.rounded))]


def _gate(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, gate = like
    given = place.rows(_ROWS, x.shape[1], seed=1)
    gates = place.rows(_ROWS, gate.shape[1], seed=2) * 2  # exact in every type
    kernel.run(given, gates, problem.format)
    return [(f"x times the {problem.format} of the gate", given, place.limit(place.rounded))]


def _activation(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (x,) = like
    given = place.rows(_ROWS, x.shape[1], seed=1) * 2  # exact in every type
    kernel.run(given, problem.format, given, _numbers(problem.format))
    return [(f"act(x) with {problem.format}", given, place.limit(place.rounded))]


def _numbers(kind: str) -> tuple[float, ...]:
    return (0.75, 1.25, 0.5, -1e-6)[: NUMBERS.get(kind, 0)]


def _map(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (x,) = like
    wide = x.dtype == torch.float32
    given = (place.floats if wide else place.rows)(_ROWS, x.shape[-1], seed=1)
    rounded = torch.float32 if wide else place.rounded
    match problem.op:
        case "zeros":
            given.fill_(math.nan)
            kernel.run(given)
            # a distance is a share of the norm
            return [("zeros", given + 1.0, 0.0)]
        case "add":
            kernel.run(given, place.rows(_ROWS, x.shape[-1], seed=2))
        case "add_bias":
            kernel.run(given, place.floats(x.shape[-1], seed=2))
        case _:
            kernel.run(given, None, 0.75)
    return [(problem.op, given, place.limit(rounded))]


def _select_rows(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (x,) = like
    wide = x.dtype == torch.float32
    make = place.floats if wide else place.rows
    given = make(7, x.shape[1], seed=1)
    out = place.nan(4, x.shape[1], dtype=given.dtype)
    kernel.run(given, place.integers([3, 0, 6, 6], torch.int64), out)
    return [("the rows", out, 0.0)]


def _place_rows(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (rows,) = like
    wide = place.floats(6, rows.shape[1] + 3, seed=1)
    index = place.integers([3, -1, 0, 5, -1], torch.int32)
    found: Found = []
    for add in (False, True):
        x = place.floats(_ROWS, rows.shape[1], seed=2)
        kernel.run(x, wide[:, 3:], index, add)
        found.append(("the rows added" if add else "the rows", x, 0.0))
    return found


def _take_columns(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (x,) = like
    wide = x.dtype == torch.float32
    given = (place.floats if wide else place.rows)(_ROWS, x.shape[1], seed=1)
    random = torch.Generator().manual_seed(2)
    order = torch.randperm(x.shape[1], generator=random).int().to(place.device)
    found: Found = []
    for back in (False, True):
        out = place.nan(_ROWS, x.shape[1], dtype=given.dtype)
        kernel.run(given, order, back, out)
        found.append(("the columns back" if back else "the columns", out, 0.0))
    return found


def _angles(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """Angles up to 130,000, and -1 to 1 for the last frequencies."""
    inv_freq, axes, shifts = like
    half = inv_freq.shape[0]
    positions = place.integers([4095, 0, 131071, 1, 77], torch.int64)
    given: tuple[Tensor, ...] = ()
    if axes is not None:  # frequencies of three axes, in turns
        given = (place.integers([i % 3 for i in range(half)], torch.int32),)
        if shifts is None:
            positions = torch.stack([positions, positions.flip(0), positions + 1])
        else:
            moved = [0, 0, -9, 3, 4, 1, 0, 2, 5, -7, 3, 3, 3, 3, 3]
            given = (*given, place.integers(moved, torch.int32).view(3, 5))
    frequencies = torch.logspace(0, -5, half, dtype=torch.float64).float().to(place.device)
    cos, sin = place.nan(5, half), place.nan(5, half)
    kernel.run(positions, frequencies, 1.25, cos, sin, *given)
    return [("cos", cos, 2.0**-11), ("sin", sin, 2.0**-11)]


def _route(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    logits, k, rule, bias = like
    given = place.floats(7, logits.shape[1], seed=1)
    given[3] = 0.5  # a tie: the first ones win
    if bias is not None:
        bias = place.floats(1, logits.shape[1], seed=2)[0]
        bias[: len(bias) // 2] = 0.25  # so that ties of logits stay ties
    chosen = place.integers([-1] * (7 * k), torch.int32).view(7, k)
    weights = place.nan(7, k)
    kernel.run(given, rule, bias, chosen, weights)
    return [("the experts", chosen, 0.0), ("their weights", weights, 2.0**-11)]


def _chosen(experts: int, k: int) -> Tensor:
    """Experts of 9 tokens: some have no row, one has many."""
    tokens = torch.arange(9)[:, None]
    return ((tokens * tokens // 3 + 2 * torch.arange(k)) % experts).int().contiguous()


def _group(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    chosen, experts = like
    k = chosen.shape[1]
    routes = empty_routes(place, 9, experts, k)
    kernel.run(_chosen(experts, k).to(place.device), routes)
    used = int(routes.active[-1])
    names = ("places", "tokens", "owners", "starts", "tiles")
    found: Found = [(name, getattr(routes, name), 0.0) for name in names]
    return [*found, ("active", routes.active[: max(0, min(used, experts))], 0.0)]


def _grouped(place: Place, experts: int, k: int) -> Routes:
    """Routes that the reference has filled."""
    host = empty_routes(place.on_host(), 9, experts, k)
    GroupByExpert().run(_chosen(experts, k), host)
    return routes_on(place.device, host)


def _owners_bias(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, experts, k = like
    routes = _grouped(place, experts, k)
    given = place.rows(9 * k, x.shape[1], seed=1)
    kernel.run(given, place.floats(experts, x.shape[1], seed=2), routes)
    return [("x + bias", given, place.limit(place.rounded))]


def _combine(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, experts, k, shared, gate = like
    routes = _grouped(place, experts, k)
    out = place.nan(9, x.shape[1])
    beside = None if shared is None else place.floats(9, x.shape[1], seed=2)
    gate = None if gate is None else place.floats(9, 1, seed=3)
    kernel.run(place.rows(9 * k, x.shape[1], seed=1), routes, out, beside, gate)
    return [("the sum of the experts", out, place.limit(torch.float32))]


def _low_rank(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """Two adapters of different ranks, one with a bias, rows without one between them."""
    shape, dtype = like
    shape = Shape(max(2, min(shape.slots, 3)), *shape[1:])
    table = kernel.table(shape, dtype, place.device)
    for slot, rank in ((0, shape.max_rank), (1, min(7, shape.max_rank))):
        parts = []
        for part in range(min(shape.parts, 2)):
            count = shape.out_features // min(shape.parts, 2)
            a = place.floats(rank, shape.in_features, seed=10 * slot + part).to(dtype)
            b = place.floats(count, rank, seed=100 + slot + part).to(dtype)
            nbytes = table.factor_bytes(rank, part * count, count)
            memory = torch.empty(nbytes + 64, dtype=torch.uint8, device=place.device)
            memory = memory[-memory.data_ptr() % 64 :][:nbytes]
            scale = 0.5 / math.sqrt(rank * (1 if shape.of_ids else shape.in_features))
            parts.append(table.place(Factors(a, b, part * count, scale), memory))
        bias = place.floats(shape.out_features, seed=7) if slot else None
        table.write(slot, Update(tuple(parts), bias))
    rows = 21
    slots = place.integers([(-1, 0, 1, 0)[i * i % 7 % 4] for i in range(rows)], torch.int32)
    if shape.of_ids:
        ids = [(37 * i) % shape.in_features for i in range(rows)]
        x = place.integers(ids, torch.int64)
    else:
        x = place.rows(rows, shape.in_features, seed=5)
    y = place.rows(rows, shape.out_features, seed=6)
    table.add(x, y, slots)
    return [("y + b a x", y, PRODUCT)]


def _sample(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """Greedy rows and drawn ones, with every truncation, XTC, mirostat, penalties and a mask."""
    (logits,) = like
    width = logits.shape[1]
    rows = 8
    given = place.floats(rows, width, seed=1) * 3
    out = SampleBuffers(rows)
    draws = np.zeros(rows, DRAW)
    draws["temperature"] = [0.0, 0.7, 1.0, 0.9, 0.8, 0.0, 1.0, 0.9]
    draws["top_k"] = [0, 40, 0, 0, 5, 0, 50, 0]
    draws["top_p"] = [1.0, 0.9, 1.0, 0.8, 1.0, 1.0, 1.0, 1.0]
    draws["min_p"] = [0.0, 0.0, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0]
    draws["typical_p"] = [1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0]
    # of the largest of 262,144 such logits the probability is about 0.03, 5 bits of surprise
    draws["xtc_threshold"] = [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.01, -1.0]
    draws["mirostat_mu"] = [math.nan] * 7 + [8.0]
    draws["uniform"] = [0.0, 0.31, 0.73, 0.52, 0.88, 0.0, 0.4, 0.6]
    out.draws[:] = draws
    some = np.unique(np.linspace(0, width - 1, min(width, 300)).astype(np.int32))
    add = Change(ChangeKind.ADD, some[:7], np.full(min(7, len(some)), 2.5, np.float32))
    penalize = Change(ChangeKind.PENALIZE, some, np.ones(len(some)), (1.3, 0.2, 0.5))
    out.set_shape(4, RowShape(mask_of(some), (add,)))
    out.set_shape(5, RowShape(None, (penalize,)))
    kernel.run(given, out.draws, out)
    found = out.read(rows)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (found.best, found.probabilities))
    best, probabilities = (x[:, None] for x in numbers)
    return [
        ("the tokens", torch.tensor(found.tokens), 0.0),
        ("the best logits", best, 2.0**-16),
        ("the probabilities", probabilities, 2.0**-11),
    ]


CASES: dict[str, Case] = {
    "norm": _norm,
    "add_norm": _norm,
    "gated_activation": _gated,
    "gate": _gate,
    "activation": _activation,
    **dict.fromkeys(("zeros", "add", "add_bias", "scale", "softcap", "clamp"), _map),
    "select_rows": _select_rows,
    "place_rows": _place_rows,
    "take_columns": _take_columns,
    "rope_angles": _angles,
    "find_places": find_places,
    "rope_and_cache": rope,
    "latent_rope_and_cache": latent_rope,
    "attention": attend,
    "route": _route,
    "group": _group,
    "add_owners_bias": _owners_bias,
    "combine": _combine,
    "low_rank": _low_rank,
    "sample": _sample,
    **STATE_CASES,
}
