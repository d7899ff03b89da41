"""Engines on a CPU run in a process that has no torch, and give the answers of one that has it.

The rule for modules is in sdk/kernels/host/__init__.py.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdk import LLM, SamplingParams
from sdk.testing import tiny_model
from tests.scripts import ROOT, run_python

NOT_INSTALLED = 'the package torch, which is not installed: pip install "embedlm[torch]"'
FOLDERS = ("kernels", "models", "loaders", "quant", "sdk")
#: Every golden file but one: gpt-oss' config is completed by transformers.
GOLDENS = sorted(
    path.parent.name
    for path in (ROOT / "tests" / "golden").glob("*/origin.json")
    if path.parent.name != "gptoss-mxfp4"
)

#: Every import of torch fails, as if it were not installed.
BLOCKED = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


# ---- nothing of torch is evaluated at import -----------------------------------------------------


def early_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Attributes of ``torch`` in code that runs when a module is imported."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            parts = getattr(node, "decorator_list", []) + node.args.defaults
            for part in [*parts, *filter(None, node.args.kw_defaults)]:
                visit(part)
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.AnnAssign):  # annotations are texts
            if node.value is not None:
                visit(node.value)
            return
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            found.append((node.lineno, node.attr))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def lazy_modules() -> list[Path]:
    """Modules that run with and without torch."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    lazy = [p for p in paths if re.search(r"^from sdk\.kernels\.lazy_torch ", p.read_text(), re.M)]
    return [path for path in lazy if "gpu" not in path.parts]


def test_modules_that_run_without_torch_keep_nothing_of_it() -> None:
    modules = lazy_modules()
    assert len(modules) > 100
    found = {
        f"{path.relative_to(ROOT)}:{line}": name
        for path in modules
        for line, name in early_names(ast.parse(path.read_text()))
    }
    assert found == {}
    both = [p for p in modules if re.search(r"^(import torch|from torch )", p.read_text(), re.M)]
    assert both == []


@pytest.mark.parametrize(
    "code",
    [
        "TYPES = (torch.float32,)",
        "def f(dtype=torch.float32): ...",
        "def f(*, dtype=torch.float32): ...",
        "@torch.no_grad()\ndef f(): ...",
        "class A:\n    kind: object = torch.int8",
        "f = lambda x=torch.int8: x",
    ],
)
def test_the_check_notices_what_is_evaluated_at_import(code: str) -> None:
    assert early_names(ast.parse(code))
    assert not early_names(ast.parse("def f(x: torch.Tensor) -> None:\n    torch.zeros(1)"))


