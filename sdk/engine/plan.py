"""Messages between the scheduler and the ranks: plans of steps and their results.

The objects are immutable and picklable and contain only ids and numbers, no tensors. So the same
objects drive one rank in this process or several ranks in child processes.

Objects that every step creates are named tuples: creating a frozen dataclass of nine fields takes
0.9 us, a named tuple 0.2 us, and a step of 32 requests creates 34 of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple, TypeAlias

from sdk.api.logprobs import Sampled
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.sampling.resolved import ResolvedParams

RequestKind = Literal["generate", "embed"]
PoolingMode = Literal["last", "cls", "mean", "max", "weightedmean", "mean_sqrt_len", "token"]
#: A vector as a list of floats; with the mode "token" a float32 array ``[tokens, hidden]``.
Pooled: TypeAlias = Any


class Pooling(NamedTuple):
    """How the hidden states of a prompt become the result of an ``embed`` request.

    ``mode``: the state of the last or of the first token (``cls``), the mean or the maximum of all,
    the mean with weights 1, 2, 3, ..., the sum over the square root of their number, or all of them
    (``token``). ``normalize``: scale each vector to length 1.
    """

    mode: PoolingMode = "last"
    normalize: bool = True
    #: Multiply the vector with the checkpoint's classification head.
    score: bool = False
    #: Return the logits of these tokens instead of the vector.
    token_ids: tuple[int, ...] = ()
    #: Start after a cached prefix; only the last token must run.
    reuse_prefix: bool = False
    #: The first token of the second of two texts, for models with token types; None: there is one.
    second_text: int | None = None


LAST_TOKEN = Pooling()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What ranks know of a sequence besides its tokens and pages; it never changes.

    A sequence is one answer of a request, one text to embed, or the negative prompt of an answer.
    """

    request_id: str
    params: SamplingParams
    kind: RequestKind = "generate"
    #: Of an ``embed`` request; ``None``: the last token, normalized.
    pooling: Pooling | None = None
    #: Token ids of strings in ``params``: bad words, EOS, sequence breakers.
    resolved: ResolvedParams = field(default_factory=ResolvedParams)
    #: For the negative sequence of a request (CFG): the id of that request. A negative sequence is
    #: never sampled; it continues with the tokens of its request.
    negative_of: str | None = None
    #: A float32 array ``[num_prompt_tokens, hidden]`` in place of the prompt's token ids.
    prompt_embeds: Any = field(default=None, compare=False, repr=False)
    #: The images in the prompt, in its order. Ranks get them without their tiles.
    images: tuple[PromptImage, ...] = field(default=(), compare=False, repr=False)


class EncodedImage(NamedTuple):
    """An image that is encoded, and the blocks of the image cache that get its rows."""

    image: ImageInput
    blocks: tuple[int, ...]


class Encoding(NamedTuple):
    """A portion of the work of the tower.

    ``begin``: images that are encoded together from now on; what was not finished is given up.
    ``units``: how many more layers of groups of tiles run; after the last one the rows are written.
    0: the run is given up.
    """

    begin: tuple[EncodedImage, ...]
    units: int


class Frames(NamedTuple):
    """The memory of consecutive pages of one request in one window group of the cache.

    ``group``: the index of the group among the window groups. ``first``: the index of the first
    page in the request's page table; its place in the group's memory is ``frames[0]``.
    """

    group: int
    first: int
    frames: tuple[int, ...]


class StateSave(NamedTuple):
    """The state of a request after its first ``num_tokens`` tokens is also written to ``slot``.

    The tokens are among those that the request runs in the step, and not drafts.
    """

    request_id: str
    num_tokens: int
    slot: int


class RequestStart(NamedTuple):
    """Everything a rank must know about a request that is new to it, or that starts over: after a
    preemption, or a rewind of its answer.

    ``token_ids`` are the prompt and the tokens generated so far. The keys and values of the first
    ``num_computed`` tokens are already in ``pages`` (a prefix hit).
    """

    spec: SequenceSpec
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    pages: tuple[int, ...]
    #: The most tokens, prompt and answer.
    max_len: int = 0
    #: Mirostat's target surprise for the next token, if a token was generated before.
    mirostat_mu: float | None = None
    #: Tokens that must not come next, because a banned string began with them.
    forbidden: tuple[int, ...] = ()
    #: For each window group of the cache where the pages are that the next token still sees.
    frames: tuple[Frames, ...] = ()
    #: Of a model with recurrent states: the slots of this sequence. A row without drafts writes its
    #: last state to the current one, at first ``slots[0]``. In a row with drafts the state after
    #: its last known token (i = 0) and after each draft goes to slot ``current + 1 + i`` (modulo
    #: their number), so that the current one after the step is that of the last accepted token.
    #: There is one more than a row has drafts at most.
    state_slots: tuple[int, ...] = ()
    #: The slot with the state after ``num_computed`` tokens, a snapshot or ``state_slots[0]``; -1:
    #: zeros. Only the first row reads it.
    initial_state: int = -1

    @property
    def request_id(self) -> str:
        """The id of its sequence."""
        return self.spec.request_id


