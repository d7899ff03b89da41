"""What a step's operators hold at once, against what the memory plan counts for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk import LLM
from sdk.kernels.operators.ops import Ops
from sdk.memory.demand import MemoryDemand, WeightBytes, workspace_bytes
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from tests.gguf_models import save_gguf
from tests.models import test_plamo2, test_rwkv
from tests.models.conftest import Paged, checkpoint_of, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

TOKENS = 48


class Counting:
    """Allocates the results of operators and records the most bytes that were alive at once."""

    def __init__(self, ops: Ops) -> None:
        self.alive = self.most = 0
        self._empty = ops.context.empty
        ops.empty = ops.context.empty = self  # type: ignore[assignment, method-assign]

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = self._empty(*shape, dtype=dtype)
        self.alive += x.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(x.untyped_storage(), self._gone, x.nbytes)
        return x

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def planned(config: Any, dtype: torch.dtype, tokens: int = TOKENS) -> int:
    """What the plan's workspace has for the activations of this many tokens."""
    demand = MemoryDemand(
        weights=WeightBytes(0, 0, 0),
        model=config,
        page_bytes=1,
        page_size=1,
        kv_dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=tokens,
        activation_bytes=dtype.itemsize,
    )
    return workspace_bytes(demand, 1, tokens) - workspace_bytes(demand, 1, 0)


def held(model_type: str, dtype: torch.dtype) -> tuple[int, int]:
    """The most a step held before its logits, and what the plan has for it and a row of them."""
    ops = Ops("cpu", backends=("reference",), num_threads=1, activations=dtype)
    counting = Counting(ops)
    model: Any = build_model(checkpoint_of(tiny(model_type)), Mesh(), ops, max_model_len=64)
    model.logits = lambda hidden: hidden
    Paged(model).run("a", prompt(TOKENS, 1))
    ops.close()
    return counting.most, planned(model.config, dtype)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "mixtral"])
def test_a_step_holds_no_more_than_is_planned_and_less_in_16_bits(model_type: str) -> None:
    wide, planned_wide = held(model_type, torch.float32)
    short, planned_short = held(model_type, torch.bfloat16)
    assert short < 0.75 * wide
    assert wide <= planned_wide
    assert short <= planned_short < planned_wide


#: Models whose mixers hold more than an attention of one size.
MIXERS = [
    "qwen3_5_text",
    "lfm2",
    "granitemoehybrid-experts",
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "olmo_hybrid",
    "gemma4_text-e",
    "gemma4_text-experts",
    "deepseek_v2-lite",
    "deepseek_v3",
    "opt-350m",
]
#: Those that transformers has no class of.
FILES: dict[str, Callable[[Path], Path]] = {
    "rwkv7": test_rwkv.KINDS["folder"][0],
    "arwkv7": test_rwkv.KINDS["hybrid"][0],
    "plamo2": lambda folder: save_gguf(folder / "m.gguf", test_plamo2.gguf()),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", [*MIXERS, *FILES])
def test_a_recorded_step_of_other_mixers_holds_no_more_than_is_planned(
    name: str, tmp_path: Path
) -> None:
    if name in FILES:
        path = FILES[name](tmp_path)
    else:
        tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(tmp_path)
        path = tmp_path
    options = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 128}
    with LLM(path, skip_tokenizer_init=True, num_threads=1, **options) as llm:
        buffers = llm._runner().strategy.graph._buffers
        blocks = [*buffers._free, *(block for _, block in buffers._lent.values())]
        held = 4 * sum(block.count for block in blocks)
        assert held <= planned(llm.model_config, torch.float32, 128)
