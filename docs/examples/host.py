"""A FastAPI application that has OpenAI's API beside its own routes, with one model for both.

uvicorn docs.examples.host:app                  # the demo model
MODEL=model.gguf uvicorn docs.examples.host:app

curl 127.0.0.1:8000/summary -H 'Content-Type: application/json' -d '{"text": "..."}'
curl 127.0.0.1:8000/v1/models
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel

from sdk import LLM, SamplingParams, demo_model
from sdk.serving import create_app


class Text(BaseModel):
    text: str


@asynccontextmanager
async def lifespan(host: FastAPI) -> AsyncIterator[None]:
    """Load the model when the application starts; close it when it stops."""
    model = os.environ.get("MODEL") or demo_model()
    with LLM(model, memory="2GiB", max_model_len=4096) as llm:
        host.state.llm = llm
        host.mount("/", create_app(llm, model_name="assistant"))  # after the routes of its own
        yield


app = FastAPI(lifespan=lifespan)


def language_model(request: Request) -> Any:
    """The model, for routes of this application."""
    return request.app.state.llm


@app.post("/summary")
async def summary(given: Text, llm: Annotated[Any, Depends(language_model)]) -> dict[str, str]:
    """A route of the application itself: it runs in the same batches as the requests of the API."""
    messages = [{"role": "user", "content": f"Summarize in one sentence:\n{given.text}"}]
    [output] = await llm.achat(messages, SamplingParams(max_tokens=64, temperature=0))
    return {"summary": output.outputs[0].text}
