"""What the router knows about one replica, and what it expects of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import NamedTuple

from sdk.cluster.replicas.report import FIRST_ANSWER, ReplicaReport

#: Seconds until an adapter is loaded that is in no slot.
_ADAPTER_SECONDS = 0.05
#: What the work for a request counts, which delays others, next to a second of its own waiting: the
#: time of its prompt for itself and each request that decodes meanwhile; and for each token of its
#: answer the step, with what it adds to the steps of the others. With 0, a prompt is computed on an
#: idle replica rather than a moment later where it is cached, and answers gather where prefixes
#: are. Chosen by simulations of 2, 8 and 100 replicas: twice as much for answers makes the median
#: time between tokens 5 to 25 % shorter, and the 90th percentile of the time to the first token
#: 27 % longer.
_PROMPT_WEIGHT = 0.1
_ANSWER_WEIGHT = 0.3
#: The share of a report in the averages over all replicas.
_RATE = 0.05


class StepSeconds(NamedTuple):
    """Seconds: per token of a prompt, per key that it reads, of a step with one decoding request,
    and per further one. The defaults count until a replica has measured some."""

    token: float = 1e-3
    pair: float = 0.0
    one: float = 1e-2
    row: float = 1e-3


class Routed(NamedTuple):
    """A request as the router sees it. ``adapter`` is the key of its adapter's files
    (``Request.adapter``), ``arrival`` a time of the scheduler's clock (no policy looks at it)."""

    request_id: str
    token_ids: Sequence[int]
    cache_salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    priority: int = 0
    max_tokens: int | None = None
    arrival: float | None = None


@dataclass(slots=True)
class Expected:
    """What counts for all replicas: the length of an answer, and the seconds of those that have
    measured none. Averages of what replicas report, so that a new one looks like the others."""

    seconds: StepSeconds = field(default_factory=StepSeconds)
    answer: float = FIRST_ANSWER
    _prompts_known: bool = False
    _decoding_known: bool = False
    _answer_known: bool = False

    def learn(self, measured: StepSeconds, answer: float) -> None:
        """A replica reports these; 0: it has measured none."""
        token, pair, one, row = self.seconds
        if measured.token:
            share = _RATE if self._prompts_known else 1.0
            token += share * (measured.token - token)
            pair += share * (measured.pair - pair)
            self._prompts_known = True
        if measured.one:
            share = _RATE if self._decoding_known else 1.0
            one += share * (measured.one - one)
            row += share * (measured.row - row)
            self._decoding_known = True
        self.seconds = StepSeconds(token, pair, one, row)
        if answer:
            self.answer += (_RATE if self._answer_known else 1.0) * (answer - self.answer)
            self._answer_known = True

    def answer_of(self, request: Routed) -> float:
        """Tokens of the answer of a request."""
        most = request.max_tokens
        return self.answer if most is None or most > self.answer else most


#: For the order of replicas: a request without tokens.
NOTHING = Routed("", ())


