"""Classification heads: the classes of a checkpoint, and the matrix that scores them.

There are two kinds. ``*ForSequenceClassification`` checkpoints have a matrix ``score`` over the
decoder's last hidden state. Rerankers such as Qwen3-Reranker are causal language models: their
classes are the logits of a few tokens (``classifier_from_token``, vLLM's name, in the config).

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sdk.kernels.dataclass import dataclass
from sdk.models.architecture import WITHOUT_HEAD
from sdk.models.configs.fields import Fields
from sdk.quant.embedding_head import Step
from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.quant.checkpoint import Checkpoint

Activation = Literal["softmax", "sigmoid", "none"]

_MAX_LABELS = 1 << 16
_ACTIVATIONS: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
#: torch's classes, which sentence-transformers names in a config.
_CLASSES: Mapping[str, Activation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_KINDS = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True, slots=True)
class Classifier:
    """The classes of a checkpoint. ``tokens``: their spellings if each is a token's logit.

    ``per_token``: every token of a text has classes. ``steps``: the head of an encoder, over states
    that are pooled as ``pooling`` says; without any, it is the matrix ``score``. ``averages``: the
    logits of a text are the mean of its tokens'.
    """

    labels: tuple[str, ...]
    activation: Activation
    tokens: tuple[str, ...] = ()
    per_token: bool = False
    pooling: str = "last"
    steps: tuple[Step, ...] = ()
    averages: bool = False

    def logits(self, pooled: Any) -> Any:
        """Logits of pooled states ``[hidden]``, or of each token's ``[tokens, hidden]``."""
        if not self.steps:
            return pooled
        rows = np.atleast_2d(np.asarray(pooled, np.float32))
        for step in self.steps:
            rows = np.stack([step(row) for row in rows])
        if self.averages:
            return rows.mean(axis=0).tolist()
        return rows if self.per_token else rows[0].tolist()

    @property
    def generates(self) -> bool:
        """Whether the checkpoint is also a causal language model."""
        return bool(self.tokens)


def classifier_of(config: Mapping[str, Any]) -> Classifier | None:
    """The classes that a config names; ``None`` for a plain language model.

    :raises CheckpointError: names the field, what was expected and what was found.
    :raises UnsupportedError: the classes are tokens, and the files have no head.
    """
    fields = Fields(config)
    tokens = config.get("classifier_from_token")
    if tokens is not None:
        if not isinstance(tokens, (list, tuple)) or not 2 <= len(tokens) <= _MAX_LABELS:
            fields.fail("classifier_from_token", "a list of two or more tokens", tokens)
        if not all(isinstance(token, str) and token for token in tokens):
            fields.fail("classifier_from_token", "a list of strings", tokens)
        if config.get(WITHOUT_HEAD):
            raise UnsupportedError(
                "config: classifier_from_token: expected a model with a head, found one without "
                "(its architectures name ...Model): it has no logits of tokens"
            )
        return Classifier(tuple(tokens), "softmax", tuple(tokens))
    names = config.get("architectures")
    given = names if isinstance(names, (list, tuple)) else ()
    if given and isinstance(given[0], str) and given[0].endswith("Model"):
        return None  # more follow that its tensors allow, too (gte-multilingual-base)
    kinds = [name for name in given if isinstance(name, str) and name.endswith(_KINDS)]
    if not kinds:
        return None
    labels = _labels(fields)
    if kinds[0].endswith("ForTokenClassification"):
        return Classifier(labels, "softmax", per_token=True)
    return Classifier(labels, _activation(fields, len(labels)))


def _activation(fields: Fields, labels: int) -> Activation:
    """sentence-transformers' activation comes first, because a model's author chose it there."""
    theirs = fields.values.get("sentence_transformers")
    named = theirs.get("activation_fn") if isinstance(theirs, Mapping) else None
    if named is None:
        named = fields.values.get("sbert_ce_default_activation_function")
    if named is not None:
        found = _CLASSES.get(str(named).rpartition(".")[2])
        if found is None:
            fields.fail("activation_fn", f"one of {', '.join(_CLASSES)}", named)
        return found
    kind = fields.values.get("problem_type")
    if kind is None:
        return "sigmoid" if labels == 1 else "softmax"
    if kind not in _ACTIVATIONS:
        fields.fail("problem_type", f"one of {sorted(_ACTIVATIONS)}", kind)
    return _ACTIVATIONS[kind]


def _labels(fields: Fields) -> tuple[str, ...]:
    """The names in ``id2label``, in the order of the head's rows."""
    named = fields.values.get("id2label")
    if named is None:
        count = fields.count("num_labels", _MAX_LABELS, default=2)
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, Mapping) or not 1 <= len(named) <= _MAX_LABELS:
        fields.fail("id2label", "a dict of labels", named)
    by_index = {str(key): value for key, value in named.items()}
    labels = tuple(by_index.get(str(index)) for index in range(len(named)))
    if not all(isinstance(label, str) for label in labels):
        fields.fail("id2label", f"a label for each of 0..{len(named) - 1}", named)
    return tuple(map(str, labels))


def read_score_head(
    checkpoint: Checkpoint, classifier: Classifier | None, hidden_size: int
) -> Tensor | None:
    """The matrix ``score`` float32 ``[labels, hidden]``, if the checkpoint has one.

    :raises CheckpointError: it is missing, or its shape does not match the config.
    """
    if classifier is None or classifier.tokens:
        return None
    weight = checkpoint.tensor("score.weight")
    expected = [len(classifier.labels), hidden_size]
    if list(weight.shape) != expected:
        raise CheckpointError(
            f"score.weight: expected shape {expected} (labels of id2label, hidden_size), found "
            f"{list(weight.shape)}"
        )
    return weight


def probabilities(activation: Activation, logits: Sequence[float]) -> list[float]:
    """The classes' probabilities, from the logits of the head."""
    logits = list(logits)
    if activation == "softmax":
        best = max(logits)
        parts = [math.exp(value - best) for value in logits]
        total = math.fsum(parts)
        return [part / total for part in parts]
    if activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    return logits


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))
