"""What is made of the baselines: tables and pictures of docs/quantization.md, expected losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.api.errors import QuantizationError
from sdk.quant.scheme import Scheme
from tests.accuracy import baselines
from tests.accuracy.baselines import Row, Rows
from tests.accuracy.measuring import ROOT, is_online
from tests.accuracy.points import BASES, CONTEXT, KV_TYPES, SERVED, Base, Point

PAGE = ROOT / "docs" / "quantization.md"
LOSSES = ROOT / "quant" / "expected_loss.json"


def write_documents() -> None:
    """Everything that is made of the baselines, anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    LOSSES.write_text(expected_losses(), encoding="utf-8")
    for base in BASES.values():
        draw(base, ROOT / "docs" / f"frontier-{base.name}.png")


def filled(page: str) -> str:
    """The page with every table made anew, between its marks ``<!-- name -->``."""
    tables = {f"weights {base.name}": weights_table(base) for base in BASES.values()}
    for name, table in {**tables, "kv": kv_table(), "served": served_table()}.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, rest = page.split(begin)
        page = before + begin + table + end + rest.split(end)[1]
    return page


def weights_table(base: Base) -> str:
    """The weights alone, from least to most lost, and what has no row yet."""
    known = baselines.read(base.name, "full")
    rows = _alone(known)
    lines = ["| scheme | bits of a layer | of all | KLD | KLD p99 | top-1 % | perplexity |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for point, row in sorted(rows.items(), key=lambda item: item[1].kld):
        name = point.scheme + (" with text" if point.scheme != point.weights else "")
        name += " (at load)" if is_online(point.scheme) else ""
        lines.append(
            f"| {name} | {row.layer_bits:.2f} | {row.bits:.2f} | {row.kld:.4f} | {row.p99:.3f} | "
            f"{100 * row.top1:.1f} | {row.perplexity:.3f} |"
        )
    missing = [f"`{point}`" for point in base.points if point not in known]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join(lines)


def kv_table() -> str:
    """Keys and values alone, beside float32 pages."""
    names = list(BASES)
    every = {name: baselines.read(name, "full") for name in names}
    lines = [
        "| `kv_cache_dtype` | " + " | ".join(f"KLD, {n} | p99 | B/token" for n in names) + " |"
    ]
    lines.append("|---" + "|---:" * (3 * len(names)) + "|")
    for kv in KV_TYPES:
        found = [every[name].get(Point("base", kv)) for name in names]
        cells = [
            "| |" if row is None else f"{row.kld:.4f} | {row.p99:.3f} | {row.kv_bytes}"
            for row in found
        ]
        lines.append(f"| {kv} | {' | '.join(cells)} |")
    return "\n".join(lines)


def served_table() -> str:
    """Everything together: weights, activations quantized by the kernels, keys and values."""
    lines = ["| weights | keys, values | " + " | ".join(f"KLD, {n} | MB" for n in BASES) + " |"]
    lines.append("|---|---" + "|---:" * (2 * len(BASES)) + "|")
    for point in SERVED:
        cells = []
        for name in BASES:
            row = baselines.read(name, "full").get(point)
            size = "" if row is None or point.weights == "base" else f"{_bytes(row) / 1e6:.0f}"
            cells.append(f"{'' if row is None else f'{row.kld:.4f}'} | {size}")
        name = "of the file" if point.weights == "base" else point.weights
        lines.append(f"| {name} | {point.kv} | {' | '.join(cells)} |")
    return "\n".join(lines)


def expected_losses() -> str:
    """What ``quant/expected_loss.json`` holds: a line per scheme and type of keys and values."""
    weights: dict[str, dict[str, Any]] = {}
    kv: dict[str, dict[str, Any]] = {}
    for base in BASES:
        rows = baselines.read(base, "full")
        for point, row in _alone(rows).items():
            if point.weights == point.scheme and _is_scheme(point.scheme):
                one = weights.setdefault(point.scheme, {"bits": row.layer_bits, "kld": {}})
                one["kld"][base] = row.kld
        for name in KV_TYPES:
            if Point("base", name) in rows:
                kv.setdefault(name, {"kld": {}})["kld"][base] = rows[Point("base", name)].kld
    return f'{{\n  "weights": {_lines(weights)},\n  "kv": {_lines(kv)}\n}}\n'


def draw(base: Base, path: Path) -> None:
    """Bytes and loss of all that runs as served, and of the weights alone."""
    from matplotlib.figure import Figure

    from sdk.evaluating.plot import Placed, draw as draw_onto

    rows = baselines.read(base.name, "full")
    panels = {
        "weights alone": [
            Placed(point.weights, row.weight_bytes, row.kld) for point, row in _alone(rows).items()
        ],
        f"as served, with keys and values of {CONTEXT} tokens": [
            Placed(f"{point.weights} {point.kv}", _bytes(row), row.kld, row.decode)
            for point, row in rows.items()
            if point in SERVED and point.weights != "base"  # the file's own grid: no loss to show
        ],
    }
    figure = Figure(figsize=(11, 5), layout="constrained")
    for number, (title, models) in enumerate(panels.items(), 1):
        draw_onto(figure.add_subplot(1, 2, number), models, f"{base.name}: {title}")
    figure.savefig(path, dpi=90)


def _alone(rows: Rows) -> Rows:
    """Those of weights in exact arithmetic."""
    return {
        point: row
        for point, row in rows.items()
        if point.weights != "base" and (point.kv, point.compute) == ("float32", "exact")
    }


def _bytes(row: Row) -> int:
    return row.weight_bytes + CONTEXT * row.kv_bytes


def _is_scheme(name: str) -> bool:
    try:
        Scheme.parse(name)
    except QuantizationError:
        return False
    return True


def _lines(rows: Mapping[str, Any]) -> str:
    inside = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f"{{\n{inside}\n  }}"
