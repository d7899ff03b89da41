"""Eight chains of LangChain at the same time on one model in one process: tokens per second.

``python tests/interop/chains.py embedlm MODEL`` and ``... llama-cpp MODEL``, in an environment with
langchain-core, langchain-community and llama-cpp-python, print a line of JSON each. Run both in
turn, several times, on a machine that does nothing else; on a busy one compare ``cpu_seconds`` with
``--threads 1``, since several threads wait for each other. llama-cpp-python's model is not safe to
use from several threads, so its chains take turns behind a lock, as its users have to do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from contextlib import nullcontext
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

SUBJECTS = ("rivers", "volcanoes", "bridges", "bicycles", "bees", "glaciers", "trains", "clocks")
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You are a helpful assistant."), ("user", "Tell me a long story about {subject}.")]
)


def embedlm_model(path: str, tokens: int, threads: int) -> tuple[Any, Any]:
    """The model, and what guards it."""
    from sdk import LLM
    from sdk.integrations.langchain import ChatEmbedLM

    llm = LLM(path, max_model_len=1024, max_num_seqs=8, num_threads=threads)
    return ChatEmbedLM(llm=llm, temperature=0, max_tokens=tokens), nullcontext()


def llama_cpp_model(path: str, tokens: int, threads: int) -> tuple[Any, Any]:
    """The model, and what guards it."""
    from langchain_community.chat_models import ChatLlamaCpp

    model = ChatLlamaCpp(
        model_path=path,
        temperature=0,
        max_tokens=tokens,
        n_ctx=1024,
        n_batch=512,
        n_threads=threads,
        verbose=False,
    )
    model.client._n_threads_batch = threads
    return model, threading.Lock()


MODELS = {"embedlm": embedlm_model, "llama-cpp": llama_cpp_model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=MODELS)
    parser.add_argument("model")
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model, guard = MODELS[args.engine](args.model, args.tokens, args.threads)
    reasons = []

    def answer(prompt: Any) -> Any:
        with guard:
            message = model.invoke(prompt)
        reasons.append(message.response_metadata["finish_reason"])
        return message

    chain = PROMPT | RunnableLambda(answer) | StrOutputParser()
    chain.invoke({"subject": "a warm-up"})
    reasons.clear()
    subjects = [{"subject": SUBJECTS[n % len(SUBJECTS)]} for n in range(args.chains)]
    start, busy = time.perf_counter(), time.process_time()
    texts = chain.batch(subjects, config={"max_concurrency": args.chains})
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert all(texts) and reasons == ["length"] * args.chains, reasons
    found = {
        "engine": args.engine,
        "chains": args.chains,
        "tokens": args.chains * args.tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(args.chains * args.tokens / seconds, 1),
        "cpu_seconds": round(busy, 2),
        "first": texts[0][:60],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
