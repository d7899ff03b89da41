"""The installed package: no native module, as ``embedlm``, beside another ``sdk``, zipped."""

from __future__ import annotations

import json
import shutil
import zipapp
import zipfile
from pathlib import Path

import pytest

from tests.structure.conftest import Run, build


@pytest.fixture
def model(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


LOAD = """
import logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
from sdk import LLM
with LLM(sys.argv[1], max_model_len=32) as llm:
    print(*llm.load_warnings, sep="\\n")
    print("-----")
    print(llm.explain())
"""


def test_a_missing_native_module_is_warned_of(run_installed: Run, model: Path) -> None:
    done = run_installed(LOAD, model)
    warning, _, explained = done.stdout.partition("\n-----\n")
    assert done.returncode == 0, done.stderr
    assert warning.startswith("this model runs on the reference kernels, about 100 times slower: ")
    assert "apt install g++" in warning and "pip install -v --force-reinstall --no-deps" in warning
    assert done.stderr == f"sdk WARNING {warning}\n"
    assert f"\nwarning    {warning}" in explained


@pytest.mark.slow
def test_the_command_line_says_that_the_native_module_is_missing(
    run_installed: Run, model: Path
) -> None:
    code = "from embedlm.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_installed(code, "run", model, "--raw", "-p", "Hi", "--max-tokens", 1)
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("embedlm: this model runs on the reference kernels, about 100 times")


SAME = """
import pickle
import embedlm
assert "sdk" not in sys.modules and "torch" not in sys.modules
import sdk
import embedlm.api.errors, sdk.api.errors
import embedlm.kernels.cpu.library, sdk.kernels.cpu.library
from embedlm.cli import main
from embedlm.cli import run as named
from embedlm import *
import sdk.cli.run
assert main is sdk.cli.main and named is sdk.cli.run
assert embedlm.LLM is sdk.LLM is LLM
assert embedlm.api.errors is sdk.api.errors and embedlm.api.errors.__spec__.name == "sdk.api.errors"
assert embedlm.kernels.cpu.library is sdk.kernels.cpu.library
assert dir(embedlm) == dir(sdk) and embedlm.__version__ == sdk.__version__
params = embedlm.SamplingParams(max_tokens=3)
assert type(pickle.loads(pickle.dumps(params))) is sdk.SamplingParams
for name in ("embedlm.nonsense", "embedlm.kernels.nonsense"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name
    else:
        raise AssertionError(name)
assert not hasattr(embedlm, "nonsense")
import runpy
sys.argv[1:] = ["--version"]
runpy.run_module("embedlm", run_name="__main__")
"""


@pytest.mark.slow
def test_embedlm_is_sdk_under_another_name(run_installed: Run) -> None:
    done = run_installed(SAME)
    assert done.stdout.startswith("embedlm 0."), done.stderr
    assert done.returncode == 0, done.stderr


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A project with a package of its own called sdk, and a test of it."""
    project = tmp_path / "project"
    (project / "sdk").mkdir(parents=True)
    (project / "sdk" / "__init__.py").write_text("ANSWER = 42\n")
    (project / "test_own.py").write_text(
        "import sdk\n\ndef test_own():\n    assert sdk.ANSWER == 42\n"
    )
    return project


@pytest.mark.parametrize(
    "use",
    ["embedlm.LLM", "from embedlm import LLM", "import embedlm.api.errors", "embedlm.cli"],
)
def test_another_projects_sdk_is_named(run_installed: Run, foreign: Path, use: str) -> None:
    done = run_installed(f"import embedlm\n{use}", before=(foreign,))
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: embedlm's package is named sdk, but `import sdk` ")
    assert str(foreign / "sdk" / "__init__.py") in last and "Rename that package" in last


#: ``python -m embedlm``, and what pip's script does.
STARTS = [
    "import runpy; runpy.run_module('embedlm', run_name='__main__')",
    "from embedlm.__main__ import main; sys.exit(main())",
]


@pytest.mark.parametrize("code", STARTS, ids=["python -m", "script"])
def test_the_command_names_another_projects_sdk_in_one_line(
    run_installed: Run, foreign: Path, code: str
) -> None:
    done = run_installed(code, before=(foreign,))
    [line] = done.stderr.splitlines()
    assert line.startswith("embedlm: embedlm's package") and str(foreign) in line
    assert done.returncode == 1


@pytest.mark.parametrize("code", STARTS, ids=["python -m", "script"])
def test_the_command_says_in_one_line_that_python_has_32_bits(
    run_installed: Run, code: str
) -> None:
    done = run_installed(f"sys.maxsize = 2**31 - 1\n{code}")
    assert done.stderr.splitlines() == [
        "embedlm: embedlm needs a Python of 64 bits, and this one has 32: install another one"
    ]
    assert done.returncode == 1


PYTEST = "import pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))"


@pytest.mark.slow
def test_pytest_runs_in_a_project_that_has_an_sdk_of_its_own(
    run_installed: Run, foreign: Path
) -> None:
    own = run_installed(PYTEST, foreign, before=(foreign,))
    assert own.returncode == 0 and "1 passed" in own.stdout, own.stdout + own.stderr
    told = run_installed(PYTEST, foreign, "--help", before=(foreign,))
    assert "--llm-model" in told.stdout


@pytest.mark.slow
def test_a_model_tested_beside_another_projects_sdk_is_a_clear_error(
    run_installed: Run, foreign: Path, model: Path
) -> None:
    done = run_installed(PYTEST, foreign, f"--llm-model={model}", before=(foreign,))
    assert done.returncode == 4
    [line] = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("ERROR: --llm-model: embedlm's package") and str(foreign) in line


ENTRY_POINTS = """
from importlib.metadata import entry_points
for group in ("console_scripts", "pytest11", "pyinstaller40"):
    for point in entry_points(group=group):
        if point.value.startswith(("embedlm", "sdk")):
            print(group, point.value, point.load() is not None)
"""


def test_every_entry_point_goes_through_embedlm(run_installed: Run) -> None:
    done = run_installed(ENTRY_POINTS)
    assert done.stdout.splitlines() == [
        "console_scripts embedlm.__main__:main True",
        "pytest11 embedlm.pytest_plugin True",
        "pyinstaller40 embedlm.pyinstaller:hook_dirs True",
    ]


HOOKS = """
import importlib.metadata, json, runpy
from pathlib import Path
points = importlib.metadata.entry_points(group="pyinstaller40", name="hook-dirs")
[point] = [point for point in points if point.value.startswith("embedlm")]
[folder] = map(Path, point.load()())
hook = runpy.run_path(str(folder / "hook-sdk.py"))
before = runpy.run_path(str(folder / "pre_safe_import_module" / "hook-embedlm.py"))
class Api:
    aliases = {}
    def add_alias_module(self, real, alias):
        self.aliases[alias] = real
before["pre_safe_import_module"](Api())
assert not any(name.partition(".")[0] in ("sdk", "torch") for name in sys.modules)
named = {name: hook[name] for name in ("hiddenimports", "binaries", "datas")}
hub = runpy.run_path(str(folder / "hook-huggingface_hub.py"))["excludedimports"]
sources = hook["module_collection_mode"]
print(json.dumps({**named, "aliases": Api.aliases, "sources": sources, "left out": hub}))
"""


def test_the_hook_of_pyinstaller_collects_modules_tables_and_the_native_library(
    run_installed: Run, installed: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    native = site / "sdk" / "kernels" / "cpu" / "_native.so"
    native.write_bytes(b"")
    done = run_installed(HOOKS, site=site)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"sdk", "sdk.llm", "sdk.kernels.reference", "sdk.loaders.formats.gptq"} <= set(
        found["hiddenimports"]
    )
    assert found["binaries"] == [[str(native), "sdk/kernels/cpu"]]
    datas = {(Path(path).name, folder) for path, folder in found["datas"]}
    page = {(name, folder) for name, folder in datas if folder.startswith("sdk/serving/page")}
    assert {("index.html", "sdk/serving/page"), ("app.js", "sdk/serving/page/js")} <= page
    datas -= page
    assert datas == {
        ("expected_loss.json", "sdk/quant"),
        ("predicted.json", "sdk/bench/gpu"),
        ("some-card.json", "sdk/kernels/tuned"),
        ("smollm2_135m.json", "sdk/cluster/simulation"),
        ("py.typed", "sdk"),
    }
    assert found["aliases"]["embedlm.cli"] == "sdk.cli" and "embedlm" not in found["aliases"]
    # Triton's kernels alone need their sources, and the hub works without its 11 MB.
    assert found["sources"] == {"sdk": "pyz", "sdk.kernels.gpu": "pyz+py"}
    assert found["left out"] == ["hf_xet"]


EDITABLE = """
import json, site
from importlib.util import find_spec
[folder, tree] = sys.argv[1:]
before = set(sys.path)
site.addsitedir(folder)
import embedlm, embedlm.pytest_plugin, sdk.kernels.packages, sdk.quant.scheme
assert embedlm.LLM is sdk.LLM
modules = (sdk, embedlm, sdk.kernels.packages, sdk.quant.scheme)
elsewhere = [module.__file__ for module in modules if not module.__file__.startswith(tree)]
assert not elsewhere, elsewhere
found = {name: find_spec(name) is not None for name in ("llm", "tokenizer", "demo", "api", "tree")}
print(json.dumps([found, sorted({*sys.path} - before)]))
"""


def test_an_editable_installation_offers_no_other_names(
    tree: Path, run_installed: Run, tmp_path: Path
) -> None:
    """`import llm` is for the package of that name, not for sdk/llm.py, and what lies beside the
    checkout is not importable."""
    site = tmp_path / "site"
    zipfile.ZipFile(build(tree, tmp_path, "build_editable")).extractall(site)
    done = run_installed(EDITABLE, site, tree, site=site)
    assert done.returncode == 0, done.stderr
    names, added = json.loads(done.stdout)
    assert not any(names.values()), names
    assert added == [str(tree)]


@pytest.fixture
def archive(installed: Path, tmp_path: Path) -> Path:
    """The installed package as a zip application."""
    path = tmp_path / "app.pyz"
    zipapp.create_archive(installed, path, main="embedlm.cli:main")
    return path


ZIPPED = """
import sdk
assert sys.argv[2] in sdk.__file__, sdk.__file__
from sdk import LLM, SamplingParams
plan = LLM.plan(sys.argv[1], memory="1MiB")
assert not plan.fits and plan.alternatives == LLM.plan(sys.argv[1], memory="1MiB").alternatives
with LLM(sys.argv[1], max_model_len=32) as llm:
    print(*llm.load_warnings)
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].finished
from sdk.kernels.gpu.tuning import read_tuning
assert read_tuning("Some Card", 1).dense_from == 77
assert read_tuning("Unknown", 1).table is None
assert read_tuning("Sister", 4, capability=(9, 0)).dense_from == 77
from sdk.serving.web_page import page_files
assert b"<!doctype html>" in page_files()["index.html"].content
"""


@pytest.mark.slow
def test_the_package_runs_from_inside_a_zip_file(
    run_installed: Run, archive: Path, model: Path
) -> None:
    done = run_installed(ZIPPED, model, archive, site=archive)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"the system cannot load a library from inside {archive}; unpack it" in done.stdout
