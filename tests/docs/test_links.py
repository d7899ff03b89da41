"""Links, headings and pictures: what a page refers to is there, in the checkout and on the site."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name_of

LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PICTURES = sorted(DOCS.rglob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def dead(page: Path, text: str) -> list[str]:
    found = []
    for link in links(text):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            found.append(link)
        elif heading and target.suffix == ".md":
            own = text if target == page else target.read_text(encoding="utf-8")
            found += [] if heading in anchors(own) else [link]
    return found


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead(page, page.read_text(encoding="utf-8")) == []


def test_the_check_notices_dead_links() -> None:
    text = "# A title\n[a](#a-title) [b](README.md) [c](#no) [d](none.md) [e](api.md#none)\n"
    assert dead(DOCS / "README.md", text) == ["#no", "none.md", "api.md#none"]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_can_be_read_in_light_and_dark_mode_and_by_a_screen_reader(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img"
    assert all((root.findtext(f"{SVG}{name}") or "").strip() for name in ("title", "desc"))
    style = root.findtext(f"{SVG}style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    for mode in (light, dark):  # WCAG AA, of every text on everything it can stand on
        fills = dict(re.findall(r"\.?([a-z]+) \{ fill: (#[0-9a-f]{6})", mode))
        for text in ("text", "dim"):
            for ground in set(fills) & {"card", "box", "a", "b", "c", "d"}:
                assert contrast(fills[text], fills[ground]) >= 4.5, (text, ground)
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size", "14"))
        length = 0.55 * size * len("".join(text.itertext()))  # DejaVu Sans, a wide one: 0.51
        left = float(text.get("x", "0")) - {"middle": length / 2, "end": length}.get(
            text.get("text-anchor", ""), 0
        )
        assert left >= 0 and left + length <= width, text.text
        assert size <= float(text.get("y", "0")) <= height, text.text


def test_the_plots_show_the_numbers_of_the_tables() -> None:
    command = [sys.executable, ".ci/benchmark_plots.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plot = (DOCS / "pictures" / "speed_avx512_vnni.svg").read_text(encoding="utf-8")
    assert "embedlm 2907" in plot and "llama.cpp 243" in plot


def test_every_picture_is_on_a_page() -> None:
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [*PICTURES, *DOCS.rglob("*.png")]
    assert len(pictures) > 6
    assert [path.name for path in pictures if f"{path.name})" not in texts] == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # it downloads the site's tools once
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    make = ["make", "docs", f"SITE={tmp_path}/site", f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    built = {path.relative_to(site).parent.as_posix() for path in site.rglob("index.html")}
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert pages - {"README"} <= built and {"changes", "contributing"} <= built
    assert {"tutorials/1_embed", "tutorials/2_quantize", "tutorials/3_serve"} <= built
    reference = (site / "reference" / "llm" / "index.html").read_text(encoding="utf-8")
    for name in ("LLM.generate", "LLM.plan", "EngineOptions.memory"):
        assert f"{name}" in reference, name
    notebook = (site / "tutorials" / "3_serve" / "index.html").read_text(encoding="utf-8")
    assert notebook.count("<img") >= 3  # its plots
    chat = (site / "guides" / "chat" / "index.html").read_text(encoding="utf-8")
    assert ">Structured output</a>" in chat and ">structured.md</a>" not in chat
    for path in site.rglob("*.html"):  # no script or style is loaded from another host
        text = path.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text  # the theme would fetch a script for it
        assert not re.search(r'<(?:script|link)[^>]* (?:src|href)="https?:[^"]*\.\w+"', text)
