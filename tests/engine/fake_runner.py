"""A rank without a model: its KV is a record of what was written where, its tokens are hashes of
it.

The KV value of a position is a hash of all KV values before it, as read back through the page
table, and of the token; the next token is a hash of the last value. So a wrong page, a stale one,
one that was never written, a missed token or a wrong position changes every token that follows, and
``expected_tokens`` says what a request must produce whatever happens around it.
"""

from __future__ import annotations

from hashlib import blake2b

from sdk.engine.plan import Sampled, StepPlan, StepResult

VOCAB = 1000


def _value(before: list[bytes], token: int) -> bytes:
    digest = blake2b(digest_size=8)
    for value in before:
        digest.update(value)
    digest.update(token.to_bytes(4, "little"))
    return digest.digest()


def _token(value: bytes) -> int:
    return int.from_bytes(value, "little") % VOCAB


def expected_tokens(prompt: list[int], num: int) -> list[int]:
    """The answer of a request that runs alone, in one piece, in pages nobody touched before."""
    values: list[bytes] = []
    tokens = list(prompt)
    for _ in range(num):
        for token in tokens[len(values) :]:
            values.append(_value(values, token))
        tokens.append(_token(values[-1]))
    return tokens[len(prompt) :]


class FakeRunner:
    """An executor. It knows only what the plans told it, and complains about plans that lie."""

    def __init__(self, page_size: int, num_pages: int, published=None) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.published = published or (lambda page: False)  # may this page still be written?
        self.slots: dict[tuple[int, int], bytes] = {}
        self.requests: dict[str, dict] = {}
        self.plans: list[StepPlan] = []
        self.errors: dict[str, str] = {}  # to be returned with the next step
        self.failure: BaseException | None = None  # to be raised by the next step
        self.started = self.closed = 0

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        for request_id in plan.dropped:
            self.requests.pop(request_id, None)
        for start in plan.started:
            assert start.request_id not in self.requests, "started twice"
            assert start.num_computed < len(start.token_ids), "nothing to run"
            self.requests[start.request_id] = {
                "tokens": list(start.token_ids),
                "computed": start.num_computed,
                "pages": list(start.pages),
                "start": start,
            }
        for request_id, pages in plan.new_pages:
            self.requests[request_id]["pages"] += pages
        for request_id, tokens in plan.appended:
            self.requests[request_id]["tokens"] += tokens
        sampled, scored, hidden = {}, {}, {}
        for request_id, num in plan.num_tokens:
            assert num > 0, "a step of no tokens"
            self._run(request_id, num, sampled, scored, hidden)
        errors, self.errors = self.errors, {}
        return StepResult(plan.step_id, sampled, scored, hidden, errors)

    def _slot(self, pages: list[int], position: int) -> tuple[int, int]:
        page = pages[position // self.page_size]
        assert 0 < page < self.num_pages, "no such page"
        return page, position % self.page_size

    def _run(self, request_id, num, sampled, scored, hidden) -> None:
        state = self.requests[request_id]
        pages, tokens, begin = state["pages"], state["tokens"], state["computed"]
        end = begin + num
        assert end <= len(tokens), "more tokens than are known"
        values = [self.slots.get(self._slot(pages, i), b"unwritten") for i in range(begin)]
        for position in range(begin, end):
            slot = self._slot(pages, position)
            assert not self.published(slot[0]), "a page others may read is written"
            values.append(_value(values, tokens[position]))
            self.slots[slot] = values[-1]
        state["computed"] = end
        start = state["start"]
        if start.params.prompt_logprobs is not None and begin < start.num_prompt_tokens:
            last = min(end, start.num_prompt_tokens - 1)
            scored[request_id] = tuple(
                Sampled(tokens[i + 1], -float(i + 1), 1) for i in range(begin, last)
            )
        if end < len(tokens):
            return
        if start.kind == "embed":
            hidden[request_id] = [float(_token(value)) for value in values]
        else:
            wanted = start.params.logprobs is not None
            sampled[request_id] = Sampled(_token(values[-1]), -0.5 if wanted else None, 1)
