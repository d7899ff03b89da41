"""``device="auto"`` on a machine with a card that is not here: engines run on the fake card, whose
kernels Triton interprets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_card import on_a_card

from sdk import LLM, CheckpointError, MemoryPool, SamplingParams
from sdk.api.options import engine_config
from sdk.kernels import gpu
from sdk.kernels.gpu import GpuBackend, linear, norm
from sdk.kernels.known_answers import check as known_answers
from sdk.kernels.known_answers.file import Answer, AnswerFile
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.norm import GatedActivation
from sdk.loading import device as devices, load as loading
from sdk.memory import products, resolve
from sdk.requests import served_engine

MACHINE = {"card": "a card that is not here"}
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 8, "max_num_seqs": 2}


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "embedlm" / "known_answers"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and a torch that finds a card."""
    monkeypatch.setattr(devices, "gpu_driver", lambda: "NVIDIA 1.2")
    monkeypatch.setattr(devices, "torch_without_cards", lambda: None)
    monkeypatch.setattr(gpu, "available", lambda device: None)
    monkeypatch.setattr(known_answers, "machine", lambda device: MACHINE)
    for name, value in (("current_device", 0), ("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for module in (resolve, loading, products, served_engine):  # plans would ask the card
        monkeypatch.setattr(module, "device_of", lambda config: "cpu")


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[LLM]:
    """With ``device="auto"``."""
    with on_a_card(path, MACHINE, **LIMITS | options) as (llm, _):
        yield llm


def test_without_a_driver_nothing_is_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_driver", lambda: None)
    monkeypatch.setattr(devices, "torch_without_cards", lambda: pytest.fail("asked"))
    with LLM(path, **LIMITS) as llm:
        assert llm.load_warnings == ()
        assert "device='auto' is the CPU: no GPU driver is loaded" in llm.explain()


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
def test_a_card_is_taken_if_every_check_passes(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(self: Any, packed: Any, x: Any, out: Any, activation: str = "") -> None:
        rows = x.float() @ decode(self.unpack(packed)).t()
        if activation:
            made = torch.empty(len(x), rows.shape[1] // 2)
            GatedActivation().run(rows, activation, made)
            rows = made
        out.copy_(rows)

    # interpreted, a product of 300 tokens takes a minute
    monkeypatch.setattr(linear.TritonLinear, "matmul", product)
    with loaded(path) as llm:
        text = llm.explain()
        assert "device     cuda:0" in text and "'auto' is the card: every check passed" in text
        assert llm.load_warnings == ()
        answers = llm._runner().ops.context.answers
        assert answers is not None and answers.ran > 8
        (output,) = llm.generate([[5, 9, 30]], SamplingParams(temperature=0.0, max_tokens=1))
        assert len(output.outputs[0].token_ids) == 1
    assert len(AnswerFile(cache, MACHINE).read()) == answers.ran
    with loaded(path) as llm:
        answers = llm._runner().ops.context.answers
        assert answers is not None and answers.ran == 0


@pytest.mark.usefixtures("driver", "cache")
def test_a_wrong_operator_leaves_the_model_on_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = norm.launch_norm

    def doubled(x: Any, residual: Any, own: Any, out: Any) -> None:
        launch(x, residual, replace(own, weight=own.weight * 2), out)

    monkeypatch.setattr(norm, "launch_norm", doubled)
    leave_out_slow_ones(monkeypatch)
    with loaded(path) as llm:
        text = llm.explain()
        (warning,) = llm.load_warnings
    assert warning.startswith("device='auto' is the CPU, not the GPU: gpu.")
    assert "norm failed its known-answer check: the norm is 1" in warning
    assert f"'auto' is the CPU: {warning.partition('GPU: ')[2]}" in text and "     cpu, " in text
    # the next load does not try
    monkeypatch.setattr(norm, "launch_norm", lambda *args: pytest.fail("launched"))
    with loaded(path) as llm:
        (warning,) = llm.load_warnings
    assert "on a card that is not here a kernel failed its known-answer check" in warning


def leave_out_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that take seconds when they are interpreted run on the CPU's kernels."""
    whole = GpuBackend.implementations
    slow = ("linear", "attention", "rope_and_cache", "sample")

    def implementations(self: GpuBackend, op: str) -> Any:
        return () if op in slow else whole(self, op)

    monkeypatch.setattr(GpuBackend, "implementations", implementations)
    monkeypatch.setattr(GpuBackend, "keys_transposed", True)


@pytest.mark.slow
@pytest.mark.usefixtures("driver", "cache")
def test_slow_kernels_leave_the_model_on_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_answers.KnownAnswers, "reason", lambda *args: None)
    leave_out_slow_ones(monkeypatch)
    with loaded(path) as llm:
        (warning,) = llm.load_warnings
    assert "rope_and_cache would run on cpu.rope_and_cache, many times slower: " in warning


@pytest.mark.usefixtures("driver", "cache")
@pytest.mark.parametrize(
    ("options", "reason", "warns"),
    [
        ({"disk_offload": "1MiB"}, "disk_offload: with device='cuda'", False),
        ({"kv_cache_dtype": "int8/int16"}, "kv_cache_dtype: int8/int16 is not", False),
        ({"kv_policy": "float16>int8"}, "kv_policy: not supported on a GPU", False),
        ({"memory": MemoryPool("100MiB")}, "a MemoryPool is of this machine's memory", False),
    ],
)
def test_options_for_a_cpu_keep_it(
    path: Path, options: dict[str, Any], reason: str, warns: bool
) -> None:
    config = engine_config(path, **options)
    asked, device = devices.card_for(config)
    assert asked is None and device.reason.startswith(reason) and device.warns is warns


@pytest.mark.usefixtures("driver", "cache")
def test_what_torch_cannot_do_is_the_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(path)
    assert devices.card_for(config)[0] is not None
    two = engine_config(path, tensor_parallel_size=2)
    assert devices.card_for(two)[1].reason.startswith("several ranks")
    AnswerFile(devices.answers_folder(), MACHINE).add({"x": Answer(1.0, "failed its check")})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    assert devices.card_for(config)[1].reason == "on a card a kernel failed its check"

    def broken(device: str) -> str:
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(gpu, "available", broken)
    found = devices.card_for(config)[1]
    assert found.reason == "OSError: libcuda.so.1" and found.warns
    monkeypatch.setattr(gpu, "available", lambda device: "torch finds no GPU")
    assert devices.card_for(config)[1].reason == "torch finds no GPU"
    monkeypatch.setattr(devices, "torch_without_cards", lambda: "torch 1 is built for CPUs alone")
    assert devices.card_for(config)[1].reason == "torch 1 is built for CPUs alone"


@pytest.mark.slow
@pytest.mark.usefixtures("driver", "cache")
def test_no_room_on_the_card_is_a_reason_and_a_damaged_file_is_an_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(config: Any, checkpoint: Any) -> Any:
        if config.device == "cuda":
            raise torch.OutOfMemoryError("the card is full")
        return whole(config, checkpoint)

    whole = loading.checked_plan
    monkeypatch.setattr(loading, "checked_plan", no_room)
    with LLM(path, **LIMITS) as llm:
        (warning,) = llm.load_warnings
    assert warning.endswith("OutOfMemoryError: the card is full")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        LLM(damaged)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__version__ = '9.1+cpu'\ncuda: Optional[str] = None\nhip = None\n", "torch 9.1+cpu is"),
        ("__version__ = '9.1'\ncuda: Optional[str] = '13.0'\nhip = None\n", None),
        ("__version__ = '9.1'\ncuda: Optional[str] = None\nhip = '7.1'\n", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_files(
    text: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda name: spec)
    found = devices.torch_without_cards()
    assert found == reason or (reason is not None and str(found).startswith(reason))
    (tmp_path / "version.py").unlink()
    assert devices.torch_without_cards() is None  # torch itself will say
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert devices.torch_without_cards() == "torch is not installed"
