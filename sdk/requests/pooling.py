"""Embeddings, pooled hidden states, classes and scores: calls that generate no tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from sdk.engine.engine import Output
from sdk.engine.plan import Pooling, PoolingMode
from sdk.errors import RequestError, UnsupportedError
from sdk.flags import check_flags
from sdk.kernels.host.torch_import import torch_module
from sdk.models.classifier import Classifier
from sdk.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankOutput,
    ScoringOutput,
)
from sdk.params import SamplingParams
from sdk.quant.embedding_head import UNIT, EmbeddingHead, NormalizeStep
from sdk.quant.safe_repr import safe_repr
from sdk.requests.advice import Advice
from sdk.requests.calls import Stage, Work
from sdk.requests.conversations import check_salt
from sdk.requests.jobs import JobMaker
from sdk.requests.pairs import pair_template, read_pair
from sdk.requests.prompts import Prompt, PromptLike, PromptReader, as_list, with_salt


class PoolingCalls:
    """These calls of one ``LLM``. ``classifier``: the classes of its checkpoint, if it has any.
    ``head``: what its files say about embeddings, or why that cannot be followed."""

    def __init__(
        self,
        jobs: JobMaker,
        reader: PromptReader,
        classifier: Classifier | None,
        head: EmbeddingHead | str | None = None,
        advice: Advice | None = None,
    ) -> None:
        """``advice``: where to say that a model was not made for a call; None: nowhere."""
        self._head_of_files = head
        self._advice = advice
        self._jobs = jobs
        self._reader = reader
        self._classifier = classifier

    def embed(
        self, prompts: Any, truncate: int | None, lora: Any = None, tenant: str | None = None
    ) -> Work[list[EmbeddingOutput]]:
        """See :meth:`sdk.LLM.embed`."""
        if (head := self._embedding_head()) is not None:
            found = yield from self._headed(head, prompts, truncate, lora, tenant)
            return [
                EmbeddingOutput(
                    one.request_id, one.prompt_token_ids, one.outputs.data, metrics=one.metrics
                )
                for one in found
            ]
        jobs = self._jobs.make(*self._read(prompts, truncate, lora, tenant), kind="embed")
        outputs = yield Stage(jobs, "embed")
        return [embedding_of(output) for output in outputs]

    def encode(
        self,
        prompts: Any,
        pooling: str | None,
        normalize: bool,
        truncate: int | None,
        lora: Any = None,
        tenant: str | None = None,
    ) -> Work[list[PoolingRequestOutput]]:
        """See :meth:`sdk.LLM.encode`."""
        torch_module("encode, which returns tensors (embed returns lists),")
        if pooling is None and (head := self._embedding_head()) is not None:
            check_flags(normalize=normalize)
            found = yield from self._headed(head, prompts, truncate, lora, tenant, normalize)
            return [with_tensor(one) for one in found]
        pooling = pooling or "last"
        if pooling not in get_args(PoolingMode):
            modes = ", ".join(get_args(PoolingMode))
            raise RequestError(f"pooling: expected one of {modes}, found {safe_repr(pooling)}")
        check_flags(normalize=normalize)
        mode: Any = pooling
        read = self._read(prompts, truncate, lora, tenant)
        found = yield from self._pooled(read, Pooling(mode, normalize))
        return [with_tensor(one) for one in found]

    def classify(
        self,
        prompts: Any,
        use_activation: bool,
        truncate: int | None,
        lora: Any = None,
        tenant: str | None = None,
    ) -> Work[list[ClassificationOutput]]:
        """See :meth:`sdk.LLM.classify`."""
        check_flags(use_activation=use_activation)
        classifier = self._need_classifier()
        read = self._read(prompts, truncate, lora, tenant)
        found = yield from self._pooled(read, self._head(classifier))
        return [
            ClassificationOutput(
                one.request_id,
                one.prompt_token_ids,
                probabilities(classifier, one) if use_activation else list(one.outputs.data),
                list(classifier.labels),
                metrics=one.metrics,
            )
            for one in found
        ]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        template: str | None,
        lora: Any = None,
        tenant: str | None = None,
        salt: str | None = None,
    ) -> Work[list[ScoringOutput]]:
        """See :meth:`sdk.LLM.score`. ``salt``: the ``cache_salt`` of all prompts."""
        self._say_what_scores_are("score")  # in the caller's thread, unlike the work
        return self._score(data_1, data_2, template, lora, tenant, salt)

    def _score(
        self,
        data_1: Any,
        data_2: Any,
        template: str | None,
        lora: Any,
        tenant: str | None,
        salt: str | None,
    ) -> Work[list[ScoringOutput]]:
        left, right = as_list(data_1), as_list(data_2)
        check_pairs(len(left), len(right))
        if self._classifier is not None:
            lefts = left * len(right) if len(left) == 1 else left
            pairs = list(zip(lefts, right, strict=True))
            return (yield from self._scored(pairs, template, lora, tenant, salt))
        if template is not None:
            raise RequestError(
                "chat_template: this model has no classification head, so it compares embeddings, "
                "which need no template; leave it out"
            )
        prompts = [with_salt(one, salt) for one in (*left, *right)]
        embedded = yield from self.embed(prompts, None, lora, tenant)
        if self._head_of_files is not None:  # its vectors may have any length
            embedded = [replace(one, embedding=UNIT(one.embedding)) for one in embedded]
        return cosines(embedded[: len(left)], embedded[len(left) :])

    def pair_tokens(self, data_1: Any, data_2: Any) -> int:
        """The tokens of the prompts that :meth:`score` computes, in the template of pairs.

        :raises RequestError: as :meth:`score`.
        """
        left, right = as_list(data_1), as_list(data_2)
        check_pairs(len(left), len(right))
        if self._classifier is None:
            prompted = self.prompted([*left, *right])
            return sum(
                len(self._reader.read(one, SamplingParams(), room=0).token_ids) for one in prompted
            )
        template = pair_template(self._reader, self._classifier, None)
        lefts = left * len(right) if len(left) == 1 else left
        pairs = zip(lefts, right, strict=True)
        return sum(len(read_pair(self._reader, pair, template).token_ids) for pair in pairs)

    def rerank(
        self,
        query: Any,
        documents: Any,
        top_n: Any,
        template: str | None,
        lora: Any = None,
        tenant: str | None = None,
        salt: str | None = None,
    ) -> Work[list[RerankOutput]]:
        """See :meth:`sdk.LLM.rerank`. ``salt``: the ``cache_salt`` of all prompts."""
        self._say_what_scores_are("rerank")
        return self._rerank(query, documents, top_n, template, lora, tenant, salt)

    def _rerank(
        self,
        query: Any,
        documents: Any,
        top_n: Any,
        template: str | None,
        lora: Any,
        tenant: str | None,
        salt: str | None,
    ) -> Work[list[RerankOutput]]:
        if not isinstance(query, str):
            raise RequestError(f"query: expected a string, found {safe_repr(query)}")
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise RequestError(
                f"documents: expected a list of strings, found {safe_repr(documents)}"
            )
        for index, document in enumerate(documents):
            if not isinstance(document, str):
                found = safe_repr(document)
                raise RequestError(f"documents[{index}]: expected a string, found {found}")
        number = isinstance(top_n, int) and not isinstance(top_n, bool)
        if top_n is not None and not (number and top_n > 0):
            raise RequestError(f"top_n: expected a positive integer, found {safe_repr(top_n)}")
        if not documents:
            return []
        scored = yield from self._score(query, list(documents), template, lora, tenant, salt)
        scores = [one.score for one in scored]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        return [RerankOutput(index, documents[index], scores[index]) for index in order]

    def prompted(self, prompts: Any) -> list[PromptLike]:
        """The prompts of :meth:`embed` with the default prompt of the files before texts.

        :raises UnsupportedError: as :meth:`embed`.
        """
        head = self._embedding_head()
        items = as_list(prompts)
        return items if head is None else [_prompted(one, head.prompt) for one in items]

    @property
    def gives_units(self) -> bool:
        """Whether the vectors of :meth:`embed` have length 1."""
        head = self._embedding_head()
        return head is None or (bool(head.steps) and isinstance(head.steps[-1], NormalizeStep))

    def _say_what_scores_are(self, method: str) -> None:
        """Warn that a model that generates text compares texts badly. In a trial with the pages of
        this project's documentation SmolLM2 found the right one first for 4 of 16 questions, where
        a search for words (BM25) found 12."""
        if self._advice is None or self._classifier is not None or self._head_of_files is not None:
            return
        self._advice.once(
            "scores",
            f"{method}(): this model is no reranker and no embedding model, so the scores are "
            "cosines of its last hidden states, which say little about relevance; a search for "
            "words may be better. Load a checkpoint with a classification head (a reranker), name "
            "the tokens of one (classifier_from_token), or load an embedding model",
        )

    # ---- inside ----------------------------------------------------------------------------------

    def _embedding_head(self) -> EmbeddingHead | None:
        """:raises UnsupportedError: the files ask for embeddings that are not supported."""
        head = self._head_of_files
        if isinstance(head, str):
            raise UnsupportedError(
                f"{head}. encode(pooling=...) with a mode gives the model's hidden states"
            )
        return head

    def _headed(
        self,
        head: EmbeddingHead,
        prompts: Any,
        truncate: int | None,
        lora: Any,
        tenant: str | None,
        normalize: bool = False,
    ) -> Work[list[PoolingRequestOutput]]:
        """The embeddings as the files describe them."""
        mode: Any = head.mode
        read = self._read(self.prompted(prompts), truncate, lora, tenant)
        found = yield from self._pooled(read, Pooling(mode, False))
        rows = [head(one.outputs.data) for one in found]
        if normalize:
            rows = [UNIT(row) for row in rows]
        return [
            one._replace(outputs=PoolingOutput(row)) for one, row in zip(found, rows, strict=True)
        ]

    def _read(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        truncate: int | None,
        lora: Any,
        tenant: str | None,
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        params = SamplingParams(truncate_prompt_tokens=truncate, tenant=tenant)
        read = [self._reader.read(item, params, room=0) for item in as_list(prompts)]
        return self._jobs.adapted(read, lora), [params] * len(read)

    def _pooled(
        self,
        read: tuple[list[Prompt], list[SamplingParams]],
        pooling: Pooling,
    ) -> Work[list[PoolingRequestOutput]]:
        outputs = yield Stage(self._jobs.make(*read, kind="embed", pooling=pooling), "encode")
        return [pooled_of(output) for output in outputs]

    def _need_classifier(self) -> Classifier:
        if self._classifier is None:
            raise RequestError(
                "classify: this model has no classification head. Load a checkpoint whose config "
                "names an architecture ...ForSequenceClassification (with the matrix "
                "score.weight), or name the tokens of the classes: "
                "hf_overrides={'classifier_from_token': ['no', 'yes']}"
            )
        return self._classifier

    def _head(self, classifier: Classifier) -> Pooling:
        if not classifier.tokens:
            return Pooling("last", False, score=True, reuse_prefix=True)
        ids = tuple(map(self._reader.token_of_class, classifier.tokens))
        return Pooling("last", False, token_ids=ids, reuse_prefix=True)

    def _scored(
        self,
        pairs: Sequence[tuple[Any, Any]],
        template: str | None,
        lora: Any,
        tenant: str | None,
        salt: str | None,
    ) -> Work[list[ScoringOutput]]:
        """The relevance of each pair by the classification head."""
        classifier = self._need_classifier()
        relevant = relevant_class(classifier)
        template = pair_template(self._reader, classifier, template)
        check_salt(salt)
        read = [replace(read_pair(self._reader, pair, template), cache_salt=salt) for pair in pairs]
        read = self._jobs.adapted(read, lora)
        params = [SamplingParams(tenant=tenant)] * len(read)
        found = yield from self._pooled((read, params), self._head(classifier))
        return [
            ScoringOutput(one.request_id, probabilities(classifier, one)[relevant]) for one in found
        ]


def relevant_class(classifier: Classifier) -> int:
    """The class whose probability is the relevance of a document.

    :raises RequestError: the model classifies something else.
    """
    labels = [label.lower() for label in classifier.labels]
    if len(labels) == 1:
        return 0
    if "yes" in labels:
        return labels.index("yes")
    raise RequestError(
        "score: the model's head has the classes "
        f"{safe_repr(list(classifier.labels))}, which do not say how well two texts match; "
        "expected a single class, or the classes yes and no. Use classify"
    )


def probabilities(classifier: Classifier, pooled: PoolingRequestOutput) -> list[float]:
    """The classes' probabilities, from the logits of the head."""
    logits = list(pooled.outputs.data)
    if classifier.activation == "softmax":
        best = max(logits)
        parts = [math.exp(value - best) for value in logits]
        total = math.fsum(parts)
        return [part / total for part in parts]
    if classifier.activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    return logits


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def embedding_of(output: Output) -> EmbeddingOutput:
    """The embedding. :raises RequestError: the request ended without one; says why."""
    if isinstance(output, EmbeddingOutput):
        return output
    raise _failure("embed", output)


