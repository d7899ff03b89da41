"""A scheduler and its fake runner, stepped together."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _loaded(name: str):
    """tests/ has no packages: a module is loaded by path, once, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_runner = _loaded("fake_runner")
fake_cuda = _loaded("fake_cuda")
fake_card = _loaded("fake_card")

from sdk.api.params import SamplingParams  # noqa: E402
from sdk.engine.job import Job  # noqa: E402
from sdk.engine.plan import SequenceSpec  # noqa: E402
from sdk.engine.scheduling.request import Request  # noqa: E402
from sdk.engine.scheduling.scheduler import Scheduler  # noqa: E402
from sdk.engine.scheduling.scheduler_config import SchedulerConfig  # noqa: E402


class Rig:
    """Steps a scheduler against a FakeRunner, checks every plan, and keeps the answers."""

    def __init__(self, **options) -> None:
        options = {"num_pages": 65, "page_size": 4, "max_model_len": 200, **options}
        options.setdefault("max_num_batched_tokens", 200)
        self.now = 0.0
        self.config = SchedulerConfig(**options)
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.pool = self.scheduler.pool
        self.runner = fake_runner.FakeRunner(
            self.config.page_size, self.config.num_pages, self._is_published
        )
        if self.config.has_groups:
            self.runner.groups = fake_runner.GroupMemory(self.config, self._is_attached)
        self.requests: dict[str, Request] = {}
        self.updates = []

    def _is_published(self, place: int) -> bool:
        tiered = self.scheduler.tiered_pool
        page = place if tiered is None else tiered._pages.get(place)
        return page is not None and self.pool.key(page) is not None

    def _is_attached(self, group: int, frame: int) -> bool:
        return self.scheduler.groups.frames[group]._pages[frame] > 0

    def vacate(self) -> None:
        """The ranks return the memory that moves to another kind."""
        if self.config.has_groups:
            vacated = self.scheduler.groups.take_vacated()
            self.runner.groups.vacate(vacated)
            self.runner.vacate(vacated.pages)

    def add(
        self,
        request_id: str,
        prompt,
        *,
        kind="generate",
        salt=None,
        priority=None,
        negative=None,
        **params,
    ):
        spec = SequenceSpec(request_id, SamplingParams(**{"max_tokens": 8, **params}), kind)
        request = Request(
            Job(
                spec,
                tuple(prompt),
                priority=priority,
                cache_salt=salt,
                arrival_time=self.now,
                negative_prompt_token_ids=negative,
            )
        )
        self.scheduler.queues.add(request)
        self.requests[request_id] = request
        return request

    def step(self, most_tokens=None):
        plan = self.scheduler.plan(most_tokens)
        counts = [row.num_scheduled_tokens for row in plan.rows]
        assert sum(counts) <= self.config.max_num_batched_tokens
        assert len(counts) <= self.config.max_num_seqs
        assert sorted(counts, key=lambda num: num > 1) == counts, "decodes come first"
        self.scheduler.check()
        updates = self.scheduler.commit(self.runner.execute(plan))
        self.scheduler.check()
        self.vacate()
        self.updates += updates
        return plan, updates

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.queues.num_running and not self.scheduler.queues.num_waiting:
                return
            self.step()
        raise AssertionError("requests starve")

    def assert_answers(self) -> None:
        """Every request has the tokens it would have alone."""
        for request in self.requests.values():
            prompt = request.token_ids[: request.num_prompt_tokens]
            output = request.output_token_ids
            guide = request.negative
            negative = None if guide is None else guide.token_ids[: guide.num_prompt_tokens]
            assert output == fake_runner.expected_tokens(prompt, len(output), negative), request


@pytest.fixture
def on_a_card():
    """Opens an engine whose steps are recorded and replayed as on a card."""
    return fake_card.on_a_card


@pytest.fixture
def rig():
    """Builds a Rig from SchedulerConfig fields."""
    return Rig
