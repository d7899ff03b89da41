"""Which images are encoded when, and how far prompts with images may run.

A prompt runs up to its next image that has no rows yet (:meth:`Images.most_tokens`). The tower runs
between steps, in portions of about ``seconds`` (:meth:`Images.plan`), so that other requests wait
little. Rows stay in a cache of fixed size, in blocks, by the key of the image: an image is
encoded once, whatever requests have it, and a request that was preempted finds it again. An image
whose tokens are all in the prefix cache is never looked at.

An image that cannot be encoded ends the requests that need it next (:meth:`Images.commit`), once it
has failed alone: what failed together with others is encoded again, image by image.

*Memory.* The image that a running request needs next is never evicted, so a request whose image has
rows advances, and blocks become free. Images further behind are encoded ahead only where they
displace nothing that a request has yet to read. Otherwise the image is evicted that saves the least
work for its blocks, by a clock as in ``CostOrder`` (Cao and Irani, GreedyDual-Size, 1997).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sdk.api.errors import RequestError
from sdk.engine.job import Job
from sdk.engine.pages.image_keys import whole_ids
from sdk.engine.plan import EncodedImage, Encoding, SequenceSpec, StepResult
from sdk.engine.scheduling.in_flight import Batch
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.tower_limits import BLOCK_ROWS, JOINT_PATCHES, TowerLimits
from sdk.kernels.dataclass import dataclass
from sdk.models.vision.image import ImageInput, PromptImage

#: How long a portion of the tower's work should take. With a step of decoding requests, which reads
#: the weights, a gap between their tokens stays below half a second.
PORTION_S = 0.25
#: The weight of the newest portion in the mean of the tower's speed.
_NEWEST = 0.3


@dataclass(slots=True)
class CachedImage:
    """Blocks of an image; it has rows (``ready``) when the step that ends its run is committed.
    ``rank``: what is smallest goes first (see the module)."""

    blocks: list[int]
    value: float
    rank: float
    ready: bool = False


@dataclass(slots=True)
class Run:
    """Images that are encoded together: ``done`` of the ``units`` parts of the run are planned.
    ``work``: of a part. ``over``: it failed or was given up, and parts in flight do nothing."""

    keys: list[bytes]
    units: int
    work: float
    done: int = 0
    over: bool = False


@dataclass(slots=True)
class Portion:
    """A part of a run, in flight. ``ends``: nothing of the run is left behind it."""

    run: Run
    work: float
    ends: bool


class Images:
    """The images of one engine's requests. Not thread-safe, like the scheduler."""

    def __init__(self, limits: TowerLimits) -> None:
        self.limits = limits
        #: How long a portion should take; less for a host that gives the engine little time.
        self.seconds = PORTION_S
        self.num_encoded = 0
        self._free = list(range(limits.num_blocks))[::-1]
        self._cached: dict[bytes, CachedImage] = {}
        self._clock = 0.0
        self._run: Run | None = None
        self._planned: deque[Portion] = deque()
        #: What failed together with others.
        self._alone: set[bytes] = set()
        self._seconds_per_work: float | None = None
        #: Whether the last plan had a portion.
        self.encoded_last = False

    # Requests

    def check(self, job: Job) -> None:
        """:raises RequestError: the images of a request are not what its prompt says, or cannot be
        read by this engine."""
        limits, images, tokens = self.limits, job.spec.images, job.prompt_token_ids
        placeholder = limits.vision.token_id
        if len(images) > limits.per_prompt:
            raise RequestError(
                f"images: expected at most {limits.per_prompt} in a prompt (limit_mm_per_prompt), "
                f"found {len(images)}"
            )
        if placeholder in (job.negative_prompt_token_ids or ()):
            raise RequestError(
                f"the negative prompt of a prompt with images: expected text alone, found the "
                f"placeholder {placeholder}"
            )
        if job.spec.prompt_embeds is not None:
            raise RequestError("images: expected token ids beside them, found prompt_embeds")
        end = 0
        last = len(tokens) - (0 if limits.vision.dual else 1)
        for number, one in enumerate(images, 1):
            self._check_image(number, one)
            for first, count in one.spans:
                if first < end or count < 1 or first + count > last:
                    raise RequestError(
                        f"image {number}: expected its placeholders after those of the image "
                        f"before it and before the last of the prompt's {len(tokens)} tokens, "
                        f"found tokens {first} to {first + count - 1}"
                    )
                end = first + count
                if any(token != placeholder for token in tokens[first:end]):
                    raise RequestError(
                        f"image {number}: expected the placeholder {placeholder} at tokens "
                        f"{first} to {end - 1}"
                    )
        wanted = sum(count for one in images for _, count in one.spans)
        found = tokens.count(placeholder)
        if found != wanted:
            raise RequestError(
                f"images: expected {wanted} placeholders ({placeholder}) in the prompt, as "
                f"many as its {len(images)} images have tokens, found {found}"
            )
        if limits.whole_prompt and len(images) > 1:
            raise RequestError(
                f"images: expected one in a prompt of this model, found {len(images)}: all tokens "
                "of its prompts see each other"
            )
        if limits.whole_prompt and len(tokens) > limits.most_joined:
            raise RequestError(
                f"prompt: expected at most {limits.most_joined} tokens beside images, which see "
                "each other both ways (of the sliding window, and of max_num_batched_tokens beside "
                f"max_num_seqs), found {len(tokens)}"
            )

    def _check_image(self, number: int, one: PromptImage) -> None:
        limits, image = self.limits, one.image
        from sdk.models.vision.patches import check_image  # with the first image

        try:
            check_image(image, limits.vision)
        except ValueError as error:
            raise RequestError(f"image {number}: {error}") from error
        counts = [count for _, count in one.spans]
        if sum(counts) != image.num_tokens:
            raise RequestError(
                f"image {number}: expected {image.num_tokens} placeholders, found {sum(counts)}"
            )
        patches = max(limits.tiles(image))
        if patches > limits.max_patches or _blocks(image) > limits.num_blocks:
            raise RequestError(
                f"image {number}: expected at most {limits.max_patches} patches in a tile and "
                f"{limits.rows} tokens, found {patches} and {image.num_tokens}"
            )
        grids = [rows * columns for rows, columns in image.grids]
        if limits.vision.axes is not None and counts != grids:
            raise RequestError(
                f"image {number}: expected spans of {grids} placeholders, the tokens of its tiles, "
                f"found {counts}"
            )
        if limits.both_ways and max(counts) > limits.most_joined:
            raise RequestError(
                f"image {number}: expected at most {limits.most_joined} tokens that see each other "
                "both ways (of the sliding window, and of max_num_batched_tokens beside "
                f"max_num_seqs), found {max(counts)}"
            )

    def mark(self, request: Request) -> None:
        """Make a prompt whose tokens see each other both ways a prefix of none but itself."""
        if self.limits.whole_prompt and request.key_prompt is not None:
            request.key_prompt = whole_ids(request.key_prompt)

    def most_tokens(self, request: Request, most: int, hard: int) -> int:
        """How many of the next ``most`` tokens of a request may run: up to the next image without
        rows, and no part of a span that sees both ways: for the rest of one, up to ``hard``."""
        begin = request.num_computed
        end = begin + most
        if self.limits.whole_prompt and begin < request.num_prompt_tokens:
            return self._whole(request, most, hard)
        for one in request.spec.images:
            ready = self._is_ready(one.image)
            for first, count in one.spans:
                after = first + count
                if after <= begin or first >= end:
                    continue
                if not ready:
                    return max(first - begin, 0)
                if self.limits.both_ways and after > end:
                    if first > begin:
                        return first - begin
                    return after - begin if after - begin <= hard else 0
        return most

    def _whole(self, request: Request, most: int, hard: int) -> int:
        """The same of a prompt that must run in one step."""
        left = request.num_prompt_tokens - request.num_computed
        if not all(self._is_ready(one.image) for one in _images_left(request)):
            return 0
        return most if left <= most else left if left <= hard else 0

    def most_joined(self, prompts: Iterable[Request]) -> int:
        """The most tokens that must run in one step, because they see one another both ways."""
        if not self.limits.both_ways:
            return 0
        if self.limits.whole_prompt:
            return max((one.num_prompt_tokens for one in prompts), default=0)
        left = (span for one in prompts for image in _images_left(one) for span in image.spans)
        return max((count for _, count in left), default=0)

    def left_seconds(
        self, requests: Iterable[Request], own: Request, num_cached: int
    ) -> float | None:
        """How long the tower would work for the images that ``requests`` have yet to read, and for
        those of ``own`` behind its first ``num_cached`` tokens. ``None``: its speed is unknown."""
        left = {one.image.key: one.image for one in _images_after(own.job.spec, num_cached)}
        for request in requests:
            keys = {one.image.key for one in _images_left(request)}
            whole = (one.image for one in request.job.spec.images)
            left.update((image.key, image) for image in whole if image.key in keys)
        images = [image for key, image in left.items() if key not in self._cached]
        if not images:
            return 0.0
        if self._seconds_per_work is None:
            return None
        work = sum(map(self.limits.work, images)) * self.limits.vision.tower.num_layers
        return work * self._seconds_per_work

    def _is_ready(self, image: ImageInput) -> bool:
        found = self._cached.get(image.key)
        return found is not None and found.ready

    # The tower

    def is_due(self, running: Iterable[Request]) -> bool:
        """Whether a running request waits for an image, or one is being encoded."""
        return self._run is not None or any(
            not self._is_ready(one.image) for one in map(_next_image, running) if one is not None
        )

    def plan(self, running: Sequence[Request], waiting: Iterable[Request]) -> Encoding | None:
        """The next portion of the tower's work; ``None``: there is nothing to do."""
        begin: tuple[EncodedImage, ...] = ()
        waiting = [request for request in waiting if request.spec.images]
        if self._run is not None and not self._is_wanted(self._run, running, waiting):
            self.give_up()
            begin = self._begin(running, waiting)
            if not begin:
                return Encoding((), 0)
        elif self._run is None:
            begin = self._begin(running, waiting)
        run = self._run
        if run is None:
            return None
        units = min(self._units(run.work), run.units - run.done)
        run.done += units
        ends = run.done == run.units
        self._planned.append(Portion(run, run.work * units, ends))
        if ends:
            self._run = None
        return Encoding(begin, units)

    def _units(self, work: float) -> int:
        """Parts of a run that fit into a portion; one at least."""
        if self._seconds_per_work is None:
            return 1
        return max(int(self.seconds / max(self._seconds_per_work * work, 1e-9)), 1)

    def commit(self, batch: Batch, result: StepResult, now: float) -> Mapping[bytes, str]:
        """``batch`` is done, and the rows that its portion ended are ready. Returns the images that
        cannot be encoded, by digest, and why.

        In a pipeline the rank that answers has no tower; the time of the whole step counts then.
        """
        encoding = batch.plan.encoding
        if encoding is None or not encoding.units or not self._planned:
            return {}
        portion = self._planned.popleft()
        run = portion.run
        if run.over:
            return {}
        if failed := {key: why for key, why in result.unencoded.items() if key in run.keys}:
            return self._failed(run, failed)
        seconds = result.encode_seconds or now - batch.planned_ts
        found, known = seconds / max(portion.work, 1.0), self._seconds_per_work
        self._seconds_per_work = found if known is None else known + _NEWEST * (found - known)
        if portion.ends:
            for key in run.keys:
                self._cached[key].ready = True
            self.num_encoded += len(run.keys)
            self._alone.difference_update(run.keys)
        return {}

    def _failed(self, run: Run, failed: Mapping[bytes, str]) -> Mapping[bytes, str]:
        """A portion failed on a rank, and its run with it: the images that cannot be encoded."""
        if self._run is run:
            self._run = None
        self._end(run)
        if len(run.keys) > 1:
            self._alone.update(run.keys)
            return {}
        self._alone.difference_update(run.keys)
        return failed

    def readers(self, key: bytes, running: Iterable[Request]) -> list[Request]:
        """The running requests that have yet to read the rows of an image."""
        return [
            request
            for request in running
            if any(one.image.key == key for one in _images_left(request))
        ]

    def _begin(
        self, running: Sequence[Request], waiting: Sequence[Request]
    ) -> tuple[EncodedImage, ...]:
        """Start a run: the images that running requests need next, then those behind them."""
        needed = {one.image.key for one in map(_next_image, running) if one is not None}
        wanted = set(needed)
        for request in (*running, *waiting):
            wanted.update(one.image.key for one in _images_left(request))
        chosen: list[EncodedImage] = []
        patches, work = 0, 0.0
        for image, keep in _candidates(running, needed, wanted):
            if image.key in self._cached:
                continue
            own = sum(self.limits.tiles(image))
            alone = image.key in self._alone
            if chosen and (alone or patches + own > JOINT_PATCHES):
                break
            blocks = self._take(_blocks(image), keep)
            if blocks is None:
                continue
            value = self.limits.work(image) / len(blocks)
            self._cached[image.key] = CachedImage(blocks, value, self._clock + value)
            needed.add(image.key)  # not to be evicted for the next one
            chosen.append(EncodedImage(image, tuple(blocks)))
            patches, work = patches + own, work + self.limits.work(image)
            if alone:
                break
        if chosen:
            images = [one.image for one in chosen]
            units = self.limits.units(images)
            work *= self.limits.vision.tower.num_layers / units
            self._run = Run([image.key for image in images], units, work)
        return tuple(chosen)

    def _take(self, count: int, keep: set[bytes]) -> list[int] | None:
        """Blocks for an image, from images that are not to be kept if necessary."""
        while len(self._free) < count:
            others = [
                (cached.rank, key)
                for key, cached in self._cached.items()
                if key not in keep and cached.ready
            ]
            if not others:
                return None
            rank, key = min(others)
            self._clock = max(self._clock, rank)
            self._free += self._cached.pop(key).blocks
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken

    def touch(self, request: Request) -> None:
        """A request has read rows: its images are worth keeping from now on again."""
        for one in request.spec.images:
            cached = self._cached.get(one.image.key)
            if cached is not None:
                cached.rank = self._clock + cached.value

    def _is_wanted(self, run: Run, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        keys = set(run.keys)
        return any(
            one.image.key in keys
            for request in (*running, *waiting)
            for one in _images_left(request)
        )

    def give_up(self) -> None:
        """Nobody needs the images of the run any more, or its state is unknown."""
        run, self._run = self._run, None
        if run is not None:
            self._end(run)

    def _end(self, run: Run) -> None:
        """A run that leaves no rows."""
        run.over = True
        for key in run.keys:
            self._free += self._cached.pop(key).blocks

    def undo(self, plans: Iterable[Encoding | None]) -> None:
        """Plans were interrupted: which images they encoded is unknown."""
        self._planned.clear()
        self.give_up()
        if any(plans):
            self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        for portion in self._planned:
            portion.run.over = True
        self._run = None
        self._alone.clear()
        self._cached.clear()
        self._free = list(range(self.limits.num_blocks))[::-1]

    def check_blocks(self) -> None:
        """Assert that each block is free or belongs to one image (tests)."""
        held = [block for cached in self._cached.values() for block in cached.blocks]
        assert sorted([*held, *self._free]) == list(range(self.limits.num_blocks))


def _blocks(image: ImageInput) -> int:
    return -(-image.num_tokens // BLOCK_ROWS)


def _images_left(request: Request) -> Iterator[PromptImage]:
    """The images of which a request has yet to run tokens."""
    return _images_after(request.spec, request.num_computed)


def _images_after(spec: SequenceSpec, num_tokens: int) -> Iterator[PromptImage]:
    """The images that do not end with the first tokens of a prompt."""
    for one in spec.images:
        first, count = one.spans[-1]
        if first + count > num_tokens:
            yield one


def _next_image(request: Request) -> PromptImage | None:
    return next(_images_left(request), None)


def _candidates(
    running: Sequence[Request], needed: set[bytes], wanted: set[bytes]
) -> Iterator[tuple[ImageInput, set[bytes]]]:
    """Images to encode, in order, and those that must be kept for each."""
    behind: list[ImageInput] = []
    for request in running:
        left = {one.image.key for one in _images_left(request)}
        whole = [one.image for one in request.job.spec.images if one.image.key in left]
        for number, image in enumerate(whole):
            if number:
                behind.append(image)
            else:
                yield image, needed
    for image in behind:
        yield image, wanted