class Swap(NamedTuple):
    """A copy of one page to a slot of the swap space (``out``), or from a slot into the cache.

    Both ids contain the tier (``kernels/kv/tiers.py``), which is the same for page and slot. With
    window groups or states: a copy of a place of this ``region`` of the cache, in equal parts to
    several slots.
    """

    page: int
    slots: tuple[int, ...]
    out: bool
    region: int = 0


class Move(NamedTuple):
    """A move of a page within the cache, to a lower tier or within its tier.

    Both ids contain the tier (``kernels/kv/tiers.py``).
    """

    source: int
    target: int


class Duplicate(NamedTuple):
    """A copy of a page into another one of its tier; both stay where they are.

    Both ids contain the tier (``kernels/kv/tiers.py``). ``group``: a copy within the memory of this
    window group instead, from one place in it to another.
    """

    source: int
    target: int
    group: int | None = None


class StateCopy(NamedTuple):
    """A copy of the recurrent states in ``slot`` to the place of a snapshot in 16 bits (``out``),
    or from there into the slot."""

    slot: int
    place: int
    out: bool


Copy = Swap | Move | Duplicate | StateCopy


#: In the place of a draft token that the ranks draft.
TO_DRAFT = -1


class StepRow(NamedTuple):
    """The tokens that one request runs in a step: its next tokens, then drafts."""

    request_id: str
    num_scheduled_tokens: int
    #: Output rows (rows that produce logits). They belong to the last tokens: none, one, or one
    #: more than there are drafts.
    num_output_rows: int = 0
    #: Tokens that a drafter expects after the known ones. Each is compared with the token sampled
    #: at the position before it; the first that differs and all after it are rejected. Ranks draft
    #: the tokens in the place of :data:`TO_DRAFT`: all of a row's drafts, or none.
    drafts: tuple[int, ...] = ()
    #: The adapter slot of its tokens; -1: no adapter.
    adapter: int = -1

    @property
    def drafts_on_rank(self) -> bool:
        """Whether the ranks draft this row's drafts."""
        return bool(self.drafts) and self.drafts[0] == TO_DRAFT


class StepPlan(NamedTuple):
    """One step: its rows in batch order, and updates for the ranks.

    Ranks apply the updates first, in this order: ``sampled``, ``copies``, ``vacated``,
    ``new_pages``, ``new_frames``, ``dropped``, ``started``. Then they do ``encoding`` and run the
    rows.
    """

    step_id: int
    #: The same tuple object in every plan while the same requests decode and nothing else happens.
    rows: tuple[StepRow, ...] = ()
    started: tuple[RequestStart, ...] = ()
    new_pages: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Requests finished, aborted, preempted or rewound since the last plan: ranks forget them.
    dropped: tuple[str, ...] = ()
    #: Copies of pages, made one after another. Each names pages by their ids at its turn. Ranks
    #: update the page tables of the requests they know, but not ids in this plan's ``new_pages``
    #: and ``started``, which are final.
    copies: tuple[Copy, ...] = ()
    #: Tokens that rank 0 sampled since the last plan, by request, for ranks that do not sample. The
    #: executor adds them when it sends the plan to these ranks.
    sampled: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Memory in window groups for pages that requests are about to write.
    new_frames: tuple[tuple[str, Frames], ...] = ()
    #: Snapshots of recurrent states, taken while the rows run.
    state_saves: tuple[StateSave, ...] = ()
    #: Places whose memory has moved to another kind of cache: pages, then frames of each window
    #: group, then slots of states, then snapshots in 16 bits. Their content is lost.
    vacated: tuple[tuple[int, ...], ...] = ()
    #: What the tower does before the rows run.
    encoding: Encoding | None = None


class StepResult(NamedTuple):
    """The result of one step.

    ``tokens`` has one sequence per row of the plan: the token sampled at the row's first output
    row, and one more for each accepted draft. It is empty for rows without output rows, for
    negative sequences, and for requests in ``errors``.
    ``details`` has more about these tokens, for requests that need it.
    ``prompt_logprobs`` scores the prompt tokens that follow the positions run in this step.
    ``errors`` ends single requests (NaN logits); the others continue.
    """

    step_id: int
    tokens: Sequence[Sequence[int]] = ()
    details: Mapping[str, Sequence[Sampled]] = {}
    prompt_logprobs: Mapping[str, tuple[Sampled, ...]] = {}
    hidden: Mapping[str, Pooled] = {}
    errors: Mapping[str, str] = {}
    #: Requests whose structured answer is complete with these tokens, and whether it was closed
    #: because few tokens were left.
    complete: Mapping[str, bool] = {}
    #: With drafts: the tokens that structures force after these, by request.
    forced: Mapping[str, Sequence[int]] = {}
    #: Slots of the swap space for which writing to the swap file failed, with the reason. These
    #: slots are empty.
    unwritten: Mapping[int, str] = {}
    #: Requests that the ranks will not draft for.
    left_out: Collection[str] = ()
    #: How long the step waited for the masks of structured answers, after the model had run.
    mask_seconds: float = 0.0
    #: How long the tower worked before the step.
    encode_seconds: float = 0.0
    #: Images of the run of the tower that failed in this step, by their keys, and why.
    unencoded: Mapping[bytes, str] = {}
