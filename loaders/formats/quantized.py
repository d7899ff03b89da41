"""Detects the quantization method of a safetensors checkpoint, and the module that decodes it.

A method is a module of this folder, named like ``quantization_config.quant_method`` (dashes become
underscores), and implements :class:`sdk.loaders.formats.stored_layer.Format`. The names of tensors
are checked too and take precedence, because a config can be missing or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from sdk.kernels.weights.layouts import Layout
from sdk.loaders.folders.safetensors_reader import StoredTensor
from sdk.loaders.formats.qweight import order_of
from sdk.loaders.formats.stored_layer import Format, StoredLayer
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.permuted import Permuted

#: Files next to config.json in which older tools put the same settings.
CONFIG_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quantization_config.json",
)
#: Endings of tensor names that only one method (or family) writes: the module to use if no config
#: names one, and the name for messages.
_TELLTALES = (
    (".qweight", "gptq", "GPTQ or AWQ"),
    (".weight_packed", "compressed_tensors", "compressed-tensors"),
    (".weight_scale_inv", "fp8", "FP8 in blocks"),
    (".weight_scale", "fp8", "FP8 or INT8 with weight scales"),
    (".SCB", "bitsandbytes", "bitsandbytes LLM.int8"),
    (".weight.quant_state.bitsandbytes__nf4", "bitsandbytes", "bitsandbytes nf4"),
    (".weight.quant_state.bitsandbytes__fp4", "bitsandbytes", "bitsandbytes fp4"),
    ("_blocks", "mxfp4", "MXFP4"),
    ("._weight_qdata", "torchao", "torchao"),
    (".W_q", "hqq", "HQQ"),
    (".biases", "", "MLX"),
    (".act.scales", "", "AWQ for activation functions with scales (MPT, Falcon)"),
)
#: Methods with more than one name.
_ALIASES = {
    "intel_auto_round": "auto_round",
    "autoround": "auto_round",
    "gguf": "gguf_blocks",  # a module called gguf would hide the package
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
#: Methods that are not supported, by name.
REFUSED = {
    "aqlm": "AQLM, sums of codebooks",
    "bitblas": "BitBLAS, codes in the order of a GPU kernel",
    "eetq": "EETQ, codes in the order of a GPU kernel",
    "exl2": "EXL2, bit widths that change inside a matrix",
    "exl3": "EXL3, trellis codes",
    "higgs": "HIGGS, rotated vectors on a grid",
    "marlin": "Marlin, codes in the order of a GPU kernel",
    "qqq": "QQQ, codes in the order of a GPU kernel",
    "quanto": "Quanto, which has no file format",
    "quark": "Quark",
    "sparseml": "SparseML, sparse matrices",
    "spqr": "SpQR, codes plus outliers",
    "vptq": "VPTQ, vector codebooks",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method of a checkpoint; ``settings`` is the config as parsed by the method's module."""

    method: str
    format: Format
    settings: Any

    def layer_of(self, tensor: str) -> str | None:
        """The packed layer to which ``tensor`` belongs, if its ending marks packed layers."""
        for ending in self.format.ENDINGS:
            if tensor.endswith(ending):
                return tensor.removesuffix(ending)
        return None

    def packs(self, layer: StoredLayer) -> bool:
        return any(layer.has(ending) for ending in self.format.ENDINGS)

    def tensors_of(self, layer: StoredLayer) -> list[StoredTensor]:
        """All tensors of a packed layer."""
        endings = (*self.format.ENDINGS, *self.format.COMPANIONS)
        return [layer.stored(ending) for ending in endings if layer.has(ending)]

    def entry(self, layer: StoredLayer, name: str) -> TensorEntry:
        """A packed layer as one entry with the file's ``name`` for it."""
        shape, numerics = self.format.outline(layer, self.settings)
        sizes = [stored.nbytes for stored in self.tensors_of(layer)]
        bits = _bits_held(numerics)
        held = None
        if bits is not None:  # the largest tensor holds the codes
            held = sum(sizes) - max(sizes) + -(-shape[0] * shape[1] * bits // 8)
        return TensorEntry(name, shape, numerics, sum(sizes), held)

    def decode(self, layer: StoredLayer) -> Layout | Permuted:
        return self.format.decode(layer, self.settings)


def quantization(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str
) -> Quantization | None:
    """The method of a checkpoint; None if it is not quantized.

    Args:
        config: ``config.json``, with ``quantization_config`` even if the tool stored it elsewhere.
        tensors: all tensors of the checkpoint, by name.
        source: the folder, for errors.

    Raises:
        CheckpointError: ``quantization_config`` is invalid, or the tensors are of another method.
        UnsupportedError: the method is not supported.
    """
    settings = config.get("quantization_config")
    text = config.get("text_config")
    if settings is None and isinstance(text, Mapping):
        settings = text.get("quantization_config")
    if settings is not None and not isinstance(settings, Mapping):
        raise CheckpointError(
            f"{source}: quantization_config is {str(settings)[:80]}, expected an object"
        )
    told = _told_tales(tensors)
    method = None if settings is None else _method(settings, source)
    why = f"quantization_config names {method}"
    if method is None:
        if not told:
            if settings is None:
                return None
            raise unsupported(source, "quantization_config names no method")
        name, (ending, method, words) = next(iter(told.items()))
        if ending == ".qweight" and _is_awq(name, tensors):
            method = "awq"
        why = f"tensor {name!r} is written by {words}"
    module = _module(method, why, source)
    for name, (ending, _, words) in told.items():
        if ending not in (*module.ENDINGS, *module.COMPANIONS):
            raise CheckpointError(f"{source}: {why}, but tensor {name!r} is written by {words}")
    return Quantization(method, module, module.settings(settings or {}, source))


def _bits_held(numerics: str) -> int | None:
    """Bits of a weight in memory, for methods whose files may store it in more or fewer."""
    integer = re.search(r"(?:^|-)w([1-8])", numerics)
    return int(integer[1]) if integer else {"f32": 32, "f16": 16, "bf16": 16}.get(numerics)


def unsupported(source: str, why: str) -> UnsupportedError:
    """The error for unsupported quantized weights; ``why`` names the method or the setting."""
    return UnsupportedError(
        f"{source}: the weights are quantized ({why}), which is not supported; "
        "use the model in F32, F16 or BF16, or as a GGUF file"
    )


def _told_tales(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[str, str, str]]:
    """The first tensor with each telltale ending that is found, the most specific endings first."""
    endings = tuple(ending for ending, *_ in _TELLTALES)
    found: dict[str, tuple[str, str, str]] = {}
    seen: set[str] = set()
    for name in tensors:
        if not name.endswith(endings):
            continue
        for tale in _TELLTALES:
            if name.endswith(tale[0]) and tale[0] not in seen:
                seen.add(tale[0])
                found[name] = tale
    return dict(sorted(found.items(), key=lambda item: _TELLTALES.index(item[1])))


def _is_awq(qweight: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a layer is in AWQ's format and not in GPTQ's, if no config says so."""
    scales = tensors.get(qweight.removesuffix("qweight") + "scales")
    return scales is not None and order_of(tensors[qweight], scales) not in (None, "gptq")


def _method(settings: Mapping[str, Any], source: str) -> str | None:
    """The method's module name; ModelOpt gives its name as the producer instead."""
    method = settings.get("quant_method")
    producer = settings.get("producer")
    if method is None and producer is not None:
        method = producer.get("name") if isinstance(producer, Mapping) else producer
    if method is None:
        return None
    if not isinstance(method, str):
        raise CheckpointError(
            f"{source}: quant_method is {str(method)[:80]}, expected the name of a method"
        )
    name = re.sub(r"[^a-z0-9]+", "_", method[:80].lower())
    return _ALIASES.get(name, name)


def _module(method: str, why: str, source: str) -> Format:
    if method in REFUSED:
        raise unsupported(source, f"{why}: {REFUSED[method]}")
    path = f"sdk.loaders.formats.{method}"
    module = import_module(path) if method and find_spec(path) is not None else None
    if not hasattr(module, "ENDINGS"):  # a helper module of this folder, not a method
        raise unsupported(source, why)
    return cast("Format", module)
