"""The size of steps that must end in time, on machines whose costs are known."""

from __future__ import annotations

import random

import pytest

from sdk.engine.scheduling.step_costs import StepCosts

PROMPT = 2000


class Machine:
    """Runs a prompt in frames of ``budget`` ms; a step takes ``fixed + each * tokens`` ms."""

    def __init__(self, fixed: float, each: float, noise: float = 0.0) -> None:
        self.fixed, self.each, self.noise = fixed, each, noise
        self.costs = StepCosts()
        self.random = random.Random(5)
        self.sizes: list[int] = []
        self.overshoots: list[float] = []

    def step(self, tokens: int) -> float:
        took = (self.fixed + self.each * tokens) * self.random.lognormvariate(0, self.noise)
        self.costs.learn(tokens, took / 1000)
        self.sizes.append(tokens)
        return took

    def run(self, budget: float, prompt: int = PROMPT) -> None:
        left = prompt
        while left:
            tokens = min(self.costs.first_tokens(budget / 1000), left, 256)
            spent = 0.0
            while tokens:
                spent += self.step(tokens)
                left -= tokens
                tokens = min(self.costs.most_tokens((budget - spent) / 1000), left, 256)
            self.overshoots.append(spent - budget)

    def overshoot(self, share: float) -> float:
        return sorted(self.overshoots)[int(share * len(self.overshoots))]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("cost", [(3.4, 0.34), (5.0, 0.05), (1.0, 0.5), (0.3, 0.02)], ids=str)
def test_steps_end_in_time_and_fill_it(cost: tuple[float, float], noise: float) -> None:
    fixed, each = cost
    machine = Machine(fixed, each, noise)
    machine.run(budget=8.0)
    assert machine.overshoot(0.95) <= 8 * (0.1 + 2 * noise)
    ideal = PROMPT / ((8.0 - fixed) / each)  # one step that fills each frame
    assert len(machine.overshoots) <= 1.4 * ideal + 8


@pytest.mark.parametrize("cost", [(10.0, 1.0), (50.0, 5.0), (200.0, 2.0)], ids=str)
def test_where_no_step_ends_in_time_a_prompt_gets_on_all_the_same(
    cost: tuple[float, float],
) -> None:
    fixed, each = cost
    machine = Machine(fixed, each)
    machine.run(budget=8.0)
    assert machine.overshoot(0.8) <= 1.6 * fixed  # of which no smaller step would spare much
    assert sum(machine.sizes) / len(machine.sizes) >= max(1.0, 0.15 * fixed / each)


def test_the_first_step_is_small_and_none_is_much_larger_than_those_before() -> None:
    costs = StepCosts()
    assert costs.first_tokens(60.0) == costs.most_tokens(60.0) == 4
    machine = Machine(0.001, 0.001)
    machine.run(budget=1000.0)
    assert machine.sizes[:4] == [4, 8, 16, 32]


def test_a_machine_that_becomes_slower_is_followed() -> None:
    machine = Machine(2.0, 0.2)
    machine.run(budget=8.0)
    machine.fixed, machine.each = 4.0, 0.5
    machine.overshoots.clear()
    machine.run(budget=8.0)
    assert max(machine.overshoots) > 3  # it was not to be known
    assert sum(over > 0.5 for over in machine.overshoots) < 15
