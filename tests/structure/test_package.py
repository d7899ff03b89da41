"""The installed shape: what `import sdk` costs, versions, and the name ``kernels``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import sdk
from sdk.kernels.gpu.tuning import table_path

ROOT = Path(__file__).parents[2]


def run_python(code: str, *path: Path) -> str:
    """Run ``code`` at the root of the checkout in a fresh interpreter, ``path`` on its path."""
    before = "import sys\n" + "".join(f"sys.path.insert(0, {str(p)!r})\n" for p in reversed(path))
    done = subprocess.run(
        [sys.executable, "-c", before + code], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    assert found[1] == sdk.__version__
    assert f"\n## [{sdk.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sdk, json; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(run_python(code)))
    heavy = {"torch", "numpy", "transformers", "triton", "tokenizers", "safetensors", "gguf"}
    heavy |= {"accelerate", "tqdm", "jinja2", "asyncio", "subprocess", "multiprocessing"}
    assert modules & heavy == set()
    assert len([name for name in modules if name.startswith("sdk")]) == 1


def test_generating_in_the_callers_thread_imports_neither_asyncio_nor_sockets() -> None:
    model = ROOT / "tests" / "golden" / "gguf-Q4_1" / "model.gguf"
    code = (
        f"import sdk, json\nwith sdk.LLM({str(model)!r}) as llm:\n"
        "    llm.generate(['a'], use_tqdm=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = set(json.loads(run_python(code).strip().rpartition("\n")[2]))
    assert modules & {"asyncio", "socket", "subprocess", "multiprocessing"} == set()


def test_finding_the_demo_model_and_parsing_the_command_line_import_nothing_heavy() -> None:
    code = (
        "import sdk.demo, sdk.cli, json; sdk.cli.build_parser(); sdk.demo.cache_folder()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = set(json.loads(run_python(code)))
    assert modules & {"torch", "numpy", "transformers", "triton", "tokenizers"} == set()


def test_the_headers_of_a_gguf_file_are_shown_without_torch() -> None:
    model = ROOT / "tests" / "golden" / "gguf-Q4_1" / "model.gguf"
    code = (
        f"import json; from sdk.cli import main; main(['inspect', {str(model)!r}, '--json'])\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    report, _, modules = run_python(code).strip().rpartition("\n")
    assert json.loads(report)["format"] == "gguf"
    assert set(json.loads(modules)) & {"torch", "transformers", "tokenizers"} == set()


def test_every_public_name_can_be_loaded() -> None:
    missing = [name for name in sdk.__all__ if not hasattr(sdk, name)]
    assert missing == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sdk.nonsense


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Of the files in a wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


def test_tables_of_tile_sizes_are_in_the_wheel(names: set[str]) -> None:
    assert "sdk/kernels/tuned/some-card.json" in names
    assert table_path("Some Card").relative_to(ROOT) == Path("kernels/tuned/some-card.json")


def test_a_wheel_has_every_module_under_one_name_and_nothing_else(names: set[str]) -> None:
    folders = {"sdk": "sdk"} | {f: f"sdk/{f}" for f in ("quant", "kernels", "models", "loaders")}
    modules = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}".removeprefix(
            "sdk/" if path.is_relative_to(ROOT / "sdk" / "embedlm") else ""
        )
        for folder, installed in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {"sdk/py.typed", "embedlm/py.typed"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"sdk", "embedlm", f"embedlm-{sdk.__version__}.dist-info"}
    endings = {Path(name).suffix for name in names if ".dist-info/" not in name}
    page = {".html", ".css", ".js", ".svg"}  # of the server
    assert endings <= {".py", ".typed", ".json", *page}  # C++ sources stay out of it
    assert "sdk/serving/page/index.html" in names


#: Names of extras in docs/install.md's table, and where their size is written.
EXTRA_ROW = re.compile(r"^\| `([\w-]+)` \| (.+) \| (.+) \| (\d+|under 1) \|$", re.MULTILINE)


def extra_sizes() -> Any:
    """The module .ci/extra_sizes.py."""
    spec = importlib.util.spec_from_file_location("extra_sizes", ROOT / ".ci" / "extra_sizes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_extras_names_each_one_and_every_package_it_brings() -> None:
    rows = EXTRA_ROW.findall((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
    listed = {name: set(packages.split(", ")) for name, packages, _, _ in rows}
    expected = {
        extra: {requirement.name for requirement in requirements}
        for extra, requirements in extra_sizes().extras().items()
        if extra not in ("", "dev")  # for people who change embedlm: CONTRIBUTING.md
    }
    assert listed == expected


def test_the_readme_s_table_of_extras_has_the_rows_of_the_page_about_installing() -> None:
    rows = EXTRA_ROW.findall((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d+|under 1) \|$", readme, re.MULTILINE)
    assert found == [(name, size) for name, _, _, size in rows] != []


def test_no_extra_is_named_that_does_not_exist() -> None:
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "sdk").rglob("*.py")]
    named = {
        extra
        for path in sources
        for extras in re.findall(r"embedlm\[([a-z,-]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert named <= {*extra_sizes().extras()} and len(named) > 3


def test_the_sizes_of_extras_are_those_of_what_is_installed() -> None:
    """Those of the extra ``dev``: the others are measured by hand (.ci/extra_sizes.py)."""
    rows = EXTRA_ROW.findall((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
    sizes = {name: 0.5 if size == "under 1" else float(size) for name, _, _, size in rows}
    measured = {}
    for extra in sizes:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            measured[extra] = extra_sizes().cost(extra)
    assert {"structured", "bench", "metrics", "server", "ray"} <= {*measured}
    # releases differ in size; a row that says half or double of what comes is wrong
    far = {e: m for e, m in measured.items() if not 0.6 < (sizes[e] + 1) / (m + 1) < 1.7}
    assert far == {}


def recipe(target: str, environment: Path) -> str:
    """What make would run for ``target`` in an environment that does not exist."""
    command = ["make", "--dry-run", target, f"VENV={environment}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_make_test_builds_the_native_module_once(tmp_path: Path) -> None:
    commands = recipe("test", tmp_path / "new").splitlines()
    builds = [line for line in commands if "pip install" in line and " -e " in line]
    assert len(builds) == 1
    assert any(line.endswith('"embedlm[dev]"') for line in commands)
    assert "EMBEDLM_LEVELS=all" in "\n".join(commands)


def test_make_run_installs_no_extra_and_builds_one_level(tmp_path: Path) -> None:
    commands = recipe("run", tmp_path / "new")
    assert commands.count(" -e .") == 1 and "embedlm[" not in commands
    assert "EMBEDLM_LEVELS=host" in commands and "EMBEDLM_LEVELS=all" not in commands
    needs = re.search(r"sed -n '(.*?)' pyproject.toml", commands)
    assert needs is not None
    listed = subprocess.run(
        ["sed", "-n", needs[1], "pyproject.toml"], capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert re.findall(r"^[\w-]+", listed, re.MULTILINE) == [
        one.name for one in extra_sizes().extras()[""]
    ]


def test_make_run_keeps_a_native_module_with_every_level(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / ".embedlm-installed").touch()
    assert ".embedlm-here" not in recipe("run", tmp_path)


#: A Python in whose environment every step succeeds, and `embedlm doctor` ends with ``code``.
_STANDS_IN = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in *doctor*) exit {code};; esac
"""


