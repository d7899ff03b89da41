"""What needs an extra says so in one line with the command, before a model is loaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from sdk.kernels.packages import missing
from tests.scripts import run_python

#: Runs the cases of one absent package, of which each is (name, code); prints {name: message}.
RUN = """
import importlib.metadata, importlib.util, json, sys
from pathlib import Path

absent = set(json.loads(sys.argv[1]))

class Others:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in absent:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Others, sys.meta_path)
golden = Path("tests/golden")
gguf = str(golden / "gguf-Q8_0" / "model.gguf")
loading = []

def load(model=gguf, **options):
    from sdk import LLM
    return LLM(model, max_model_len=64, on_progress=lambda *at: loading.append(at), **options)

def command(*words):
    import contextlib, io
    from sdk.cli import main
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(list(map(str, words)))
    raise RuntimeError(said.getvalue().removesuffix("\\n")) if code == 2 else SystemExit(code)

found = {}
for name, code in json.loads(sys.argv[2]).items():
    loading.clear()
    try:
        exec(code)
        found[name] = "nothing is raised"
    except Exception as error:
        found[name] = str(error) if not loading else "weights have been read"
print(json.dumps(found))
"""

REMOTE = "sdk.RemoteWorkers(listen='127.0.0.1:29500', token='a' * 32)"
#: Package -> extra -> name of a place -> code that gets there.
PLACES: dict[str, dict[str, dict[str, str]]] = {
    "torch": {
        "gpu": {"device": "load(device='cuda')"},
        "torch": {
            "ranks": "load(tensor_parallel_size=2)",
            "stages": "load(pipeline_parallel_size=2)",
            "remote ranks": f"import sdk; load(tensor_parallel_size=2, remote_workers={REMOTE})",
            "replicas": "load(data_parallel_size=2)",
            "worker": "import sdk; sdk.run_worker(gguf, connect='127.0.0.1:1', token='a' * 32)",
            "quantize": "from sdk import quantize",
            "evaluate": "from sdk import evaluate",
            "Evaluation": "from sdk import Evaluation",
            "tiny_model": "from sdk.testing import tiny_model",
            "tiny_adapter": "from sdk.testing import tiny_adapter",
            "encode": "from sdk import LLM\n"
            "with LLM(gguf, max_model_len=64) as llm: llm.encode('x')",
            "logits_processors": "from sdk import LLM, SamplingParams\n"
            "params = SamplingParams(logits_processors=[lambda ids, row: row])\n"
            "with LLM(gguf, max_model_len=64) as llm: llm.generate('x', params, use_tqdm=False)",
            "embedlm quantize": "command('quantize', gguf, '/nowhere', '--scheme', 'q8_0')",
            "embedlm eval": "command('eval', gguf)",
            "embedlm worker": "command('worker', gguf, '--connect', '127.0.0.1:1', '--token-file', "
            "'pyproject.toml')",
            "embedlm tune": "command('tune')",
            "embedlm bench accuracy": "command('bench', gguf, '--suite', 'accuracy')",
            "embedlm bench gemm": "command('bench', gguf, '--suite', 'gemm')",
            "vllm's classify": "from sdk.compat.vllm import LLM\n"
            "LLM(gguf, max_model_len=64).encode('x', pooling_task='classify')",
            "a pickled head": "from sdk.loaders.torch_file import torch_header\n"
            "from sdk.loaders.model_file import ModelFile\n"
            "import zipfile\n"
            "path = Path(sys.argv[3]) / 'head.pt'\n"
            "with zipfile.ZipFile(path, 'w') as file: file.writestr('head/data.pkl', b'')\n"
            "torch_header(ModelFile(path))",
            "a reference kernel": "from sdk.kernels import reference\n"
            "from sdk.kernels.backend import Problem\n"
            "from sdk.kernels.registry import choose\n"
            "choose([reference.open_backend('cpu', 1)], Problem('norm'))",
        },
    },
    "transformers": {
        "torch": {
            "defaults of a config": "load(golden / 'arch-gemma3' / 'hf')",
            "a model through its code": "from sdk.models.transformers_code.backend import "
            "read_hf_config\nread_hf_config({'model_type': 'stablelm'})",
            "llama-cpp-python's tokenizer": "from sdk.compat.llama_cpp import llama_tokenizer\n"
            "llama_tokenizer.LlamaHFTokenizer.from_pretrained('x')",
        },
    },
    "llguidance": {
        "structured": {
            "structured output": "from sdk import LLM, SamplingParams\n"
            "params = SamplingParams(structured_outputs={'choice': ['a', 'b']})\n"
            "with LLM(gguf, max_model_len=64) as llm: llm.generate('x', params, use_tqdm=False)",
            "embedlm run --regex": "command('run', gguf, '-p', 'x', '--regex', 'a')",
        },
    },
    "PIL": {
        "vision": {
            "a file": "from sdk.images.decode import decode\n"
            "decode(b'\\x89PNG\\r\\n\\x1a\\n')",
            "an array with an opacity": "import numpy\n"
            "from sdk.images.decode import decode\n"
            "decode(numpy.zeros((2, 2, 4), 'uint8'))",
            "a resize": "import numpy\n"
            "from sdk.images.processors import image_processor\n"
            "image_processor({'model_type': 'gemma3'}, {}).read(numpy.zeros((2, 2, 3), 'uint8'))",
        },
    },
    "fastapi": {
        "server": {
            "embedlm serve": "command('serve', gguf, '--port', '0')",
            "create_app": "from sdk.serving import create_app",
            "its module": "import sdk.serving.app",
            "openai's clients": "import sdk.integrations.openai",
            "DSPy": "import sdk.integrations.dspy",
        }
    },
    "uvicorn": {"server": {"embedlm serve": "command('serve', gguf, '--port', '0')"}},
    "prometheus_client": {"metrics": {"prometheus": "import sdk.metrics.prometheus"}},
    "opentelemetry": {"metrics": {"opentelemetry": "import sdk.requests.driving.opentelemetry"}},
    "matplotlib": {
        "bench": {
            "embedlm bench --plots": "command('bench', gguf, '--plots', '/nowhere')",
            "embedlm eval --plot": "command('eval', gguf, '--plot', '/nowhere.png')",
        },
    },
    "gguf": {"bench": {"embedlm bench random-1b": "command('bench', 'random-1b')"}},
    "ray": {
        "ray": {
            "ranks": "load(tensor_parallel_size=2, distributed_executor_backend='ray')",
            "data": "import sdk.cluster.integrations.ray.data",
            "serve": "import sdk.cluster.integrations.ray.serve",
        }
    },
    "lm_eval": {"lm-eval": {"harness": "import sdk.evaluating.harness"}},
    "auto_gptq": {
        "gptq": {"quantize": "import sdk; sdk.quantize(gguf, '/nowhere', 'gptq-w4g128', "
            "library='auto-gptq')"},
    },
    "awq": {
        "awq": {"quantize": "import sdk; sdk.quantize(gguf, '/nowhere', 'awq-w4g128', "
            "library='autoawq')"},
    },
}  # fmt: skip


@cache
def messages(package: str, folder: str) -> dict[str, str]:
    """What each place says without ``package``; one process for all of them."""
    codes = {name: code for places in PLACES[package].values() for name, code in places.items()}
    # Where torch is missing, transformers cannot run either.
    absent = [package, *(["transformers"] if package == "torch" else [])]
    out = run_python(RUN, json.dumps(absent), json.dumps(codes), folder)
    found: dict[str, str] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("extras"))


@pytest.mark.parametrize(
    ("package", "extra", "place"),
    [
        (package, extra, place)
        for package, extras in PLACES.items()
        for extra, places in extras.items()
        for place in places
    ],
)
def test_what_needs_an_extra_says_so_before_anything_is_loaded(
    package: str, extra: str, place: str, folder: str
) -> None:
    said = messages(package, folder)[place]
    assert f'is not installed: pip install "embedlm[{extra}]"' in said
    assert "\n" not in said


#: Module of ``sdk.integrations`` -> the package that it is for -> its distribution.
FRAMEWORKS = {
    "dspy": ("dspy", "dspy"),
    "haystack": ("haystack", "haystack-ai"),
    "langchain": ("langchain_core", "langchain-core"),
    "llamaindex": ("llama_index", "llama-index-core"),
    "llm": ("llm", "llm"),
    "mcp": ("mcp", "mcp"),
    "openai": ("openai", "openai"),
}


@pytest.fixture(scope="module")
def said_without() -> dict[str, str]:
    """What the import of each integration says where no framework is installed."""
    codes = {name: f"import sdk.integrations.{name}" for name in FRAMEWORKS}
    absent = [package for package, _ in FRAMEWORKS.values()]
    found: dict[str, str] = json.loads(
        run_python(RUN, json.dumps(absent), json.dumps(codes)).splitlines()[-1]
    )
    return found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_integration_names_the_package_that_it_is_for(
    name: str, said_without: dict[str, str]
) -> None:
    package = FRAMEWORKS[name][1]
    assert said_without[name] == (
        f"sdk.integrations.{name} needs the package {package}, which is not installed: "
        f"pip install {package}"
    )


def test_every_integration_of_a_framework_has_a_test() -> None:
    folder = Path(__file__).parents[2] / "sdk" / "integrations"
    wrapped = {file.stem for file in folder.glob("*.py") if "with needed_for" in file.read_text()}
    assert wrapped == set(FRAMEWORKS)


def test_a_part_of_llama_index_is_a_package_of_its_own() -> None:
    error = ModuleNotFoundError("no", name="llama_index.llms")
    assert str(missing(error, "chat_model needs")).endswith(
        "pip install llama-index-llms-openai-like"
    )
