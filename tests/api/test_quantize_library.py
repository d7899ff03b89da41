"""Quantizing with another library: its process, its failures, and what is refused before.

The real ones have environments of their own (tests/interop). Here a package that calls itself
``awq`` stands in for autoawq, as far as it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sdk
from sdk import LLM, LoadCancelled, QuantizationError, RequestError, UnsupportedError
from sdk.cli import main

IDS = [[3, 4, 5, 6], [7, 8, 9, 10]]
AWQ = """
import shutil
from pathlib import Path

class AwqQuantizer:
    def _get_input_feat(self, layer, linears):
        return {}

class Llama:
    def __init__(self, model, kind, quantized, config, quant_config, processor):
        assert str(model.dtype) == "torch.float16"
        self.model = model

    def quantize(self, quant_config, calib_data, quantizer_cls, **options):
        assert str(self.model.dtype) == "torch.float32"
        assert quant_config["q_group_size"] == 64 and calib_data == %(ids)r
        print("the library prints")
        quantizer = quantizer_cls()
        for layer in self.model.model.layers:
            quantizer._get_input_feat(layer, {})
        %(then)s

    def save_quantized(self, folder):
        assert str(self.model.dtype) == "torch.float16"
        Path(folder).mkdir()
        for name in %(files)r:
            shutil.copyfile(Path(%(source)r) / name, Path(folder) / name)
"""


@pytest.fixture
def llama(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


@pytest.fixture
def autoawq(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``autoawq(then, files)``: a stand-in whose result is a checkpoint of the real one."""

    def install(
        then: str = "pass", files: tuple[str, ...] = ("config.json", "model.safetensors")
    ) -> None:
        package = tmp_path / "site" / "awq"
        for folder in (package / "models", package / "quantize"):
            folder.mkdir(parents=True)
        facts = {"ids": IDS, "then": then, "files": files, "source": str(golden / "awq-gemm")}
        (package / "everything.py").write_text(AWQ % facts)
        (package / "models" / "_config.py").write_text("class AwqConfig:\n    pass\n")
        (package / "models" / "auto.py").write_text(
            "from awq.everything import Llama\nAWQ_CAUSAL_LM_MODEL_MAP = {'llama': Llama}\n"
        )
        (package / "quantize" / "quantizer.py").write_text(
            "from awq.everything import AwqQuantizer\n"
        )
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def made_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "site")


@pytest.mark.slow
def test_a_library_makes_the_folder_in_a_process_of_its_own(
    llama: Path, tmp_path: Path, autoawq: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    autoawq()
    seen = []
    out = sdk.quantize(
        llama,
        tmp_path / "made",
        "awq-w4g64",
        calibration=IDS,
        tokens=4,
        library="autoawq",
        on_progress=lambda *progress: seen.append(progress),
    )
    assert seen == [("quantize", done, 2) for done in (0, 0, 1, 2)]
    assert made_in(tmp_path) == ["made"]
    assert (out / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    with LLM(out, max_model_len=64, skip_tokenizer_init=True) as llm:
        assert {layer.format for layer in llm.quant_report().layers} >= {"w4a16g128"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "files", "message"),
    [
        ("raise ValueError('no such kernel')", (), "exit code 1: ValueError: no such kernel"),
        pytest.param(
            "__import__('os')._exit(9)",
            (),
            "exit code 9: the library prints",
            marks=pytest.mark.slow,
        ),
        pytest.param("pass", ("config.json",), "safetensors", marks=pytest.mark.slow),
    ],
)
def test_a_library_that_fails_leaves_nothing_behind(
    then: str,
    files: tuple[str, ...],
    message: str,
    llama: Path,
    tmp_path: Path,
    autoawq: Callable[..., None],
) -> None:
    autoawq(then, files)
    with pytest.raises(sdk.SdkError, match=message):
        sdk.quantize(
            llama, tmp_path / "o", "awq-w4g64", calibration=IDS, tokens=4, library="autoawq"
        )
    assert made_in(tmp_path) == []


@pytest.mark.slow
def test_a_stopped_library_ends_at_once_and_leaves_nothing_behind(
    llama: Path, tmp_path: Path, autoawq: Callable[..., None]
) -> None:
    autoawq("__import__('time').sleep(3600)")
    with pytest.raises(LoadCancelled, match="cancelled by on_progress at 1 of 2"):
        sdk.quantize(
            llama,
            tmp_path / "made",
            "awq-w4g64",
            calibration=IDS,
            tokens=4,
            library="autoawq",
            on_progress=lambda stage, done, total: done < 1,
        )
    assert made_in(tmp_path) == []


@pytest.mark.parametrize(
    ("library", "scheme", "message"),
    [
        ("auto-gptq", "gptq-w4g32", r'auto-gptq is not installed: pip install "embedlm\[gptq\]"'),
        ("autoawq", "awq-w4g32", r'autoawq is not installed: pip install "embedlm\[awq\]"'),
        ("autoawq", "gptq-w4g32", "autoawq: expected a scheme like awq-w4g128, found gptq-w4g32"),
        (
            "auto-gptq",
            "gptq-w4g32-h6",
            "auto-gptq: expected a scheme like gptq-w4g128, found .*-h6",
        ),
        ("auto_awq", "awq", "library: expected one of auto-gptq, autoawq, found 'auto_awq'"),
    ],
)
def test_a_library_that_is_not_there_or_does_not_know_the_scheme_is_named(
    library: str, scheme: str, message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(QuantizationError, match=message):
        sdk.quantize(llama, tmp_path / "made", scheme, library=library)
    assert made_in(tmp_path) == []


def test_only_folders_of_plain_weights_go_to_a_library(
    golden: Path, tmp_path: Path, autoawq: Callable[..., None]
) -> None:
    autoawq()
    options = {"calibration": IDS, "tokens": 4, "library": "autoawq"}
    sources = {"arch-llama3/model.gguf": "a GGUF file can only become another GGUF file"}
    sources["ct-w4a16"] = "expects a folder with unquantized weights"
    for source, words in sources.items():
        with pytest.raises(UnsupportedError, match=words):
            sdk.quantize(golden / source, tmp_path / "made", "awq-w4g64", **options)
    with pytest.raises(RequestError, match="ids from 0 to 447"):
        sdk.quantize(
            golden / "arch-llama3" / "hf",
            tmp_path / "made",
            "awq-w4g64",
            **options | {"calibration": [[448] * 4]},
        )
    (tmp_path / "made").mkdir()
    with pytest.raises(QuantizationError, match="exists already"):
        sdk.quantize(golden / "arch-llama3" / "hf", tmp_path / "made", "awq-w4g64", **options)
    assert made_in(tmp_path) == ["made"]


def test_the_command_names_the_library(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "made")
    assert main(["quantize", str(llama), out, "--scheme", "awq-w4g32", "--with", "autoawq"]) == 2
    assert 'autoawq is not installed: pip install "embedlm[awq]"' in capsys.readouterr().err
