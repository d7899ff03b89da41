"""Programs of hosts, for tests: ``python remote_programs.py NAME JSON``. They print JSON lines."""

from __future__ import annotations

import json
import sys
import time

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [7, 300, 12]]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def answers(llm) -> list[list[int]]:
    from sdk import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]


def engine(model: str, remote: dict | None = None, size: int = 2, **options) -> None:
    """Rank 0 of a real engine."""
    from sdk import LLM, RemoteWorkers

    options = {"tensor_parallel_size": size, "num_threads": 1, "max_model_len": 64, **options}
    if remote is not None:
        options["remote_workers"] = RemoteWorkers(**remote)
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        say(tokens=answers(llm))


def steps(listen: str, seconds: float = 60.0) -> None:
    """Rank 0 of the fake runner: steps until one fails, or for some seconds."""
    import rank_runner
    import remote_fakes

    from sdk.api.errors import EngineDeadError
    from sdk.api.remote_workers import RemoteWorkers
    from sdk.cluster.executors.process import ProcessExecutor
    from sdk.cluster.executors.remote.ranks import RemoteRanks
    from sdk.engine.plan import StepPlan

    workers = RemoteWorkers(listen=listen, token=remote_fakes.TOKEN, timeout=60)
    executor = ProcessExecutor(
        rank_runner.FakeRunner,
        rank_runner.FakeConfig(),
        2,
        workers=lambda: RemoteRanks(workers, remote_fakes.fake_codec()),
    )
    executor.start()
    number = 0
    began = last = time.monotonic()
    try:
        while time.monotonic() - began < seconds:
            number += 1
            executor.launch(StepPlan(number))
            executor.result()
            last = time.monotonic()
            if number == 10:
                say(running=True)
            time.sleep(0.01)
        say(steps=number)
    except EngineDeadError as error:
        say(error=str(error), seconds=time.monotonic() - last)
    executor.close()


def launched(model: str, token: str, **options) -> None:
    """The same program on all hosts."""
    from sdk import launched_llm

    llm = launched_llm(
        model,
        token=token,
        num_threads=1,
        max_model_len=64,
        skip_tokenizer_init=True,
        **options,
    )
    if llm is None:
        say(served=True)
        return
    with llm:
        say(tokens=answers(llm))


if __name__ == "__main__":
    programs = {"engine": engine, "steps": steps, "launched": launched}
    programs[sys.argv[1]](**json.loads(sys.argv[2]))
