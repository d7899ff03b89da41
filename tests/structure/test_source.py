"""The shape of the source: import order, sizes, and what library code never does."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sdk
from sdk.models.architecture import architectures

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "quant", "loaders", "models", "sdk")

#: What each folder may import of ours, besides itself.
ALLOWED = {
    "kernels": set(),
    "quant": {"kernels"},
    # the layouts are the plain tensors a format decodes into, not kernels; models.architecture,
    # some of models.configs and models.vision describe files of a model, .other_models those
    # that do not run; they import nothing of the loaders
    "loaders": {
        "quant",
        "kernels.weights.layouts",
        "kernels.lazy_torch",
        "kernels.dataclass",
        "kernels.packages",
        "models.architecture",
        "models.configs.keys",
        "models.other_models",
        "models.configs.experts",
        "models.configs.fields",
        "models.configs.sliding",
        "models.vision.family",
        "models.vision.mmproj_names",
        "kernels.weights.stored_rows",
        "kernels.system",
        "kernels.system.blocks",
    },
    "models": {"quant", "kernels"},
    "sdk": {"kernels", "quant", "loaders", "models"},
}
#: The storeys of sdk/, lowest first. A module may import what stands in its own room or below, at
#: the top of its file, inside a function and for type checkers alike. The last storeys surround the
#: library: nothing of it imports them.
STOREYS = (
    *("api", "text", "sampling", "structured", "tools", "metrics", "engine", "executors"),
    *("memory", "loading", "images", "requests", "quantizing"),
    *("tokenizer", "llm", "async_llm", "demo"),
    *("evaluating", "cli", "testing", "serving", "cluster", "compat", "integrations", "bench"),
)
#: The commands, which may print.
PRINTING = (
    "sdk/cli/",
    "sdk/bench/",
    "sdk/serving/serve_command.py",
    "sdk/serving/keys_command.py",
    "sdk/cluster/worker_command.py",
)
#: Type checkers alone see these: the interface of a part that a caller may replace.
UPWARDS = {
    ("sdk/api/scheduling_policy.py", "sdk.engine.scheduling.request"): "policies order requests",
    ("sdk/sampling/resolved.py", "sdk.structured.compiler"): "a grammar is one of the parameters",
}
MAX_FILE_LINES = 600  # an upper bound, not a target: meaning decides where a file ends
MAX_FUNCTION_LINES = 60

TOP_LEVEL = {
    *("sdk", "quant", "kernels", "models", "loaders", "tests", "docs", "pyproject.toml"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "CMakeLists.txt"),
    *(".ci", ".github", ".gitignore", "mkdocs.yml"),
}
#: What a checkout may hold besides, because a tool or a build made it (all in .gitignore).
MADE = {".git", ".venv", "build", "dist", "bench-results", "__pycache__"}

#: What a rank's own process may do, which the host's may not: (file, call) -> why.
EXEMPT = {
    ("kernels/dataclass.py", "exec"): "as the standard library does: names of fields, no input",
    ("kernels/system/posix.py", "signal.signal"): "in a child process of ours: its parent ends it",
    ("kernels/system/windows.py", "signal.signal"): "the same; and of `embedlm serve`, put back",
    (
        "sdk/cluster/executors/worker.py",
        "torch.set_num_threads",
    ): "the same: the child's torch is ours",
    ("sdk/bench/peers/embedding.py", "torch.set_num_threads"): "a worker process of the bench",
    ("sdk/cluster/wire/local.py", "pickle.loads"): "messages of our own child processes",
    (
        "sdk/cluster/replicas/messages.py",
        "pickle.loads",
    ): "of what was just pickled: can it be read again?",
    (
        "sdk/cluster/replicas/replica.py",
        "pickle.loads",
    ): "in a child process of ours: jobs of its parent",
    ("sdk/cluster/replicas/parent.py", "torch.set_num_threads"): "the same: its torch is ours",
}

#: Runs where this package is not installed, so its modules import each other by relative names.
STANDALONE = ROOT / "sdk" / "bench" / "peers"

#: Modules of the engine that only decide, and must import without torch and numpy.
PURE = (
    *("sdk/api/params.py", "sdk/api/outputs.py", "sdk/demo.py", "sdk/engine/plan.py"),
    *("sdk/memory/plan.py", "sdk/memory/demand.py", "sdk/memory/fitting.py"),
    *(f"sdk/engine/pages/{name}.py" for name in ("page_pool", "prefixes", "swap")),
    *(f"sdk/engine/scheduling/{name}.py" for name in ("request", "scheduler", "scheduler_config")),
    *(f"sdk/engine/scheduling/{name}.py" for name in ("queues", "admission", "commit")),
)


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "__pycache__" not in path.parts]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
            elif node.module == "sdk":
                for alias in node.names:
                    yield node.lineno, f"sdk.{alias.name}"
            else:
                yield node.lineno, node.module or ""


def order_errors(folder: str, nodes: Iterable[ast.AST]) -> list[str]:
    errors = []
    for line, name in imported(nodes):
        if name.startswith("."):
            errors.append(f"line {line}: relative import")
            continue
        top, _, rest = name.partition(".")
        if top in ("kernels", "quant", "loaders", "models"):
            errors.append(f"line {line}: {name} (ours are imported as sdk.{top})")
        if top != "sdk" or folder == "sdk":
            continue
        target = rest.partition(".")[0] or "sdk"
        if target not in ("kernels", "quant", "loaders", "models"):
            target = "sdk"
        fine = {folder, *ALLOWED[folder]}
        if target not in fine and rest not in fine:
            errors.append(f"line {line}: {folder} imports {name}")
    return errors


def storey(name: str) -> str:
    """``sdk.engine.plan`` and ``sdk.Snapshot`` -> ``engine``; "" for what is outside of them."""
    name = sdk._EXPORTS.get(name.removeprefix("sdk."), name)
    room = name.removeprefix("sdk.").partition(".")[0]
    return "" if name == "sdk" or room in FOLDERS else room


def storey_errors(file: str, nodes: Iterable[ast.AST]) -> list[str]:
    """The imports of a file of sdk/ from a storey above its own."""
    own = storey(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    errors = []
    for line, name in imported(nodes):
        other = storey(name) if name.startswith("sdk.") else ""
        if other not in STOREYS or own not in STOREYS or (file, name) in UPWARDS:
            continue
        if STOREYS.index(other) > STOREYS.index(own):
            errors.append(f"line {line}: {own} imports {name} from above")
    return errors


@dataclass(frozen=True)
class Library:
    """What all tests of the library's files ask, from one walk of each: 120,000 lines take two
    seconds to parse, and their trees 250 MB."""

    order: dict[str, dict[str, list[str]]]  # folder -> file -> wrong imports
    imports: dict[str, set[str]]  # module -> modules of ours that it imports
    words: dict[str, set[tuple[int, str]]]  # file -> (line, text) of its constants
    functions: dict[str, int]  # file:function -> lines
    forbidden: dict[str, list[str]]
    state: dict[str, list[str]]


@pytest.fixture(scope="module")
def library() -> Library:
    found = Library({}, {}, {}, {}, {}, {})
    known = {module_name(path) for path in sources(*FOLDERS)}
    for folder in FOLDERS:
        found.order[folder] = {}
        for path in sources(folder):
            name, tree = name_of(path), parse(path)
            nodes = list(ast.walk(tree))
            found.order[folder][name] = [
                error
                for error in order_errors(folder, nodes)
                if not (error.endswith("relative import") and path.parent == STANDALONE)
            ]
            found.imports[module_name(path)] = imports_of(nodes, known)
            found.words[name] = {
                (node.lineno, node.value)
                for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            for function, lines in function_lines(nodes):
                place = f"{name}:{function}"
                found.functions[place] = max(lines, found.functions.get(place, 0))
            if folder == "sdk":
                found.order[folder][name] += storey_errors(name, nodes)
            found.forbidden[name] = forbidden(nodes, may_print=name.startswith(PRINTING))
            found.state[name] = mutable_state(tree)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_lies_below_them(library: Library, folder: str) -> None:
    errors = library.order[folder]
    assert errors, f"no sources in {folder}"
    assert {name: found for name, found in errors.items() if found} == {}


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ("kernels", "from sdk.quant.spec import QuantSpec"),
        ("quant", "import sdk.loaders.open"),
        ("loaders", "def f():\n    from sdk.models.auto import build_model"),
        ("loaders", "from sdk.models.architectures.llama import Model"),
        ("models", "from sdk.loaders import open"),
        ("quant", "from sdk.api.errors import SdkError"),
        ("quant", "from sdk import LLM"),
        ("sdk", "import kernels.ops"),
        ("quant", "from .spec import QuantSpec"),
    ],
)
def test_the_order_check_notices_a_wrong_import(folder: str, code: str) -> None:
    assert order_errors(folder, ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("sdk/api/params.py", "from sdk.structured.compiler import Grammar"),
        ("sdk/engine/engine.py", "def f():\n    from sdk.requests.driving.driver import Driver"),
        ("sdk/loading/load.py", "import sdk.cluster.executors.process"),
        ("sdk/llm.py", "if TYPE_CHECKING:\n    from sdk.cluster import replicas"),
        ("sdk/tools/__init__.py", "from sdk import LLM"),
        ("sdk/serving/app.py", "from sdk.bench import engines"),
    ],
)
def test_the_order_check_notices_an_import_from_a_storey_above(file: str, code: str) -> None:
    assert storey_errors(file, ast.walk(ast.parse(code)))


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = ["sdk", *([] if folder == "sdk" else [folder]), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, empty without one."""
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def imports_of(nodes: Iterable[ast.AST], known: Container[str]) -> set[str]:
    """Modules of ours that imports name, also those for type checkers; ``from sdk import llm``
    names ``sdk.llm``, not ``sdk``."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module or "" for name in inside}
    return {name for name in found if name in known}


def test_modules_do_not_import_each_other_in_a_circle(library: Library) -> None:
    assert "sdk.kernels.operators.ops" in library.imports
    graph = {name: found - {name} for name, found in library.imports.items()}
    assert circle_in(graph) == []


def test_the_circle_check_notices_one() -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sdk.a import A"
    texts = {"sdk.a": "from sdk import b", "sdk.b": "def f():\n    import sdk.c", "sdk.c": guarded}
    graph = {name: imports_of(ast.walk(ast.parse(text)), texts) for name, text in texts.items()}
    circle = circle_in(graph)
    assert set(circle) == set(texts) and circle[0] == circle[-1]
    assert circle_in({**graph, "sdk.c": set()}) == []


#: Code that may name a model: names of tokenizers, Mistral's own format, models that tools make.
NAMES_MODELS = ("loaders/tokenizer/", "loaders/writers/gguf_vocabulary.py", "sdk/bench/")
NAMES_MODELS += (
    "loaders/folders/mistral_params.py",
    "sdk/api/other_names.py",
    "models/architectures/",
)
NAMES_MODELS += ("models/vision/",)
NAMES_MODELS += ("sdk/testing/tiny_models.py",)
#: Mixers, which are called in a layer like the model that had them first.
NAMES_MODELS += ("models/mixers/mamba.py", "models/mixers/mamba2.py")
#: Which models have which image processor.
NAMES_MODELS += ("sdk/images/processors/__init__.py",)
#: Written from what the files say.
NAMES_MODELS += ("models/architecture_names.py",)
#: Models that do not run; tests/models/test_other_models.py compares it with the registry.
NAMES_MODELS += ("models/other_models.py",)
#: Formats of tool calls and of chats, which are called like a model.
NAMES_MODELS += ("sdk/tools/", "sdk/compat/llama_cpp/_chat.py")


def test_only_its_own_file_names_a_model(library: Library) -> None:
    own = architectures()
    names = {name for one in own for name in (one.model_type, *one.aliases)}
    names |= {one.gguf.name for one in own if one.gguf is not None}
    found = [
        f"{name}:{line}: {word}"
        for name, words in library.words.items()
        if not name.startswith(NAMES_MODELS)
        for line, word in words
        if word in names
    ]
    assert found == []


def test_the_mapped_folders_have_no_init_file() -> None:
    # With one, `import transformers` in a checkout would take our kernels/ for Hugging Face's.
    found = [name for name in FOLDERS[:4] if (ROOT / name / "__init__.py").exists()]
    assert found == []


def test_no_module_of_ours_hides_one_of_the_standard_library_or_of_a_dependency() -> None:
    hidden = {"types", "queue", "platform", "inspect", "safetensors", "gguf", "torch", "triton"}
    dumping_grounds = {"utils", "util", "common", "helpers", "misc", "manager"}
    found = [name_of(p) for p in sources(*FOLDERS) if p.stem in hidden | dumping_grounds]
    assert found == []


def test_the_top_level_is_exactly_what_is_documented() -> None:
    here = {path.name for path in ROOT.iterdir()}
    caches = {
        name for name in here if re.fullmatch(r"\.(venv-.*|.*cache|hypothesis|coverage)", name)
    }
    assert sorted(TOP_LEVEL - here) == []
    assert sorted(here - TOP_LEVEL - MADE - caches) == []


def lines_of(name: str) -> int:
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def test_files_are_short_enough_to_read() -> None:
    lengths = {name_of(path): lines_of(name_of(path)) for path in sources(*FOLDERS)}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def function_lines(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Signature and docstring are not counted: a kernel has up to 50 arguments."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            yield node.name, node.end_lineno - node.body[documented].lineno + 1


def test_functions_are_short_enough_to_read(library: Library) -> None:
    assert {x: n for x, n in library.functions.items() if n > MAX_FUNCTION_LINES} == {}


def dotted(node: ast.AST) -> str:
    """``torch.load`` of such an expression; nothing of another one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def forbidden(nodes: Iterable[ast.AST], *, may_print: bool) -> list[str]:
    """What library code never does: print, globals, torch-wide settings, environment, handlers."""
    found = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Global):
            found.append(f"line {line}: global {', '.join(node.names)}")
        elif isinstance(node, ast.Call):
            call = dotted(node.func)
            if call == "print" and not may_print:
                found.append(f"line {line}: print")
            if re.fullmatch(r"torch\.set_\w+|os\.(putenv|unsetenv|chdir)|signal\.signal", call):
                found.append(f"line {line}: {call}")
            if re.fullmatch(r"os\.environ\.(update|setdefault|pop|clear)", call):
                found.append(f"line {line}: {call}")
            if re.fullmatch(r"logging\.(basicConfig|info|warning|error|debug)", call):
                found.append(f"line {line}: {call} (the root logger is the host's)")
            safe = call == "torch.load" and "weights_only=True" in map(ast.unparse, node.keywords)
            if re.fullmatch(r"(pickle|marshal)\.loads?|torch\.load|eval|exec", call) and not safe:
                found.append(f"line {line}: {call} runs what a file says")
            if call == "warnings.filterwarnings" or call == "warnings.simplefilter":
                found.append(f"line {line}: {call}")
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Subscript) and dotted(target.value) == "os.environ":
                    found.append(f"line {line}: os.environ is changed")
    return found


