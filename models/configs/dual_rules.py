"""What is said of an encoder of texts beside one of images."""

from __future__ import annotations

from typing import NamedTuple


class DualRules(NamedTuple):
    """An encoder of texts beside one of images, in whose space the vectors of both are.

    ``projection``: the matrix behind the last token. ``optional``: a folder of this encoder alone
    may lack it. ``filled``: texts are filled up to one length. ``until_end``: what follows the
    first token that ends a text does not count. ``lower_case``: texts are read so. ``each``: see
    :class:`sdk.quant.embedding_head.Contrast`.
    """

    projection: str
    optional: bool = False
    filled: bool = False
    until_end: bool = False
    lower_case: bool = False
    each: bool = False