def pooled_of(output: Output) -> PoolingRequestOutput:
    """The pooled states. :raises RequestError: the request ended without them; says why."""
    if isinstance(output, PoolingRequestOutput):
        return output
    raise _failure("encode", output)


def _failure(method: str, output: Any) -> RequestError:
    reason = output.outputs[0]
    return RequestError(
        f"{method}: request {output.request_id} ended with {reason.finish_reason}: "
        f"{reason.stop_reason}"
    )


def with_tensor(output: PoolingRequestOutput) -> PoolingRequestOutput:
    """The output with a tensor, for callers."""
    import torch  # the other calls, and FakeLLM, need none

    return output._replace(outputs=PoolingOutput(torch.as_tensor(output.outputs.data)))


def _prompted(item: PromptLike, prompt: str) -> PromptLike:
    """A prompt with a text before it; token ids stay as they are."""
    if isinstance(item, str):
        return prompt + item
    if prompt and isinstance(item, Mapping) and isinstance(item.get("prompt"), str):
        return {**item, "prompt": prompt + item["prompt"]}
    return item


def check_pairs(first: int, second: int) -> None:
    """:raises RequestError: the numbers are different, and ``first`` is not 1."""
    if first not in (1, second):
        raise RequestError(f"score: expected one text or {second} in data_1, found {first}")


def cosines(
    first: Sequence[EmbeddingOutput], second: Sequence[EmbeddingOutput]
) -> list[ScoringOutput]:
    """Cosines of vectors of length 1, pair by pair; a single ``first`` is compared with all."""
    if len(first) == 1:
        first = list(first) * len(second)
    return [
        ScoringOutput(b.request_id, _dot(a.embedding, b.embedding))
        for a, b in zip(first, second, strict=True)
    ]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
