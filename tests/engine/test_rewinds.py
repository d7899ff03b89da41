"""Answers that lose their last tokens, against a runner that notices every wrong page."""

from __future__ import annotations

import random

import pytest
from fake_runner import ScriptedDrafter, expected_tokens

from sdk.engine.scheduling.drafts import Drafts

#: Fields of SchedulerConfig. Prompts share pages, and there are too few for all requests.
POOLS = {
    "roomy": {},
    "few pages": {"num_pages": 20, "max_num_seqs": 4},
    "no prefix cache": {"num_pages": 20, "max_num_seqs": 4, "enable_prefix_caching": False},
    "swapped": {"num_pages": 20, "max_num_seqs": 4, "num_swap_pages": 30},
    "tiers": {"num_pages": 14, "max_num_seqs": 4, "kv_bits": (16, 8)},
    "short steps": {"num_pages": 20, "max_num_seqs": 4, "max_num_batched_tokens": 5},
}


class Rewinding:
    """Requests of a rig that lose tokens, and what they must answer in the end."""

    def __init__(self, rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.forbidden: dict[str, dict[int, tuple[int, ...]]] = {}

    def add(self, name: str, prompt, *, rewinds: bool = True, **params):
        request = self.rig.add(name, prompt, **params)
        self.forbidden[name] = {}
        for sequence in request.sequences if rewinds else ():
            sequence.num_certain = sequence.num_prompt_tokens
        return request

    def rewind(self, request, num_tokens: int) -> None:
        position = num_tokens - request.num_prompt_tokens
        known = self.forbidden[request.request_id]
        known = {at: ids for at, ids in known.items() if at <= position}
        known[position] = (*known.get(position, ()), request.token_ids[num_tokens])
        self.forbidden[request.request_id] = known
        self.rig.scheduler.rewind(request, num_tokens, known[position])
        self.rig.scheduler.check()

    def step(self, share: float) -> None:
        """A step, after which some answers lose tokens or have more certain ones."""
        alive = [one for one in self.rig.requests.values() if not one.finished]
        self.rig.step()
        for request in alive:
            ended = request.finish_reason in ("stop", "length")
            changed = ended or request.status.value == "running"
            if not changed or request.num_certain >= request.num_tokens:
                continue
            if self.random.random() < share:
                self.rewind(request, self.random.randrange(request.num_certain, request.num_tokens))
            elif not ended and self.random.random() < 0.5:
                more = self.random.randint(0, request.num_tokens - request.num_certain)
                for sequence in request.sequences:
                    sequence.num_certain += more

    def run(self, share: float) -> None:
        queues = self.rig.scheduler.queues
        for _ in range(400):
            self.step(share)
        for _ in range(2000):
            if not queues.num_running + queues.num_waiting:
                break
            self.rig.step()
        else:
            raise AssertionError("requests starve")
        self.rig.step()  # the ranks hear of the last that ended
        assert not self.rig.scheduler.prefixes.pending
        for name, request in self.rig.requests.items():
            prompt = request.token_ids[: request.num_prompt_tokens]
            output, negative = request.output_token_ids, request.negative
            others = negative and negative.token_ids[: negative.num_prompt_tokens]
            expected = expected_tokens(prompt, len(output), others, self.forbidden[name])
            assert output == expected, name
            assert len(output) == request.params.max_tokens


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("drafts", [0, 3], ids=["", "drafts"])
@pytest.mark.parametrize("pool", POOLS)
def test_every_answer_is_that_of_the_request_alone(rig, pool: str, drafts: int) -> None:
    rewinds = 0
    for seed in range(6):
        rewinding = Rewinding(rig(**POOLS[pool]), seed)
        scheduler = rewinding.rig.scheduler
        if drafts:
            scheduler.drafts = Drafts(ScriptedDrafter(), drafts)
        for index in range(6):  # pairs with one prompt, one of which publishes all its pages
            prompt = [*range(7), *[index // 2] * (index // 2)]
            more = {"guidance_scale": 1.5} if index == 3 and pool != "tiers" else {}
            rewinding.add(str(index), prompt, rewinds=index % 2 == 0, max_tokens=30, **more)
        rewinding.run(0.3)
        rewinds += scheduler.num_rewinds
        sampled = sum(len(one.output_token_ids) for one in rewinding.rig.requests.values())
        assert scheduler.committer.num_generation_tokens == sampled
    assert rewinds > 100


def test_a_request_goes_on_in_its_own_pages(rig) -> None:
    """Pages that may be written again are not published, so it need not start over."""
    rewinding = Rewinding(rig(), 0)
    request = rewinding.add("a", range(6), max_tokens=20)
    for _ in range(11):
        rewinding.rig.step()
    assert request.num_output_tokens == 11 and request.num_published == 1  # 6 certain tokens
    pages = list(request.pages)
    rewinding.rewind(request, 9)
    plan, _ = rewinding.rig.step()
    [start] = plan.started
    assert list(start.pages) == pages == request.pages and start.num_computed == 8
    assert start.forbidden == rewinding.forbidden["a"][3]
    assert [row.num_scheduled_tokens for row in plan.rows] == [1]
    rewinding.run(0)
    assert request.num_preemptions == 0


def test_a_request_that_ended_with_the_last_token_comes_back(rig) -> None:
    rewinding = Rewinding(rig(), 0)
    request = rewinding.add("a", range(6), max_tokens=5)
    for _ in range(5):
        rewinding.rig.step()
    assert request.finish_reason == "length" and not request.pages
    rewinding.rewind(request, 8)
    assert request.finish_reason is None
    rewinding.run(0)
    assert request.finish_reason == "length" and request.num_preemptions == 1


def test_a_request_that_is_aborted_after_a_rewind_is_forgotten(rig) -> None:
    rewinding = Rewinding(rig(), 0)
    request = rewinding.add("a", range(6))
    for _ in range(4):
        rewinding.rig.step()
    rewinding.rewind(request, 7)
    rewinding.rig.scheduler.queues.abort("a")
    rewinding.add("b", range(3))
    plan, _ = rewinding.rig.step()
    assert [start.request_id for start in plan.started] == ["b"]
    assert list(rewinding.rig.runner.requests) == ["b"]
