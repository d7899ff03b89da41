"""What a launch does, for ``sdk/bench/gpu/roofline.py``: bytes, products and instructions.

Taken from the launch's own arguments (``machine_code.Started``) and from its machine code: the main
loop's instructions times its turns, and the rest once. Weights, keys and values are read from
memory, and everything else once as well. Loops of other kernels than products and attention are
not counted: those kernels are as short as their launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from listed_card import DecodeStep, TorchLaunch
from machine_code import Started
from torch import Tensor

from sdk.bench.gpu import roofline
from sdk.bench.gpu.roofline import Assumptions, Device, Work
from sdk.kernels.gpu import byte_rows, scratch

#: Numbers of :func:`machine_code.findings`.
Numbers = Mapping[str, float]
#: Tensors that are read in part: by pages, or by rows.
_PAGES = ("k", "v", "k_scale", "v_scale", "k_codes", "v_codes", "k_centre")
_WEIGHTS = (
    *("w0", "w1", "w2", "scale", "super_scale", "nested", "offset", "zeros", "minus"),
    *("super_minus", "table", "w"),
)
_ATTENTION = ("decode_kernel", "prefill_kernel", "shared_kernel")


def work_of(started: Started, found: Numbers) -> Work:
    """The work of one launch."""
    name = started.source.name
    common: dict[str, Any] = {
        "kernel": name,
        "programs": math.prod(started.grid),
        "warps": int(found["warps"]),
        "registers": int(found["registers"]),
        "shared": int(found["shared"]),
        "overlaps": bool(started.source.options.get("launch_pdl")),
    }
    if name in _ATTENTION:
        return _attention(started, found, common)
    if name.startswith("product"):
        return _product(started, found, common)
    whole = _nbytes(started, _PAGES + _WEIGHTS)
    if name == "decode_rows":
        n, out = started.arguments["N"], started.arguments["out"]
        whole += _nbytes(started, (), only=_WEIGHTS) * out.shape[0] / n
    if "BY_ROW" in started.source.constants:  # of an embedding, the rows that are written
        whole = 2.0 * started.arguments["out"].nbytes
    each = _instructions(found, 0)
    return Work(**common, read=whole, in_flight=whole / common["programs"], **each)


def _nbytes(started: Started, without: Sequence[str], only: Sequence[str] | None = None) -> float:
    """Bytes of the arguments, each memory once."""
    tensors = {
        (x.data_ptr(), x.nbytes): x.nbytes
        for name, x in started.arguments.items()
        if isinstance(x, Tensor) and name not in without and (only is None or name in only)
    }
    return float(sum(tensors.values()))


def _instructions(found: Numbers, turns: float) -> dict[str, float]:
    """Of a program whose main loop makes this many turns."""
    warps = found["warps"]
    each = {"instructions": "loop", "alu": "loop_alu", "fma": "loop_fma"}
    return {
        name: warps * (found.get(name, 0) - found.get(loop, 0) + found.get(loop, 0) * turns)
        for name, loop in each.items()
    }


def _stages(started: Started) -> int:
    """Turns whose loads are under way; ``product_one`` loads one turn ahead."""
    matrix = started.source.name != "product_one"
    return max(1, started.source.options["num_stages"] - 1) if matrix else 1


def _product(started: Started, found: Numbers, common: dict[str, Any]) -> Work:
    given, constants = started.arguments, started.source.constants
    weights = _nbytes(started, (), only=_WEIGHTS)
    rest = _nbytes(started, (*_WEIGHTS, "counters"))
    if given.get("parts") is not None:  # written, and read by the last program of a tile
        rest += given["parts"].nbytes
    n, m = given["N"], given.get("M", 1)
    unit = constants.get("UNIT") or constants.get("BLOCK_K") or byte_rows.STEP
    units = given.get("units") or -(-given["K"] // unit)
    columns = units * unit
    turns = given.get("share", units)
    tile = weights / (n * columns) * constants["BLOCK_N"] * unit
    if constants.get("ROUTED"):  # the arguments are the first expert's; all are read
        weights *= given["offsets"].shape[0]
    macs = 0.0
    if found.get("matrix"):
        macs = float(n * columns * -(-m // constants["BLOCK_M"]) * constants["BLOCK_M"])
    return Work(
        **common,
        read=weights + rest,
        in_flight=tile * _stages(started),
        macs=macs,
        narrow=started.source.name == "product_bytes",
        **_instructions(found, turns),
    )


def _attention(started: Started, found: Numbers, common: dict[str, Any]) -> Work:
    """Programs without keys end at once and are not counted; the others have as many on average."""
    given, constants = started.arguments, started.source.constants
    lengths = given["context_len"].tolist()
    queries = given["query_start"].diff().tolist()
    block, kv_heads, width = constants["BLOCK_N"], given["kv_heads"], constants["HEAD_DIM"]
    page = given["k"].shape[1] * given["k"].shape[2]
    of_token = sum(
        given[name][0].nbytes / page
        for name in ("k", "v", "k_scale", "v_scale")
        if _own(given, name)
    )
    if started.source.name == "prefill_kernel":
        rows = constants["BLOCK_M"] // constants["GROUP"]
        tiles = [
            (length - count + min((i + 1) * rows, count), kv_heads)
            for length, count in zip(lengths, queries, strict=True)
            for i in range(-(-count // rows))
        ]
    else:
        split = scratch.SPLIT
        while split * constants["MAX_SPLITS"] < max(lengths):
            split *= 2
        tiles = [
            (min(split, length - start), kv_heads)
            for length in lengths
            for start in range(0, length, split)
        ]
        common |= _joining(constants, -(-max(lengths) // split))
    programs = sum(heads for _, heads in tiles)
    turns = sum(-(-keys // block) * heads for keys, heads in tiles) / programs
    pairs = sum(keys * heads for keys, heads in tiles) * constants["BLOCK_M"]
    common["programs"] = programs
    return Work(
        **common,
        read=sum(lengths) * kv_heads * of_token,
        written=float(given["q"].nbytes + given["out"].nbytes),
        in_flight=of_token * block * _stages(started),
        macs=float(2 * pairs * width) if found.get("matrix") else 0.0,
        **_instructions(found, turns),
    )


def _joining(constants: Mapping[str, Any], parts: int) -> dict[str, float]:
    """What the last program of a request and key head adds up. The maxima are loaded four at a
    time, as the compiler unrolls that loop, or all at once."""
    if parts < 2 or "BLOCK_S" not in constants:
        return {}
    at_once, maxima = constants["BLOCK_S"], parts / 4
    if constants["JOIN_M"]:
        at_once, maxima = constants["JOIN_S"], 1
    of_part = 4 * constants["GROUP"] * (constants["HEAD_DIM"] + 2)
    return {"joined": parts * of_part, "turns": maxima + -(-parts // at_once)}


def _own(given: Mapping[str, Any], name: str) -> bool:
    """Whether these are scales of their own, and no stand-in for missing ones."""
    codes = name.partition("_")[0]
    return name == codes or given[name].data_ptr() != given[codes].data_ptr()


def torch_seconds(device: Device, launch: TorchLaunch, given: Assumptions) -> float:
    """Predicted seconds of one of torch's launches in a graph. Kernels of libraries that are no
    plain products are as good as those: at the same share of the peak."""
    if launch.product is not None:
        m, n, k = launch.product
        return roofline.library(device, m, n, k, given, narrow=launch.narrow)
    moving = launch.nbytes / (device.bandwidth * given.bandwidth)
    if launch.macs:
        multiplying = 2 * launch.macs / (device.tflops * given.library)
        return given.graph_launch + max(moving, multiplying)
    return given.graph_launch + max(moving, given.latency)


def weight_bytes(step: DecodeStep) -> float:
    """Bytes of the matrices that a step multiplies with."""
    own = [x for x in step.kernels if x.source.name.startswith("product")]
    library = [x.product for x in step.torch if x.product is not None]
    return sum(_nbytes(x, (), only=_WEIGHTS) for x in own) + sum(2 * n * k for _, n, k in library)


def step_seconds(
    device: Device, step: DecodeStep, found: Mapping[str, Numbers], given: Assumptions
) -> float:
    """Predicted seconds of all launches of a step. ``found``: what was found, by key."""
    works = [work_of(started, found[started.source.key]) for started in step.kernels]
    own = sum(roofline.seconds(device, work, given) for work in works)
    return own + sum(torch_seconds(device, x, given) for x in (*step.torch, *step.outside))
