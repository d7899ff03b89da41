"""Which images are encoded when, and how far prompts with images may run.

A prompt runs up to its next image that has no rows yet (:meth:`Images.most_tokens`). The tower runs
between steps, in portions of about ``seconds`` (:meth:`Images.plan`), so that other requests wait
little. Rows stay in a cache of fixed size, in blocks, by the digest of the image: an image is
encoded once, whatever requests have it, and a request that was preempted finds it again. An image
whose tokens are all in the prefix cache is never looked at.

*Memory.* The image that a running request needs next is never evicted, so a request whose image has
rows advances, and blocks become free. Images further behind are encoded ahead only where they
displace nothing that a request has yet to read. Otherwise the image is evicted that saves the least
work for its blocks, by a clock as in ``CostOrder`` (Cao and Irani, GreedyDual-Size, 1997).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sdk.api.errors import RequestError
from sdk.engine.job import Job
from sdk.engine.pages.image_keys import whole_ids
from sdk.engine.plan import EncodedImage, Encoding
from sdk.engine.scheduling.image_limits import BLOCK_ROWS, JOINT_PATCHES, ImageLimits
from sdk.engine.scheduling.in_flight import Batch
from sdk.engine.scheduling.request import Request
from sdk.kernels.dataclass import dataclass
from sdk.models.vision.image import ImageInput, PromptImage

#: How long a portion of the tower's work should take. With a step of decoding requests, which reads
#: the weights, a gap between their tokens stays below half a second.
PORTION_S = 0.25
#: The weight of the newest portion in the mean of the tower's speed.
_NEWEST = 0.3


@dataclass(slots=True)
class CachedImage:
    """Blocks of an image; it has rows when its run is done. ``rank``: what is smallest goes first
    (see the module)."""

    blocks: list[int]
    value: float
    rank: float
    ready: bool = False


@dataclass(slots=True)
class Run:
    """Images that are encoded together: ``done`` of the ``units`` parts of the run are planned.
    ``work``: of a part."""

    digests: list[bytes]
    units: int
    work: float
    done: int = 0


class Images:
    """The images of one engine's requests. Not thread-safe, like the scheduler."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        #: How long a portion should take; less for a host that gives the engine little time.
        self.seconds = PORTION_S
        self.num_encoded = 0
        self._free = list(range(limits.num_blocks))[::-1]
        self._cached: dict[bytes, CachedImage] = {}
        self._clock = 0.0
        self._run: Run | None = None
        self._planned: list[float] = []  # the work of portions in flight
        self._seconds_per_work: float | None = None
        #: Whether the last plan had a portion.
        self.encoded_last = False

    # Requests

    def check(self, job: Job) -> None:
        """:raises RequestError: the images of a request are not what its prompt says, or cannot be
        read by this engine."""
        limits, images, tokens = self.limits, job.spec.images, job.prompt_token_ids
        if len(images) > limits.per_prompt:
            raise RequestError(
                f"images: expected at most {limits.per_prompt} in a prompt (limit_mm_per_prompt), "
                f"found {len(images)}"
            )
        if job.params.guidance_scale != 1.0:
            raise RequestError("guidance_scale: expected 1 for a prompt with images")
        if job.spec.prompt_embeds is not None:
            raise RequestError("images: expected token ids beside them, found prompt_embeds")
        end = 0
        for number, one in enumerate(images, 1):
            self._check_image(number, one)
            for first, count in one.spans:
                if first < end or count < 1 or first + count >= len(tokens):
                    raise RequestError(
                        f"image {number}: expected its placeholders after those of the image "
                        f"before it and before the last of the prompt's {len(tokens)} tokens, "
                        f"found tokens {first} to {first + count - 1}"
                    )
                end = first + count
                if any(token != limits.token_id for token in tokens[first:end]):
                    raise RequestError(
                        f"image {number}: expected the placeholder {limits.token_id} at tokens "
                        f"{first} to {end - 1}"
                    )
        wanted = sum(count for one in images for _, count in one.spans)
        found = tokens.count(limits.token_id)
        if found != wanted:
            raise RequestError(
                f"images: expected {wanted} placeholders ({limits.token_id}) in the prompt, as "
                f"many as its {len(images)} images have tokens, found {found}"
            )
        if limits.whole_prompt and len(images) > 1:
            raise RequestError(
                f"images: expected one in a prompt of this model, found {len(images)}: all tokens "
                "of its prompts see each other"
            )
        if limits.whole_prompt and len(tokens) > self._most_ahead:
            raise RequestError(
                f"prompt: expected at most {self._most_ahead} tokens beside images, which see each "
                "other both ways (of the sliding window, and of max_num_batched_tokens beside "
                f"max_num_seqs), found {len(tokens)}"
            )

    def _check_image(self, number: int, one: PromptImage) -> None:
        limits, image = self.limits, one.image
        count = sum(count for _, count in one.spans)
        if count != image.num_tokens:
            raise RequestError(
                f"image {number}: expected {image.num_tokens} placeholders, found {count}"
            )
        patches = max(limits.tiles(image), default=0)
        if patches > limits.max_patches or _blocks(image) > limits.num_blocks:
            raise RequestError(
                f"image {number}: expected at most {limits.max_patches} patches in a tile and "
                f"{limits.rows} tokens, found {patches} and {image.num_tokens}"
            )
        counts = [count for _, count in one.spans]
        grids = [rows * columns for rows, columns in image.grids]
        if limits.axes and counts != grids:
            raise RequestError(
                f"image {number}: expected spans of {grids} placeholders, the tokens of its tiles, "
                f"found {counts}"
            )
        most = self._most_ahead
        if limits.both_ways and max(counts) > most:
            raise RequestError(
                f"image {number}: expected at most {most} tokens that see each other both ways (of "
                "the sliding window, and of max_num_batched_tokens beside max_num_seqs), found "
                f"{max(counts)}"
            )

    @property
    def _most_ahead(self) -> int:
        """Tokens that see each other both ways, at most."""
        return min(self.limits.window or self.limits.span, self.limits.span)

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

    def _is_ready(self, image: ImageInput) -> bool:
        found = self._cached.get(image.digest)
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
        self._planned.append(run.work * units)
        if run.done == run.units:
            for digest in run.digests:
                self._cached[digest].ready = True
            self.num_encoded += len(run.digests)
            self._run = None
        return Encoding(begin, units)

    def _units(self, work: float) -> int:
        """Parts of a run that fit into a portion; one at least."""
        if self._seconds_per_work is None:
            return 1
        return max(int(self.seconds / max(self._seconds_per_work * work, 1e-9)), 1)

    def learn(self, batch: Batch, seconds: float, now: float) -> None:
        """``batch`` is done, whose portion took so long. In a pipeline the rank that answers has no
        tower; the whole step counts then."""
        encoding = batch.plan.encoding
        if encoding is not None and encoding.units and self._planned:
            work, seconds = self._planned.pop(0), seconds or now - batch.planned_ts
            found, known = seconds / max(work, 1.0), self._seconds_per_work
            self._seconds_per_work = found if known is None else known + _NEWEST * (found - known)

    def _begin(
        self, running: Sequence[Request], waiting: Sequence[Request]
    ) -> tuple[EncodedImage, ...]:
        """Start a run: the images that running requests need next, then those behind them."""
        needed = {one.image.digest for one in map(_next_image, running) if one is not None}
        wanted = set(needed)
        for request in (*running, *waiting):
            wanted.update(one.image.digest for one in _images_left(request))
        chosen: list[EncodedImage] = []
        patches, work = 0, 0.0
        for image, keep in _candidates(running, needed, wanted):
            if image.digest in self._cached:
                continue
            own = sum(self.limits.tiles(image))
            if chosen and patches + own > JOINT_PATCHES:
                break
            blocks = self._take(_blocks(image), keep)
            if blocks is None:
                continue
            value = self.limits.work(image) / len(blocks)
            self._cached[image.digest] = CachedImage(blocks, value, self._clock + value)
            needed.add(image.digest)  # not to be evicted for the next one
            chosen.append(EncodedImage(image, tuple(blocks)))
            patches, work = patches + own, work + self.limits.work(image)
        if chosen:
            images = [one.image for one in chosen]
            units = self.limits.units(images)
            work *= self.limits.layers / units
            self._run = Run([image.digest for image in images], units, work)
        return tuple(chosen)

    def _take(self, count: int, keep: set[bytes]) -> list[int] | None:
        """Blocks for an image, from images that are not to be kept if necessary."""
        while len(self._free) < count:
            others = [
                (cached.rank, digest)
                for digest, cached in self._cached.items()
                if digest not in keep and cached.ready
            ]
            if not others:
                return None
            rank, digest = min(others)
            self._clock = max(self._clock, rank)
            self._free += self._cached.pop(digest).blocks
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken

    def touch(self, request: Request) -> None:
        """A request has read rows: its images are worth keeping from now on again."""
        for one in request.spec.images:
            cached = self._cached.get(one.image.digest)
            if cached is not None:
                cached.rank = self._clock + cached.value

    def _is_wanted(self, run: Run, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        digests = set(run.digests)
        return any(
            one.image.digest in digests
            for request in (*running, *waiting)
            for one in _images_left(request)
        )

    def give_up(self) -> None:
        """Nobody needs the images of the run any more, or its state is unknown."""
        run, self._run = self._run, None
        for digest in () if run is None else run.digests:
            self._free += self._cached.pop(digest).blocks

    def undo(self, plans: Iterable[Encoding | None]) -> None:
        """Plans were interrupted: which images they encoded is unknown."""
        self._planned.clear()
        self.give_up()
        if any(plans):
            self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._run = None
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
    for one in request.spec.images:
        first, count = one.spans[-1]
        if first + count > request.num_computed:
            yield one


def _next_image(request: Request) -> PromptImage | None:
    return next(_images_left(request), None)


def _candidates(
    running: Sequence[Request], needed: set[bytes], wanted: set[bytes]
) -> Iterator[tuple[ImageInput, set[bytes]]]:
    """Images to encode, in order, and those that must be kept for each."""
    behind: list[ImageInput] = []
    for request in running:
        left = {one.image.digest for one in _images_left(request)}
        whole = [one.image for one in request.job.spec.images if one.image.digest in left]
        for number, image in enumerate(whole):
            if number:
                behind.append(image)
            else:
                yield image, needed
    for image in behind:
        yield image, wanted