# ---- the same answers ----------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
RUN_GOLDENS = """
from sdk import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
for path in sys.argv[1:]:
    try:
        with LLM(path, max_model_len=128) as llm:
            [one] = llm.generate([[5, 9, 30, 77]], params, use_tqdm=False)[0].outputs
        print(json.dumps([list(one.token_ids), [list(map(str, row)) for row in one.logprobs],
            [[x.logprob for x in row.values()] for row in one.logprobs]]))
    except Exception as error:
        print(json.dumps(repr(error)))
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def without_torch() -> dict[str, Any]:
    """The answers of all golden files, from one process without torch."""
    paths = [model_of(ROOT / "tests" / "golden" / name) for name in GOLDENS]
    lines = run_python(BLOCKED + RUN_GOLDENS, *paths, timeout=300).splitlines()
    return dict(zip(GOLDENS, map(json.loads, lines), strict=True))


def model_of(folder: Path) -> Path:
    """A GGUF file, or a folder of safetensors."""
    file = folder / "model.gguf"
    return file if file.is_file() else folder


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("name", GOLDENS)
def test_answers_of_every_golden_file_are_those_with_torch(
    name: str, without_torch: dict[str, Any], golden: Path
) -> None:
    found = without_torch[name]
    assert isinstance(found, list), found
    with LLM(model_of(golden / name), max_model_len=128) as llm:
        [one] = llm.generate([[5, 9, 30, 77]], GREEDY, use_tqdm=False)[0].outputs
    assert found[0] == list(one.token_ids)
    rows = one.logprobs or ()
    assert found[1] == [list(map(str, row)) for row in rows]
    # Weights are packed by the same native code. What differs by a few units of the last place are
    # angles of rotary embeddings and scales of tables, which numpy and torch compute.
    expected = np.array([[x.logprob for x in row.values()] for row in rows])
    assert np.abs(np.array(found[2]) - expected).max() < 1e-3


def test_a_mixture_of_experts_runs_without_torch(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "q8_0", "qwen3_moe")
    [line] = run_python(BLOCKED + RUN_GOLDENS, folder).splitlines()
    with LLM(folder, max_model_len=128) as llm:
        [one] = llm.generate([[5, 9, 30, 77]], GREEDY, use_tqdm=False)[0].outputs
    assert json.loads(line)[0] == list(one.token_ids)


# ---- what else a server does ---------------------------------------------------------------------


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter for SmolLM2-135M."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(30):
        for name, (rows, columns) in {"self_attn.q_proj": (576, 576)}.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            a, b = random.standard_normal((4, columns)), random.standard_normal((rows, 4))
            tensors[f"{base}.lora_A.weight"] = (a * 0.05).astype(np.float32)
            tensors[f"{base}.lora_B.weight"] = (b * 0.05).astype(np.float32)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


#: Prints one JSON line per feature: its name and its answer. ``{between}`` runs before the second
#: half of the requests.
FEATURES = """
import asyncio, threading
from sdk import LLM, BeamSearchParams, LoRARequest, SamplingParams, Snapshot
model, adapter, file = sys.argv[1:4]
LONG = "The quick brown fox jumps over the lazy dog. " * 6

def params(**changed):
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, **changed})

def text(outputs):
    return [one.text for output in outputs for one in output.outputs]

