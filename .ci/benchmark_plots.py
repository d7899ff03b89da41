"""The plots of docs/bench/benchmarks.md, one for each machine, from its tables.

python .ci/benchmark_plots.py            # writes docs/pictures/speed_*.svg
python .ci/benchmark_plots.py --check    # exit code 1 if it would change one
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
#: The plot, the part of the page with its numbers, and the machine.
PLOTS = {
    "speed_avx512_vnni": ("q4_1", "AMD EPYC (Zen 5), 2 cores, AVX-512-VNNI"),
    "speed_zen4": ("q4_1-zen4", "AMD EPYC (Zen 4), 2 cores, AVX-512-VNNI"),
    "speed_avx2": ("q4_1-avx2", "AMD EPYC (Zen 4), 2 cores, AVX2 only"),
}
ROW = re.compile(r"^\| (\S+) [^|]*\| \w+ \| (\d+) \| ([\d.]+) \|", re.MULTILINE)
STYLE = """  <style>
    svg { font: 14px system-ui, sans-serif; }
    .card { fill: #ffffff; } text { fill: #1f2328; } .dim { fill: #57606a; }
    .a { fill: #cfe3ff; stroke: #0a5bc4; } .b { fill: #ffe0c2; stroke: #a34700; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; } text { fill: #e6edf3; } .dim { fill: #a3adb8; }
      .a { fill: #12386b; stroke: #79b4ff; } .b { fill: #5c2e0a; stroke: #ffab70; }
    }
  </style>"""
LEFT, FULL, BAR = 165, 415, 20  # of a bar: its left edge, the longest one, its height


def numbers(part: str) -> dict[str, dict[str, float]]:
    """Tokens per second in a part of the page: ``{"16 requests": {"embedlm": 1567.6, ...}}``."""
    page = (ROOT / "docs" / "bench" / "benchmarks.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- {part} -->")[2].partition(f"<!-- /{part} -->")[0]
    found: dict[str, dict[str, float]] = {}
    for title in re.split(r"^\*\*", text, flags=re.MULTILINE)[1:]:
        kind = title.partition("**")[0].lower()
        if kind not in ("prefill", "decode"):
            continue
        for engine, count, value in ROW.findall(title):
            what = f"prefill, {count} tokens" if kind == "prefill" else f"{count} requests"
            what = "1 request" if what == "1 requests" else what
            found.setdefault(what, {})[engine] = float(value)
    return found


def most(prefill: bool) -> float:
    """The longest bar of all plots, so that the machines can be compared."""
    return max(
        value
        for part, _ in PLOTS.values()
        for what, engines in numbers(part).items()
        for value in engines.values()
        if what.startswith("prefill") == prefill
    )


def plot(part: str, machine: str) -> str:
    """Bars by what was measured; prefill has a scale of its own."""
    measured = numbers(part)
    lines, y = [], 62
    for what, engines in measured.items():
        longest = most(what.startswith("prefill"))
        lines.append(f'  <text x="20" y="{y + 15}">{what}</text>')
        for engine, value in engines.items():
            length = max(1, round(FULL * value / longest))
            cls = "a" if engine == "embedlm" else "b"
            lines += [
                f'  <rect class="{cls}" x="{LEFT}" y="{y}" width="{length}" height="{BAR}"/>',
                f'  <text x="{LEFT + length + 8}" y="{y + 15}" font-size="12">'
                f"{engine} {value:.0f}</text>",
            ]
            y += BAR + 4
        y += 10
    spoken = "; ".join(
        f"{what}: " + ", ".join(f"{engine} {value:.0f}" for engine, value in engines.items())
        for what, engines in measured.items()
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y + 6}" role="img" '
        'aria-labelledby="title desc">',
        f'  <title id="title">Tokens per second on {machine}</title>',
        f'  <desc id="desc">{spoken}</desc>',
        STYLE,
        f'  <rect class="card" width="720" height="{y + 6}" rx="8"/>',
        f'  <text x="20" y="28">SmolLM2-135M Q4_1 on {machine}</text>',
        '  <text class="dim" x="20" y="48" font-size="12">tokens per second</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def main() -> None:
    for name, (part, machine) in PLOTS.items():
        path = PICTURES / f"{name}.svg"
        wanted = plot(part, machine)
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text(encoding="utf-8") != wanted:
                raise SystemExit(f"benchmark_plots: {path.name} differs: run this script")
        else:
            path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