def mutable_state(tree: ast.Module) -> list[str]:
    """Module-level names that functions could fill: empty containers and anything rebound later.

    A table that is written down in full is a constant; ``cache = {}`` waits to be filled.
    """
    found = []
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        empty = isinstance(value, ast.List | ast.Dict | ast.Set) and not (
            value.keys if isinstance(value, ast.Dict) else value.elts
        )
        made = isinstance(value, ast.Call) and re.fullmatch(
            r"(collections\.)?(dict|list|set|defaultdict|OrderedDict|deque|Counter)"
            r"|threading\.\w+|itertools\.count|weakref\.\w+|contextvars\.ContextVar",
            dotted(value.func),
        )
        if empty or (made and not value.args):
            found.append(f"line {node.lineno}: {ast.unparse(node)[:60]}")
    return found


def test_library_code_leaves_the_host_alone(library: Library) -> None:
    found = [
        f"{name}: {error}"
        for name, errors in library.forbidden.items()
        for error in errors
        if not any(name == file and f" {call}" in error for file, call in EXEMPT)
    ]
    assert found == []


def test_modules_hold_no_state(library: Library) -> None:
    assert {name: errors for name, errors in library.state.items() if errors} == {}


@pytest.mark.parametrize(
    "code",
    [
        "print('x')",
        "def f():\n    global x",
        "torch.set_num_threads(1)",
        "os.environ['A'] = 'b'",
        "del os.environ['A']",
        "os.environ.setdefault('A', 'b')",
        "signal.signal(2, f)",
        "logging.basicConfig()",
        "pickle.load(f)",
        "torch.load(f)",
    ],
)
def test_the_guest_check_notices(code: str) -> None:
    assert forbidden(ast.walk(ast.parse(code)), may_print=False)


@pytest.mark.parametrize(
    "code", ["cache = {}", "seen: set[int] = set()", "lock = threading.Lock()"]
)
def test_the_state_check_notices(code: str) -> None:
    assert mutable_state(ast.parse(code))


@pytest.mark.parametrize("name", PURE)
def test_deciding_modules_import_neither_torch_nor_numpy(name: str) -> None:
    heavy = {"torch", "numpy", "transformers", "triton", "safetensors", "gguf"}
    found = {imports.partition(".")[0] for _, imports in imported(ast.walk(parse(ROOT / name)))}
    assert found & heavy == set()
