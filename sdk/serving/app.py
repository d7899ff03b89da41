"""``create_app``: an ASGI application with OpenAI's API, on its own or inside a host's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sdk.kernels.packages import needed_for

with needed_for("sdk.serving.create_app needs"):
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

from sdk import __version__
from sdk.api.flags import check_flags
from sdk.api.image_options import ImageFetcher
from sdk.serving.access import Access, Open, Role
from sdk.serving.anthropic import messages as anthropic
from sdk.serving.endpoint import Endpoint, Handler, Services
from sdk.serving.errors import INTERNAL, ErrorResponse
from sdk.serving.guard.body_limits import BodyLimits
from sdk.serving.guard.http_limits import BODY_WITH_IMAGES
from sdk.serving.interfaces import interface_of
from sdk.serving.kept_responses import MAX_KEPT_BYTES, KeptResponses
from sdk.serving.live import Live
from sdk.serving.models import Models
from sdk.serving.ollama import answers as ollama, embed as ollama_embed, models as ollama_models
from sdk.serving.routes import generate, pooling, responses, state, tokens
from sdk.serving.routes.metrics import Metrics
from sdk.serving.web_page import page_routes

#: 16 MiB: a context of a million tokens as text is 4 MB.
MAX_BODY_BYTES = 2**24
#: OpenAI's and Anthropic's routes: under ``/v1``, and without it for an app that is mounted at
#: ``/v1`` or at any other path that a client has as its base URL.
_OPENAI: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/chat/completions", generate.chat_completions),
    ("POST", "/completions", generate.completions),
    ("POST", "/responses", responses.responses),
    ("GET", "/responses/{response_id}", responses.retrieve),
    ("DELETE", "/responses/{response_id}", responses.delete),
    ("POST", "/messages", anthropic.messages),
    ("POST", "/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/embeddings", pooling.embeddings),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/score", pooling.score),
    ("GET", "/models", state.models),
    ("GET", "/models/{model:path}", state.model),
)
_OTHERS: tuple[tuple[str, str, Handler, Role | None], ...] = (
    ("GET", "/health", state.health, None),
    ("GET", "/ready", state.ready, None),
    ("POST", "/tokenize", tokens.tokenize, "user"),
    ("POST", "/detokenize", tokens.detokenize, "user"),
    ("POST", "/v2/rerank", pooling.rerank, "user"),  # Cohere's
    ("POST", "/pooling", pooling.pooling, "user"),
    ("POST", "/classify", pooling.classify, "user"),
)
_OLLAMA: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama_embed.embed),
    ("POST", "/api/embeddings", ollama_embed.embeddings),
    ("POST", "/api/show", ollama_models.show),
    ("GET", "/api/tags", ollama_models.tags),
    ("GET", "/api/ps", ollama_models.running),
    ("GET", "/api/version", ollama_models.version),
    ("POST", "/api/pull", ollama_models.refuse),
    ("POST", "/api/push", ollama_models.refuse),
    ("POST", "/api/create", ollama_models.refuse),
    ("POST", "/api/copy", ollama_models.refuse),
    ("DELETE", "/api/delete", ollama_models.refuse),
    ("POST", "/api/blobs/{digest}", ollama_models.refuse),
    ("GET", "/api/blobs/{digest}", ollama_models.refuse),
)


def create_app(
    models: Any,
    *,
    model_name: str | Sequence[str] | None = None,
    access: Access | None = None,
    max_body_bytes: int | None = None,
    max_kept_bytes: int = MAX_KEPT_BYTES,
    limits: BodyLimits | None = None,
    page: bool = False,
    metrics_prefix: str = "embedlm",
    image_fetcher: ImageFetcher | None = None,
) -> FastAPI:
    """An application that answers OpenAI's API with ``models``, which their owner closes.

    ``models``: an :class:`sdk.LLM`, or a mapping of the names that requests use to them, in which
    one may have several. ``model_name``: the name, or names, of a single model (default: that of
    its file or folder); responses have the first one. While there is one model without adapters,
    requests may use any name. ``access``: who may do what (default: everybody everything; see
    :mod:`sdk.serving.access`). ``max_kept_bytes``: of the responses that ``previous_response_id``
    may name; 0 keeps none. ``max_body_bytes``: of the body of a request (default: 16 MiB, and 32
    MiB where a model reads images). ``limits``: of the parameters of one request, besides those of
    ``SamplingParams``.
    :func:`sdk.serving.guard.protected` adds the limits of HTTP. ``page``: serve the page at ``/``
    and its live view, ``/live``. ``metrics_prefix``: of the names at ``/metrics``; with ``"vllm"``
    they are those of vLLM. ``image_fetcher``: gets images that requests name by a URL, such as
    :class:`sdk.ImageHosts`; without it images must be in the request. The LLM's own fetcher and
    folder are for its owner's code: requests never reach them.

    ``host.mount("/", create_app(llm))`` has ``/v1/chat/completions``, ``/health`` and so on, and so
    has ``host.mount("/v1", create_app(llm))`` for OpenAI's routes. The app has no lifespan and no
    global state, and adds nothing to its host.

    :raises RequestError: ``models`` are none, or a name is invalid.
    """
    check_flags(page=page)
    served = Models(models, model_name)
    live = Live(served) if page else None
    if max_body_bytes is None:
        max_body_bytes = BODY_WITH_IMAGES if any(one.sees for one in served) else MAX_BODY_BYTES
    services = Services(
        served,
        access or Open(),
        max_body_bytes,
        limits,
        KeptResponses(max_kept_bytes),
        None if live is None else live.ended,
        image_fetcher,
    )
    app = FastAPI(
        title="embedlm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect names a scheme, which is wrong behind TLS
    )
    for method, path, handler in _OPENAI:
        for prefix in ("/v1", ""):
            _add(app, method, prefix + path, Endpoint(handler, services))
    for method, path, handler, role in _OTHERS:
        _add(app, method, path, Endpoint(handler, services, role))
    for method, path, handler in _OLLAMA:
        _add(app, method, path, Endpoint(handler, services))
    _add(app, "GET", "/metrics", Endpoint(Metrics(served, metrics_prefix), services, "metrics"))
    if live is not None:
        app.router.routes.extend(page_routes())
        _add(app, "GET", "/live", Endpoint(live, services, "metrics"))
        app.state.live = live  # its owner closes it before it waits for requests
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _add(app: FastAPI, method: str, path: str, endpoint: Callable[..., Any]) -> None:
    app.router.routes.append(Route(path, endpoint, methods=[method]))


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return _response(
        request, ErrorResponse(error.status_code, message, code, headers=error.headers or {})
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(request, INTERNAL)


def _response(request: Request, error: ErrorResponse) -> Response:
    body = interface_of(request.url.path).error(error)
    return Response(body, error.status, dict(error.headers), "application/json")
