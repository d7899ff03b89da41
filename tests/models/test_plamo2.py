"""GGUF files of PLaMo 2, which transformers has no class of, against its formulas in float64.

A file of llama.cpp's converter gave the same; so did llama.cpp's logits, for a file whose first
layer attends (docs/log/models.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sdk import LLM, SamplingParams
from sdk.loaders.folders.hf_folder import complete_config
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, prompt

Load = Callable[..., Any]
Tensors = dict[str, Tensor]
_HIDDEN, _WIDTH, _VOCAB, _LAYERS, _EPS = 64, 96, 96, 4, 1e-6
_HEADS, _KV_HEADS, _DIM = 4, 2, 16
_SSM_HEADS, _STATE, _TAPS, _RANK = 6, 24, 4, 64
_INNER = _SSM_HEADS * _DIM
#: Layers of Mamba, as with ``mamba_step`` 2.
MAMBA = [True, False, True, False]


def tensors() -> Tensors:
    """By the names of the file, norms as they are applied."""
    random = torch.Generator().manual_seed(3)

    def normal(*shape: int, scale: float = 0.1, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=random) * scale + mean

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=1.2 * columns**-0.5)

    found = {
        "token_embd.weight": normal(_VOCAB, _HIDDEN, scale=0.2),
        "output_norm.weight": normal(_HIDDEN, mean=1.0, scale=0.3),
    }
    for i, mamba in enumerate(MAMBA):
        at = f"blk.{i}."
        norms = ("attn_norm.weight", "post_attention_norm", "ffn_norm.weight", "post_ffw_norm")
        for name in norms:
            found[at + name] = normal(_HIDDEN, mean=1.0, scale=0.3)
        found[f"{at}ffn_up.weight"] = matrix(2 * _WIDTH, _HIDDEN)
        found[f"{at}ffn_down.weight"] = matrix(_HIDDEN, _WIDTH)
        if not mamba:
            found[f"{at}attn_qkv.weight"] = matrix((_HEADS + 2 * _KV_HEADS) * _DIM, _HIDDEN)
            found[f"{at}attn_output.weight"] = matrix(_HIDDEN, _HEADS * _DIM)
            found[f"{at}attn_q_norm.weight"] = normal(_HEADS, _DIM, mean=1.0, scale=0.3)
            found[f"{at}attn_k_norm.weight"] = normal(_KV_HEADS, _DIM, mean=1.0, scale=0.3)
            continue
        found[f"{at}ssm_in.weight"] = matrix(2 * _INNER, _HIDDEN)
        found[f"{at}ssm_conv1d.weight"] = normal(_INNER, _TAPS, scale=0.5)
        found[f"{at}ssm_x.weight"] = matrix(_RANK + 2 * _STATE, _INNER)
        found[f"{at}ssm_dt.weight"] = matrix(_SSM_HEADS, _RANK)
        found[f"{at}ssm_dt.bias"] = normal(_SSM_HEADS, scale=0.5)
        found[f"{at}ssm_a"] = -normal(_SSM_HEADS, scale=0.5).exp()
        found[f"{at}ssm_d"] = normal(_SSM_HEADS, mean=1.0, scale=0.3)
        found[f"{at}ssm_out.weight"] = matrix(_HIDDEN, _INNER)
        for name, size in (("dt", _RANK), ("b", _STATE), ("c", _STATE)):
            found[f"{at}ssm_{name}_norm"] = normal(size, mean=1.0, scale=0.3)
    return found


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight


def _mamba(t: Tensors, at: str, x: Tensor) -> Tensor:
    n = len(x)
    z, x = (x @ t[f"{at}ssm_in.weight"].t()).view(n, _SSM_HEADS, 2, _DIM).unbind(2)
    x = torch.cat([torch.zeros(_TAPS - 1, _INNER).double(), x.reshape(n, _INNER)])
    windows = torch.stack([x[j : j + n] for j in range(_TAPS)], dim=2)
    x = silu((windows * t[f"{at}ssm_conv1d.weight"]).sum(2))
    b, c, dt = (x @ t[f"{at}ssm_x.weight"].t()).split([_STATE, _STATE, _RANK], 1)
    dt, b, c = (
        _norm(one, t[f"{at}ssm_{name}_norm"]) for one, name in ((dt, "dt"), (b, "b"), (c, "c"))
    )
    dt = softplus(dt @ t[f"{at}ssm_dt.weight"].t() + t[f"{at}ssm_dt.bias"])
    x, state = x.view(n, _SSM_HEADS, _DIM), torch.zeros(_SSM_HEADS, _DIM, _STATE).double()
    out = []
    for i in range(n):
        change = (dt[i, :, None] * x[i])[:, :, None] * b[i]
        state = state * (dt[i] * t[f"{at}ssm_a"]).exp()[:, None, None] + change
        out.append(state @ c[i] + t[f"{at}ssm_d"][:, None] * x[i])
    return (torch.stack(out) * silu(z)).reshape(n, _INNER) @ t[f"{at}ssm_out.weight"].t()


def _turned(x: Tensor) -> Tensor:
    """``[T, heads, dim]``: i and i + dim / 2 turn together."""
    angles = torch.arange(len(x)).double()[:, None] * 3000.0 ** (
        -torch.arange(0, _DIM, 2).double() / _DIM
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _attention(t: Tensors, at: str, x: Tensor) -> Tensor:
    n = len(x)
    qkv = (x @ t[f"{at}attn_qkv.weight"].t()).view(n, -1, _DIM)
    q, k, v = qkv.split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    q = _turned(_norm(q, t[f"{at}attn_q_norm.weight"]))
    k = _turned(_norm(k, t[f"{at}attn_k_norm.weight"]))
    k, v = (one.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for one in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * _DIM**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    y = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)
    return y @ t[f"{at}attn_output.weight"].t()


def logits(ids: list[int]) -> Tensor:
    t = {name: x.double() for name, x in tensors().items()}
    x = t["token_embd.weight"][ids]
    for i, mamba in enumerate(MAMBA):
        at = f"blk.{i}."
        y = (_mamba if mamba else _attention)(t, at, _norm(x, t[f"{at}attn_norm.weight"]))
        x = x + _norm(y, t[f"{at}post_attention_norm"])
        y = _norm(x, t[f"{at}ffn_norm.weight"]) @ t[f"{at}ffn_up.weight"].t()
        gate, up = y.chunk(2, dim=1)
        y = (silu(gate) * up) @ t[f"{at}ffn_down.weight"].t()
        x = x + _norm(y, t[f"{at}post_ffw_norm"])
    return _norm(x, t["output_norm.weight"]) @ t["token_embd.weight"].t()


def gguf() -> GgufBytes:
    """As llama.cpp's converter of October 2026 writes it."""

    def counts(number: int) -> tuple[int, Any]:
        return ARRAY, (I32, [0 if mamba else number for mamba in MAMBA])

    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, _LAYERS),
        "context_length": (U32, 256),
        "embedding_length": (U32, _HIDDEN),
        "feed_forward_length": (U32, _WIDTH),
        "attention.head_count": counts(_HEADS),
        "attention.head_count_kv": counts(_KV_HEADS),
        "attention.key_length": (U32, _DIM),
        "attention.value_length": (U32, _DIM),
        "attention.layer_norm_rms_epsilon": (F32, _EPS),
        "rope.freq_base": (F32, 3000.0),
        "ssm.state_size": (U32, _STATE),
        "ssm.conv_kernel": (U32, _TAPS),
        "ssm.time_step_rank": (U32, _SSM_HEADS),
        "ssm.inner_size": (U32, _INNER),
        "ssm.group_count": (U32, 0),
    }
    file = GgufBytes({"general.architecture": (STRING, "plamo2")})
    file.metadata |= {f"plamo2.{key}": value for key, value in facts.items()}
    for name, values in tensors().items():
        data = np.ascontiguousarray(values.numpy(), "<f4")
        file.tensors[name] = (data.shape[::-1], 0, data.tobytes())
    return file


