"""Known-answer checks of the Triton kernels, under the interpreter.

Every operator passes, and every operator with a mistake in it is found, replaced and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.answer_file import AnswerFile
from sdk.kernels.backend import Problem
from sdk.kernels.head_norms import HeadNorms
from sdk.kernels.known_answers import KnownAnswers
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.layouts import ActivationScheme
from sdk.kernels.low_rank import Shape
from sdk.kernels.ops import Ops
from sdk.kernels.rounding import Rounding
from sdk.quant.spec import KVSpec

MACHINE = {"card": "a card that is not here", "driver": "1"}


@pytest.fixture
def ops() -> Iterator[Ops]:
    made = Ops("cpu", num_threads=1, backends=("gpu", "reference"), activations="bfloat16")
    yield made
    made.close()


def answers_of(ops: Ops, folder: Path | None = None) -> KnownAnswers:
    file = None if folder is None else AnswerFile(folder, MACHINE)
    ops.context.answers = KnownAnswers(ops.context, file)
    return ops.context.answers


def pages(dtype: str, head_dim: int = 64, kv_heads: int = 2, size: int = 16) -> KVPages:
    """The second of three layers' pages, as a card has them."""
    spec = KVSpec(num_layers=3, kv_heads=kv_heads, head_dim=head_dim, page_size=size, dtype=dtype)
    return KVCache(spec, 2, keys_transposed=False).layers[1]


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, width, dtype=dtype)


def heads(count: int, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of a fused projection."""
    return torch.zeros(2, (count + 4) * head_dim, dtype=dtype)[:, : count * head_dim].view(
        2, count, head_dim
    )


def attention(dtype: str, **changed: Any) -> tuple[str, Sequence[Any], dict[str, Any]]:
    own = pages(dtype, **changed)
    like = [heads(4, own.head_dim), own, 0.2, None, None, None, True]
    return "attention", like, {"head_dim": own.head_dim, "kv_dtype": own.dtype}


def rope(dtype: str, norms: bool = False) -> tuple[str, Sequence[Any], dict[str, Any]]:
    own, weight = pages(dtype), torch.ones(64)
    parts = heads(4), heads(2), heads(2)
    like = (*parts, torch.zeros(2, 32), own, HeadNorms(weight, weight, 1e-6) if norms else None)
    return "rope_and_cache", like, {"head_dim": 64, "kv_dtype": own.dtype}


CODES = ActivationScheme("int")
F32 = torch.float32
#: name -> operator, what it will run on, fields of its problem.
CASES: dict[str, Callable[[], tuple[str, Sequence[Any], dict[str, Any]]]] = {
    "rms_norm": lambda: ("rms_norm", (rows(200), torch.ones(200), torch.bfloat16, None), {}),
    "rms_norm-wide": lambda: ("rms_norm", (rows(96, F32), torch.ones(96), F32, None), {}),
    "add_rms_norm": lambda: (
        "add_rms_norm",
        (rows(200), torch.ones(200), torch.bfloat16, None),
        {},
    ),
    "add_rms_norm-codes": lambda: (
        "add_rms_norm",
        (rows(200), torch.ones(200), torch.bfloat16, Rounding(CODES, torch.int8, 256, 1)),
        {"inputs": str(CODES)},
    ),
    "gated_activation": lambda: ("gated_activation", (rows(300),), {"format": "silu"}),
    "gated_activation-gelu": lambda: ("gated_activation", (rows(300),), {"format": "gelu_tanh"}),
    "zeros": lambda: ("zeros", (rows(70, F32),), {}),
    "add": lambda: ("add", (rows(70),), {}),
    "add_bias": lambda: ("add_bias", (rows(70),), {}),
    "scale": lambda: ("scale", (rows(70, F32),), {}),
    "softcap": lambda: ("softcap", (rows(70, F32),), {}),
    "select_rows": lambda: ("select_rows", (rows(70, F32),), {}),
    "take_columns": lambda: ("take_columns", (rows(70),), {}),
    "rope_angles": lambda: ("rope_angles", (torch.ones(32),), {}),
    "find_places": lambda: ("find_places", (16,), {}),
    **{
        f"rope_and_cache-{t}": (lambda t=t: rope(t))
        for t in ("float16", "bfloat16", "int8", "fp8", "int4")
    },
    "rope_and_cache-norms": lambda: rope("float16", norms=True),
    **{
        f"attention-{t}": (lambda t=t: attention(t))
        for t in ("float32", "float16", "bfloat16", "int8", "fp8", "int4", "k8v4")
    },
    "route": lambda: ("route", (rows(8, F32), 2, True), {}),
    "group": lambda: ("group", (torch.zeros(2, 2, dtype=torch.int32), 8), {}),
    "add_owners_bias": lambda: ("add_owners_bias", (rows(70), 8, 2), {}),
    "combine": lambda: ("combine", (rows(70), 8, 2), {}),
    "low_rank": lambda: ("low_rank", (Shape(4, 200, 132, 2, 16), torch.bfloat16), {}),
    "low_rank-ids": lambda: (
        "low_rank",
        (Shape(4, 50, 70, 1, 8, of_ids=True), torch.bfloat16),
        {},
    ),
    "sample": lambda: ("sample", (rows(9000, F32),), {}),
}


def tried(ops: Ops, name: str) -> tuple[Any, str | None]:
    """The first kernel of the operator, and why it must not run."""
    op, like, fields = CASES[name]()
    kernel = ops.context.backends[0].implementations(op)[0]
    answers = ops.context.answers
    assert answers is not None
    return kernel, answers.reason(kernel, Problem(op, **fields), like)


@pytest.mark.parametrize("name", CASES)
def test_every_operator_passes(ops: Ops, name: str) -> None:
    answers = answers_of(ops)
    kernel, reason = tried(ops, name)
    assert kernel.name.startswith("gpu.") and reason is None
    (answer,) = answers._known.values()
    print(name, answer.distance)
    assert answers.ran == 1
