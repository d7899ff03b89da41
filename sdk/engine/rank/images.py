"""Images on one rank: the rows that its tower makes, and what a step reads of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.engine.plan import Encoding, StepRow
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.request_images import RequestImages, images_of
from sdk.engine.rank.step_buffers import Buffers
from sdk.engine.scheduling.tower_limits import BLOCK_ROWS
from sdk.kernels.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from sdk.kernels.operators.ops import Ops
    from sdk.models.vision.config import VisionConfig
    from sdk.models.vision.tower import Tower, TowerRun

_Ints = NDArray[np.int32]
logger = logging.getLogger("sdk")


class Encoded(NamedTuple):
    """What a portion of the tower's work has come to. ``failed``: images by their keys, and why."""

    seconds: float
    failed: Mapping[bytes, str]


class ImageCache:
    """The rows of images, in blocks that the scheduler hands out, and the tower that makes them.

    ``rows``: float32 ``[number of rows, features * hidden]``, at a fixed place.
    """

    def __init__(self, tower: Tower, num_rows: int, ops: Ops) -> None:
        self._tower = tower
        width = tower.config.features * tower.config.hidden_size
        self.rows: Tensor = ops.empty(num_rows, width)
        #: By the key of an image: the rows of the cache that it has.
        self._index: dict[bytes, _Ints] = {}
        self._owners: dict[int, bytes] = {}  # by block
        self._run: TowerRun | None = None
        self._images: list[tuple[bytes, _Ints]] = []  # of the run

    def encode(self, work: Encoding) -> Encoded:
        """Do a portion of the tower's work. If that fails, its images have no rows."""
        begin = perf_counter()
        if work.begin or not work.units:
            self._run, self._images = None, []
        try:
            if work.begin:
                self._begin(work)
            if self._run is not None and self._run.advance(work.units):
                self._store(self._run.rows())
        except Exception as error:
            logger.error("an image could not be encoded", exc_info=error)
            why = f"the image could not be encoded: {type(error).__name__}: {error}"
            failed = {key: why for key, _ in self._images}
            self._run, self._images = None, []
            return Encoded(perf_counter() - begin, failed)
        return Encoded(perf_counter() - begin, {})

    def _begin(self, work: Encoding) -> None:
        for image, blocks in work.begin:
            for block in blocks:  # an image that was evicted
                self._index.pop(self._owners.pop(block, b""), None)
            known = [block for block, owner in self._owners.items() if owner == image.key]
            for block in known:  # given up, or evicted and not yet overwritten
                del self._owners[block]
            self._owners.update(dict.fromkeys(blocks, image.key))
            rows = np.add.outer(np.array(blocks) * BLOCK_ROWS, np.arange(BLOCK_ROWS))
            self._images.append((image.key, rows.ravel()[: image.num_tokens].astype(np.int32)))
        self._run = self._tower.begin([image for image, _ in work.begin])

    def _store(self, found: Sequence[Tensor]) -> None:
        with torch.inference_mode():
            for (key, index), rows in zip(self._images, found, strict=True):
                self.rows[torch.from_numpy(index).long().to(self.rows.device)] = rows
                self._index[key] = index
        self._run, self._images = None, []

    @property
    def dual(self) -> bool:
        """See :class:`sdk.models.vision.config.VisionConfig`."""
        return self._tower.config.dual

    def vector(self, key: bytes) -> Tensor:
        """The vector of an encoded image of a dual encoder, float32 ``[1, hidden]``."""
        index = torch.from_numpy(self._index[key]).long()
        return self.rows[index.to(self.rows.device)]

    def index_of(self, key: bytes) -> _Ints:
        """The rows of the cache that an encoded image has, int32 ``[num_tokens]``."""
        return self._index[key]


class ImageInputs:
    """The inputs of a step about images, in fixed buffers: see ``AttentionBatch``.

    ``cache``: ``None`` on ranks that embed no tokens.
    """

    def __init__(
        self, config: VisionConfig, max_tokens: int, device: torch.device, cache: ImageCache | None
    ) -> None:
        self.config, self._cache = config, cache
        axes = 0 if config.axes is None else 3
        self._buffers = Buffers(
            device,
            (np.int32, (max_tokens,)),
            (np.int32, (max_tokens,)),
            (np.int32, (max(axes, 1), max_tokens)),
        )
        self._rows, self._ahead, self._shifts = self._buffers.arrays
        rows, ahead, shifts = self._buffers.tensors
        self._rows[:] = -1
        self._written = 0  # tokens at the beginning that may not be text's
        self.rows: Tensor | None = None if cache is None else rows
        self.ahead: Tensor | None = None if config.both_ways is None else ahead
        self.shifts: Tensor | None = shifts if axes else None
        self._buffers.send()

    def prepare(self, request: RankRequest) -> None:
        """A request is new to the rank."""
        if request.spec.images:
            request.images = images_of(request.spec, request.num_prompt, self.config)

    def clear(self) -> None:
        """All tokens of the step are text of prompts without images."""
        if self._written:
            self._rows[: self._written] = -1
            self._ahead[: self._written] = 0
            self._shifts[:, : self._written] = 0
            self._written = 0
            self._buffers.send()

    def write(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> None:
        """Write the step of these rows."""
        self.clear()
        if all(request.images is None for request in requests):
            return
        end = 0
        for row, request in zip(rows, requests, strict=True):
            begin, end = end, end + row.num_scheduled_tokens
            if request.images is not None:
                self._write(request.images, request.num_computed, begin, end)
        self._written = end
        self._buffers.send()

    def stand_in(self, token_ids: NDArray[np.int64]) -> None:
        """Replace the tokens of images in a step: see ``VisionConfig.stand_in``."""
        token = self.config.stand_in
        if token is not None and self._written:
            own = token_ids[: self._written]
            own[self._rows[: self._written] >= 0] = token

    def _write(self, own: RequestImages, first: int, begin: int, end: int) -> None:
        """The tokens ``begin`` to ``end`` of the step are those of a request from ``first`` on."""
        last = first + end - begin
        for one in own.images if self._cache is not None else ():
            row = 0
            for start, count in one.spans:
                low, high = max(start, first), min(start + count, last)
                if low < high:
                    index = self._cache.index_of(one.image.key)  # type: ignore[union-attr]
                    part = index[row + low - start : row + high - start]
                    self._rows[begin + low - first : begin + high - first] = part
                row += count
        if own.ahead is not None:
            part = own.ahead[first:last]
            self._ahead[begin : begin + len(part)] = part
        if own.shifts is not None:
            known = own.shifts[:, first:last]
            self._shifts[:, begin : begin + known.shape[1]] = known
            self._shifts[:, begin + known.shape[1] : end] = own.shift
