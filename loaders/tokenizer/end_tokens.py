"""The tokens that end an answer.

Files name one end-of-text token; chat models stop at another (end of turn), which many files do not
name. llama.cpp therefore also checks spellings, and so does this module. One rule differs:
spellings that other models use for ordinary text (``</s>`` is HTML to Gemma 3 and Phi-3) count only
if the file marks the token as control. The markers of fill-in-the-middle models do not count: they
separate files and do not end an answer.
"""

from __future__ import annotations

from collections.abc import Callable

# These mean the same in all models: files that mark them as ordinary text are wrong.
_ALWAYS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
)
_IF_CONTROL = (
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<turn|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
)


def end_token_ids(
    token_to_id: Callable[[str], int | None], is_control: Callable[[int], bool]
) -> frozenset[int]:
    """Ids of tokens whose spelling marks the end of an answer."""
    found: dict[str, int] = {}
    for text in (*_ALWAYS, *_IF_CONTROL):
        token_id = token_to_id(text)
        if token_id is not None and (text in _ALWAYS or is_control(token_id)):
            found[text] = token_id
    # In the harmony format (and solar-open) <|end|> ends a message, and another message follows.
    if {"<|call|>", "<|return|>"} <= found.keys() or {"<|calls|>", "<|flush|>"} <= found.keys():
        found.pop("<|end|>", None)
    return frozenset(found.values())
