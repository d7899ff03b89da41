"""The state of a request on one rank, kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdk.engine.plan import LAST_TOKEN, Frames, RequestStart
from sdk.engine.rank.pooling import Pooler
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.sampling.state import SamplerState

if TYPE_CHECKING:
    from sdk.engine.rank.request_images import RequestImages
    from sdk.structured.answer import StructuredAnswer


class RankRequest:
    """A request, or the negative sequence of one (CFG): its tokens, pages and sampling state."""

    __slots__ = (
        "current_slot",
        "drafted",
        "embeds",
        "frames",
        "images",
        "initial_slot",
        "negative",
        "num_computed",
        "num_prompt",
        "pages",
        "pooler",
        "spec",
        "state",
        "state_slots",
        "structured",
        "token_ids",
        "uses_hidden",
    )

    def __init__(self, start: RequestStart, num_windows: int = 0) -> None:
        self.spec = spec = start.spec
        self.token_ids = list(start.token_ids)
        self.num_prompt = start.num_prompt_tokens
        self.num_computed = start.num_computed
        self.pages = list(start.pages)
        #: For each window group the frames of its pages; 0: the page has none that is needed.
        self.frames: list[list[int]] = [[] for _ in range(num_windows)]
        for one in start.frames:
            self.add_frames(one)
        #: See ``RequestStart.state_slots``: the index of the current one, and whether the last row
        #: had drafts, so that the next current one is that of the last accepted token.
        self.state_slots = start.state_slots
        self.current_slot, self.drafted = 0, False
        #: The slot that the next row reads; ``None``: the current one. -1: it begins with zeros.
        self.initial_slot: int | None = start.initial_state
        #: Its negative sequence, which continues with the same tokens.
        self.negative: RankRequest | None = None
        #: Whether hidden states of its rows are used, for prompt log-probabilities or an embedding.
        self.uses_hidden = spec.kind == "embed" or spec.params.prompt_logprobs is not None
        self.pooler = Pooler(spec.pooling or LAST_TOKEN) if spec.kind == "embed" else None
        #: Set where the model sees images.
        self.images: RequestImages | None = None
        self.embeds: Tensor | None = None
        if spec.prompt_embeds is not None:
            self.embeds = torch.from_numpy(spec.prompt_embeds)
        #: Not used by negative sequences.
        self.state = SamplerState(
            spec.params,
            spec.resolved,
            start.token_ids[: start.num_prompt_tokens] if self.embeds is None else (),
            start.token_ids[start.num_prompt_tokens :],
            start.mirostat_mu,
            start.forbidden,
        )

        #: The structured part of its answer, if it has one.
        self.structured: StructuredAnswer | None = None
        grammar = spec.resolved.grammar
        if grammar is not None:
            from sdk.structured.answer import StructuredAnswer  # with the first structure

            resolved, output = spec.resolved, start.token_ids[start.num_prompt_tokens :]
            reasoning = None
            if resolved.think_start_id is not None and resolved.think_end_id is not None:
                reasoning = resolved.think_start_id, resolved.think_end_id
            self.structured = StructuredAnswer(
                grammar,
                start.token_ids[: start.num_prompt_tokens],
                output,
                start.max_len - start.num_prompt_tokens,
                reasoning,
            )

    @property
    def places(self) -> tuple[list[int], ...]:
        """The entries of its row in each page table: its pages, then its frames by group."""
        return (self.pages, *self.frames)

    @property
    def num_places(self) -> tuple[int, ...]:
        """How many of each there are."""
        return tuple(map(len, self.places))

    def saves(self, num_drafts: int) -> list[int]:
        """The slots that the states of a row go to: after its last known token and each draft."""
        slots, current = self.state_slots, self.current_slot
        if not num_drafts:
            return [slots[current]]
        return [slots[(current + 1 + i) % len(slots)] for i in range(num_drafts + 1)]

    def ran(self, num_tokens: int, num_drafts: int) -> None:
        """A row was launched with so many tokens, drafts included."""
        self.num_computed += num_tokens - num_drafts
        if self.state_slots:
            self.initial_slot, self.drafted = None, num_drafts > 0

    def add_frames(self, given: Frames) -> bool:
        """Give pages frames in one group; whether they had others before."""
        own = self.frames[given.group]
        if rewrites := given.first < len(own):
            del own[given.first :]
        own += [0] * (given.first - len(own))
        own += given.frames
        return rewrites

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens: one, and one more for each accepted draft.

        ``num_computed`` does not include the drafts of a step yet, so accepted ones are added here.
        """
        self.state.append(token_ids)
        self.token_ids += token_ids
        self.num_computed += len(token_ids) - 1
        if self.drafted:
            self.current_slot = (self.current_slot + len(token_ids)) % len(self.state_slots)
            self.drafted = False
        if self.negative is not None:
            self.negative.token_ids += token_ids
