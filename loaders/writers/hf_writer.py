"""Writes a quantized model as a folder that transformers, vLLM and this package can read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sdk.kernels.weights.layouts import Dense, Layout
from sdk.loaders.folders.expert_names import first_spelling
from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.folders.hf_folder import MAX_CONFIG, HfFolder
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.json_file import read_json
from sdk.loaders.model_shapes import num_experts
from sdk.loaders.qkv_rows import our_rows
from sdk.loaders.writers import integer_layers
from sdk.loaders.writers.parts import join_parts
from sdk.models.architecture import architecture
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import UnsupportedError
from sdk.quant.permuted import Permuted
from sdk.quant.quantize import quantize_rows
from sdk.quant.scheme import Scheme
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import PackedWeight, Weight, weight_of

#: Files besides weights and config, which are copied unchanged.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "LICENSE", "LICENSE.txt", "README.md"),
)


class HfWriter:
    """See :class:`sdk.quantizing.job.Writer`.

    :raises UnsupportedError: the source is not a folder of a plain language model.
    """

    def __init__(self, source: Checkpoint, scheme: Scheme) -> None:
        if source.format != "safetensors":
            raise UnsupportedError(
                f"{source.path}: {scheme.text} is written as a folder, which needs config and "
                "tokenizer of the original folder; a GGUF file can only become another GGUF file"
            )
        self._folder, self._source = source.path, source
        self._config = read_json(source.path / "config.json", MAX_CONFIG)
        if "text_config" in self._config:
            raise UnsupportedError(
                f"{source.path}: writing the text part of a multimodal model as a folder is not "
                "supported"
            )
        self._scheme = scheme
        # transformers finds packed experts of some models only under their first names, gptqmodel
        # only under the later ones
        own = architecture(self._config.get("model_type"))
        #: The names of a model that does not use a Llama's.
        self._names: TensorNames | None = None
        if own is not None and own.tensors.names:
            self._names = TensorNames(own.tensors.names)
        first = own is not None and own.tensors.block_sparse_moe
        self._first_names = first and scheme.container == "compressed-tensors"
        self._encode, self._settings = _encoding(scheme, self._in_config, self._with_more())
        if num_experts(self._config) and "ignore" in self._settings:
            self._settings["ignore"].append(_ROUTERS)
        for begin, ends in _OF_STATES.items():
            if any(key.startswith(begin) for key in self._config):
                if "ignore" in self._settings:
                    self._settings["ignore"].append(f"re:.*[.]({ends})$")
                elif "modules_to_not_convert" in self._settings:
                    names = ends.replace("[.]", ".").split("|")
                    self._settings["modules_to_not_convert"] = names

    def matrix(self, name: str, weight: Layout | Permuted) -> tuple[dict[str, Tensor], str]:
        """The tensors of a quantized layer by their names in the file, and an empty note."""
        rows = our_rows(self._source.config, name)
        if rows is not None:
            weight = self._with_rows(name, weight, rows)
        name, found = self._spelled(name), self._encode(weight)
        return {name + ending: tensor for ending, tensor in found.items()}, ""

    def plain(self, name: str, tensor: Tensor) -> tuple[dict[str, Tensor], str]:
        """A norm or a bias in float32; a router or a table of positions unchanged."""
        rows = our_rows(self._source.config, name.removesuffix(".weight"))
        return {self._spelled(name): tensor if rows is None else tensor[rows]}, ""

    def _with_rows(self, name: str, weight: Layout | Permuted, rows: Tensor) -> Layout | Permuted:
        """The rows of a matrix in the order of the files of its model.

        :raises UnsupportedError: rows that share a scale would be apart.
        """
        layout = weight.layout if isinstance(weight, Permuted) else weight
        moved = weight_of(layout).reordered(rows)
        if not isinstance(moved, PackedWeight):
            raise UnsupportedError(
                f"{self._folder}: {name}: {self._scheme.text} shares scales among neighbouring "
                f"rows, which files of {self._config['model_type']} have in another order; use "
                "fp8-channel"
            )
        found = moved.layout
        return Permuted(found, weight.order) if isinstance(weight, Permuted) else found

    def _in_config(self, name: str) -> str:
        """What ends the file's name of the matrix ``name``, which is outside layers or in the
        first: its last part, or all parts inside a layer where the model has names of its own."""
        if self._names is None:
            return name.rpartition(".")[2]
        return self._names.theirs(name).rpartition(".0.")[2]

    def _with_more(self) -> list[str]:
        """What ends the file's names of the matrices with more bits; experts and the MLP beside
        them may have names of their own (Mixtral's ``w2``, Granite's ``output_linear``)."""
        names = [self._in_config(name) for name in _MORE]
        if self._names is not None:
            names.append(self._in_config(_JOINED))
        else:
            for layer in range(self._config["num_hidden_layers"]):
                for part in _MORE_OF_EXPERTS:
                    found = self._spelled(f"model.layers.{layer}.{part}")
                    names.append(found.rpartition(".")[2])
        return list(dict.fromkeys(names))

    def _spelled(self, name: str) -> str:
        """The name that transformers looks for: what is beside experts, and all of a model that
        does not use a Llama's names, is called as it was."""
        if self._names is not None and isinstance(self._source, HfFolder):
            found = self._source.spelled_in_file(name)
            return self._names.theirs(name) if found == name else found
        if isinstance(self._source, HfFolder) and self._is_ahead(name):
            return self._source.spelled_in_file(name)
        if isinstance(self._source, HfFolder) and _BESIDE_EXPERTS.search(name):
            found = self._source.spelled_in_file(name)
            if "block_sparse_moe.gate" not in found:
                return found
        return first_spelling(name) if self._first_names else name

    def _is_ahead(self, name: str) -> bool:
        """Whether a tensor is of a block of multi-token prediction, which follows the layers."""
        found, layers = _LAYER.search(name), self._source.config["num_hidden_layers"]
        return found is not None and int(found[1]) >= layers

    def whole(
        self, name: str, weight: Weight, gram: Tensor | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """The embedding or the head: packed if the scheme says so, else unchanged, or float16 if
        the source has it packed. ``gram``: of the inputs that GPTQ quantizes it for."""
        if self._scheme.head is not None:
            return self.matrix(name, quantize_rows(name, weight, self._scheme.head, gram))
        layout = weight.layout if isinstance(weight, PackedWeight) else None
        values = layout.values if isinstance(layout, Dense) else weight.dequantize().half()
        return {f"{self._spelled(name)}.weight": values}, ""

    def finish(self, parts: Sequence[Path], out: Path) -> None:
        """Write the folder ``out``, which must not exist yet."""
        out.mkdir()
        join_parts(parts, out)
        config = {key: value for key, value in self._config.items() if key != "quantization_config"}
        config["quantization_config"] = self._settings
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_beside(self._folder, out)


def copy_beside(source: Path, out: Path) -> None:
    """Copy tokenizer, template and licence from the folder ``source`` to ``out``."""
    for name in _BESIDE:
        file = folder_file(source, name)
        if file is not None:
            shutil.copyfile(file, out / name)


#: Our names of the matrices with more bits in a layer, and of the embedding and the head.
_MORE = ("model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj")
#: Queries, keys and values in one matrix: it ends like that of values.
_JOINED = "model.layers.0.self_attn.qkv_proj"
_MORE_OF_EXPERTS = ("mlp.experts.0.down_proj", "mlp.shared_experts.down_proj")
_ENDS = ("model.embed_tokens", "lm_head")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
#: Routers stay plain.
_BESIDE_EXPERTS = re.compile(
    r"\.mlp\.(shared_experts|gate|shared_expert_gate)\b|\.e_score_correction_bias$"
)
_ROUTERS = "re:.*[.](gate|router|shared_expert_gate|gate[.]wg|router[.]layer)$"
#: So does what makes strengths, decays and time steps of recurrent layers (quant/online.py): how a
#: key of their configs begins, and how the names of these matrices end.
_OF_STATES = {
    "linear_num_": "in_proj_a|in_proj_b|in_proj_ba|linear_attn[.]a_proj|linear_attn[.]b_proj",
    # Kimi, as published and as transformers writes it
    **dict.fromkeys(("linear_attn_config", "linear_head_dim"), "self_attn[.]b_proj|[fg]_[ab]_proj"),
    "time_step_rank": "x_proj|dt_proj",  # Mamba
    "mamba_dt_rank": "x_proj|dt_proj",  # Jamba
    "decay_low_rank_dim": "lora[.]0|lora[.]2",  # RWKV-7
}
_Encode = Callable[["Layout | Permuted"], dict[str, Tensor]]
_Named = Callable[[str], str]


def _encoding(
    scheme: Scheme, named: _Named, with_more: Sequence[str]
) -> tuple[_Encode, dict[str, Any]]:
    """How a layer is stored, and the ``quantization_config`` that says so. ``with_more``: what ends
    the names of matrices with more bits."""
    spec = scheme.spec
    group = -1 if spec.group is None else spec.group
    if scheme.container == "gptq":
        settings = {
            "quant_method": "gptq",
            "bits": spec.bits,
            "group_size": group,
            "sym": spec.symmetric,
            "desc_act": scheme.sorted_columns,
            "static_groups": not scheme.sorted_columns,
            "true_sequential": False,
            "damp_percent": 0.01,
            "lm_head": False,
            "checkpoint_format": "gptq_v2",
            "pack_dtype": "int32",
        }
        return integer_layers.gptq_tensors, settings
    if scheme.container == "awq":
        settings = {
            "quant_method": "awq",
            "bits": spec.bits,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
        return integer_layers.awq_tensors, settings
    if scheme.container == "hqq":
        weights = {"nbits": spec.bits, "group_size": group, "axis": 1}
        settings = {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}
        return integer_layers.hqq_tensors, settings
    return _compressed_tensors(scheme, named, with_more)


def _integers(spec: QuantSpec) -> dict[str, Any]:
    """Integers in compressed-tensors' terms."""
    found = {"num_bits": spec.bits, "type": "int", "symmetric": spec.symmetric, "dynamic": False}
    if spec.group is None:
        return {**found, "strategy": "channel"}
    return {**found, "strategy": "group", "group_size": spec.group}


def _compressed_tensors(
    scheme: Scheme, named: _Named, with_more: Sequence[str]
) -> tuple[_Encode, dict[str, Any]]:
    spec = scheme.spec
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = {**weights, "dynamic": True, "strategy": "token"}
    encode: _Encode
    if scheme.method == "fp8":
        encode, format_ = integer_layers.float8_tensors, "float-quantized"
        weights["strategy"] = scheme.share
        if scheme.share == "block":
            weights["block_structure"] = [128, 128]
            inputs = {**weights, "dynamic": True, "strategy": "group", "group_size": 128}
            del inputs["block_structure"]
    elif scheme.method == "float4":
        encode, format_ = integer_layers.float4_tensors, f"{scheme.text}-pack-quantized"
        kind = "group" if scheme.text == "mxfp4" else "tensor_group"
        weights |= {"num_bits": 4, "strategy": kind, "group_size": spec.group}
        inputs = None
    else:
        weights = _integers(spec)
        if spec.activation_bits == 8:
            encode, format_ = integer_layers.int8_tensors, "int-quantized"
            inputs = {**weights, "dynamic": True, "strategy": "token"}
        else:
            encode, format_ = integer_layers.packed_tensors, "pack-quantized"
            inputs = None
    layers: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
    }
    layers["output_activations"] = None
    groups = {"group_0": layers}
    if scheme.head is not None:
        weights = _integers(scheme.head)
        groups["group_1"] = {
            **layers,
            "targets": [f"re:.*{named(name)}" for name in _ENDS],
            "weights": weights,
            "input_activations": None,
        }
    if scheme.more is not None:
        groups["group_2"] = {
            **layers,
            "targets": [f"re:.*{name}$" for name in with_more],
            "weights": _integers(scheme.more),
        }
    settings = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [named("lm_head")] if scheme.head is None else [],
        "kv_cache_scheme": None,
    }
    return encode, settings
