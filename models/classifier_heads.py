"""Classification heads with layers of their own, over pooled states or over each token's.

Decoders have one matrix, ``score``, over the last token (:mod:`sdk.models.classifier`). Encoders
have a dense layer, perhaps a norm, and an output matrix with a bias. Sources: transformers'
``*ForSequenceClassification`` and ``*ForTokenClassification``, llama.cpp's ``build_pooling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sdk.models.architecture import architecture
from sdk.models.classifier import Classifier
from sdk.models.configs.fields import Fields
from sdk.models.configs.head_rules import HeadRules
from sdk.quant.embedding_head import DenseStep, LayerNormStep, Step
from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from sdk.quant.checkpoint import Checkpoint


#: transformers' names of activations and of poolings.
_NAMES = {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh", "silu": "SiLU"}
_MODES = {"bos": "cls"}


def has_layers(classifier: Classifier | None, model_type: object) -> bool:
    """Whether the head is more than the matrix ``score`` over the last token."""
    if classifier is None:
        return False
    own = architecture(model_type)
    return classifier.per_token or (own is not None and own.head is not None)


def with_layers(
    checkpoint: Checkpoint, classifier: Classifier | None, values: Mapping[str, Any], hidden: int
) -> Classifier | None:
    """The classifier with its head's layers, if it :func:`has_layers`.

    :raises CheckpointError: a tensor is missing, or its shape does not match the config.
    """
    kind = values.get("model_type")
    if classifier is None or not has_layers(classifier, kind):
        return classifier
    fields = Fields(values)
    own = architecture(kind)
    rules = HeadRules((), ("score",)) if own is None or own.head is None else own.head
    if checkpoint.format == "gguf":
        rules = _of_gguf(checkpoint, rules)
    steps: list[Step] = []
    if rules.dense and (rules.on_tokens or not classifier.per_token):
        steps += _before_output(checkpoint, rules, fields, hidden)
    out = ("classifier", "score") if classifier.per_token and not rules.on_tokens else rules.out
    name = _found(checkpoint, out)
    weight = _matrix(checkpoint, name, (len(classifier.labels), hidden))
    steps.append(DenseStep(weight, _vector(checkpoint, f"{name}.bias", len(weight)), "Identity"))
    usual = "mean" if checkpoint.format == "gguf" else rules.poolings[0]  # of files without the key
    pooling = _setting(fields, rules.pooling, rules.poolings, usual)
    late = pooling == "late" and not classifier.per_token
    mode = "token" if late or classifier.per_token else _MODES.get(pooling, pooling)
    return replace(classifier, pooling=mode, steps=tuple(steps), averages=late)


def _of_gguf(checkpoint: Checkpoint, rules: HeadRules) -> HeadRules:
    """The head by our names of its tensors in a GGUF file.

    :raises UnsupportedError: a part of the head is not in the file.
    """
    if not checkpoint.has("classifier.dense.weight"):
        raise UnsupportedError(
            f"{checkpoint.path}: the classification head has no tensor cls.weight: llama.cpp's "
            "converter leaves out the pooler of a BERT, without which the scores would be others. "
            "Use the model's folder"
        )
    typed = rules.gguf_untyped is None or checkpoint.has("model.embed_types.weight")
    return rules._replace(
        dense=("classifier.dense",),
        out=("score",),
        norm=("classifier.norm",),
        activation=rules.gguf_activation if typed else str(rules.gguf_untyped),
    )


def _before_output(
    checkpoint: Checkpoint, rules: HeadRules, fields: Fields, hidden: int
) -> list[Step]:
    """The dense layer and the norm."""
    name = _found(checkpoint, rules.dense)
    known = tuple(_NAMES)
    activation = _setting(fields, rules.activation, known, "gelu")
    weight = _matrix(checkpoint, name, (hidden, hidden))
    bias = _vector(checkpoint, f"{name}.bias", hidden)
    steps: list[Step] = [DenseStep(weight, bias, _NAMES.get(activation, activation))]
    if rules.norm and checkpoint.has(f"{rules.norm[0]}.weight"):
        name = _found(checkpoint, rules.norm)
        scale = _vector(checkpoint, f"{name}.weight", hidden)
        shift = _vector(checkpoint, f"{name}.bias", hidden)
        assert scale is not None
        eps = float(fields.values.get("norm_eps", fields.values.get("layer_norm_eps", 1e-5)))
        zeros = np.zeros(hidden, np.float32)
        steps.append(LayerNormStep(scale, zeros if shift is None else shift, eps))
    return steps


def _setting(fields: Fields, rule: str, known: tuple[str, ...], usual: str) -> str:
    """What a rule says, or the config's value of the key that it names."""
    if not rule.startswith("="):
        return rule
    value = fields.values.get(rule[1:], usual)
    if value not in known:
        raise UnsupportedError(
            f"config: {rule[1:]}: expected one of {', '.join(known)}, found {str(value)[:80]!r}"
        )
    return str(value)


def _found(checkpoint: Checkpoint, names: tuple[str, ...]) -> str:
    for name in names:
        if checkpoint.has(f"{name}.weight"):
            return name
    expected = " or ".join(f"{name}.weight" for name in names)
    raise CheckpointError(
        f"{checkpoint.path}: expected the classification head that the config names, found no "
        f"tensor {expected}"
    )


def _matrix(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Any:
    found = np.asarray(checkpoint.tensor(f"{name}.weight").numpy(), np.float32)
    if found.shape != shape:
        raise CheckpointError(
            f"{name}.weight: expected shape {list(shape)}, as the config says, found "
            f"{list(found.shape)}"
        )
    return found


def _vector(checkpoint: Checkpoint, name: str, size: int) -> Any:
    if not checkpoint.has(name):
        return None
    found = np.asarray(checkpoint.tensor(name).numpy(), np.float32)
    if found.shape != (size,):
        raise CheckpointError(f"{name}: expected shape [{size}], found {list(found.shape)}")
    return found
