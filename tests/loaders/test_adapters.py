"""Files of adapters: what they say is followed, and what is wrong with them is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.adapters.adapter_file import AdapterFile, low_rank
from sdk.loaders.adapters.open import open_adapter
from sdk.loaders.adapters.patterns import MAX_LENGTH, compile_pattern
from sdk.loaders.adapters.peft_folder import canonical
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.counted import lines_run

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 32, 64, 40, 4, 2
LAYER = "model.layers.0."
MATRICES = {
    "model.embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (VOCAB, HIDDEN),
    f"{LAYER}self_attn.q_proj": (HIDDEN, HIDDEN),
    f"{LAYER}self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    f"{LAYER}self_attn.o_proj": (HIDDEN, HIDDEN),
    f"{LAYER}mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}
Q = f"base_model.model.{LAYER}self_attn.q_proj"
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors() -> dict[str, Tensor]:
    return {f"{Q}.lora_A.weight": numbers(4, HIDDEN), f"{Q}.lora_B.weight": numbers(HIDDEN, 4)}


def folder(path: Path, stored: dict[str, Tensor] | None = None, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if stored is None else stored, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**PLAIN, **config}))
    return path


def opened(path: Path, scale: float = 1.0) -> AdapterFile:
    return open_adapter(path, CONFIG, MATRICES, scale)


def update(path: Path, name: str = f"{LAYER}self_attn.q_proj", scale: float = 1.0) -> Tensor:
    with opened(path, scale) as file:
        a, b, _ = file.read("x").matrices[name]
        return b.float() @ a.float()


# ---- folders of PEFT -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 3}, 0.75),
        ({"alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"alpha_pattern": {"_proj": 12, "k_proj": 5}}, 2.0),  # no whole name
        ({"alpha_pattern": {"v_proj": 5, "q_pro.": 12, "q_proj": 1}}, 3.0),  # the first counts
        ({"r": 7, "rank_pattern": {r".*\.0\.self_attn\.(q|k)_proj": 4}}, 2.0),
        ({"lora_dropout": 0.1, "target_modules": "all-linear", "loftq_config": {}}, 2.0),
    ],
    ids=str,
)
def test_the_scale_follows_the_config(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    path = folder(tmp_path, **config)
    expected = scale * numbers(HIDDEN, 4) @ numbers(4, HIDDEN)
    torch.testing.assert_close(update(path), expected)
    torch.testing.assert_close(update(path, scale=0.5), 0.5 * expected)


def test_the_embedding_has_factors_by_token(tmp_path: Path) -> None:
    stem = "base_model.model.model.embed_tokens"
    a, b = numbers(4, VOCAB, seed=1), numbers(HIDDEN, 4, seed=2)
    own = numbers(VOCAB, HIDDEN)
    names = {"lora_embedding_A": a, "lora_embedding_B": b, "base_layer.weight": own}
    path = folder(tmp_path, {f"{stem}.{name}": value for name, value in names.items()})
    expected = 2.0 * (b @ a).T
    torch.testing.assert_close(update(path, "model.embed_tokens"), expected)


def test_biases_stand_beside_factors_and_alone(tmp_path: Path) -> None:
    k = Q.replace("q_proj", "k_proj")
    stored = tensors() | {
        f"{Q}.base_layer.bias": numbers(HIDDEN, seed=3),
        f"{k}.bias": numbers(HIDDEN // 2, seed=4),
    }
    with opened(folder(tmp_path, stored, bias="all")) as file:
        found = file.read("x").matrices
    assert (found[f"{LAYER}self_attn.q_proj"].bias == numbers(HIDDEN, seed=3)).all()
    alone = found[f"{LAYER}self_attn.k_proj"]
    assert alone.bias is not None and (alone.bias == numbers(HIDDEN // 2, seed=4)).all()
    assert not (alone.b @ alone.a).any()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("model.language_model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("language_model.model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("language_model.lm_head", "lm_head"),
        ("embed_tokens", "model.embed_tokens"),
        ("lm_head", "lm_head"),
    ],
)
def test_paths_are_those_of_a_causal_language_model(theirs: str, ours: str) -> None:
    assert canonical(theirs) == ours


def test_equal_files_have_equal_hashes_and_others_do_not(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a"), folder(tmp_path / "b"), folder(tmp_path / "c", lora_alpha=9)]
    digests = []
    for path in paths:
        with opened(path) as file:
            digests.append(file.digest())
            assert file.rank == 4
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_factors_keep_their_type_where_the_scale_is_exact(dtype: torch.dtype) -> None:
    a, b = numbers(4, 8, dtype=dtype), numbers(8, 4, dtype=dtype)
    kept = torch.float32 if dtype == torch.float64 else dtype
    for scale, expected in ((2.0, kept), (1.0, kept), (0.75, torch.float32)):
        found = low_rank(a, b, scale, "x")
        assert found.a.dtype == found.b.dtype == expected
        torch.testing.assert_close(found.b.double(), scale * b.double(), rtol=1e-6, atol=0)
    big = low_rank(a.half(), torch.full((8, 4), 60000.0).half(), 4.0, "x")
    assert big.b.dtype == torch.float32 and (big.b == 240000 - 128).all() | (big.b > 2e5).all()
    tiny = low_rank(a.half(), torch.full((8, 4), 6e-8).half(), 0.5, "x")
    assert tiny.b.dtype == torch.float32 and (tiny.b > 0).all()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "expected peft_type 'LORA', found 'LOHA'"),
        ({"peft_type": None}, "expected peft_type 'LORA', found None"),
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* replaces whole matrices"),
        ({"lora_bias": True}, "lora_bias=True is not supported: biases"),
        ({"layer_replication": [[0, 1]]}, "layer_replication=.* repeats layers"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.* rows of the embedding"),
        ({"target_parameters": ["x"]}, "target_parameters="),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* only after certain tokens"),
        ({"megatron_config": {"a": 1}}, "megatron_config="),
        ({"use_qalora": True}, "use_qalora=True is not supported: this release does not know"),
        ({"invented_later": 3}, "invented_later=3 is not supported: this release does not know"),
        *(
            ({"init_lora_weights": init}, f"init_lora_weights='{init}': .* changed when")
            for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"r": 0}, "r: expected an integer from 1"),
        ({"r": True}, "r: expected an integer"),
        ({"r": 5}, r"self_attn\.q_proj has rank 5 by r and rank_pattern, its tensors have rank 4"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number"),
        ({"bias": "some"}, "bias: expected none, all or lora_only"),
        ({"use_rslora": 1}, "use_rslora: expected true or false"),
        ({"rank_pattern": [4]}, "rank_pattern: expected a dict"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\]: expected an integer"),
        ({"alpha_pattern": {"(q": 4}}, r"alpha_pattern: the pattern '\(q' has an unbalanced \("),
        (
            {"alpha_pattern": {f"q.*{i}": 1 for i in range(70)}},
            "has 70 regular expressions, at most 64",
        ),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_followed_is_named(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(folder(tmp_path, **config))


def _renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        stored[new] = stored.pop(old)

    return change


def _set(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__setitem__(name, value)


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(B), "expected both factors, A and B"),
        (lambda stored: stored.clear(), "header|expected tensors of an adapter, found none"),
        (_renamed(A, A.removeprefix("base_model.model.")), "expected base_model.model.PATH.lora_A"),
        (_renamed(A, f"{Q}.lora_A.default.weight"), "expected base_model.model.PATH"),
        (_set(A, numbers(4, HIDDEN + 1)), r"expected a matrix \[32, 32\].* found \[32, 33\]"),
        (_set(B, numbers(HIDDEN, 5)), "expected two factors of one rank .* found 4 and 5"),
        (_set(A, numbers(4)), "expected factors of two dimensions"),
        (_set(A, torch.zeros(0, HIDDEN)), "expected two factors of one rank from 1"),
        (_set(A, torch.zeros(4, HIDDEN, dtype=torch.int32)), "expected one of F16, .* found I32"),
        (_set(f"{Q}.lora_magnitude_vector", numbers(HIDDEN)), "DoRA is not supported"),
        (_set(f"{Q}.lora_B.bias", numbers(HIDDEN)), "lora_bias. are not supported"),
        (_set(f"{Q}.base_layer.bias", numbers(HIDDEN)), "a bias, but the config says bias='none'"),
        (_set(f"{Q}.weight", numbers(HIDDEN, HIDDEN)), "replaces a whole matrix"),
        (_set(f"{Q}.base_layer.weight", numbers(HIDDEN, HIDDEN)), "replaces this matrix"),
        (
            _set("base_model.model.lm_head.base_layer.weight", numbers(VOCAB + 8, HIDDEN)),
            "replaces this matrix",
        ),
        (_set(A, numbers(4, HIDDEN) * float("nan")), "factor A has values that are not finite"),
        (
            _set(A.replace(".model.layers", ".layers"), numbers(4, HIDDEN)),
            "is in it twice",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    stored = tensors()
    change(stored)
    with pytest.raises(CheckpointError, match=message), opened(folder(tmp_path, stored)) as file:
        file.read("x")


def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    weights = path / "adapter_model.safetensors"
    raw = weights.read_bytes()
    for changed, message in (
        (raw[:-4], "truncated"),
        (raw + b"1234", "bytes after the last tensor"),
        (b"\xff" * 8 + raw[8:], "header length"),
        (b"", "the file is empty"),
    ):
        weights.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            opened(path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        opened(path)
    (path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedError, match=r"a pickle.*save_pretrained writes safetensors"):
        opened(path)
    (path / "adapter_config.json").write_text("[" * 100)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        opened(path)
    (path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"found no adapter_config\.json"):
        opened(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    secret = tmp_path / "secret.json"
    (path / "adapter_config.json").rename(secret)
    (path / "adapter_config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside its folder"):
        opened(path)


def test_other_files_are_no_adapters(tmp_path: Path) -> None:
    other = tmp_path / "adapter.bin"
    other.write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"expected a LoRA adapter: a folder with"):
        opened(other)


# ---- patterns ------------------------------------------------------------------------------------

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "lm_head",
    "q_proj",
    "",
]
PATTERNS = [
    *("q_proj", "self_attn.q_proj", "_proj", "model.layers.0.self_attn.q_proj", "lm_head"),
    *(r"^model\.layers\.1\.mlp\.down_proj", r"layers\.\d+\.self_attn\.q_proj", ".*", ".+proj"),
    *(r"layers\.[01]\..*", r"(q|k|down)_proj", r"(?:mlp|self_attn)\.(?:down|q)_proj$", "lm_?head"),
    *(
        r"layers\.1{1,2}\..*",
        r"layers\.1{2}\..*",
        r"[^.]+",
        r"\w+_head",
        r"(a|)q_proj",
        "(l(m_)h)ead",
    ),
    *(r"layers\.\d\D.*", "^q_proj$", r"(q_)?proj", r"(\.?\w+)+"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_peft_matches(pattern: str) -> None:
    matches = compile_pattern(pattern, "x")
    expected = [re.match(rf"(.*\.)?({pattern})$", name) is not None for name in NAMES]
    assert [matches(name) for name in NAMES] == expected


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "[a", "*a", "a**", "a+?", "(?=a)", r"\1", r"\Z", "a{1000}", "a{2,999}", "(" * 20,
     "a" * (MAX_LENGTH + 1), "a^b", "a$b"],
    ids=lambda pattern: pattern[:12],
)  # fmt: skip
def test_patterns_beyond_that_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^x: "):
        compile_pattern(pattern, "x")


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*b", "(a?){60}a{60}b"])
def test_a_pattern_made_to_take_forever_takes_no_time(pattern: str) -> None:
    matches = compile_pattern(pattern, "x")
    found: list[bool] = []
    assert lines_run(lambda: found.append(matches("a" * 60 + "c"))) < 100_000
    assert found == [False]


# ---- GGUF ----------------------------------------------------------------------------------------


def interleaved(b: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter permutes the rows of q and k."""
    return b.reshape(heads, 2, b.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(b.shape)


def gguf(path: Path, stored: dict[str, Tensor], **facts: Any) -> Path:
    values: dict[str, Any] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
        **{name.replace("__", "."): value for name, value in facts.items()},
    }
    writer = GGUFWriter(path, values.pop("general.architecture", "llama"))
    for name, value in values.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_float32(name, value)
    for name, tensor in stored.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors() -> dict[str, Tensor]:
    b = numbers(HIDDEN, 4)
    return {
        "blk.0.attn_q.weight.lora_a": numbers(4, HIDDEN),
        "blk.0.attn_q.weight.lora_b": interleaved(b, HEADS),
        "blk.0.ffn_down.weight.lora_a": numbers(4, INNER, seed=1).half(),
        "blk.0.ffn_down.weight.lora_b": numbers(HIDDEN, 4, seed=2).half(),
        "token_embd.weight.lora_a": numbers(VOCAB, 4, seed=3),
        "token_embd.weight.lora_b": numbers(HIDDEN, 4, seed=4),
    }


