"""What was measured, committed: one JSON per base, a line per row, and what counts as worse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.accuracy.points import Point, Tier

FOLDER = Path(__file__).parent / "baselines"


@dataclass(frozen=True)
class Row:
    """Divergences in nats; ``bits`` of all tensors, ``layer_bits`` of the matrices of layers.

    Speeds are one sample, for information: nothing is compared with them.
    """

    kld: float
    p99: float
    top1: float
    perplexity: float
    bits: float
    layer_bits: float
    weight_bytes: int
    kv_bytes: int
    prompt: int
    decode: int


#: Up to this much more is the same: (relative, absolute). The arithmetic of one machine and one
#: thread of torch repeats itself bit for bit. SIMD levels add in another order, which moves codes
#: of keys and values to their neighbours: k8v4 of SmolLM2 loses 0.00593 with AVX-512, 0.00647 with
#: AVX2 and 0.00637 without SIMD over the short tier's 256 positions; 0.00582 with AVX-512 and
#: 0.00568 with AVX2 over 2,048.
#: So the short tier's rows of integer pages are the worst of three levels: for int4 pages of
#: SmolLM2 a perplexity of 17.7 with AVX-512, 17.9 with AVX2 and 18.4 without SIMD.
ROOM: Mapping[Tier, Mapping[str, tuple[float, float]]] = {
    "short": {"kld": (0.12, 5e-5), "p99": (0.25, 5e-4), "perplexity": (0.005, 0.0)},
    "full": {"kld": (0.03, 5e-5), "p99": (0.15, 5e-4), "perplexity": (0.005, 0.0)},
}
#: Positions whose likeliest token may change sides: 4 of 256, 12 of 2,048.
TOP1_ROOM: Mapping[Tier, float] = {"short": 0.016, "full": 0.006}
#: Bytes are arithmetic.
EXACT = ("weight_bytes", "kv_bytes")

Rows = dict[Point, Row]


def worse(known: Row, found: Row, tier: Tier) -> list[str]:
    """What of ``found`` is worse than ``known``, in words; ``tier``: what both were measured on."""
    wrong = []
    for name, (relative, absolute) in ROOM[tier].items():
        before, now = getattr(known, name), getattr(found, name)
        if not now <= before * (1 + relative) + absolute:  # NaN is worse too
            wrong.append(f"{name} {before:.5g} -> {now:.5g}")
    if not found.top1 >= known.top1 - TOP1_ROOM[tier]:
        wrong.append(f"top1 {known.top1:.4f} -> {found.top1:.4f}")
    for name in EXACT:
        before, now = getattr(known, name), getattr(found, name)
        if now > before:
            wrong.append(f"{name} {before} -> {now}")
    return wrong


def read(base: str, tier: Tier) -> Rows:
    """Empty where nothing is committed yet."""
    return {Point.parse(name): Row(**row) for name, row in _content(base).get(tier, {}).items()}


def write(base: str, tier: Tier, rows: Mapping[Point, Row]) -> None:
    """A line per row, so that a change shows as the rows it changes."""
    content = {**_content(base), tier: {str(point): asdict(row) for point, row in rows.items()}}
    parts = []
    for name in ("full", "short"):
        lines = [
            f"    {json.dumps(key)}: {json.dumps(row)}"
            for key, row in content.get(name, {}).items()
        ]
        parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    _path(base).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _content(base: str) -> dict[str, dict[str, dict[str, float]]]:
    path = _path(base)
    found: dict[str, dict[str, dict[str, float]]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    )
    return found


def _path(base: str) -> Path:
    return FOLDER / f"{base}.json"