def requests(llm):
    ask = lambda **changed: text(llm.generate("Once upon a", params(**changed), use_tqdm=False))
    yield "plain", ask()
    yield "chat", text(llm.chat([{"role": "user", "content": "Hi"}], params(), use_tqdm=False))
    yield "stream", [piece.outputs[0].text for piece in llm.stream("Once upon a", params())][-1]
    scored = llm.generate("Once", params(logprobs=3, prompt_logprobs=2), use_tqdm=False)[0]
    yield "logprobs", [sorted(row) for row in scored.outputs[0].logprobs]
    yield "sampled", ask(temperature=0.9, top_p=0.9, min_p=0.05, seed=3, n=2, frequency_penalty=0.1,
        repetition_penalty=1.2, bad_words=["time"], logit_bias={5: 1.0}, min_tokens=2)
    yield "mirostat", ask(temperature=0.9, seed=1, mirostat_mode=2)
    yield "allowed", ask(allowed_token_ids=[5, 6, 7, 100])
    yield "banned", ask(banned_strings=["time"])
    guided = {"prompt": "Once upon a", "negative_prompt": "Never"}
    yield "guidance", text(llm.generate(guided, params(guidance_scale=1.5), use_tqdm=False))
    yield "structure", ask(structured_outputs={"json": {"type": "array", "maxItems": 2}})
    beams = llm.beam_search("Once", BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
    yield "beams", [one.text for one in beams[0].sequences]
    yield "adapter", text(llm.generate("Once upon a", params(), use_tqdm=False,
        lora_request=LoRARequest("a", 1, adapter)))
    pooled = llm.embed("Once upon a", use_tqdm=False)[0].embedding
    yield "embed", [round(x, 4) for x in pooled[:8]]
    llm.snapshot(LONG).save(file)
    llm.restore(Snapshot.load(file))
    yield "restored", text(llm.generate(LONG, params(), use_tqdm=False))
    async def coroutine():
        return [piece.outputs[0].text async for piece in llm.astream("Once upon a", params())][-1]
    yield "async", asyncio.run(coroutine())

with LLM(model, max_model_len=256, enable_lora=True) as llm:
    first = dict(requests(llm))
    print(json.dumps(first))
    {between}
for name in ("int16", "int8", "int4", "fp8", "bfloat16", "k8v4"):
    with LLM(model, max_model_len=128, kv_cache_dtype=name, kv_cache_memory_bytes="4MiB") as llm:
        print(json.dumps(text(llm.generate(LONG, params(), use_tqdm=False))))
for more in ({"enforce_eager": True}, {"compute": "exact"}, {"disk_offload": "60MiB"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"swap_space": "32MiB"}):
    with LLM(model, max_model_len=128, **more) as llm:
        print(json.dumps(text(llm.generate(LONG, params(), use_tqdm=False))))
"""


def features(start: str, between: str, *arguments: Path) -> list[Any]:
    code = start + FEATURES.replace("{between}", between)
    return [json.loads(line) for line in run_python(code, *arguments, timeout=300).splitlines()]


@pytest.mark.slow
def test_features_give_the_same_answers_without_torch_and_when_it_comes_later(
    smollm2: Path, tmp_path: Path
) -> None:
    files = (smollm2, write_adapter(tmp_path / "lora"), tmp_path / "prefix.snapshot")
    end = "assert 'torch' not in sys.modules"
    alone = features(BLOCKED, end, *files)
    assert features("import json, sys, torch\n", "pass", *files) == alone
    # The host program imports torch in another thread while the engine answers, then goes on.
    meanwhile = """
    thread = threading.Thread(target=__import__, args=("torch",))
    thread.start()
    while thread.is_alive():
        assert text(llm.generate("Once upon a", params(), use_tqdm=False)) == first["plain"]
    assert "torch" in sys.modules and dict(requests(llm)) == first
    """
    assert features("import json, sys\n", meanwhile.strip(), *files) == alone


@pytest.mark.slow
def test_an_engine_goes_on_when_the_program_imports_torch(golden: Path) -> None:
    code = """
    import gc, sys, threading, types
    from sdk import LLM, SamplingParams
    from sdk.kernels.host.dtypes import BY_STORAGE, DTYPES
    from sdk.kernels.host.tensor import HostTensor

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    def ask(llm, ids=(5, 9, 30, 77)):
        return list(llm.generate([list(ids)], params, use_tqdm=False)[0].outputs[0].token_ids)

    with LLM(sys.argv[1], max_model_len=128) as llm, LLM(
        sys.argv[1], max_model_len=128, enforce_eager=True
    ) as eager:
        expected = ask(llm)
        assert ask(eager) == expected and "torch" not in sys.modules
        # Types that are kept would be those of the other mode once torch is imported.
        known = [id(DTYPES), id(BY_STORAGE)]
        for dtype in DTYPES.values():
            for one in gc.get_referrers(dtype):
                owner = type(one).__module__
                names = one.keys() if isinstance(one, dict) else ()
                if id(one) in known or isinstance(one, HostTensor | types.FrameType):
                    continue
                assert "inference_mode" in names or "__name__" in names, (dtype, owner, one)
        thread = threading.Thread(target=__import__, args=("torch",))
        thread.start()
        count = 0
        while thread.is_alive() or not count:
            assert ask(eager) == ask(llm) == expected
            count += 1
        import torch
        before = torch.get_num_threads()
        assert ask(eager) == ask(llm) == expected
        with LLM(sys.argv[1], max_model_len=128) as other:
            assert ask(other) == expected and torch.get_num_threads() == before
    print("fine")
    """
    assert run_python(code, golden / "gguf-Q4_K_M" / "model.gguf") == "fine\n"


@pytest.mark.slow
def test_callbacks_get_tensors_of_torch(golden: Path) -> None:
    code = """
    import sys
    from sdk import LLM, SamplingParams
    def only_seven(output, row):
        import torch
        assert isinstance(row, torch.Tensor) and row.dtype == torch.float32
        return torch.where(torch.arange(len(row)) == 7, row, -torch.inf)
    with LLM(sys.argv[1], max_model_len=64) as llm:
        assert "torch" not in sys.modules
        params = SamplingParams(max_tokens=3, logits_processors=[only_seven], ignore_eos=True)
        print(list(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids))
    """
    assert run_python(code, golden / "gguf-Q8_0" / "model.gguf") == "[7, 7, 7]\n"


def test_a_broken_torch_is_an_error_that_says_what_needs_it(golden: Path) -> None:
    code = """
    from sdk import LLM
    try:
        LLM(sys.argv[1])
    except ImportError as error:
        print(error)
    """
    found = run_python(BLOCKED + code.replace("\n    ", "\n"), golden / "gptoss-mxfp4")
    assert "gptoss-mxfp4/config.json: its fields that are left to the defaults" in found
    code = """
    from sdk.kernels.lazy_torch import torch
    uses = [lambda: torch.softmax, lambda: torch.zeros(2).cumsum(0), lambda: torch.device("cuda")]
    for use in uses:
        try:
            use()
        except ImportError as error:
            print(str(error).partition(" needs the package torch, ")[0])
    """
    found = run_python(BLOCKED + code.replace("\n    ", "\n"))
    assert found == "torch.softmax\nTensor.cumsum\nthe device cuda\n"


# ---- what every start pays for -------------------------------------------------------------------

#: Modules of ours with a file that one token of a GGUF file imports. An import that only a feature
#: needs belongs where the feature is switched on.
MOST_FILES = 361
ANSWER = """
import sys
from sdk import LLM
with LLM(sys.argv[1], max_model_len=64) as llm:
    llm.generate([[5, 9, 30]], use_tqdm=False)
print(*(module.__file__ for name, module in sys.modules.items()
    if name.startswith("sdk.") and getattr(module, "__file__", None)))
"""


def test_a_start_imports_nothing_that_only_some_requests_need() -> None:
    """``importlib.metadata`` alone takes 15 ms, with the ``email`` package."""
    code = ANSWER.partition("print(")[0] + "print(*sys.modules)"
    found = run_python(code, model_of(ROOT / "tests" / "golden" / "gguf-Q8_0")).split()
    assert not {"importlib.metadata", "email.message", "decimal", "csv", "fractions"} & {*found}


def test_modules_of_every_start_make_their_dataclasses_quickly() -> None:
    """The standard library takes 0.8 ms for a class: see sdk/kernels/dataclass.py."""
    model = model_of(ROOT / "tests" / "golden" / "gguf-Q8_0")
    files = [Path(name) for name in run_python(ANSWER, model).split()]
    assert 200 < len(files) <= MOST_FILES
    slow = re.compile(r"^from dataclasses import .*\bdataclass\b|^import dataclasses", re.M)
    found = {path.stem for path in files if slow.search(path.read_text(encoding="utf-8"))}
    assert found == {"dataclass"}


NO_NATIVE = (
    BLOCKED
    + """
import warnings
from sdk import LLM, SamplingParams
from sdk.kernels.cpu import library

warnings.simplefilter("ignore")
library.find_spec = lambda name: None
try:
    LLM(sys.argv[1], max_model_len=64)
except Exception as error:
    print(type(error).__name__, isinstance(error, ImportError), error)
"""
)


def test_without_torch_and_the_native_module_the_load_is_refused(golden: Path) -> None:
    """Not at the first request: the reference kernels need torch."""
    said = run_python(NO_NATIVE, str(golden / "gguf-Q8_0" / "model.gguf"))
    assert said.startswith("MissingPackageError True the reference backend, which runs everything")
    assert "(native module" in said and f"), needs {NOT_INSTALLED}" in said
