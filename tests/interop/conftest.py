"""Other libraries, each in an environment of its own (environments.py), and tiny models for them.

A driver is a program of ``drivers/`` that runs in such an environment: it reads jobs (JSON) and
writes a folder or an .npz file for each. Importing the libraries takes longer than their work on
models this small, so all jobs of a kind are one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sdk
from sdk import LLM, SamplingParams
from sdk.loaders.folders.expert_names import spelled_as_ours
from sdk.loaders.open import open_checkpoint
from tests.structure.conftest import installed, tree, wheel  # noqa: F401  (fixtures)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MADE = ROOT / "build" / "interop"
Job = Mapping[str, Any]
Run = Callable[..., "dict[str, Result]"]


class Result:
    """What a driver made for one job."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @property
    def path(self) -> Path:
        """``out``, if it was made."""
        error = Path(f"{self.out}.error")
        assert not error.exists(), error.read_text()[-3000:]
        return self.out

    @property
    def arrays(self) -> Mapping[str, Any]:
        with np.load(self.path) as found:
            return dict(found)


@pytest.fixture(scope="session")
def python() -> Callable[[str], Path]:
    """``python(environment)``: its interpreter."""

    def find(environment: str) -> Path:
        found = MADE / environment / "bin" / "python"
        assert found.exists(), f"{found} is missing: run `make test-interop`"
        return found

    return find


@pytest.fixture(scope="session")
def run(python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(environment, driver, {name: job}, folders=False)``: a result for each job, by name."""

    def call(
        environment: str, driver: str, jobs: Mapping[str, Job], *, folders: bool = False
    ) -> dict[str, Result]:
        place = tmp_path_factory.mktemp(driver)
        ending = "" if folders else ".npz"
        outs = {name: place / f"{number}{ending}" for number, name in enumerate(jobs)}
        listed = [{**job, "out": str(outs[name])} for name, job in jobs.items()]
        (place / "jobs.json").write_text(json.dumps(listed))
        program = str(HERE / "drivers" / f"{driver}.py")
        command = [str(python(environment)), program, str(place / "jobs.json")]
        done = subprocess.run(
            command, cwd=place, env=surroundings(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return {name: Result(out) for name, out in outs.items()}

    return call


@pytest.fixture(scope="session")
def packaged(installed: Path) -> Path:  # noqa: F811
    """A folder for ``PYTHONPATH`` with this package as a wheel has it, native module included.

    In an environment it goes before the package that pip put there when the environment was made.
    """
    native = find_spec("sdk.kernels.cpu._native")
    assert native is not None and native.origin is not None
    shutil.copy(native.origin, installed / "sdk" / "kernels" / "cpu")
    return installed


@pytest.fixture
def quantize_with(python: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """``quantize_with(library, model, scheme, ids)``: the folder that ``sdk.quantize`` makes with a
    library, in the environment of the extras."""

    def call(library: str, source: Path, scheme: str, ids: list[list[int]]) -> Path:
        out = tmp_path / "made"
        code = (
            "import json, sys, sdk\n"
            "ids = json.loads(sys.argv[1])\n"
            "options = {'calibration': ids, 'tokens': len(ids[0]), 'library': sys.argv[2]}\n"
            "sdk.quantize(*sys.argv[3:], **options)"
        )
        arguments = [json.dumps(ids), library, str(source), str(out), scheme]
        command = [str(python("extras")), "-c", code, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=surroundings(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert [path.name for path in tmp_path.iterdir()] == ["made"]
        return out

    return call


def surroundings() -> dict[str, str]:
    """The environment variables of a driver: nothing of this checkout, no network."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # gptqmodel asks for more workers than small machines have cores, and compiles every kernel
    # (30 s a model)
    own = {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1"}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", **own}


@pytest.fixture(scope="session")
def ids() -> list[list[int]]:
    """Calibration text of the tiny models."""
    return torch.randint(3, 512, (8, 64), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return torch.randint(3, 512, (24,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model("llama")``, ``model("mixtral")``, ...: a folder with a random model in float16."""
    folder = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        out = folder / kind
        if not out.exists():
            _save(kind, out)
        return out

    return make


_SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


def _save(kind: str, out: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **_SIZES, **_EXPERTS.get(kind, {}))
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.05)
    made.half().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(ROOT / "tests" / "golden" / "gptq-w4-g128-act" / name, out / name)


@pytest.fixture(scope="session")
def quantized(
    model: Callable[[str], Path],
    ids: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, Path]]:
    """``quantized(schemes, kind="llama")``: the folders that this package makes, by scheme."""

    def make(schemes: Sequence[str], kind: str = "llama") -> dict[str, Path]:
        place = tmp_path_factory.mktemp("ours")
        options = {"calibration": ids, "tokens": len(ids[0])}
        return {s: sdk.quantize(model(kind), place / s, s, **options) for s in schemes}

    return make


@pytest.fixture(scope="session")
def logits() -> Callable[..., Tensor]:
    """``logits(path, prompt, compute="exact")``: log probabilities of all positions but the
    last, ``[len(prompt) - 1, vocab]``."""

    def compute_logits(path: Path, prompt: list[int], compute: str = "exact") -> Tensor:
        params = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
        options: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True}
        with LLM(path, compute=compute, **options) as llm:
            found = llm.generate({"prompt_token_ids": prompt}, params)[0].prompt_logprobs
        assert found is not None
        rows = [[row[i].logprob for i in sorted(row)] for row in found if row is not None]
        return torch.tensor(rows)

    return compute_logits


@pytest.fixture(scope="session")
def distance() -> Callable[[Tensor, Any], float]:
    """``distance(found, expected)``: relative, of centred rows. The expected logits may have the
    last position too."""

    def relative(found: Tensor, expected: Any) -> float:
        expected = torch.as_tensor(expected)[: len(found)]
        found = found - found.mean(-1, keepdim=True)
        expected = expected - expected.mean(-1, keepdim=True)
        return float((found - expected).norm() / expected.norm())

    return relative


@pytest.fixture(scope="session")
def assert_weights() -> Callable[[Path, Mapping[str, Any], torch.dtype], None]:
    """``assert_weights(folder, theirs, dtype)``: every packed layer of the folder is, rounded to
    ``dtype``, what they found, bit for bit."""

    def compare(folder: Path, theirs: Mapping[str, Any], dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(str(folder))
        try:
            plain = ("F32", "F16", "BF16")
            packed = [entry.name for entry in checkpoint.entries() if entry.format not in plain]
            assert packed
            for name in map(spelled_as_ours, packed):
                ours = checkpoint.weight(name).dequantize().to(dtype).float()
                wrong = int((ours != torch.from_numpy(theirs[name])).sum())
                assert wrong == 0, f"{name}: {wrong} of {ours.numel()} values differ"
        finally:
            checkpoint.close()

    return compare
