"""How many tokens conversations compute twice, here and with llama-cpp-python.

    python tests/engine/hit_rates.py MODEL.gguf [--peer-python PYTHON]

Each row is one pattern of requests, one after another, with a text of its own. Counted are tokens
of prompts that ran through the model although they had run behind the same beginning before. The
last token of an answer has not. llama-cpp-python keeps what its high-level interface does: the
sequence that it computed last, and a ``LlamaRAMCache`` of whole sequences (``--peer-python``: an
interpreter that has it). Times are not measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONTEXT, ANSWER = 1024, 24
#: Runs a prompt; returns its answer of ``ANSWER`` tokens and how many tokens of the prompt ran.
Ask = Callable[[Sequence[int]], tuple[list[int], int]]


def text(length: int, seed: int) -> list[int]:
    """Tokens that differ for each ``seed``."""
    return [3 + (seed * 7919 + 31 * i + i * i) % 900 for i in range(length)]


class Counted:
    """Asks, and counts the tokens of prompts: ``new`` ones, and those that ran ``twice``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.new = self.twice = 0
        self._known: set[tuple[int, ...]] = set()

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """The prompt and its answer."""
        answer, computed = self._ask(prompt)
        assert len(answer) == ANSWER
        whole = (*prompt, *answer)
        new = sum(whole[:end] not in self._known for end in range(1, len(prompt) + 1))
        self.new += new
        self.twice += computed - new
        self._known |= {whole[:end] for end in range(1, len(whole))}
        return list(whole)


def chat(ask: Counted) -> None:
    conversation = text(96, 1)
    for turn in range(6):
        conversation = [*ask(conversation), *text(20, 100 + turn)]


def regenerate(ask: Counted) -> None:
    prompt = [*ask(text(96, 2)), *text(20, 200)]
    for _ in range(4):
        ask(prompt)


def edit(ask: Counted) -> None:
    history = ask(text(96, 3))
    for number in range(4):
        ask([*history, *text(20, 300 + number)])


def users(ask: Counted) -> None:
    system = text(160, 4)
    for number in range(6):
        ask([*system, *text(20, 400 + number)])


def agents(ask: Counted) -> None:
    branches = [ask(text(128, 5))] * 3
    for step in range(2):
        branches = [
            ask([*branch, *text(16, 500 + 10 * step + number)])
            for number, branch in enumerate(branches)
        ]


def short(ask: Counted) -> None:
    for _ in range(2):
        for number in range(6):
            ask(text(10, 600 + number))


PATTERNS: dict[str, Callable[[Counted], None]] = {
    "a chat of six turns": chat,
    "an answer generated four times": regenerate,
    "four versions of the last message": edit,
    "six users with one system prompt, one by one": users,
    "three agents that branch, two steps each": agents,
    "six short prompts, each of them twice": short,
}


def ours(model: str) -> Ask:
    from sdk import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    llm = LLM(model, max_model_len=CONTEXT, max_num_seqs=4, kv_cache_memory_bytes=2**30)

    def ask(prompt: Sequence[int]) -> tuple[list[int], int]:
        [output] = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        computed = len(prompt) - (output.num_cached_tokens or 0)
        return list(output.outputs[0].token_ids), computed

    return ask


def llama_cpp_python(model: str) -> Ask:
    from llama_cpp import Llama, LlamaRAMCache

    llm: Any = Llama(
        model, n_ctx=CONTEXT, n_batch=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    llm.set_cache(LlamaRAMCache(2**30))
    ran, evaluate = [0], llm.eval

    def counting(tokens: Sequence[int]) -> None:
        ran[0] += len(tokens)
        evaluate(tokens)

    llm.eval = counting

    def ask(prompt: Sequence[int]) -> tuple[list[int], int]:
        ran[0], tokens = 0, list(prompt)
        try:  # as create_completion does
            state = llm.cache[tokens]
            own = Llama.longest_token_prefix(llm._input_ids.tolist(), tokens)
            if Llama.longest_token_prefix(state.input_ids.tolist(), tokens) > own:
                llm.load_state(state)
        except KeyError:
            pass
        answer: list[int] = []
        for token in llm.generate(list(tokens), temp=0.0):
            answer.append(token)
            if len(answer) == ANSWER:
                break
        llm.cache[tokens + answer] = llm.save_state()
        return answer, ran[0] - (ANSWER - 1)

    return ask


ENGINES = {"embedlm": ours, "llama-cpp-python": llama_cpp_python}


def measured(engine: str, model: str) -> dict[str, tuple[int, int]]:
    """By pattern the new tokens of prompts, and those computed twice."""
    ask, found = ENGINES[engine](model), {}
    for name, pattern in PATTERNS.items():
        counted = Counted(ask)
        pattern(counted)
        found[name] = (counted.new, counted.twice)
        print(engine, name, found[name], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--peer-python")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedlm")
    arguments = parser.parse_args()
    if arguments.engine != "embedlm":
        print(json.dumps(measured(arguments.engine, arguments.model)))
        return
    sys.path.insert(0, str(ROOT))
    columns = {"embedlm": measured("embedlm", arguments.model)}
    if arguments.peer_python:
        command = [arguments.peer_python, __file__, arguments.model]
        command += ["--engine", "llama-cpp-python"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        columns["llama-cpp-python"] = json.loads(done.stdout)
    print(f"| {Path(arguments.model).name} | new | {' | '.join(columns)} |")
    print(f"|---|---:|{'---:|' * len(columns)}")
    for name in PATTERNS:
        twice = " | ".join(str(found[name][1]) for found in columns.values())
        print(f"| {name} | {columns['embedlm'][name][0]} | {twice} |")


if __name__ == "__main__":
    main()
