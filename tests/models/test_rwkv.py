"""RWKV-7 and ARWKV-7, which transformers has no class of, against their formulas in float64.

llama.cpp's converter and logits gave the same for the same folder (docs/log/models.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from sdk import LLM
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import read_config
from sdk.models.parallel import Mesh
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from tests.gguf_models import F32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, prompt
from tests.models.test_stages import stages_of
from tests.same_answers import OPTIONS, PROMPTS, answers, check_answers

Load = Callable[..., Any]
Array = NDArray[np.float64]
_HIDDEN, _DIM, _LAYERS, _WIDTH, _VOCAB = 64, 16, 3, 96, 96
_HEADS = _HIDDEN // _DIM
_RANKS = {"w": 24, "a": 20, "v": 12, "g": 40}
CONFIG: dict[str, Any] = {
    "model_type": "rwkv7",
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "intermediate_size": _WIDTH,
    "head_dim": _DIM,
    "vocab_size": _VOCAB,
    "decay_low_rank_dim": _RANKS["w"],
    "a_low_rank_dim": _RANKS["a"],
    "v_low_rank_dim": _RANKS["v"],
    "gate_low_rank_dim": _RANKS["g"],
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 4e-5,
    "attn_mode": "chunk",
    "attn": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
#: That of llama.cpp; of folders the dim of a head times the eps of norms.
_HEAD_EPS = _DIM * CONFIG["norm_eps"]


def tensors(*, hybrid: bool = False) -> dict[str, Tensor]:
    """By flash-linear-attention's names; those of a ``hybrid`` (ARWKV) beside time mixing are
    Qwen 2's."""
    random = torch.Generator().manual_seed(4)

    def normal(*shape: int, scale: float = 0.1, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=random) * scale + mean

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=1.3 * columns**-0.5)

    found = {
        "model.embeddings.weight": normal(_VOCAB, _HIDDEN, scale=0.7),
        "lm_head.weight": normal(_VOCAB, _HIDDEN, scale=0.2),
    }
    norms = ["norm", *(f"layers.{i}.{one}_norm" for i in range(_LAYERS) for one in ("attn", "ffn"))]
    norms += ["layers.0.pre_norm", *(f"layers.{i}.attn.g_norm" for i in range(_LAYERS))]
    for name in norms:
        found[f"model.{name}.weight"] = normal(_HIDDEN, mean=1.0, scale=0.3)
        found[f"model.{name}.bias"] = normal(_HIDDEN, scale=0.2)
    for i in range(_LAYERS):
        at = f"model.layers.{i}.attn."
        for name in "rwkvag":
            found[f"{at}x_{name}"] = torch.rand(1, 1, _HIDDEN, generator=random)
        for name in "rkvo":
            found[f"{at}{name}_proj.weight"] = matrix(_HIDDEN, _HIDDEN)
        for name, rank in _RANKS.items():
            if name == "v" and not i:
                continue
            found[f"{at}{name}_lora.lora.0.weight"] = matrix(rank, _HIDDEN)
            found[f"{at}{name}_lora.lora.2.weight"] = matrix(_HIDDEN, rank)
            if name != "g":
                found[f"{at}{name}_lora.lora.2.bias"] = normal(_HIDDEN, scale=0.5)
        found[f"{at}k_k"] = normal(_HIDDEN, mean=0.8, scale=0.3)
        found[f"{at}k_a"] = normal(_HIDDEN, mean=0.9, scale=0.3)
        found[f"{at}r_k"] = normal(_HEADS, _DIM, scale=0.4)
        mlp = f"model.layers.{i}.ffn."
        found[f"{mlp}x_k"] = torch.rand(_HIDDEN, generator=random)
        found[f"{mlp}key.weight"] = matrix(_WIDTH, _HIDDEN)
        found[f"{mlp}value.weight"] = matrix(_HIDDEN, _WIDTH)
        if hybrid:
            found[f"{mlp}gate.weight"] = matrix(_WIDTH, _HIDDEN)
    return found


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Oracle:
    """The formulas of the paper (arXiv 2503.14456, section 4 and appendix), one token at a time."""

    def __init__(
        self,
        values: dict[str, Tensor],
        head_eps: float,
        *,
        hybrid: bool = False,
        gated: bool = True,
    ) -> None:
        self.t = {name: x.double().numpy() for name, x in values.items()}
        self.head_eps, self.hybrid, self.gated = head_eps, hybrid, gated
        self.state = np.zeros((_LAYERS, _HEADS, _DIM, _DIM))  # [values, keys]
        self.before = np.zeros((_LAYERS, 2, _HIDDEN))
        self.first: Array = np.zeros(0)

    def norm(self, x: Array, name: str) -> Array:
        weight, bias = self.t[f"model.{name}.weight"], self.t[f"model.{name}.bias"]
        if self.hybrid:
            found: Array = x / np.sqrt((x * x).mean() + CONFIG["norm_eps"]) * weight
            return found
        own: Array = (x - x.mean()) / np.sqrt(x.var() + CONFIG["norm_eps"]) * weight + bias
        return own

    def low(self, x: Array, at: str, activation: Callable[[Array], Array]) -> Array:
        y: Array = self.t[f"{at}.lora.2.weight"] @ activation(self.t[f"{at}.lora.0.weight"] @ x)
        return y + self.t.get(f"{at}.lora.2.bias", 0.0)

    def time_mix(self, layer: int, x: Array) -> Array:
        at, t = f"model.layers.{layer}.attn.", self.t
        delta = self.before[layer, 0] - x
        self.before[layer, 0] = x
        mixed = {n: x + delta * t[f"{at}x_{n}"].reshape(-1) for n in "rwkvag"}
        r, k, v = (t[f"{at}{n}_proj.weight"] @ mixed[n] for n in "rkv")
        w = np.exp(-np.exp(-0.5) * _sigmoid(self.low(mixed["w"], f"{at}w_lora", np.tanh)))
        a = _sigmoid(self.low(mixed["a"], f"{at}a_lora", lambda y: y))
        if layer:
            v = v + (self.first - v) * _sigmoid(self.low(mixed["v"], f"{at}v_lora", lambda y: y))
        else:
            self.first = v
        removal = (k * t[f"{at}k_k"]).reshape(_HEADS, _DIM)
        removal = removal / np.linalg.norm(removal, axis=1, keepdims=True)
        k = k * (1 + (a - 1) * t[f"{at}k_a"])
        r, k, v, w, a = (one.reshape(_HEADS, _DIM) for one in (r, k, v, w, a))
        out = np.zeros((_HEADS, _DIM))
        for h in range(_HEADS):
            change = np.diag(w[h]) - np.outer(removal[h], a[h] * removal[h])
            self.state[layer, h] = self.state[layer, h] @ change + np.outer(v[h], k[h])
            out[h] = self.state[layer, h] @ r[h]
        spread = np.sqrt(out.var(axis=1, keepdims=True) + self.head_eps)
        out = (out - out.mean(axis=1, keepdims=True)) / spread
        y = out.reshape(-1) * t[f"{at}g_norm.weight"] + t[f"{at}g_norm.bias"]
        y = y + ((r * k * t[f"{at}r_k"]).sum(1, keepdims=True) * v).reshape(-1)
        if self.gated:
            y = y * self.low(_as_is(mixed["g"]), f"{at}g_lora", _sigmoid)
        found: Array = t[f"{at}o_proj.weight"] @ y
        return found

    def mlp(self, layer: int, x: Array) -> Array:
        at = f"model.layers.{layer}.ffn."
        if self.hybrid:
            gate = self.t[f"{at}gate.weight"] @ x
            wide: Array = gate * _sigmoid(gate) * (self.t[f"{at}key.weight"] @ x)
        else:
            mixed = x + (self.before[layer, 1] - x) * self.t[f"{at}x_k"]
            self.before[layer, 1] = x
            wide = np.maximum(self.t[f"{at}key.weight"] @ mixed, 0) ** 2
        found: Array = self.t[f"{at}value.weight"] @ wide
        return found

    def logits(self, ids: list[int]) -> Tensor:
        found = []
        for token in ids:
            x = self.t["model.embeddings.weight"][token]
            if not self.hybrid:
                x = self.norm(x, "layers.0.pre_norm")
            for layer in range(_LAYERS):
                x = x + self.time_mix(layer, self.norm(x, f"layers.{layer}.attn_norm"))
                x = x + self.mlp(layer, self.norm(x, f"layers.{layer}.ffn_norm"))
            found.append(self.t["lm_head.weight"] @ self.norm(x, "norm"))
        return torch.from_numpy(np.stack(found))


