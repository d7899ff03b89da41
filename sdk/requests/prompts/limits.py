"""How many tokens a prompt may have, and which ones."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.models.vision.image import ImageInput
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.images import described


class PromptLimits:
    """The limits of one model's prompts: ids below ``vocab_size``, ``max_model_len`` tokens with
    the answer. ``room``: tokens of the context that must stay free."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def kept(self, params: SamplingParams, room: int) -> int | None:
        """The tokens that ``truncate_prompt_tokens`` keeps of a prompt; None: it is not set."""
        cut = params.truncate_prompt_tokens
        if cut != -1 or room == 0:
            return self.max_model_len if cut == -1 else cut
        answer = params.max_tokens
        if answer is None or answer >= self.max_model_len:
            answer = self.max_model_len // 4
        return max(1, self.max_model_len - answer)

    def checked(
        self, ids: Sequence[Any], room: int, images: Sequence[ImageInput] = ()
    ) -> tuple[int, ...]:
        """The ids as plain integers. ``images``: those among them, for errors.

        :raises RequestError: there are none or too many, or one is not in the vocabulary.
        """
        count, limit = len(ids), self.max_model_len - room
        if count > limit:
            raise self.too_long(count, room, images=images)
        items = list(itertools.islice(ids, limit))
        if not all(map(is_id, items)):
            raise RequestError(
                f"prompt_token_ids: expected a list of integers, found {safe_repr(ids)}"
            )
        if not items:
            raise RequestError("prompt: it is empty (no tokens); pass at least one token")
        plain = tuple(map(operator.index, items))  # plain integers, not subclasses
        low, high = min(plain), max(plain)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"prompt_token_ids: expected ids in 0..{self.vocab_size - 1}, "
                f"found {safe_repr(low if low < 0 else high)}"
            )
        return plain

    def check_images(self, images: Sequence[ImageInput], room: int) -> None:
        """:raises RequestError: they alone are more than the context holds."""
        count = sum(image.num_tokens for image in images)
        if count > self.max_model_len - room:
            raise self.too_long(count, room, "at least ", images)

    def too_long(
        self, count: int, room: int, about: str = "", images: Sequence[ImageInput] = ()
    ) -> RequestError:
        """A prompt has ``count`` tokens, and with ``about`` "at least ".

        ``images``: those in it, which nobody can shorten.
        """
        left = f" and {room} must be left for the answer" if room else ""
        if images:
            size = f"{count} tokens, {described(images)}"
            advice = "send fewer or smaller images or raise max_model_len"
        else:
            kept, size = "end" if room else "beginning", f"{count} tokens"
            advice = (
                "shorten it, raise max_model_len, or set truncate_prompt_tokens=-1 to keep its "
                f"{kept}"
            )
        return RequestError(
            f"prompt: {about}{size}, but the context holds {self.max_model_len}{left}; {advice}"
        )


def is_id(value: object) -> bool:
    """Whether it may be a token id."""
    return isinstance(value, int) and not isinstance(value, bool)
