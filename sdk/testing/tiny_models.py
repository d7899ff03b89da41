"""``tiny_model``: writes a real checkpoint of two layers with random weights, in any format."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.api.errors import RequestError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.model_shapes import expected_shape, num_experts
from sdk.models.architecture import RMS_NORM_EPS, Architecture, architecture, architectures
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.experts import key_of
from sdk.models.configs.keys import only_read, with_our_keys
from sdk.models.decoder import Decoder
from sdk.models.parallel import Mesh
from sdk.models.source import Source
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError, QuantizationError, UnsupportedError
from sdk.quant.safe_repr import safe_repr
from sdk.quant.scheme import Scheme
from sdk.quant.weight import Weight, weight_of
from sdk.quantizing import quantize

#: 256 columns: the width of a GGUF superblock, and two groups of 128.
_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
#: Of a mixture of experts, by fact (:data:`sdk.models.configs.experts.NAMES`).
_EXPERTS = {
    "count": 2,
    "per_token": 2,
    "normalized": True,
    "shared": 1,
    "shared_width": 256,
    "dense": 1,
}
_VOCAB_SIZE = 384
_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Merges of the tokenizer come from these words.
_TEXT = (
    "the cat sat on the mat and the dog said hello to the other cats in the world because "
    "this is a small text with the words that a small model should know about and write"
)
#: Factors that change nothing.
_ONES = ("layer_scalar", ".gate.scale", ".per_expert_scale")
#: Not quantized: a folder in float16.
_PLAIN = "float16"
_SEQUENCES, _TOKENS = 4, 64


def tiny_model(
    folder: str | PathLike[str],
    format: str = "q4_k_m",
    architecture: str = "llama",
    *,
    seed: int = 0,
) -> Path:
    """Write a tiny model into ``folder`` and return the path for ``LLM``.

    Two layers with random weights, 384 tokens, a byte-level tokenizer and a chat template. The
    same arguments write the same weights. The file has less than 3 MB and is written in less than
    two seconds.

    ``format``: ``"float16"`` (a folder, not quantized) or a scheme of :func:`sdk.quantize`:
    ``"q4_k_m"`` and ``"f16"`` are GGUF files, ``"gptq"``, ``"awq"``, ``"int4"`` and ``"fp8"``
    folders. ``architecture``: the ``model_type`` of a native decoder
    (docs/models.md).

    :raises RequestError: an argument is wrong. :raises QuantizationError: the format is unknown,
        does not suit the architecture, or the result exists.
    """
    known = _known(architecture)
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise RequestError(f"seed: expected an integer of at least 0, found {safe_repr(seed)}")
    if not isinstance(format, str):
        raise RequestError(f"format: expected a name, found {safe_repr(format)}")
    scheme = None if format == _PLAIN else Scheme.parse(format)
    parent = Path(folder).expanduser()
    gguf = scheme is not None and scheme.container == "gguf"
    name = f"{known.model_type}-{format}"
    target = parent / (f"{name}.gguf" if gguf else name)
    if target.exists():
        raise QuantizationError(f"{target}: exists already; name another folder")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=parent) as work:
        plain = Path(work) / "plain"
        _write_plain(plain, known, seed)
        if scheme is None:
            return plain.rename(target)
        calibration = None
        if scheme.needs_data:
            draw = torch.Generator().manual_seed(seed)
            shape = _SEQUENCES, _TOKENS
            calibration = torch.randint(_VOCAB_SIZE, shape, generator=draw).tolist()
        how: dict[str, Any] = {"sequences": _SEQUENCES, "tokens": _TOKENS, "num_threads": 1}
        try:
            return quantize(plain, target, format, calibration=calibration, **how)
        except (QuantizationError, UnsupportedError) as error:
            why = str(error).removeprefix(f"{plain}: ")
            raise QuantizationError(f"tiny_model: {name}: {why}") from error


def tiny_architectures() -> tuple[Architecture, ...]:
    """The models that :func:`tiny_model` writes: native decoders whose folders are read."""
    known = (one for one in architectures() if one.config.causal and one.folders)
    found = (one for one in known if one.dual is None)  # CLIP's encoder of texts is causal
    return tuple(one for one in found if one.model_type not in _OTHER_SIZES)


def _known(name: object) -> Architecture:
    found = architecture(name) if isinstance(name, str) else None
    if found is None or found not in tiny_architectures():
        names = ", ".join(one.model_type for one in tiny_architectures())
        raise RequestError(f"architecture: expected one of {names}, found {safe_repr(name)}")
    return found


#: Sizes in parts of their own, or vectors whose shape the model takes as it comes.
_OTHER_SIZES = ("dbrx", "hyperclovax", "rwkv7", "spark2_5")
_FULL, _SLIDES = "full_attention", "sliding_attention"
_WINDOWED: dict[str, Any] = {"layer_types": [_SLIDES, _FULL], "sliding_window": 32}
_DELTAS: dict[str, Any] = {
    "layer_types": ["linear_attention", _FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "num_key_value_heads": _SHAPE["num_attention_heads"],
}
_INDEXER: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 2048}
_ONE_GROUP: dict[str, Any] = {"n_group": 1, "topk_group": 1}
_DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
#: What models have besides, with every kind of layer.
_KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTAS),
    "olmo_hybrid": _DELTAS,
    "lfm2": {"layer_types": ["conv", _FULL], "conv_L_cache": 3, "conv_bias": False},
    "lfm2_moe": {"layer_types": ["conv", _FULL], "conv_L_cache": 3, "conv_bias": False},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 512},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 32, "expand": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "deepseek_v2": {**_LATENT, **_ONE_GROUP, "norm_topk_prob": False},
    **{name: {**_LATENT, **_ONE_GROUP} for name in ("deepseek_v3", "kimi_k2")},
    "deepseek_v32": {**_LATENT, **_ONE_GROUP, **_INDEXER},
    "glm_moe_dsa": {**_LATENT, **_INDEXER},
    "glm4_moe_lite": {**_LATENT, **_DENSE_FIRST},
    **dict.fromkeys(("mistral4", "youtu", "minicpm3"), _LATENT),
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", _FULL],
        "linear_num_heads": 4,
        "linear_head_dim": 64,
    },
    "gemma4_text": {
        **_WINDOWED,
        "global_head_dim": 128,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": _VOCAB_SIZE,
    },
    "gemma3n_text": {
        **_WINDOWED,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": _VOCAB_SIZE,
        "activation_sparsity_pattern": [0.9, 0.0],
        "laurel_rank": 32,
    },
    "openelm": {
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [0.5, 1.0],
        "ffn_dim_divisor": 128,
    },
    "laguna": {**_WINDOWED, "num_attention_heads_per_layer": [8, 4]},
    "llama4_text": {
        "layer_types": ["chunked_attention", _FULL],
        "attention_chunk_size": 32,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "intermediate_size_mlp": 256,
        "num_experts_per_tok": 1,
    },
    "mimo_v2_flash": {
        **_WINDOWED,
        **_DENSE_FIRST,
        "v_head_dim": 32,
        "partial_rotary_factor": 0.5,
        "swa_rope_theta": 10000.0,
    },
    "step3p5": {**_WINDOWED, **_DENSE_FIRST, "num_sliding_attention_heads": 8},
}
#: What follows from other keys, and transformers' classes do not let a file say.
_NOT_STORED = {
    "falcon_h1": ("layer_types",),
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "jamba", "bamba"), ("layer_types",)),
    "minicpm3": ("logits_scaling",),
}
#: What a GGUF file of a model can express, where the defaults of its class are something else.
_FOR_GGUF: dict[str, dict[str, Any]] = {
    "exaone4": {
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention"],
    },
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": _SHAPE["num_attention_heads"]},
    "qwen2_moe": {"norm_topk_prob": False},
}


def _write_plain(folder: Path, known: Architecture, seed: int) -> None:
    """A folder in float16, as transformers writes it."""
    experts: dict[str, Any] = {}
    if known.config.expert_width is not None:
        facts = ((key_of(fact, known.config.keys), value) for fact, value in _EXPERTS.items())
        experts = {key: value for key, value in facts if key is not None}
        experts[known.config.expert_width] = _SHAPE["intermediate_size"]
    shape = {key: value for key, value in _SHAPE.items() if key != RMS_NORM_EPS}
    if isinstance(known.config.norm_eps, str):
        shape[known.config.norm_eps] = _SHAPE[RMS_NORM_EPS]
    config = {
        "hidden_act": "silu",
        **known.config.defaults,
        **only_read(shape, known),
        **experts,
        **_KINDS.get(known.model_type, {}),
        **_FOR_GGUF.get(known.model_type, {}),
        "model_type": known.model_type,
        "vocab_size": _VOCAB_SIZE,
        "eos_token_id": 0,
        "dtype": "float16",
    }
    checkpoint = RandomCheckpoint(folder, with_our_keys(config), known, seed)
    with closing(Ops(num_threads=1)) as ops:
        Decoder(RandomSource(checkpoint, ModelConfig.from_dict(checkpoint.config), Mesh(), ops, 64))
    folder.mkdir()
    tensors = _as_stored(checkpoint.tensors, known)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dropped = _NOT_STORED.get(known.model_type, ())
    kept = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    stored = {known.config.names.get(key, key): value for key, value in kept.items()}
    (folder / "config.json").write_text(json.dumps(stored, indent=2))
    _write_tokenizer(folder)


def _as_stored(tensors: Mapping[str, Tensor], known: Architecture) -> dict[str, Tensor]:
    """The tensors with the names and shapes of a folder; the order of random rows is any."""
    theirs, found = TensorNames(known.tensors.names).theirs, {}
    for name, values in tensors.items():
        turned = known.tensors.layers_transposed and values.dim() == 2 and ".layers." in name
        found[theirs(name)] = values.t().contiguous() if turned else values
    return found


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": _SPECIAL[0], "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))


class RandomSource(Source):
    """Tells a :class:`RandomCheckpoint` the shape of what the model pulls."""

    def pull(self, path: str, shape: tuple[int, int], *, more_rows: bool = False) -> Weight:
        assert isinstance(self.checkpoint, RandomCheckpoint)
        self.checkpoint.shapes.setdefault(self._name(path), shape)
        return super().pull(path, shape, more_rows=more_rows)

    def vector(self, path: str, *shape: int | None) -> Tensor:
        assert isinstance(self.checkpoint, RandomCheckpoint)
        sizes = tuple(size for size in shape if size is not None)
        if len(sizes) == len(shape):
            self.checkpoint.shapes.setdefault(self._name(path).removesuffix(".weight"), sizes)
        return super().vector(path, *shape)


class RandomCheckpoint:
    """A :class:`sdk.quant.checkpoint.Checkpoint` that makes the tensors a model pulls.

    ``tensors`` are those that were pulled, in float16, as a folder stores them.
    """

    format = "safetensors"
    tokenizer = None

    def __init__(
        self, path: Path, config: Mapping[str, Any], known: Architecture, seed: int
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config: Mapping[str, Any] = {}
        self.kv_scales: Mapping[str, float] = {}
        self.processor: Mapping[str, Any] = {}
        self.on_bytes: Callable[[int, int], None] | None = None
        self.tensors: dict[str, Tensor] = {}
        #: Of tensors that the config does not tell.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._offset = known.tensors.norm_offset
        joined = known.gguf is not None and "mlp.gate_up_proj" in known.gguf.tensors
        self._joined: tuple[str, ...] = ("qkv_proj", "gate_up_proj") if joined else ()
        if "self_attn.qkv_proj" in known.tensors.names:
            self._joined = ("qkv_proj",)
        self._draw = torch.Generator().manual_seed(seed)

    def _random(self, name: str) -> Tensor:
        shape = expected_shape(self.config, name)
        if name.endswith("e_score_correction_bias"):
            shape = (num_experts(self.config) or 0,)
        pulled = self.shapes.get(name, shape)
        if shape is None or pulled is None or math.prod(shape) != math.prod(pulled):
            shape = pulled  # only the model knows it
        if shape is None:
            raise CheckpointError(f"{name}: its shape is unknown, so there are no random weights")
        # Rows of length 1 keep the size of the values. Those of the embedding are as large as what
        # a layer adds, so that the next token depends on the last one and answers do not repeat.
        width = shape[-1] if shape else 1
        scale = 1.0 if name.endswith("embed_tokens") else 1.0 / math.sqrt(width)
        return (torch.randn(shape, generator=self._draw) * scale).to(torch.float16)

    def weight(self, name: str) -> Weight:
        """A random matrix; with it the values of the residual stream keep their size."""
        key = f"{name}.weight"
        if key not in self.tensors:
            self.tensors[key] = self._random(name)
        return weight_of(Dense(self.tensors[key]))

    def tensor(self, name: str) -> Tensor:
        """A norm that changes nothing, or a random vector."""
        if name not in self.tensors:
            stem = name.removesuffix(".weight")
            found = self._random(stem)
            if "norm" in stem:
                found.fill_(0.0 if stem.endswith(".bias") else 1.0 - self._offset(stem))
            if stem.endswith(_ONES):
                found.fill_(1.0)
            if stem.endswith("act_fn.eps"):
                found.fill_(-1e-6)
            self.tensors[name] = found
        return self.tensors[name].to(torch.float32)

    def has(self, name: str) -> bool:
        """Names begin with ``model.``; there are no optional biases."""
        return name == "model.embed_tokens" or name.endswith(self._joined)

    def alike(self, one: str, other: str) -> bool:
        return False

    def entries(self) -> Sequence[TensorEntry]:
        return []

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing is open."""