def _as_is(x: Array) -> Array:
    return x


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


_TOP = {
    "model.embeddings.weight": "token_embd.weight",
    "model.layers.0.pre_norm.weight": "token_embd_norm.weight",
    "model.layers.0.pre_norm.bias": "token_embd_norm.bias",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}
_NAMES = {
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.g_norm": "time_mix_ln",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.k_k": "time_mix_k_k.weight",
    "attn.k_a": "time_mix_k_a.weight",
    "attn.r_k": "time_mix_r_k.weight",
    "ffn.x_k": "channel_mix_lerp_k.weight",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
    **{f"attn.{n}_lora.lora.0": f"time_mix_{n}1" for n in _RANKS},
    **{f"attn.{n}_lora.lora.2": f"time_mix_{n}2" for n in _RANKS},
}
_HYBRID = {"ffn_norm": "ffn_norm", "ffn.key": "ffn_up", "ffn.value": "ffn_down"}
_HYBRID["ffn.gate"] = "ffn_gate"


def gguf(*, hybrid: bool = False, gated: bool = True) -> GgufBytes:
    """As llama.cpp's converter of October 2026 writes it; layer 0 has a copy of the learning rate's
    tensors in the place of those that mix values."""
    arch = "arwkv7" if hybrid else "rwkv7"
    eps = "attention.layer_norm_rms_epsilon" if hybrid else "attention.layer_norm_epsilon"
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, _LAYERS),
        "context_length": (U32, 1 << 20),
        "embedding_length": (U32, _HIDDEN),
        "feed_forward_length": (U32, _WIDTH),
        "attention.head_count": (U32, 0),
        eps: (F32, CONFIG["norm_eps"]),
        "wkv.head_size": (U32, _DIM),
        "attention.decay_lora_rank": (U32, _RANKS["w"]),
        "attention.iclr_lora_rank": (U32, _RANKS["a"]),
        "attention.value_residual_mix_lora_rank": (U32, _RANKS["v"]),
        "attention.gate_lora_rank": (U32, _RANKS["g"] if gated else 0),
    }
    if hybrid:
        facts["token_shift_count"] = (U32, 1)
    file = GgufBytes({"general.architecture": (STRING, arch)})
    file.metadata |= {f"{arch}.{key}": value for key, value in facts.items()}

    def put(name: str, values: Tensor) -> None:
        data = np.ascontiguousarray(values.float().numpy(), "<f4")
        file.tensors[name] = (data.shape[::-1], 0, data.tobytes())

    values = tensors(hybrid=hybrid)
    for name, x in values.items():
        if name in _TOP:
            if not (hybrid and ("bias" in name or "pre_norm" in name)):
                put(_TOP[name], x)
            continue
        _, _, layer, own = name.split(".", 3)
        if own.startswith("attn.x_") or (not gated and "g_lora" in own):
            continue
        if hybrid and (own == "ffn.x_k" or own in ("attn_norm.bias", "ffn_norm.bias")):
            continue
        if own.endswith(".lora.2.bias"):
            put(f"blk.{layer}.time_mix_{own[5]}0.weight", x)
            continue
        stem, _, ending = own.rpartition(".") if own not in _NAMES else (own, "", "")
        names = {**_NAMES, **_HYBRID} if hybrid else _NAMES
        x = x.reshape(1, 1, -1) if own == "ffn.x_k" else x
        x = x.flatten() if own == "attn.r_k" else x
        put(f"blk.{layer}.{names[stem]}" + f".{ending}" * bool(ending), x)
    for i in range(_LAYERS):
        each = [values[f"model.layers.{i}.attn.x_{n}"] for n in ("rwkvag" if gated else "rwkva")]
        put(f"blk.{i}.time_mix_lerp_fused.weight", torch.stack(each))
    for n in range(3):
        shape, kind, data = file.tensors[f"blk.0.time_mix_a{n}.weight"]
        file.tensors[f"blk.0.time_mix_v{n}.weight"] = (shape, kind, data)
    return file


