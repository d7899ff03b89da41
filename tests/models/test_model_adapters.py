"""Adapters of whole models: the same as adapters merged into the weights, for every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.adapters.peft_folder import renamer
from sdk.loaders.open import open_checkpoint
from sdk.models.adapters import EMBEDDING, ModelAdapters
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.adapter import Adapter, LowRank
from sdk.quant.errors import AdapterError
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.weight import DenseWeight, Weight
from tests.models.conftest import DictCheckpoint, Paged, Ranks, checkpoint_of, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES, EXPERTS

#: Biases, joined files, norms, scaled embeddings, soft caps, scaled logits, heads of their own.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "glm4": {"head_dim": 24},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "gemma2": {"sliding_window": 9},
    "gemma3_text": {"num_key_value_heads": 1, "sliding_window": 8},
    "cohere": {"logit_scale": 0.5},
    "nemotron": {"mlp_bias": True},
    "phi": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    # shared experts, their gate, and a gate beside queries, keys and values
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "afmoe": {**EXPERTS, "num_experts": 4, "num_shared_experts": 2, "sliding_window": 8},
}
PACKED = [
    *("gguf-Q4_1", "gguf-Q4_K_M", "gptq-w4-g128-act", "bnb-nf4", "fp8-block"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *("arch-qwen3", "awq-gemm", "awq-gemv", "bnb-int8", "bnb-nf4-double", "ct-fp8-block"),
            *("ct-fp8-dynamic", "ct-mxfp4a16", "ct-nvfp4a16", "ct-w4a16", "ct-w4a16-asym"),
            *("ct-w8a8-int8", "gguf-IQ3_S", "gguf-IQ4_NL", "gguf-IQ4_XS", "gguf-Q2_K"),
            *("gguf-Q3_K_M", "gguf-Q4_0", "gguf-Q5_0", "gguf-Q5_K_M", "gguf-Q6_K", "gguf-Q8_0"),
            *("gptq-v2-w4-g64-asym", "gptq-w2-g64", "gptq-w3-g128-asym", "gptq-w8-g128"),
            *("gptoss-mxfp4", "torchao-int8wo"),
        )
    ),
]


@pytest.fixture(autouse=True)
def _no_slots_left(ops: Ops) -> Iterator[None]:
    yield
    ops.adapter_slots = None


def adapter_for(
    matrices: dict[str, tuple[int, int]],
    names: Sequence[str] | None = None,
    *,
    biased: Sequence[str] = (),
    seed: int = 0,
) -> Adapter:
    """Random factors of ranks 1 to 16 for matrices; ``biased``: endings of those with a bias."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for index, path in enumerate(matrices if names is None else names):
        (out, inputs), rank = matrices[path], (1, 3, 8, 16)[index % 4]
        a = torch.randn(rank, inputs, generator=random) / inputs**0.5
        b = torch.randn(out, rank, generator=random) * 0.5 / rank**0.5
        if path == EMBEDDING:
            a, b = torch.randn(rank, inputs, generator=random) * 0.1, b
        bias = torch.randn(out, generator=random) if path.endswith(tuple(biased)) else None
        found[path] = LowRank(a, b, bias)
    return Adapter(f"adapter {seed}", found)


def alone(matrices: dict[str, tuple[int, int]]) -> list[str]:
    """The matrices under their own names, without those that join several of them."""
    return [path for path in matrices if not path.endswith(("qkv_proj", "gate_up_proj"))]


