"""An image after preprocessing, and its place in a prompt: what callers' code hands to the engine.

numpy is imported for type checkers only: plans of steps are made without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ImageInput(NamedTuple):
    """One image, resized and cut into the tiles that the tower reads; not yet normalized.

    ``tiles``: uint8 ``[height, width, 3]`` each, RGB; a tile is one sequence of the tower. Their
    sides are multiples of the patches' (of merged patches where the model merges them).
    ``grids``: for each tile the rows and columns of the tokens that it becomes.
    ``num_tokens``: how many rows of embeddings the model gets, all tiles together.
    ``digest``: 32 bytes that identify the pixels and sizes, and so the embeddings.
    """

    tiles: tuple[NDArray[np.uint8], ...]
    grids: tuple[tuple[int, int], ...]
    num_tokens: int
    digest: bytes
    #: Rows and columns of pixels before resizing.
    size: tuple[int, int] = (0, 0)

    @property
    def key(self) -> bytes:
        """What its rows are known by: the digest, and how many there are."""
        return self.digest + self.num_tokens.to_bytes(8, "big")


class PromptImage(NamedTuple):
    """An image in a prompt.

    ``spans``: the first token and the number of tokens of each run of placeholders, in the order of
    the prompt. Together they have ``image.num_tokens`` tokens, one for each row of embeddings.
    """

    image: ImageInput
    spans: tuple[tuple[int, int], ...]
