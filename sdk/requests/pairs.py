"""Prompts of a query and a document, for models that score such pairs (cross-encoders)."""

from __future__ import annotations

from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.models.classifier import Classifier
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompt_kinds import ChatOptions
from sdk.requests.prompts import Prompt, PromptReader

#: llama.cpp's name for the template that a GGUF file of a reranker has, with these two marks.
_GGUF_NAME = "rerank"
_MARKS = {"{query}": "{{ messages[0].content }}", "{document}": "{{ messages[1].content }}"}
#: For models that answer yes or no: the format of Qwen3-Reranker, from its model card.
_YES_OR_NO = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
_PARAMS = SamplingParams()


def pair_template(reader: PromptReader, classifier: Classifier, given: str | None) -> str | None:
    """The chat template of pairs: the caller's, the checkpoint's, or that of yes-or-no models.

    None: the two texts follow each other. A template gets two messages, ``query`` and
    ``document`` (their roles), or has the marks ``{query}`` and ``{document}``.

    :raises RequestError: ``given`` is not a template.
    """
    if given is not None and not isinstance(given, str):
        raise RequestError(
            f"chat_template: expected the source or the name of a template, found "
            f"{safe_repr(given)}"
        )
    tokenizer = reader.tokenizer
    named = {} if tokenizer is None else tokenizer.chat_templates
    source = named.get(_GGUF_NAME) if given is None else named.get(given, given)
    if source is None and {"yes", "no"} == {label.lower() for label in classifier.labels}:
        source = _YES_OR_NO
    if source is not None and all(mark in source for mark in _MARKS):
        for mark, expression in _MARKS.items():
            source = source.replace(mark, expression)
        source += "\n" if source.endswith("\n") else ""  # Jinja drops one at the end
    return source


def read_pair(
    reader: PromptReader,
    pair: tuple[Any, Any],
    template: str | None,
    truncate: int | None = None,
) -> Prompt:
    """The prompt of a query and a document."""
    for text in pair:
        if not isinstance(text, str):
            raise RequestError(
                f"score: expected strings for a model with a classification head, found "
                f"{safe_repr(text)}"
            )
    query, document = pair
    if template is None:
        return reader.read_texts(query, document, truncate)
    if truncate is not None:
        raise RequestError(
            "truncate_prompt_tokens: expected none for a model whose pairs have a template, which "
            f"cannot be cut, found {safe_repr(truncate)}; shorten the documents"
        )
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    options = ChatOptions(add_generation_prompt=False, chat_template=template)
    return reader.read_chat(messages, _PARAMS, options)