def test_a_gguf_adapter_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path = gguf(tmp_path / "a.gguf", gguf_tensors())
    torch.testing.assert_close(update(path), 2.0 * numbers(HIDDEN, 4) @ numbers(4, HIDDEN))
    a, b = numbers(4, INNER, seed=1).half().float(), numbers(HIDDEN, 4, seed=2).half().float()
    torch.testing.assert_close(update(path, f"{LAYER}mlp.down_proj"), 2.0 * b @ a)
    rows = 2.0 * numbers(VOCAB, 4, seed=3) @ numbers(HIDDEN, 4, seed=4).T
    torch.testing.assert_close(update(path, "model.embed_tokens"), rows)
    without = gguf(tmp_path / "b.gguf", gguf_tensors(), adapter__lora__alpha=0.0)
    torch.testing.assert_close(update(without), numbers(HIDDEN, 4) @ numbers(4, HIDDEN))
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "a.gguf")
    torch.testing.assert_close(update(tmp_path / "folder", scale=0.5), update(without))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"general__type": "model"}, r"expected a LoRA adapter \(general.type 'adapter'\)"),
        ({"adapter__type": "other"}, "expected adapter.type 'lora', found 'other'"),
        ({"general__architecture": "qwen2"}, "is for a model of the architecture 'qwen2'"),
        ({"adapter__alora__invocation_tokens": 1.0}, "aLoRA"),
        ({"adapter__lora__alpha": "8"}, "adapter.lora.alpha is 8, expected a number"),
    ],
)
def test_a_gguf_file_that_is_no_such_adapter_is_named(
    facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(gguf(tmp_path / "a.gguf", gguf_tensors(), **facts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blk.0.attn_q.weight.lora_a"), "expected both lora_a and lora_b"),
        (_renamed("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight"), "expected NAME.lora_a"),
        (
            lambda s: [s.__setitem__(f"blk.7.attn_q.weight.lora_{x}", numbers(4, 4)) for x in "ab"],
            "the model has no such matrix",
        ),
        (_set("blk.0.attn_q.weight.lora_a", numbers(4, 16)), r"expected a matrix \[32, 32\]"),
        (_set("blk.0.attn_q.weight.lora_b", numbers(32, 5)), "two factors of one rank"),
    ],
)
def test_tensors_of_a_gguf_adapter_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    stored = gguf_tensors()
    change(stored)
    with pytest.raises(CheckpointError, match=message):
        opened(gguf(tmp_path / "a.gguf", stored))


def test_a_gguf_adapter_needs_a_model_that_has_gguf_files(tmp_path: Path) -> None:
    path = gguf(tmp_path / "a.gguf", gguf_tensors())
    with pytest.raises(UnsupportedError, match=r"GGUF files of the model 'rwkv' are not"):
        open_adapter(path, CONFIG | {"model_type": "rwkv"}, MATRICES)
