"""Hand-overs from another process, which may die in the middle of one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdk import LLM
from sdk.cluster.transfer import EnginePages, HandOverReceiver
from tests.cluster.transfer.pairs import CONNECTORS, LIMIT, PROMPT, USABLE, answer, check, facts
from tests.scripts import ROOT

#: Reads lines "<transfer id> <destination>"; computes the prompt in chunks and hands it over.
SENDER = """
import sys, time
from sdk import LLM
from sdk.cluster.transfer import EnginePages, HandOverSender
from tests.cluster.transfer.pairs import CONNECTORS, PREFILL, PROMPT

path, name, dies = sys.argv[1:]
connector, listener = CONNECTORS[name]()
listener.close()
options = dict(max_model_len=128, max_num_batched_tokens=16, max_num_seqs=4)
with LLM(path, **options) as llm, HandOverSender(EnginePages.of(llm), connector) as sender:
    print("ready", flush=True)
    for line in sys.stdin:
        transfer_id, destination = line.split()
        llm.reset_prefix_cache()
        [request_id] = llm.enqueue([PROMPT], PREFILL)
        outcome = sender.hand_over(transfer_id, destination, PROMPT, request_id=request_id)
        if dies == "yes":
            llm.step()
            llm.step()
            print("half", flush=True)
            time.sleep(600)
        llm.wait_for_completion()
        print(*outcome.result(60)[1:], flush=True)
"""


@contextmanager
def _sender(path: Path, connector: str, dies: str = "no") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, path, connector, dies],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _say(process: subprocess.Popen[str], *words: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(" ".join(words) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    "connector",
    [
        "shared memory",
        pytest.param("tcp", marks=pytest.mark.slow),
    ],
)
def test_another_process_computes_a_prompt_and_this_one_answers_it(
    tiny_path: Path, connector: str
) -> None:
    _, listener = CONNECTORS[connector]()
    with (
        LLM(tiny_path, max_model_len=128) as llm,
        HandOverReceiver(EnginePages.of(llm), listener) as receiver,
        _sender(tiny_path, connector) as process,
    ):
        alone = facts(answer(llm))
        for transfer_id in ("one", "two"):
            llm.reset_prefix_cache()
            assert _say(process, transfer_id, listener.address) == f"{USABLE} 0 None"
            assert receiver.result(transfer_id).result(LIMIT)[1:] == (USABLE, 0, None)
            output = answer(llm)
            assert output.num_cached_tokens == USABLE and facts(output) == alone
        check(llm)


@pytest.mark.parametrize("connector", [pytest.param(x, marks=pytest.mark.slow) for x in CONNECTORS])
def test_a_sender_that_is_killed_costs_the_rest_of_the_prompt(
    tiny_path: Path, connector: str
) -> None:
    _, listener = CONNECTORS[connector]()
    with (
        LLM(tiny_path, max_model_len=128) as llm,
        HandOverReceiver(EnginePages.of(llm), listener) as receiver,
        _sender(tiny_path, connector, "yes") as process,
    ):
        alone = facts(answer(llm))
        llm.reset_prefix_cache()
        keys = receiver._pages.kept.keys(PROMPT, None)
        assert _say(process, "one", listener.address) == "half"
        while not receiver._pages.kept.num_cached(keys):
            time.sleep(0.001)  # the timeout of the test ends this
        process.kill()
        result = receiver.result("one").result(LIMIT)
        assert 0 < result.num_tokens < USABLE
        assert "connection" in (result.problem or "")
        output = answer(llm)
        assert output.num_cached_tokens == result.num_tokens and facts(output) == alone
        check(llm)
