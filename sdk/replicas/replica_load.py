"""What the router knows about one replica, and what it expects of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from sdk.replicas.report import ReplicaReport

#: Seconds until an adapter is loaded that is in no slot.
_ADAPTER_SECONDS = 0.05
#: What the work for a request counts that delays others, next to a second of its own waiting:
#: computing its prompt, and each decode step of its answer. With 0, a prompt is computed on an idle
#: replica rather than a moment later where it is cached, and answers gather where prefixes are.
_PROMPT_WEIGHT = 0.2
_ANSWER_WEIGHT = 0.1


class StepSeconds(NamedTuple):
    """Measured seconds: per token of a prompt, per key that it reads, of a step with one decoding
    request, and per further one. The defaults count until a replica has measured some."""

    token: float = 1e-3
    pair: float = 0.0
    one: float = 1e-2
    row: float = 1e-3

    def decode(self, rows: int) -> float:
        """A step in which so many requests decode; as long as with one if there is none."""
        return self.one + self.row * max(rows - 1, 0)


@dataclass(slots=True)
class Sent:
    """A request that was sent to a replica. ``tokens`` of its prompt are not cached there; they
    read ``pairs`` keys. ``promised``: the pages that it will publish."""

    request_id: str
    number: int  # among those sent to this replica
    tenant: str | None
    adapter: str | None
    tokens: int
    pairs: float
    answer: float
    pages: int
    promised: list[bytes]


class ReplicaLoad:
    """The last report of a replica and the requests sent to it, in seconds and tokens."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.closing = False
        self.report: ReplicaReport | None = None
        self.seconds = StepSeconds()
        self.num_sent = 0
        self.unfinished: dict[str, Sent] = {}
        self._reported_at = 0.0
        #: Sent, and not in the last report yet; their sums.
        self._unseen: deque[Sent] = deque()
        self._tokens, self._pairs, self._answers, self._pages = 0, 0.0, 0.0, 0

    def sent(self, one: Sent) -> None:
        """A request was sent."""
        self.num_sent += 1
        self.unfinished[one.request_id] = one
        self._unseen.append(one)
        self._add(one, 1)

    def _add(self, one: Sent, sign: int) -> None:
        self._tokens += sign * one.tokens
        self._pairs += sign * one.pairs
        self._answers += sign * one.answer
        self._pages += sign * one.pages

    def reported(self, report: ReplicaReport, now: float) -> None:
        """A report has come. It contains the first ``report.received`` requests."""
        self.report, self._reported_at = report, now
        while self._unseen and self._unseen[0].number < report.received:
            self._add(self._unseen.popleft(), -1)
        if report.seconds_per_token > 0 and report.decode_seconds > 0:
            self.seconds = StepSeconds(
                report.seconds_per_token,
                report.seconds_per_pair,
                report.decode_seconds,
                report.decode_row_seconds,
            )

    @property
    def measured(self) -> bool:
        """Whether ``seconds`` were measured."""
        report = self.report
        return report is not None and report.seconds_per_token > 0 and report.decode_seconds > 0

    def score(
        self, tokens: int, pairs: float, now: float, tenant: str | None, adapter: str | None
    ) -> float:
        """Expected seconds to the first token of a request with so much to compute, and what its
        work counts. ``now``: a time of the router's clock.
        """
        report, seconds = self.report, self.seconds
        ahead, ahead_pairs = self._tokens, self._pairs
        count, answers, answer = len(self._unseen), self._answers, 0.0
        decoding, slots, step_tokens = 0, 0, 0
        if report is not None:
            decoding, slots, step_tokens = (
                report.num_decoding,
                report.max_num_seqs,
                report.step_tokens,
            )
            ahead += report.prompt_tokens
            ahead_pairs += report.prompt_pairs
            count += report.num_running + report.num_waiting
            answers += report.output_tokens
            answer = report.answer_tokens
            if report.tenants and ahead:
                share = self._ahead_of(report, tenant, tokens) / ahead
                ahead, ahead_pairs = round(ahead * share), ahead_pairs * share
        step = seconds.decode(decoding)
        steps = 1.0
        if step_tokens:
            steps += (ahead + tokens) // max(step_tokens - decoding, 1)
        work = seconds.token * ahead + seconds.pair * ahead_pairs
        if ahead and report is not None and report.prompt_tokens:
            # a replica that does not report in time gets later and later
            work = abs(work - (now - self._reported_at))
        own = seconds.token * tokens + seconds.pair * pairs
        first = work + own + steps * step
        if decoding:
            first += 0.5 * step  # of the one that runs
        if count:
            first += self._until_free(tokens, count, slots, answers)
        if adapter is not None and not self._has_adapter(adapter):
            first += _ADAPTER_SECONDS
        return first + _PROMPT_WEIGHT * own + _ANSWER_WEIGHT * answer * seconds.decode(count + 1)

    def _ahead_of(self, report: ReplicaReport, tenant: str | None, tokens: int) -> float:
        """Prompt tokens that a fair policy runs before a new request of ``tenant``: those of its
        own requests, and of each other tenant as much as its weight allows until then."""
        work = {one.tenant: one for one in report.tenants}
        own = work.get(tenant)
        mine, weight = (own.tokens, own.weight) if own else (0, 1.0)
        others = dict.fromkeys(work, 0.0) | {one.tenant: float(one.tokens) for one in work.values()}
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

    def _until_free(self, tokens: int, count: int, slots: int, answers: float) -> float:
        """Seconds until a slot and pages for ``tokens`` are free. The ``count`` requests before are
        taken to end one after another, evenly until twice the mean of what is left of them."""
        report = self.report
        if report is None:
            return 0.0
        ends = max(count + 1 - slots, 0)
        lacking = self._pages + -(-tokens // report.page_size) - report.free_pages
        if lacking > 0:
            used = max(report.total_pages - report.free_pages + self._pages, 1)
            ends = max(ends, -(-lacking * count // used))
        if not ends:
            return 0.0
        return 2 * ends / count * answers / count * self.seconds.decode(min(count, slots))

    def _has_adapter(self, adapter: str) -> bool:
        report = self.report
        if report is not None and adapter in report.adapters:
            return True
        return any(one.adapter == adapter for one in self.unfinished.values())