def test_logits_match_however_the_work_is_cut(tmp_path: Path, load: Load) -> None:
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf()))
    model, ids = load(checkpoint), prompt(75, 1)
    assert checkpoint.unused() == []
    whole = Paged(model).run("a", ids)
    assert (whole - logits(ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 70, 71, 72]):
        assert torch.equal(Paged(model).run("a", ids, splits), whole)


def test_two_ranks_have_the_logits_of_one(tmp_path: Path, load: Load) -> None:
    path = save_gguf(tmp_path / "m.gguf", gguf())
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        model = load(open_checkpoint(path), mesh=own)
        return Paged(model, 1, ranks=2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


@pytest.mark.slow  # 4 s; logits are compared above
def test_answers_are_the_same_however_requests_run(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", gguf())
    options = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 160}
    prompts = [{"prompt_token_ids": prompt(count, count)} for count in (70, 33, 17)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for more in (
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 4},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ):
        with LLM(path, **options, **more) as llm:
            llm.generate(prompts[:1], greedy)  # the next one has a hit
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, greedy)])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("inner_size", 95, "ssm.inner_size is 95, expected a multiple of 6 heads"),
        ("group_count", 1, "ssm.group_count is 1, expected 0"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(
    key: str, value: int, message: str, tmp_path: Path
) -> None:
    file = gguf()
    file.metadata[f"plamo2.ssm.{key}"] = (U32, value)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="plamo2"):
        complete_config({"model_type": "plamo2", "hidden_size": 64}, str(tmp_path))