def _folder(path: Path) -> Path:
    return folder(path / "m")


def _file(path: Path) -> Path:
    return save_gguf(path / "m.gguf", gguf())


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[], Oracle]]] = {
    "folder": (_folder, lambda: Oracle(tensors(), _HEAD_EPS)),
    "gguf": (_file, lambda: Oracle(tensors(), 64e-5)),
    "hybrid": (
        lambda path: save_gguf(path / "m.gguf", gguf(hybrid=True)),
        lambda: Oracle(tensors(hybrid=True), 64e-5, hybrid=True),
    ),
    "hybrid-ungated": (
        lambda path: save_gguf(path / "m.gguf", gguf(hybrid=True, gated=False)),
        lambda: Oracle(tensors(hybrid=True), 64e-5, hybrid=True, gated=False),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_however_the_work_is_cut(kind: str, tmp_path: Path, load: Load) -> None:
    make, oracle = KINDS[kind]
    checkpoint = open_checkpoint(make(tmp_path))
    model, ids = load(checkpoint), prompt(70, 1)
    whole = Paged(model).run("a", ids)
    assert (whole - oracle().logits(ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 33, 34, 69]):
        assert torch.equal(Paged(model).run("a", ids, splits), whole)
    unused = [] if kind == "folder" else [f"blk.0.time_mix_v{n}.weight" for n in range(3)]
    assert sorted(checkpoint.unused()) == unused


@pytest.mark.slow  # 8 s; operators are tested for this in test_states.py
@pytest.mark.parametrize("kind", ["folder", "hybrid"])
def test_answers_are_the_same_however_requests_run(kind: str, tmp_path: Path) -> None:
    """Alone, together, in chunks, after hits, with drafts, from a snapshot; packed."""
    path, saved = KINDS[kind][0](tmp_path), tmp_path / "saved"
    alone, turns, again = check_answers(path)
    with LLM(path, **OPTIONS) as llm:
        assert "recorded graph" in str(llm.explain())
        llm.snapshot({"prompt_token_ids": turns[0]}).save(saved)
    with LLM(path, **OPTIONS) as llm:
        llm.restore(saved)
        assert answers(llm, turns[:1]) == again[:1]
        assert llm.get_metrics()["num_prompt_tokens_cached"] >= 64
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(path, **OPTIONS, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS) == alone
    if kind == "folder":
        with LLM(path, **OPTIONS, quantization="int8") as llm:
            packed = [answers(llm, [one])[0] for one in PROMPTS]
            assert answers(llm, PROMPTS) == packed
            assert "w8a16s" in str(llm.explain())


@pytest.mark.parametrize("kind", ["folder", "hybrid"])
def test_two_ranks_have_the_logits_of_one(kind: str, tmp_path: Path, load: Load) -> None:
    path = KINDS[kind][0](tmp_path)
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        model = load(open_checkpoint(path), mesh=own)
        return Paged(model, ranks=2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_hand_on_the_values_of_the_first_layer(
    kind: str, ranks: int, tmp_path: Path, load: Load
) -> None:
    """The last of three stages gets them through the one before it, and the bits are those of one
    stage."""
    path, ids = KINDS[kind][0](tmp_path), prompt(30, 1)

    def work(own: Mesh) -> tuple[Tensor, Tensor]:
        expected = Paged(load(open_checkpoint(path), mesh=own), ranks=ranks).run("a", ids, [11])
        runs = [range(1), range(1, 2), range(2, _LAYERS)]
        stages = stages_of(load, lambda: open_checkpoint(path), runs, own)
        found = []
        for part in (ids[:11], ids[11:]):
            for stage in stages:
                logits = stage.step({"a": part})["a"]
            found.append(logits)
        return torch.cat(found), expected

    for found, expected in Ranks(ranks).run(work) if ranks > 1 else [work(Mesh())]:
        assert torch.equal(found, expected)


def test_what_is_impossible_or_not_computed_is_refused_by_name(tmp_path: Path, load: Load) -> None:
    for changes, kind, message in (
        ({"norm_first": False}, UnsupportedError, "norm_first: expected True, found False"),
        ({"attn": {"layers": [1]}}, UnsupportedError, "attn: expected None"),
        ({"head_dim": 24}, CheckpointError, "head_dim: expected a divisor of hidden_size 64"),
        ({"a_low_rank_dim": 0}, CheckpointError, "a_low_rank_dim: expected an integer"),
    ):
        with pytest.raises(kind, match=message):
            read_config(open_checkpoint(folder(tmp_path / "m", **changes)).config)
    with pytest.raises(AlignmentError, match="cannot split 4 heads of RWKV-7 over 3 ranks"):
        read_config(open_checkpoint(folder(tmp_path / "m")).config).rank_caches(3)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.1.time_mix_lerp_fused.weight", (5, 1, 1, 64), "expected 6 times 64 numbers"),
        ("blk.1.time_mix_k_k.weight", (60,), "key_norm: expected 64 numbers, found 60"),
        ("blk.1.channel_mix_lerp_k.weight", (1, 1, 60), "expected 1 times 64 numbers"),
    ],
)
def test_tensors_of_another_size_are_named(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path, load: Load
) -> None:
    file = gguf()
    data = np.zeros(shape, "<f4")
    file.tensors[name] = (shape[::-1], 0, data.tobytes())
    with pytest.raises(CheckpointError, match=message):
        load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))


@pytest.mark.parametrize(
    ("hybrid", "count", "expected"), [(False, 1, "expected 2"), (True, 2, "expected 1")]
)
def test_files_with_another_number_of_shifts_are_refused(
    hybrid: bool, count: int, expected: str, tmp_path: Path
) -> None:
    file = gguf(hybrid=hybrid)
    arch = "arwkv7" if hybrid else "rwkv7"
    file.metadata[f"{arch}.token_shift_count"] = (U32, count)
    with pytest.raises(CheckpointError, match=f"token_shift_count is {count}, {expected}"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