@dataclass(slots=True)
class Sent:
    """A request for a replica. Of the ``length`` tokens of its prompt, ``tokens`` are not cached
    there. ``promised``: the pages that it will publish."""

    request_id: str
    tenant: str | None
    priority: int
    adapter: str | None
    length: int
    tokens: int
    answer: float
    page_size: int
    promised: list[bytes]
    #: Among those sent to this replica; -1: it is not sent yet.
    number: int = -1

    @property
    def pairs(self) -> float:
        """The keys that the tokens which are not cached read, summed."""
        return self.tokens * (self.length - self.tokens / 2)

    @property
    def pages(self) -> int:
        """The pages that it takes from those that are free."""
        return -(-(self.tokens + int(self.answer)) // self.page_size)


class ReplicaLoad:
    """The last report of a replica and the requests sent to it, in seconds and tokens."""

    def __init__(self, index: int, expected: Expected) -> None:
        self.index = index
        self.closing = False
        self.report: ReplicaReport | None = None
        #: What it has measured; 0: nothing yet.
        self.measured = StepSeconds(0.0, 0.0, 0.0, 0.0)
        self._expected = expected
        self.num_sent = 0
        self.unfinished: dict[str, Sent] = {}
        self._adapters: Counter[str] = Counter()  # of unfinished requests
        self._reported_at = 0.0
        #: Chosen for this replica, and not sent yet.
        self._later: dict[str, Sent] = {}
        #: Sent, and not in the last report yet.
        self._unseen: deque[Sent] = deque()
        #: Sums: of the prompts of ``_unseen``, and of the answers and pages of both.
        self._tokens, self._pairs, self._answers, self._pages = 0, 0.0, 0.0, 0
        self._refresh()

    def chosen(self, one: Sent) -> None:
        """A request will be sent. From now on its answer counts: so many that are chosen before the
        first one is sent do not all get the same replica."""
        self.unfinished[one.request_id] = one
        if one.adapter is not None:
            self._adapters[one.adapter] += 1
        self._later[one.request_id] = one
        self._add_answer(one, 1)
        self._refresh()

    def sent(self, request_id: str, *, handed_over: bool = False) -> None:
        """A request that was chosen is sent. From now on its prompt counts too: what is left of it
        after its full pages if these were handed over. No effect if it was sent before."""
        one = self._later.pop(request_id, None)
        if one is None:
            return
        if handed_over:
            self._add_answer(one, -1)
            one.tokens = min(one.tokens, (one.length - 1) % one.page_size + 1)
            self._add_answer(one, 1)
        one.number = self.num_sent
        self.num_sent += 1
        self._unseen.append(one)
        self._add_prompt(one, 1)
        self._refresh()

    def ended(self, request_id: str) -> Sent:
        """A request has ended. If it was sent, its work counts until the replica reports so."""
        one = self.unfinished.pop(request_id)
        if one.adapter is not None:
            self._adapters[one.adapter] -= 1
        if self._later.pop(request_id, None) is not None:
            self._add_answer(one, -1)
            self._refresh()
        return one

    def _add_prompt(self, one: Sent, sign: int) -> None:
        self._tokens += sign * one.tokens
        self._pairs += sign * one.pairs

    def _add_answer(self, one: Sent, sign: int) -> None:
        self._answers += sign * one.answer
        self._pages += sign * one.pages

    def reported(self, report: ReplicaReport, now: float) -> None:
        """A report has come. It contains the first ``report.received`` requests."""
        self.report, self._reported_at = report, now
        while self._unseen and self._unseen[0].number < report.received:
            sent = self._unseen.popleft()
            self._add_prompt(sent, -1)
            self._add_answer(sent, -1)
        token, pair, one, row = self.measured
        if report.seconds_per_token > 0:
            token, pair = report.seconds_per_token, report.seconds_per_pair
        if report.decode_seconds > 0:
            one, row = report.decode_seconds, report.decode_row_seconds
        self.measured = StepSeconds(token, pair, one, row)
        self._refresh()

    def _seconds(self) -> StepSeconds:
        """Its own, and what is expected for those that it has not measured: a replica that only
        computes prompts never measures a step that decodes."""
        own, expected = self.measured, self._expected.seconds
        if own.token and own.one:
            return own
        prompts, decoding = own if own.token else expected, own if own.one else expected
        return StepSeconds(prompts.token, prompts.pair, decoding.one, decoding.row)

    def _refresh(self) -> None:
        """Add what is in the report and what is not."""
        report = self.report
        self._ahead, self._ahead_pairs = self._tokens, self._pairs
        self._count, self._output = len(self._unseen) + len(self._later), self._answers
        self._decoding, self._room, self._slots, self._overdue = 0, maxsize, maxsize, False
        if report is not None:
            self._decoding = report.num_decoding
            self._ahead += report.prompt_tokens
            self._ahead_pairs += report.prompt_pairs
            self._count += report.num_running + report.num_waiting
            self._output += report.output_tokens
            self._room = max(report.step_tokens - report.num_decoding, 1)
            self._slots = report.max_num_seqs
            self._overdue = report.prompt_tokens > 0

    def score(self, request: Routed, tokens: int, pairs: float, now: float) -> float:
        """Expected seconds to the first token of a request that has this much to compute here, and
        what its work counts. ``now``: a time of the router's clock.
        """
        report, ahead = self.report, self._ahead
        token, pair, one, row = seconds = self._seconds()
        work = token * ahead + pair * self._ahead_pairs
        if report is not None:
            if ahead and (report.tenants or report.priorities):
                if report.tenants:
                    share = self._fair_ahead(report, request.tenant, tokens) / ahead
                else:
                    share = self._urgent_ahead(report, request.priority) / ahead
                ahead, work = round(ahead * share), work * share
            if self._overdue:  # one that does not report in time gets later and later
                work = abs(work - (now - self._reported_at))
            if self._count >= self._slots or -(-tokens // report.page_size) > (
                report.free_pages - self._pages
            ):
                work += self._until_free(report, tokens, seconds)
        own = token * tokens + pair * pairs
        steps: float = 1 + (ahead + tokens) // self._room
        step = one
        if self._decoding:
            step += row * (self._decoding - 1)
            steps += 0.5  # of the step that runs
        answer = self._expected.answer_of(request) * (one + 2 * row * self._count)
        if request.adapter is not None and not self._has_adapter(request.adapter):
            work += _ADAPTER_SECONDS
        return (
            work
            + own
            + _PROMPT_WEIGHT * own * (1 + self._decoding)
            + steps * step
            + _ANSWER_WEIGHT * answer
        )

    def _urgent_ahead(self, report: ReplicaReport, priority: int) -> int:
        """Prompt tokens that run before a new request of ``priority``: a smaller one is first."""
        ahead = sum(tokens for level, tokens in report.priorities if level <= priority)
        return ahead + sum(sent.tokens for sent in self._unseen if sent.priority <= priority)

    def _fair_ahead(self, report: ReplicaReport, tenant: str | None, tokens: int) -> float:
        """Prompt tokens that a fair policy runs before a new request of ``tenant``: those of its
        own requests, and of each other tenant as much as its weight allows until then."""
        work = {one.tenant: one for one in report.tenants}
        own = work.get(tenant)
        mine, weight = (own.tokens, own.weight) if own else (0, 1.0)
        others = {one.tenant: float(one.tokens) for one in work.values()}
        for sent in self._unseen:
            if sent.tenant == tenant:
                mine += sent.tokens
            else:
                others[sent.tenant] = others.get(sent.tenant, 0.0) + sent.tokens
        others.pop(tenant, None)
        ahead = float(mine)
        for name, left in others.items():
            known = work.get(name)
            ahead += min(left, (mine + tokens) * (known.weight if known else 1.0) / weight)
        return ahead

    def _until_free(self, report: ReplicaReport, tokens: int, seconds: StepSeconds) -> float:
        """Seconds until a slot and pages for ``tokens`` are free. The requests before are taken to
        end one after another, evenly until twice the mean of what is left of them."""
        count = max(self._count, 1)
        ends = max(self._count + 1 - self._slots, 0)
        lacking = self._pages + -(-tokens // report.page_size) - report.free_pages
        if lacking > 0:
            used = max(report.total_pages - report.free_pages + self._pages, 1)
            ends = max(ends, -(-lacking * count // used))
        step = seconds.one + seconds.row * (min(count, self._slots) - 1)
        return 2 * ends / count * self._output / count * step

    def _has_adapter(self, adapter: str) -> bool:
        """Whether an adapter is loaded, or an earlier request needs it too."""
        loaded = self.report is not None and adapter in self.report.adapters
        return loaded or self._adapters[adapter] > 0
