"""A service that answers from the text files of a folder, and says from which.

FOLDER=handbook uvicorn docs.examples.rag_service:app         # the demo models
curl 127.0.0.1:8000/ask -H 'Content-Type: application/json' -d '{"question": "When do you open?"}'

MODEL, EMBEDDER, RERANKER: paths or hub names. Without RERANKER, embeddings alone order passages.
Questions that come at the same time share the steps of the engines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, StringConstraints

from sdk import LLM, RequestError, SamplingParams, demo_model
from sdk.demo import MINILM

#: Passages that a search finds, and those that the model reads.
FOUND, READ = 20, 3
#: Words of a passage: what embedding models read at once. Characters, for text with few spaces.
WORDS, CHARACTERS = 120, 800
#: The longest answer.
MAX_TOKENS = 320
logger = logging.getLogger("rag_service")


class Question(BaseModel):
    question: Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)
    ]


class Citation(BaseModel):
    file: str
    text: str
    score: float


class Answer(BaseModel):
    """``citations``: the passages that the answer names, best first."""

    answer: str
    citations: list[Citation]


@dataclass(frozen=True)
class Passage:
    file: str
    text: str


def passages_of(folder: Path) -> Iterator[Passage]:
    """Parts of its files of Markdown and plain text, each with the heading above it."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".md", ".txt") or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8", errors="replace")
        except OSError as error:
            logger.warning("left out: %s", error)
            continue
        if "\0" in text:
            logger.warning("left out: %s is not text in UTF-8", path)
            continue
        for part in parts_of(text):
            yield Passage(path.relative_to(folder).as_posix(), part)


def parts_of(text: str) -> Iterator[str]:
    """Paragraphs of a text, short ones together, long ones in pieces."""
    title, part = "", ""
    for block in re.split(r"\n\s*\n", text):
        heading = re.match(r"#+ (.*)", block)
        if part and heading:
            yield f"{title}\n{part}".strip()
            part = ""
        if heading:
            title, block = heading[1], block[heading.end() :]
        for piece in textwrap.wrap(block, CHARACTERS, replace_whitespace=False):
            longer = part + piece
            if part and (len(longer) > CHARACTERS or len(longer.split()) > WORDS):
                yield f"{title}\n{part}".strip()
                part = ""
            part += f"{piece.strip()}\n"
    if part:
        yield f"{title}\n{part}".strip()


class Library:
    """The passages of a folder, their vectors, and the models."""

    def __init__(self, folder: Path, chat: LLM, embedder: LLM, reranker: LLM | None) -> None:
        self._chat, self._embedder, self._reranker = chat, embedder, reranker
        if not folder.is_dir():
            raise RuntimeError(f"{folder}: is not a folder")
        self.passages = list(passages_of(folder))
        if not self.passages:
            raise RuntimeError(f"{folder}: has no .md and no .txt file with text")
        texts = [one.text for one in self.passages]
        found = embedder.embed(texts, truncate_prompt_tokens=-1)
        self._vectors = np.array([one.embedding for one in found], np.float32)

    async def search(self, question: str) -> list[tuple[Passage, float]]:
        """The passages that fit best, with their scores."""
        [asked] = await self._embedder.aembed([question], truncate_prompt_tokens=-1)
        scores = self._vectors @ np.array(asked.embedding, np.float32)
        best = np.argsort(-scores, kind="stable")[:FOUND].tolist()
        if self._reranker is None:
            return [(self.passages[i], float(scores[i])) for i in best[:READ]]
        texts = [self.passages[i].text for i in best]
        ranks = await self._reranker.arerank(question, texts, READ, truncate_prompt_tokens=-1)
        return [(self.passages[best[one.index]], one.relevance_score) for one in ranks]

    async def answer(self, question: str) -> Answer:
        """An answer from the passages. Its form is constrained, so it always names sources."""
        found = await self.search(question)
        ids_of = self._chat.get_tokenizer().apply_chat_template
        room = self._chat.max_model_len - MAX_TOKENS
        messages = conversation(question, found)
        while len(found) > 1 and len(ids_of(messages, add_generation_prompt=True)) > room:
            found.pop()  # some scripts take several tokens for each character
            messages = conversation(question, found)
        form = {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "minLength": 1, "maxLength": 600},
                "sources": {
                    "type": "array",
                    "items": {"enum": list(range(1, len(found) + 1))},
                    "minItems": 1,
                    "maxItems": len(found),
                },
            },
            "required": ["answer", "sources"],
            "additionalProperties": False,
        }
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        [output] = await self._chat.achat(messages, params, returns=form)
        said = output.parsed
        used = [found[n - 1] for n in sorted(set(said["sources"]))]
        citations = [Citation(file=p.file, text=p.text, score=score) for p, score in used]
        return Answer(answer=said["answer"], citations=citations)


def conversation(question: str, found: list[tuple[Passage, float]]) -> list[dict[str, str]]:
    """What the model reads."""
    shown = "\n\n".join(f"[{n}] {one.text}" for n, (one, _) in enumerate(found, 1))
    return [
        {"role": "system", "content": "Answer from the numbered passages alone, briefly."},
        {"role": "user", "content": f"{shown}\n\nQuestion: {question}"},
    ]


@asynccontextmanager
async def lifespan(host: FastAPI) -> AsyncIterator[None]:
    """Load the models and read the folder when the service starts; close them when it stops."""
    with ExitStack() as models:

        def opened(variable: str, default: Path | None, **options: Any) -> LLM | None:
            model = os.environ.get(variable) or default
            return models.enter_context(LLM(model, **options)) if model else None

        chat = opened("MODEL", demo_model(), memory="2GiB", max_model_len=2048)
        embedder = opened("EMBEDDER", demo_model(MINILM))
        assert chat is not None and embedder is not None
        folder = Path(os.environ.get("FOLDER", "."))
        given = folder, chat, embedder, opened("RERANKER", None)
        host.state.library = await asyncio.to_thread(Library, *given)  # it computes all vectors
        yield


app = FastAPI(lifespan=lifespan)


def the_library(request: Request) -> Library:
    library: Library = request.app.state.library
    return library


@app.post("/ask")
async def ask(given: Question, library: Annotated[Library, Depends(the_library)]) -> Answer:
    """An answer with its citations."""
    try:
        return await library.answer(given.question)
    except (RequestError, json.JSONDecodeError) as error:
        raise HTTPException(422, str(error)) from error
