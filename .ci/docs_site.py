"""What the documentation site has besides the pages of docs/: hooks of mkdocs (mkdocs.yml).

- the reference, one page for each group of names in ``sdk.__all__``, from their docstrings;
- the notebooks of docs/tutorials, as pages with their stored outputs;
- CONTRIBUTING.md and CHANGELOG.md.

Links between the pages are written for a code host. One that leaves docs/ leads to the page of the
site where there is one, and to the repository otherwise.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "build" / "docs-source"  # named in mkdocs.yml
REPOSITORY = "https://github.com/embedlm/embedlm/blob/main"
#: Pages of the top folder, and what they are called on the site.
TOP_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
#: Pages of the reference: a title and the modules whose names it has.
REFERENCE = {
    "llm": ("LLM", "sdk.llm"),
    "async_llm": ("AsyncLLM", "sdk.async_llm"),
    "parameters": (
        "Parameters of requests",
        *("sdk.api.params", "sdk.api.beam_search", "sdk.api.structured_params", "sdk.api.lora"),
    ),
    "outputs": ("Outputs", "sdk.api.outputs", "sdk.engine.running_requests"),
    "tokenizer": ("Tokenizer", "sdk.tokenizer"),
    "memory": ("Memory", "sdk.memory.plan", "sdk.api.memory_pool", "sdk.engine.snapshot"),
    "scheduling": ("Scheduling", "sdk.api.scheduling_policy"),
    "metrics": (
        "Metrics",
        *("sdk.metrics.stats", "sdk.metrics.histogram", "sdk.metrics.slo", "sdk.metrics.trace"),
    ),
    "quantization": (
        "Quantization",
        *("sdk.quantizing", "sdk.evaluating", "sdk.loading.quant_report"),
    ),
    "images": ("Images", "sdk.api.image_hosts"),
    "processes": ("Several processes", "sdk.api.remote_workers", "sdk.cluster.distributed"),
    "demo": ("Demo model", "sdk.demo"),
    "errors": ("Errors", "sdk.api.errors"),
}


def on_startup(**_: Any) -> None:
    """The package in build/docs-source, in one piece and with a file in every folder.

    The reference is made by reading sources. The reader does not look into folders without an
    ``__init__.py``, which the four top folders and some of sdk/ do not have, shows the roles of
    Sphinx as they are, and wants a line for each ``:raises``.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "native", "page")
    shutil.copytree(ROOT / "sdk", SOURCES / "sdk", ignore=ignored)
    for path in list(SOURCES.rglob("*.py")):
        (path.parent / "__init__.py").touch()
        text = path.read_text(encoding="utf-8")
        text = re.sub(r":(?:class|meth|func|attr|mod|data|exc):(`)~?", r"\1", text)
        path.write_text(re.sub(r"(?<=\.) (?=:raises \w+:)", "\n    ", text), encoding="utf-8")


def on_config(config: Any) -> Any:
    """Put the pages of the reference where the navigation names their folder."""
    expand(config.nav, "reference/", [f"reference/{name}.md" for name in REFERENCE])
    return config


def expand(nav: Any, folder: str, pages: list[str]) -> None:
    for item in nav:
        if isinstance(item, dict):
            for title, value in item.items():
                if value == folder:
                    item[title] = pages
                elif isinstance(value, list):
                    expand(value, folder, pages)


def on_files(files: Files, config: Any) -> Files:
    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for path, text in reference_pages():
        add(path, text)
    for name, page in TOP_PAGES.items():
        add(page, (ROOT / name).read_text(encoding="utf-8"))
    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        for name, content in notebook_page(notebook):
            add(f"tutorials/{name}", content)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a code host become links of the site; one that shows a file's name shows its title.

    A page without headings has no table of contents, and so more room.
    """
    source = page.file.src_uri
    if not re.search("^##|^:::", markdown, re.MULTILINE):
        page.meta["hide"] = ["toc"]
    here = "" if source in TOP_PAGES.values() else posixpath.dirname(f"docs/{source}")
    site = posixpath.dirname(source)

    def moved(match: re.Match[str]) -> str:
        path, _, heading = match[2].partition("#")
        target = posixpath.normpath(posixpath.join(here, path))
        if "://" in path or not path:
            return match[0]
        if target in TOP_PAGES:
            new = posixpath.relpath(TOP_PAGES[target], site or ".")
        elif target.startswith("docs/") and (ROOT / target).is_file() and not is_program(target):
            new = posixpath.relpath(target.removeprefix("docs/"), site or ".")
        else:
            new = f"{REPOSITORY}/{target}"
        if target.startswith("docs/tutorials/"):
            new = re.sub(r"\.ipynb$", ".md", new)
        shown = match[1]
        if shown[1:-1] in (path, posixpath.basename(path)) and path.endswith((".md", ".ipynb")):
            shown = f"[{title(ROOT / target)}]"
        return f"{shown}({new}{'#' + heading if heading else ''})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    link = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
    return "".join(
        part if part.lstrip().startswith("```") else link.sub(moved, part) for part in parts
    )


def title(path: Path) -> str:
    """The first heading of a page or a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return text.partition("# ")[2].partition("\n")[0]


def is_program(path: str) -> bool:
    """Files of docs/ that mkdocs.yml leaves out of the site."""
    return path.endswith(".py") or "Dockerfile" in path


def reference_pages() -> Iterator[tuple[str, str]]:
    modules = exports()
    for name, (title, *sources) in REFERENCE.items():
        names = [f"::: {source}.{one}" for source in sources for one in modules.pop(source)]
        options = []
        if name == "llm":
            shown = ", ".join(methods("sdk.llm", "LLM"))
            names[0] += f"\n    options:\n      inherited_members: true\n      members: [{shown}]"
            options = ["::: sdk.api.options.EngineOptions"]
        yield f"reference/{name}.md", f"# {title}\n\n" + "\n\n".join([*names, *options]) + "\n"
    if modules:
        raise PluginError(f".ci/docs_site.py: no page of the reference has {sorted(modules)}")


def methods(module: str, name: str) -> list[str]:
    """The public methods and properties of a class, as in the sources; those of its bases first."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    origin = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    names: list[str] = []
    for base in found.bases:
        assert isinstance(base, ast.Name)
        names += methods(origin.get(base.id, module), base.id)
    names += [
        one.name for one in found.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [one for one in dict.fromkeys(names) if not one.startswith("_")]


def exports() -> dict[str, list[str]]:
    """The public names of ``sdk`` by module, read without importing it."""
    tree = ast.parse((ROOT / "sdk" / "__init__.py").read_text(encoding="utf-8"))
    imports = next(node for node in tree.body if isinstance(node, ast.If)).body
    found: dict[str, list[str]] = {}
    for node in imports:
        assert isinstance(node, ast.ImportFrom) and node.module
        found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return found


def notebook_page(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook's page, and the pictures in its outputs."""
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{number}.png"
                yield name, base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    yield f"{path.stem}.md", "\n\n".join(parts) + "\n"