@pytest.mark.parametrize("code", [0, 1])
def test_make_build_tries_again_until_the_native_module_is_there(tmp_path: Path, code: int) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(_STANDS_IN.format(code=code))
    python.chmod(0o755)
    for _ in range(2):
        command = ["make", "build", f"VENV={tmp_path}"]
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert (tmp_path / ".embedlm-installed").exists() == (code == 0)
    builds = (python.parent / "calls").read_text().count(" -e .\n")
    assert builds == (1 if code == 0 else 2)


def test_the_workflows_run_what_there_is_on_every_python_that_is_supported() -> None:
    folder = ROOT / ".github" / "workflows"
    flows = {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    jobs = [job for flow in flows.values() for job in flow["jobs"].values()]
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        if command[0] == "make":
            assert command[1] in targets
        elif command[0].startswith("."):
            assert os.access(ROOT / command[0], os.X_OK), command
        for word in command:
            if re.match(r"\.?(ci|tests|docs)(/|$)", word):
                assert (ROOT / word).exists(), command
    assert ["make", "test"] in [command[:2] for command in commands]
    text = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    matrix = flows["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    tried = flows["wheels.yml"]["jobs"]["try"]["strategy"]["matrix"]["python"]
    assert matrix == supported and tried == [supported[0], supported[-1]]


TRANSFORMERS_AND_KERNELS = """
from transformers import LlamaForCausalLM
import json
try:
    import kernels
    where = getattr(kernels, "__file__", None)
except ImportError:
    where = None
print(json.dumps(where))
"""


@pytest.mark.slow
def test_transformers_imports_beside_our_kernels_folder() -> None:
    # A namespace without a file counts as absent; a file would mean that our code was imported.
    where = json.loads(run_python(TRANSFORMERS_AND_KERNELS))
    assert where is None or not Path(where).is_relative_to(ROOT)


@pytest.mark.slow
def test_transformers_finds_the_real_kernels_package_beside_our_folder(tmp_path: Path) -> None:
    package, facts = tmp_path / "kernels", tmp_path / "kernels-0.11.0.dist-info"
    package.mkdir()
    facts.mkdir()
    # Any name can be imported from the stand-in, as transformers takes a dozen from the real one.
    (package / "__init__.py").write_text(
        "__version__ = '0.11.0'\n"
        "class _Any:\n"
        "    def __init__(self, *args, **kwargs): pass\n"
        "    def __call__(self, *args, **kwargs): return self\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return _Any\n"
    )
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.11.0\n")
    where = json.loads(run_python(TRANSFORMERS_AND_KERNELS, ROOT, tmp_path))
    assert where == str(package / "__init__.py")
