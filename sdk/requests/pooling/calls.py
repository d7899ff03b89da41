"""Embeddings, pooled hidden states, classes and scores: calls that generate no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from sdk.api.errors import RequestError, UnsupportedError
from sdk.api.flags import check_flags
from sdk.api.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankOutput,
    ScoringOutput,
)
from sdk.api.params import SamplingParams
from sdk.engine.engine import Output
from sdk.engine.plan import Pooling, PoolingMode
from sdk.kernels.host.torch_import import torch_module
from sdk.models.classifier import Classifier, probabilities
from sdk.quant.embedding_head import EmbeddingHead, NormalizeStep, unit
from sdk.quant.safe_repr import safe_repr
from sdk.requests.job_maker import JobMaker
from sdk.requests.job_runner import BatchedCall, JobBatch
from sdk.requests.pooling.items import as_prompt, check_item
from sdk.requests.pooling.pairs import pair_template, read_pair
from sdk.requests.pooling.prompts import PoolingPrompts
from sdk.requests.pooling.vectors import Wanted, max_similarity, similarity
from sdk.requests.pooling.zero_shot import check_pictures, checked_labels, contrast_of, matches
from sdk.requests.progress import Advice
from sdk.requests.prompts.kinds import check_salt
from sdk.requests.prompts.reader import Prompt, PromptReader, as_list

_PLAIN = Wanted()
#: Names of prompts for the two sides of a search, sentence-transformers' and those of models.
_QUERY = ("query",)
_DOCUMENT = ("document", "passage", "corpus")


class PoolingRequests:
    """These calls of one ``LLM``. ``classifier``: the classes of its checkpoint, if it has any.
    ``head``: what its files say about embeddings, or why that cannot be followed."""

    def __init__(
        self,
        job_maker: JobMaker,
        reader: PromptReader,
        classifier: Classifier | None,
        head: EmbeddingHead | str | None = None,
        advice: Advice | None = None,
        hidden_size: int | None = None,
    ) -> None:
        """``advice``: where to say that a model was not made for a call; None: nowhere.
        ``hidden_size``: of the model, if known before it runs."""
        self._hidden_size = hidden_size
        self._head_of_files = head
        self._advice = advice
        self._job_maker = job_maker
        self._reader = reader
        self._prompts = PoolingPrompts(reader)
        self._classifier = classifier

    def embed(
        self,
        prompts: Any,
        truncate: int | None,
        lora: Any = None,
        tenant: str | None = None,
        wanted: Wanted = _PLAIN,
    ) -> BatchedCall[list[EmbeddingOutput]]:
        """See :meth:`sdk.LLM.embed`."""
        head, is_unit = self._embedding_head(), self.gives_units
        self._check_one_vector(head)
        if self._hidden_size is not None:
            width = self._hidden_size if head is None else head.width(self._hidden_size)
            wanted.check_size(width)
        read = self._job_maker.adapted(self.read(prompts, truncate, wanted), lora)
        if head is None:
            params = [SamplingParams(tenant=tenant)] * len(read)
            outputs = yield JobBatch(self._job_maker.make(read, params, kind="embed"), "embed")
            found = [embedding_of(output) for output in outputs]
            if wanted == _PLAIN:
                return found
            return [replace(one, embedding=wanted.vector(one.embedding, is_unit)) for one in found]
        pooled = yield from self._headed(head, read, tenant)
        return [
            EmbeddingOutput(
                one.request_id,
                one.prompt_token_ids,
                wanted.vector(one.outputs.data, is_unit),
                metrics=one.metrics,
            )
            for one in pooled
        ]

    def read(
        self, prompts: Any, truncate: int | None = None, wanted: Wanted | None = None
    ) -> list[Prompt]:
        """See :meth:`PoolingPrompts.read`."""
        head = self._head_of_files if wanted is None else self._embedding_head()
        return self._prompts.read(
            prompts, truncate, wanted, None if isinstance(head, str) else head
        )

    def encode(
        self,
        prompts: Any,
        pooling: str | None,
        normalize: bool,
        truncate: int | None,
        lora: Any = None,
        tenant: str | None = None,
        wanted: Wanted = _PLAIN,
    ) -> BatchedCall[list[PoolingRequestOutput]]:
        """See :meth:`sdk.LLM.encode`."""
        torch_module("encode, which returns tensors (embed returns lists),")
        head = self._head_of(pooling)
        if head is not None:
            check_flags(normalize=normalize)
            ready = self._job_maker.adapted(self.read(prompts, truncate, wanted), lora)
            found = yield from self._headed(head, ready, tenant, normalize)
            return [with_tensor(one) for one in found]
        pooling = pooling or "last"
        if pooling not in get_args(PoolingMode):
            modes = ", ".join(get_args(PoolingMode))
            raise RequestError(f"pooling: expected one of {modes}, found {safe_repr(pooling)}")
        check_flags(normalize=normalize)
        mode: Any = pooling
        ready = self._job_maker.adapted(
            self.read(prompts, truncate, wanted if wanted.asks else None), lora
        )
        found = yield from self._pooled(ready, tenant, Pooling(mode, normalize))
        return [with_tensor(one) for one in found]

    def classify(
        self,
        prompts: Any,
        use_activation: bool,
        truncate: int | None,
        lora: Any = None,
        tenant: str | None = None,
        labels: Any = None,
    ) -> BatchedCall[list[ClassificationOutput]]:
        """See :meth:`sdk.LLM.classify`."""
        check_flags(use_activation=use_activation)
        if labels is not None:
            return (
                yield from self._matched(prompts, labels, use_activation, truncate, lora, tenant)
            )
        classifier = self._need_classifier()
        read = self._job_maker.adapted(self.read(prompts, truncate), lora)
        found = yield from self._classes(read, tenant, classifier)
        return [
            ClassificationOutput(
                one.request_id,
                one.prompt_token_ids,
                self._probs(classifier, one, use_activation),
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
        truncate: int | None = None,
    ) -> BatchedCall[list[ScoringOutput]]:
        """See :meth:`sdk.LLM.score`. ``salt``: the ``cache_salt`` of all prompts."""
        self._say_what_scores_are("score")  # in the caller's thread, unlike the work
        return self._score(data_1, data_2, template, lora, tenant, salt, truncate)

    def _score(
        self,
        data_1: Any,
        data_2: Any,
        template: str | None,
        lora: Any,
        tenant: str | None,
        salt: str | None,
        truncate: int | None,
    ) -> BatchedCall[list[ScoringOutput]]:
        left, right = as_list(data_1), as_list(data_2)
        check_pairs(len(left), len(right))
        if self._classifier is not None:
            lefts = left * len(right) if len(left) == 1 else left
            pairs = list(zip(lefts, right, strict=True))
            return (yield from self._scored(pairs, template, lora, tenant, salt, truncate))
        if template is not None:
            raise RequestError(
                "chat_template: this model has no classification head, so it compares embeddings, "
                "which need no template; leave it out"
            )
        check_salt(salt)
        read = [replace(one, cache_salt=salt) for one in self._sides(left, right, truncate)]
        head = self._embedding_head()
        if head is not None and head.per_token:
            if head.pads_queries:
                raise RequestError(
                    "score: this model fills queries up with mask tokens (do_query_expansion in "
                    "its files), which is not supported: the scores would be others; "
                    "encode(texts) gives the vectors of tokens"
                )
            read = self._job_maker.adapted(read, lora)
            rows = yield from self._headed(head, read, tenant)
            return self._late(head, rows[: len(left)], rows[len(left) :])
        embedded = yield from self.embed(read, None, lora, tenant)
        kind = "cosine" if head is None else head.similarity
        return compared(embedded[: len(left)], embedded[len(left) :], kind)

    def _sides(self, left: Any, right: Any, truncate: int | None) -> list[Prompt]:
        """The prompts of texts to compare: as queries and as documents, if the files have prompts
        for these and none for every text."""
        head = self._embedding_head()
        read: list[Prompt] = []
        for items, names in ((left, _QUERY), (right, _DOCUMENT)):
            texts = [as_prompt(one, self._reader.images) for one in items]
            known = () if head is None or head.default_prompt is not None else head.prompts
            name = next((one for one in names if one in known), None)
            asked = name if all(map(_is_text, texts)) else None
            read += self.read(texts, truncate, Wanted(prompt_name=asked))
        return read

    def _late(
        self,
        head: EmbeddingHead,
        left: Sequence[PoolingRequestOutput],
        right: Sequence[PoolingRequestOutput],
    ) -> list[ScoringOutput]:
        """Scores of late interaction: each token of a query with the best one of a document."""
        tokenizer = self._reader.need_tokenizer("score")
        ids = {tokenizer.token_to_id(word) for word in head.skipped_words}
        lefts = list(left) * len(right) if len(left) == 1 else left
        scores: list[ScoringOutput] = []
        for query, document in zip(lefts, right, strict=True):
            kept = [token not in ids for token in document.prompt_token_ids]
            rows = document.outputs.data[kept] if any(kept) else document.outputs.data
            scores.append(
                ScoringOutput(document.request_id, max_similarity(query.outputs.data, rows))
            )
        return scores

    def pair_tokens(self, data_1: Any, data_2: Any, truncate: int | None = None) -> int:
        """The tokens of the prompts that :meth:`score` computes, in the template of pairs.

        :raises RequestError: as :meth:`score`.
        """
        left, right = as_list(data_1), as_list(data_2)
        check_pairs(len(left), len(right))
        if self._classifier is None:
            return sum(len(one.token_ids) for one in self._sides(left, right, truncate))
        template = pair_template(self._reader, self._classifier, None)
        lefts = left * len(right) if len(left) == 1 else left
        pairs = zip(lefts, right, strict=True)
        return sum(
            len(read_pair(self._reader, pair, template, truncate).token_ids) for pair in pairs
        )

    def rerank(
        self,
        query: Any,
        documents: Any,
        top_n: Any,
        template: str | None,
        lora: Any = None,
        tenant: str | None = None,
        salt: str | None = None,
        truncate: int | None = None,
    ) -> BatchedCall[list[RerankOutput]]:
        """See :meth:`sdk.LLM.rerank`. ``salt``: the ``cache_salt`` of all prompts."""
        self._say_what_scores_are("rerank")
        return self._rerank(query, documents, top_n, template, lora, tenant, salt, truncate)

    def _rerank(
        self,
        query: Any,
        documents: Any,
        top_n: Any,
        template: str | None,
        lora: Any,
        tenant: str | None,
        salt: str | None,
        truncate: int | None,
    ) -> BatchedCall[list[RerankOutput]]:
        check_item("query", query)
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise RequestError(
                f"documents: expected a list of strings, found {safe_repr(documents)}"
            )
        for index, document in enumerate(documents):
            check_item(f"documents[{index}]", document)
        number = isinstance(top_n, int) and not isinstance(top_n, bool)
        if top_n is not None and not (number and top_n > 0):
            raise RequestError(f"top_n: expected a positive integer, found {safe_repr(top_n)}")
        if not documents:
            return []
        texts = list(documents)
        scored = yield from self._score(query, texts, template, lora, tenant, salt, truncate)
        scores = [one.score for one in scored]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        return [RerankOutput(index, documents[index], scores[index]) for index in order]

    @property
    def gives_units(self) -> bool:
        """Whether the vectors of :meth:`embed` have length 1."""
        head = self._embedding_head()
        return head is None or head.gives_units

    def _say_what_scores_are(self, method: str) -> None:
        """Warn that a model that generates text compares texts badly. In a trial with the pages of
        this project's documentation SmolLM2 found the right one first for 4 of 16 questions, where
        a search for words (BM25) found 12."""
        if self._advice is None or self._classifier is not None or self._head_of_files is not None:
            return
        self._advice.once(
            "scores",
            f"{method}(): this model is neither a reranker nor an embedding model, so the scores "
            "are cosines of its last hidden states, which say little about relevance; a search for "
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

    def _head_of(self, pooling: str | None) -> EmbeddingHead | None:
        """The head that applies to a call of :meth:`encode`."""
        if pooling is None:
            return self._embedding_head()
        head = self._head_of_files
        late = isinstance(head, EmbeddingHead) and head.per_token
        return head if late and pooling == "token" else None  # type: ignore[return-value]

    def _check_one_vector(self, head: EmbeddingHead | None) -> None:
        if head is not None and head.per_token:
            raise RequestError(
                "embed: this model has a vector for each token of a text (late interaction), not "
                "one for the text; use encode(texts), or score and rerank"
            )

    def _headed(
        self,
        head: EmbeddingHead,
        read: Sequence[Prompt],
        tenant: str | None,
        normalize: bool = False,
    ) -> BatchedCall[list[PoolingRequestOutput]]:
        """The embeddings as the files describe them: lists, or a matrix for each text."""
        mode: Any = head.mode
        found = yield from self._pooled(read, tenant, Pooling(mode, False))
        if head.per_token:
            tables = [head.rows(one.outputs.data) for one in found]
            if normalize and not head.gives_units:
                tables = [np.stack([NormalizeStep()(row) for row in table]) for table in tables]
            return [
                one._replace(outputs=PoolingOutput(table))
                for one, table in zip(found, tables, strict=True)
            ]
        rows = [
            (head.of_image if of.images else head)(one.outputs.data, of.skip)
            for one, of in zip(found, read, strict=True)
        ]
        if normalize:
            rows = [unit(row) for row in rows]
        return [
            one._replace(outputs=PoolingOutput(row)) for one, row in zip(found, rows, strict=True)
        ]

    def _pooled(
        self, read: Sequence[Prompt], tenant: str | None, pooling: Pooling
    ) -> BatchedCall[list[PoolingRequestOutput]]:
        params = [SamplingParams(tenant=tenant)] * len(read)
        jobs = self._job_maker.make(read, params, kind="embed", pooling=pooling)
        outputs = yield JobBatch(jobs, "encode")
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

    def _classes(
        self, read: Sequence[Prompt], tenant: str | None, classifier: Classifier
    ) -> BatchedCall[list[PoolingRequestOutput]]:
        """The logits of the head."""
        found = yield from self._pooled(read, tenant, self._head(classifier))
        if not classifier.steps:
            return found
        return [
            one._replace(outputs=PoolingOutput(classifier.logits(one.outputs.data)))
            for one in found
        ]

    def _matched(
        self,
        prompts: Any,
        labels: Any,
        use_activation: bool,
        truncate: int | None,
        lora: Any,
        tenant: str | None,
    ) -> BatchedCall[list[ClassificationOutput]]:
        """How well texts match images, in one batch."""
        head = self._embedding_head()
        contrast, names = contrast_of(head), checked_labels(labels)
        assert head is not None
        pictures = self.read(prompts, truncate)
        check_pictures(pictures)
        read = self._job_maker.adapted([*pictures, *self.read(names, truncate, _PLAIN)], lora)
        found = yield from self._headed(head, read, tenant)
        texts = [one.outputs.data for one in found[len(pictures) :]]
        return [
            ClassificationOutput(
                one.request_id,
                one.prompt_token_ids,
                matches(contrast, one.outputs.data, texts, use_activation),
                list(names),
                metrics=one.metrics,
            )
            for one in found[: len(pictures)]
        ]

    def _probs(self, classifier: Classifier, one: PoolingRequestOutput, use: bool) -> list[Any]:
        """Probabilities or logits of a text, or of each of its tokens."""
        if classifier.per_token:
            rows = one.outputs.data.tolist()
            return [probabilities(classifier.activation, row) for row in rows] if use else rows
        return (
            probabilities(classifier.activation, one.outputs.data)
            if use
            else list(one.outputs.data)
        )

    def _head(self, classifier: Classifier) -> Pooling:
        if classifier.steps:
            mode: Any = classifier.pooling
            return Pooling(mode, False)
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
        truncate: int | None,
    ) -> BatchedCall[list[ScoringOutput]]:
        """The relevance of each pair by the classification head."""
        classifier = self._need_classifier()
        relevant = relevant_class(classifier)
        template = pair_template(self._reader, classifier, template)
        check_salt(salt)
        read = [
            replace(read_pair(self._reader, pair, template, truncate), cache_salt=salt)
            for pair in pairs
        ]
        read = self._job_maker.adapted(read, lora)
        found = yield from self._classes(read, tenant, classifier)
        return [
            ScoringOutput(
                one.request_id, probabilities(classifier.activation, one.outputs.data)[relevant]
            )
            for one in found
        ]


def relevant_class(classifier: Classifier) -> int:
    """The class whose probability is the relevance of a document.

    :raises RequestError: the model classifies something else.
    """
    labels = [label.lower() for label in classifier.labels]
    if classifier.per_token:
        raise RequestError(
            "score: the model's head classifies the tokens of a text, which says nothing about how "
            "well two texts match. Use classify"
        )
    if len(labels) == 1:
        return 0
    if "yes" in labels:
        return labels.index("yes")
    raise RequestError(
        "score: the model's head has the classes "
        f"{safe_repr(list(classifier.labels))}, which do not say how well two texts match; "
        "expected a single class, or the classes yes and no. Use classify"
    )


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


def _is_text(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, Mapping) and "prompt" in item)


def check_pairs(first: int, second: int) -> None:
    """:raises RequestError: the numbers are different, and ``first`` is not 1."""
    if first not in (1, second):
        raise RequestError(f"score: expected one text or {second} in data_1, found {first}")


def compared(
    first: Sequence[EmbeddingOutput], second: Sequence[EmbeddingOutput], kind: str
) -> list[ScoringOutput]:
    """How alike vectors are, pair by pair; a single ``first`` is compared with all."""
    if len(first) == 1:
        first = list(first) * len(second)
    return [
        ScoringOutput(b.request_id, similarity(a.embedding, b.embedding, kind))
        for a, b in zip(first, second, strict=True)
    ]