def with_slots(ops: Ops, paged: Paged, ids: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Logits of a prompt whose tokens have these adapter slots."""
    ops.adapter_slots = torch.tensor(slots, dtype=torch.int32)
    return paged.step({"a": ids})["a"]


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= 2e-5 * wanted.norm())


def merged(checkpoint: DictCheckpoint, adapter: Adapter) -> DictCheckpoint:
    """The checkpoint with the adapter added to its tensors."""
    tensors = dict(checkpoint.tensors)
    if checkpoint.config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"]
    for path, (a, b, bias) in adapter.matrices.items():
        tensors[f"{path}.weight"] = tensors[f"{path}.weight"] + b @ a
        if bias is not None:
            tensors[f"{path}.bias"] = bias
    config = checkpoint.config | {"tie_word_embeddings": False}
    return DictCheckpoint(config, tensors)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_the_same_as_merged_weights(
    name: str, ops: Ops, load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(tiny(name, **MODELS[name]))
    model = load(checkpoint)
    adapters = ModelAdapters(model, ops, 2)
    joined = name in ("phi3", "falcon")
    names = [path for path in adapters.matrices if f"{path}.weight" in checkpoint.tensors]
    names += ["lm_head"] if "lm_head" not in names else []
    assert any(path.endswith("qkv_proj") for path in names) == joined
    # Models have no place for a bias that they do not have otherwise, but adapters do.
    biases = [path for path in names if f"{path}.bias" in checkpoint.tensors]
    adapter = adapter_for(adapters.matrices, names, biased=biases)
    ids = prompt(21, 3)
    plain = Paged(model).run("a", ids)
    packed = adapters.pack(adapter)
    assert packed.nbytes == adapters.nbytes(adapter) > 0
    adapters.write(1, packed)
    found = with_slots(ops, Paged(model), ids, [1] * 21)
    wanted = Paged(load(merged(checkpoint, adapter))).run("a", ids)
    assert close(found, wanted) and not close(found, plain)
    assert torch.equal(with_slots(ops, Paged(model), ids, [-1] * 21), plain)
    assert torch.equal(with_slots(ops, Paged(model), ids, [0] * 21), plain)
    adapters.clear(1)
    assert torch.equal(with_slots(ops, Paged(model), ids, [1] * 21), plain)


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_with_an_adapter_are_dequantized_ones_with_it_merged(
    name: str, golden: Path, ops: Ops
) -> None:
    path = golden / name
    path = next(path.glob("*.gguf"), path / "hf" if (path / "hf").is_dir() else path)
    model = build_model(open_checkpoint(path), Mesh(), ops, max_model_len=64)
    adapters = ModelAdapters(model, ops, 1)
    names = [one for one in alone(adapters.matrices) if one not in (EMBEDDING, "lm_head")]
    adapter = adapter_for(adapters.matrices, names)
    adapters.write(0, adapters.pack(adapter))

    def change(name: str, weight: Weight) -> Weight:
        if name not in adapter.matrices:
            return weight
        a, b, _ = adapter.matrices[name]
        return DenseWeight(Dense(weight.dequantize() + b @ a))

    ids = [x % model.config.vocab_size for x in prompt(13, 5)]
    found = with_slots(ops, Paged(model), ids, [0] * 13)
    ops.adapter_slots = None
    rewritten = RewrittenCheckpoint(open_checkpoint(path), change)
    dense = build_model(rewritten, Mesh(), ops, max_model_len=64)
    wanted = Paged(dense).run("a", ids)
    assert close(found, wanted)


def test_rows_of_a_step_have_adapters_of_their_own(ops: Ops, load: Callable[..., Any]) -> None:
    model = load(tiny("llama"))
    adapters = ModelAdapters(model, ops, 3)
    for slot in range(3):
        made = adapter_for(adapters.matrices, alone(adapters.matrices), seed=slot)
        adapters.write(slot, adapters.pack(made))
    work = {
        name: prompt(length, length) for name, length in zip("abcd", (9, 1, 20, 4), strict=True)
    }
    slots = dict(zip("abcd", (2, 0, -1, 1), strict=True))
    ops.adapter_slots = torch.tensor([slots[n] for n, ids in work.items() for _ in ids]).int()
    together = Paged(model).step(work)
    for name, ids in work.items():
        found = with_slots(ops, Paged(model), ids, [slots[name]] * len(ids))
        assert torch.equal(found, together[name]), name


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("phi3", 2), ("qwen2", 4), ("gemma2", 2), ("phi", 2), ("qwen2_moe", 2)],
)
def test_ranks_together_have_the_whole_adapter(
    name: str, size: int, ops: Ops, load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(tiny(name, vocab_size=97, output_bias=True, **MODELS[name]))
    model = load(checkpoint)
    whole = ModelAdapters(model, ops, 1)
    names = [path for path in whole.matrices if f"{path}.weight" in checkpoint.tensors]
    biased = ("q_proj", "o_proj", "up_proj", "down_proj", "lm_head")
    adapter = adapter_for(whole.matrices, names, biased=biased)
    whole.write(0, whole.pack(adapter))
    ids = prompt(15, 2)
    expected = with_slots(ops, Paged(model), ids, [0] * 15)

    def work(mesh: Mesh) -> tuple[Tensor, int]:
        own = load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=mesh)
        adapters = ModelAdapters(own, ops, 1)
        packed = adapters.pack(adapter)
        adapters.write(0, packed)
        count = mesh.heads(own.config.num_heads, own.config.num_kv_heads).kv_count
        return Paged(own, count).step({"a": ids})["a"], packed.nbytes

    found = Ranks(size).run(work)
    for logits, nbytes in found:
        assert close(logits, expected)
        assert nbytes < whole.nbytes(adapter)


def test_a_joined_matrix_and_its_parts_are_the_same(ops: Ops, load: Callable[..., Any]) -> None:
    model = load(tiny("llama"))
    adapters = ModelAdapters(model, ops, 2)
    path = "model.layers.1.self_attn"
    shapes = [adapters.matrices[f"{path}.{name}_proj"] for name in "qkv"]
    a = torch.randn(4, 64) * 0.1
    parts = [torch.randn(out, 4) for out, _ in shapes]
    joined = Adapter("joined", {f"{path}.qkv_proj": LowRank(a, torch.cat(parts))})
    separate = {f"{path}.{name}_proj": LowRank(a, b) for name, b in zip("qkv", parts, strict=True)}
    adapters.write(0, adapters.pack(joined))
    adapters.write(1, adapters.pack(Adapter("parts", separate)))
    ids = prompt(7, 7)
    found = [with_slots(ops, Paged(model), ids, [slot] * 7) for slot in (0, 1)]
    assert close(*found)


def test_an_adapter_that_does_not_fit_names_the_matrix_and_changes_nothing(
    ops: Ops, load: Callable[..., Any]
) -> None:
    model = load(tiny("mixtral", num_local_experts=5))
    adapters = ModelAdapters(model, ops, 1, max_rank=8)
    q, a, b = "model.layers.0.self_attn.q_proj", torch.zeros(2, 64), torch.zeros(64, 2)
    bad = torch.full((64, 2), float("inf"))
    cases: list[tuple[str, LowRank, str]] = [
        ("model.layers.0.self_attn.qq", LowRank(a, b), "no such matrix.*it has model.layers.0"),
        ("model.layers.9.self_attn.q_proj", LowRank(a, b), "no such matrix"),
        (q, LowRank(a.t(), b), r"\[r, 64\] and \[64, r\], found \[64, 2\] and \[64, 2\]"),
        (q, LowRank(a, torch.zeros(65, 2)), r"found \[2, 64\] and \[65, 2\]"),
        (q, LowRank(a, torch.zeros(64, 3)), r"found \[2, 64\] and \[64, 3\]"),
        (q, LowRank(a[:0], b[:, :0]), r"found \[0, 64\]"),
        (q, LowRank(a[0], b), r"found \[64\]"),
        (q, LowRank(a, b, torch.zeros(63)), r"a bias \[64\], found \[63\]"),
        (q, LowRank(a.int(), b), "floats in a, found torch.int32"),
        (q, LowRank(a, bad), "b contains numbers that are not finite"),
        (q, LowRank(torch.zeros(9, 64), torch.zeros(64, 9)), "rank of at most 8, found 9"),
        ("model.layers.0.mlp.experts.1.gate_proj", LowRank(a, b), "experts are not supported"),
        (EMBEDDING, LowRank(a, torch.zeros(95, 2)), r"b and a .*\[96, r\] and \[r, 64\]"),
        (EMBEDDING, LowRank(a, torch.zeros(96, 2), torch.zeros(96)), "has no bias"),
    ]
    ids = prompt(5, 5)
    made = adapter_for(adapters.matrices, [q])
    adapters.write(0, adapters.pack(made))
    before = with_slots(ops, Paged(model), ids, [0] * 5)
    for path, matrix, why in cases:
        wrong = Adapter("wrong", {**made.matrices, path: matrix})
        for call in (adapters.pack, adapters.nbytes):
            if "finite" in why and call == adapters.nbytes:
                continue
            with pytest.raises(AdapterError, match=f"adapter 'wrong', {path}: .*{why}"):
                call(wrong)
    with pytest.raises(AdapterError, match="at least one matrix"):
        adapters.pack(Adapter("none", {}))
    assert torch.equal(with_slots(ops, Paged(model), ids, [0] * 5), before)
    with pytest.raises(ValueError, match="expected slots and ranks"):
        ModelAdapters(model, ops, 0)


def test_models_that_run_through_transformers_have_adapters_of_their_linears(
    ops: Ops, load: Callable[..., Any]
) -> None:
    model = load(tiny("persimmon", num_key_value_heads=4))
    adapters = ModelAdapters(model, ops, 1)
    assert EMBEDDING not in adapters.matrices
    with pytest.raises(AdapterError, match="embedding are not supported for this model"):
        adapters.pack(Adapter("e", {EMBEDDING: LowRank(torch.zeros(2, 64), torch.zeros(96, 2))}))
    adapter = adapter_for(adapters.matrices, alone(adapters.matrices))
    ids = prompt(9, 4)
    adapters.write(0, adapters.pack(adapter))
    found = with_slots(ops, Paged(model), ids, [0] * 9)
    checkpoint = checkpoint_of(tiny("persimmon", num_key_value_heads=4))
    wanted = Paged(load(merged(checkpoint, adapter))).run("a", ids)
    assert close(found, wanted)


@pytest.mark.parametrize(
    "name", [x for x in ARCHITECTURES if "num_experts" in str(ARCHITECTURES[x])]
)
def test_an_adapter_of_whatever_is_beside_experts_finds_its_matrix(
    name: str, ops: Ops, load: Callable[..., Any]
) -> None:
    """By the names that PEFT writes, which are those of transformers' modules."""
    oracle = tiny(name.split("-")[0], **ARCHITECTURES[name])
    matrices = ModelAdapters(load(checkpoint_of(oracle)), ops, 1).matrices
    ours = renamer(oracle.config.to_dict())
    for path, module in oracle.named_modules():
        if path.endswith("kv_b_proj"):  # is divided into its heads, half of which are transposed
            assert ours(path) not in matrices
        elif isinstance(module, torch.nn.Linear) and ".experts." not in path:
            assert matrices[ours(path)] == tuple(module.weight.shape)
