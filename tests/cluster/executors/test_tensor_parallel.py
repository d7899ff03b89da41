"""The real runner on a tiny model: two ranks answer as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import config_of, decode

from sdk.cluster.executors.process import ProcessExecutor
from sdk.engine.rank.runner import ModelRunner
from sdk.executors.local import LocalExecutor


@pytest.mark.slow
def test_drafts_are_accepted_on_all_ranks(golden: Path) -> None:
    """Right ones, wrong ones and a right one before a wrong one; ranks agree on what was kept."""
    config = config_of(golden / "arch-llama3/hf")
    plain = [result.tokens[1] for result in decode(LocalExecutor(ModelRunner, config), 9)]
    answer = [token for tokens in plain for token in tokens]
    drafts = {
        2: (answer[2], answer[3]),  # both are right: the step gives three tokens
        3: (answer[5], (answer[6] + 1) % 400),  # the first is right
        4: ((answer[7] + 1) % 400,),
    }
    for executor in (LocalExecutor(ModelRunner, config), ProcessExecutor(ModelRunner, config, 2)):
        found = [result.tokens[1] for result in decode(executor, 6, drafts)]
        assert [len(tokens) for tokens in found] == [1, 1, 3, 2, 1, 1]
        assert [token for tokens in found for token in tokens] == answer


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("checkpoint", ["arch-llama3/hf", "gguf-Q4_0/model.gguf"])
def test_two_ranks_choose_the_tokens_of_one(golden: Path, checkpoint: str) -> None:
    config = config_of(golden / checkpoint)
    one = decode(LocalExecutor(ModelRunner, config), 6)
    two = decode(ProcessExecutor(ModelRunner, config, 2), 6)
    for alone, parallel in zip(one, two, strict=True):
        assert alone.tokens == parallel.tokens and alone.tokens[1]
        assert alone.details.keys() == parallel.details.keys()
        for name, (expected,) in alone.details.items():
            (found,) = parallel.details[name]
            assert found.token_id == expected.token_id
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert alone.prompt_logprobs.keys() == parallel.prompt_logprobs.keys()
        for name, scores in alone.prompt_logprobs.items():
            expected = [score.logprob for score in scores]
            assert [s.logprob for s in parallel.prompt_logprobs[name]] == pytest.approx(
                expected, abs=1e-4
            )
