"""Prompts of a query and a document, for models that score such pairs (cross-encoders)."""

from __future__ import annotations

from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.models.classifier import Classifier
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.items import parts_of
from sdk.requests.prompts.kinds import ChatOptions
from sdk.requests.prompts.reader import Prompt, PromptReader

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
#: The same for models that read images: the messages of Qwen3-VL-Reranker's own code, in the
#: template of its conversations.
YES_OR_NO_SEEN = "a conversation"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_SEARCH = "<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
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
        source = _YES_OR_NO if reader.images is None else YES_OR_NO_SEEN
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
    """The prompt of a query and a document, which have images where the model reads them."""
    sees = reader.images is not None and template is not None
    for item in pair:
        if not isinstance(item, str) and not sees:
            raise RequestError(
                f"score: expected strings for a model with a classification head, found "
                f"{safe_repr(item)}"
            )
    query, document = pair
    if template is None:
        return reader.read_texts(query, document, truncate)
    if truncate is not None:
        raise RequestError(
            "truncate_prompt_tokens: expected none for a model whose pairs have a template, which "
            f"cannot be cut, found {safe_repr(truncate)}; shorten the documents"
        )
    if template == YES_OR_NO_SEEN:
        return reader.read_chat(_judged(query, document), _PARAMS, ChatOptions())
    messages = [
        {"role": role, "content": item if isinstance(item, str) else parts_of(item)}
        for role, item in (("query", query), ("document", document))
    ]
    options = ChatOptions(add_generation_prompt=False, chat_template=template)
    return reader.read_chat(messages, _PARAMS, options)


def _judged(query: Any, document: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": _SEARCH},
        {"type": "text", "text": "<Query>:"},
        *parts_of(query),
        {"type": "text", "text": "\n<Document>:"},
        *parts_of(document),
    ]
    return [
        {"role": "system", "content": [{"type": "text", "text": _JUDGE}]},
        {"role": "user", "content": parts},
    ]
