"""The notebooks of docs/tutorials, from top to bottom, each in a kernel of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.pages import anchors, links

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
#: How many plots are stored in each.
PLOTS = {"1_embed": 0, "2_quantize": 1, "3_serve": 3, "4_images": 2}


def cells(notebook: Any, kind: str) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == kind]


@pytest.fixture
def cache(smollm2: Path, tmp_path: Path) -> Path:
    """A user's cache that holds the model already: nothing is downloaded."""
    folder = tmp_path / "embedlm"
    folder.mkdir()
    (folder / smollm2.name).symlink_to(smollm2)
    return tmp_path


def with_output(notebook: Any) -> list[bool]:
    """Which cells put something out, progress bars of a slow machine aside."""
    return [
        any(output.get("name") != "stderr" for output in cell.outputs)
        for cell in cells(notebook, "code")
    ]


def run(notebook: Any, folder: Path, environment: dict[str, str]) -> None:
    """All cells in a kernel of their own; raises what a cell raised."""
    client = NotebookClient(notebook, timeout=900, kernel_name="python3")
    client.execute(cwd=str(folder), env=environment)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it quantizes six times: 2 min 48 s beside another test run
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_top_to_bottom(path: Path, cache: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = with_output(notebook)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
    }
    before = set(tmp_path.iterdir())
    try:
        run(notebook, tmp_path, environment)
        made = {path.name for path in set(tmp_path.iterdir()) - before} - {"ipython", "matplotlib"}
        # A second run differs only by the files that the first has left.
        again = nbformat.read(path, as_version=4)
        writing = [i for i, cell in enumerate(again.cells) if "make(" in cell.source]
        assert bool(made) == bool(writing), made
        if writing:
            again.cells = again.cells[: writing[-1] + 1]
            run(again, tmp_path, environment)
    finally:
        for file in tmp_path.glob("*.gguf"):  # 0.8 GB, and pytest keeps folders
            file.unlink()
    assert with_output(notebook) == committed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_opens_in_colab_and_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert f"/docs/tutorials/{path.name})" in cells(notebook, "markdown")[0].source, "the badge"
    install = cells(notebook, "code")[0].source
    assert '%pip install --quiet "{source}"' in install
    assert re.search(r'source = "embedlm(\[\w+\])? @ git\+https://', install), "not on PyPI yet"
    assert re.search(r'source = "/content/embedlm-.*\.whl(\[\w+\])?"', install), "a wheel"
    assert re.search(r"\*\*On a T4 .*extra `gpu`", cells(notebook, "markdown")[0].source, re.DOTALL)
    assert any(cell.outputs for cell in cells(notebook, "code"))
    outputs = [output for cell in cells(notebook, "code") for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS[path.stem]
    text = path.read_text()
    assert not re.search(r'"output_type": "error"', text)
    for link in links("\n\n".join(cell.source for cell in cells(notebook, "markdown"))):
        name, _, heading = link.partition("#")
        assert (path.parent / name).exists(), f"{link} is not there"
        assert not heading or heading in anchors((path.parent / name).read_text()), link


def test_there_are_tutorials() -> None:
    assert [path.stem for path in NOTEBOOKS] == [*PLOTS]
