"""Eight chains of a framework at the same time on one model in one process: tokens per second.

``python tests/interop/chains.py embedlm MODEL`` and ``... llama-cpp MODEL`` print a line of JSON
each; ``--framework llama-index`` takes LlamaIndex instead of LangChain. The environment needs
llama-cpp-python and langchain-core with langchain-community, or llama-index-core with
llama-index-llms-openai-like and llama-index-llms-llama-cpp. Run both in turn, several times, on a
machine that does nothing else; on a busy one compare ``cpu_seconds`` with ``--threads 1``, since
several threads wait for each other. llama-cpp-python's model is not safe to use from several
threads, so its chains take turns behind a lock, as its users have to do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

SUBJECTS = ("rivers", "volcanoes", "bridges", "bicycles", "bees", "glaciers", "trains", "clocks")
SYSTEM = "You are a helpful assistant."
QUESTION = "Tell me a long story about {subject}."
CONTEXT = 1024
#: Of ``embedlm`` and ``llama-cpp``: one answer with the reason why it ended, of several subjects.
Answers = Callable[[Sequence[str]], "list[tuple[str, str]]"]


class Options(NamedTuple):
    model: str
    tokens: int
    threads: int
    chains: int


def embedlm(options: Options) -> Any:
    from sdk import LLM

    limits: dict[str, Any] = {"max_num_seqs": options.chains, "num_threads": options.threads}
    return LLM(options.model, max_model_len=CONTEXT, **limits)


def langchain(engine: str, options: Options) -> Answers:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnableLambda

    limits = {"temperature": 0, "max_tokens": options.tokens}
    guard: AbstractContextManager[Any] = nullcontext()
    if engine == "embedlm":
        from sdk.integrations.langchain import ChatEmbedLM

        model = ChatEmbedLM(llm=embedlm(options), **limits)
    else:
        from langchain_community.chat_models import ChatLlamaCpp

        sizes = {"n_ctx": CONTEXT, "n_batch": 512, "n_threads": options.threads, "verbose": False}
        model = ChatLlamaCpp(model_path=options.model, **limits, **sizes)
        model.client._n_threads_batch = options.threads
        guard = threading.Lock()
    reasons: list[str] = []

    def answer(prompt: Any) -> Any:
        with guard:
            message = model.invoke(prompt)
        reasons.append(message.response_metadata["finish_reason"])
        return message

    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", QUESTION)])
    chain = prompt | RunnableLambda(answer) | StrOutputParser()

    def answers(subjects: Sequence[str]) -> list[tuple[str, str]]:
        reasons.clear()
        questions = [{"subject": subject} for subject in subjects]
        texts = chain.batch(questions, config={"max_concurrency": options.chains})
        return list(zip(texts, reasons, strict=True))

    return answers


def llama_index(engine: str, options: Options) -> Answers:
    from llama_index.core.llms import ChatMessage

    guard: AbstractContextManager[Any] = nullcontext()
    if engine == "embedlm":
        from sdk.integrations.llamaindex import chat_model

        model = chat_model(embedlm(options), temperature=0, max_tokens=options.tokens)
    else:
        from llama_index.llms.llama_cpp import LlamaCPP

        sizes = {"n_threads": options.threads, "n_threads_batch": options.threads, "n_batch": 512}
        model = LlamaCPP(
            model_path=options.model,
            temperature=0,
            max_new_tokens=options.tokens,
            context_window=CONTEXT,
            messages_to_prompt=_chat_ml,
            completion_to_prompt=str,
            model_kwargs=sizes,
            verbose=False,
        )
        guard = threading.Lock()

    def answer(subject: str) -> tuple[str, str]:
        asked = [("system", SYSTEM), ("user", QUESTION.format(subject=subject))]
        with guard:
            found = model.chat([ChatMessage(role=role, content=text) for role, text in asked])
        raw = found.raw if isinstance(found.raw, dict) else found.raw.model_dump()
        return str(found.message.content), raw["choices"][0]["finish_reason"]

    def answers(subjects: Sequence[str]) -> list[tuple[str, str]]:
        with ThreadPoolExecutor(options.chains) as pool:
            return list(pool.map(answer, subjects))

    return answers


def _chat_ml(messages: Sequence[Any]) -> str:
    """The template of SmolLM2 and Qwen, which the other classes find in the file."""
    turns = [f"<|im_start|>{m.role.value}\n{m.content}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


FRAMEWORKS = {"langchain": langchain, "llama-index": llama_index}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("embedlm", "llama-cpp"))
    parser.add_argument("model")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="langchain")
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    options = Options(args.model, args.tokens, args.threads, args.chains)
    answers = FRAMEWORKS[args.framework](args.engine, options)
    answers(["a warm-up"])
    subjects = [SUBJECTS[n % len(SUBJECTS)] for n in range(args.chains)]
    start, busy = time.perf_counter(), time.process_time()
    found = answers(subjects)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert all(text and reason == "length" for text, reason in found), found
    line = {
        "engine": args.engine,
        "framework": args.framework,
        "chains": args.chains,
        "tokens": args.chains * args.tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(args.chains * args.tokens / seconds, 1),
        "cpu_seconds": round(busy, 2),
        "first": found[0][0][:60],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
