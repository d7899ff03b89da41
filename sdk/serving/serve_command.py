"""Answer the APIs of OpenAI, Ollama and Anthropic over HTTP.

Progress goes to stderr. Ctrl-C or SIGTERM ends it: no new request is accepted, those that run may
end within ``--drain-seconds``, and the others are aborted. A second Ctrl-C aborts them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.api.image_hosts import ImageHosts
from sdk.api.sizes import parse_bytes
from sdk.cli.engine_arguments import add_engine_arguments, as_arguments, engine_options
from sdk.cli.lora_arguments import add_adapters, add_lora_argument, named_adapters
from sdk.cli.text_file import read_options
from sdk.demo import demo_model
from sdk.kernels.packages import missing
from sdk.kernels.system import SYSTEM
from sdk.serving.guard_arguments import (
    Protection,
    add_guard_arguments,
    protection,
    warning,
    with_images,
)

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from sdk.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="models, with the names that requests use (default: the demo model)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the names of a single model; responses have the first one",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (%(default)s)")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long running requests may go on after a signal (%(default)s)",
    )
    parser.add_argument("--max-num-seqs", type=int, help="the most requests in one step")
    parser.add_argument("--threads", type=int, help="default: the CPUs of this process")
    add_engine_arguments(parser)
    add_lora_argument(parser, "which are models for clients; with one model")
    parser.add_argument(
        "--options", type=Path, metavar="FILE", help="further options of LLM, a JSON object"
    )
    parser.add_argument(
        "--kept-responses",
        default="64MiB",
        metavar="SIZE",
        help="memory for responses that later requests go on from; 0: none (%(default)s)",
    )
    parser.add_argument(
        "--allowed-image-hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help="hosts from which images are fetched that a request names by a URL: img.example.org, "
        "*.example.org, * for every public one (default: none)",
    )
    parser.add_argument(
        "--allowed-image-networks",
        nargs="+",
        default=[],
        metavar="NETWORK",
        help="private networks in which such a host may be, such as 10.1.0.0/16",
    )
    parser.add_argument("--no-page", action="store_true", help="no page at / and no live view")
    parser.add_argument(
        "--forwarded-allow-ips",
        metavar="IPS",
        help="proxies whose X-Forwarded-For names the client",
    )
    add_guard_arguments(parser)


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    if not args.models:
        return []
    return list(named_models(args.models, args.served_model_name).values())


def run(args: argparse.Namespace) -> int:
    named = named_models(args.models, args.served_model_name)
    adapters = named_adapters(args.lora)
    check_adapters(adapters, named)
    kept_bytes(args)  # before the model is loaded
    image_hosts(args)
    if args.drain_seconds < 0:
        raise RequestError(
            f"--drain-seconds: expected at least 0, found {args.drain_seconds:g}; 0 aborts at once"
        )
    try:
        import fastapi  # noqa: F401  # before the model is loaded
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing(error, "the command serve needs") from error
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(protection(args))
        if (text := warning(args)) is not None:
            say(text)
        listening = stack.enter_context(bound(args.host, args.port))
        loaded = {
            model: stack.enter_context(opened(", ".join(names_of(model, named)), options, args))
            for model, options in with_options(named, args, adapters).items()
        }
        add_adapters(next(iter(loaded.values())), adapters)
        return serve(listening, {n: loaded[model] for n, model in named.items()}, args, guard)


def kept_bytes(args: argparse.Namespace) -> int:
    """The value of ``--kept-responses``. :raises RequestError: it is not a size."""
    size: str = args.kept_responses
    return 0 if size == "0" else parse_bytes(size, "--kept-responses")


def image_hosts(args: argparse.Namespace) -> ImageHosts | None:
    """From where images are fetched. :raises RequestError: a host or a network is invalid."""
    if not args.allowed_image_hosts:
        if args.allowed_image_networks:
            raise RequestError("--allowed-image-networks: needs --allowed-image-hosts too")
        return None
    return ImageHosts(args.allowed_image_hosts, networks=args.allowed_image_networks)


def names_of(model: str, named: Mapping[str, str]) -> list[str]:
    """The names of one model, which is loaded once."""
    return [name for name, other in named.items() if other == model]


def named_models(words: list[str], served: Sequence[str] = ()) -> dict[str, str]:
    """The models by name; a file or folder is spelled the same under each of its names.

    ``served``: all names of a single model.

    :raises RequestError: two models have the same name, or it is not clear whose the names are.
    """
    named: dict[str, str] = {}
    spelled: dict[Path, str] = {}  # files as they were given first
    for word in words or [str(demo_model())]:
        name, equals, model = word.partition("=")
        if not equals or "/" in name or not name:
            model = word
            name = Path(word).stem if word.endswith(".gguf") else word
            name = Path(name).name if Path(word).exists() else name
        if not model:
            raise RequestError(f"models: expected NAME=MODEL, found {word!r}")
        if name in named:
            raise RequestError(
                f"models: two have the name {name!r}; give each its own: NAME={model}"
            )
        if Path(model).exists():
            model = spelled.setdefault(Path(model).resolve(), model)
        named[name] = model
    if not served:
        return named
    if len(named) > 1:
        raise RequestError(
            f"--served-model-name: expected one model, found {len(named)}; use NAME=MODEL"
        )
    if len(set(served)) < len(served) or "" in served:
        raise RequestError(
            f"--served-model-name: expected different names, found {' '.join(map(repr, served))}"
        )
    return dict.fromkeys(served, next(iter(named.values())))


def serve(
    listening: socket.socket, llms: dict[str, LLM], args: argparse.Namespace, guard: Protection
) -> int:
    """Serve until a signal comes; the exit code."""
    import uvicorn

    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if any(llm._reader.images is not None for llm in llms.values()):
        guard = with_images(guard, args)
    app = made_app(llms, args, guard)

    class Server(uvicorn.Server):
        """Ends when told, without raising the signal again: the exit code says how it ended."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say(f"listening at http://{address}/v1 for {', '.join(llms)} (Ctrl-C stops)")
            if not args.no_page:
                say(f"page at http://{address}/")

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with SYSTEM.stop_signals(asyncio.get_running_loop(), self.stop):
                yield

        def stop(self, number: int) -> None:
            if self.should_exit:
                self.force_exit = True
                return
            self.should_exit = True
            count = len(self.server_state.tasks)
            if not args.no_page:
                count -= app.state.live.close()
            if count:
                say(
                    f"stopping; {count} request(s) may end within {args.drain_seconds:g} s "
                    "(Ctrl-C aborts them)"
                )

    # Its message about requests that are aborted is said below.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "running task" not in record.msg)
    server = Server(server_config(app, args, guard))
    server.run(sockets=[listening])
    if server.force_exit:
        say("stopped; the running requests were aborted")
        return 130
    say("stopped")
    return 0


def made_app(llms: dict[str, LLM], args: argparse.Namespace, guard: Protection) -> FastAPI:
    """The application, with the limits of single requests."""
    from sdk.serving.app import create_app

    return create_app(
        llms,
        access=guard.access,
        max_body_bytes=guard.http.body_bytes,
        max_kept_bytes=kept_bytes(args),
        limits=guard.body,
        page=not args.no_page,
        image_fetcher=image_hosts(args),
    )


def server_config(app: FastAPI, args: argparse.Namespace, guard: Protection) -> uvicorn.Config:
    """How uvicorn runs the protected application."""
    import uvicorn

    from sdk.serving.guard import Gate, protected, uvicorn_options

    gate = Gate(guard.http.requests)
    config = uvicorn.Config(
        protected(app, access=guard.access, limits=guard.http, origins=guard.origins, gate=gate),
        log_config=None,
        access_log=False,
        lifespan="off",  # the app has none
        proxy_headers=args.forwarded_allow_ips is not None,
        forwarded_allow_ips=args.forwarded_allow_ips,
        **uvicorn_options(guard.http, gate),
    )
    config.timeout_graceful_shutdown = args.drain_seconds
    return config


def bound(host: str, port: int) -> socket.socket:
    """A socket bound before the model is loaded; nobody can connect to it yet.

    :raises OSError: the address cannot be used; the message names it. :raises RequestError: there
        is not such a port.
    """
    if not 0 <= port < 2**16:
        raise RequestError(f"--port: expected 0 to {2**16 - 1}, found {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error}") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --port"
        ) from error
    return made


def check_adapters(adapters: Mapping[str, str], named: Mapping[str, str]) -> None:
    """:raises RequestError: it is not clear whose adapters they are, or one has a model's name."""
    count = len(set(named.values()))
    if adapters and count > 1:
        raise RequestError(
            f"--lora: expected one model, found {count}; serve the others in another process"
        )
    if same := sorted(set(adapters) & set(named)):
        raise RequestError(f"--lora: {same[0]!r} is the name of the model; expected another")


def with_options(
    named: Mapping[str, str], args: argparse.Namespace, adapters: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The options of each model (not of each name), with room for ``adapters``. With several
    models, ``--memory`` is the budget of all together."""
    from sdk.api.memory_pool import MemoryPool

    options = read_options(args.options)
    if adapters:
        from sdk.memory.weights import adapter_options

        own = {**adapter_options(list(adapters.values())), "lora_dtype": args.lora_dtype}
        options = {**own, **options}
    options |= engine_options(args, "max_num_seqs")
    if args.threads is not None:
        options["num_threads"] = args.threads
    models = list(dict.fromkeys(named.values()))
    if len(models) > 1 and options.get("mmproj") is not None:
        raise RequestError(
            f"mmproj: expected one model, found {len(models)}; leave it out, and put the file of "
            "each model beside it"
        )
    if len(models) > 1 and "memory" in options:
        options["memory"] = MemoryPool(options["memory"])
    return {model: {**options, "model": model} for model in models}


def opened(name: str, options: dict[str, Any], args: argparse.Namespace) -> LLM:
    """Load one model. :raises OutOfMemoryError: with advice as arguments of this command."""
    from sdk.llm import LLM

    say(f"loading {options['model']} as {name}")
    try:
        llm = LLM(**options)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(as_arguments(str(error), args)) from error
    except TypeError as error:
        if args.options is None:
            raise
        raise RequestError(f"--options {args.options}: {error}") from error
    plan = llm.memory_plan
    say(
        f"{name}: context of {plan.max_model_len} tokens, "
        f"up to {plan.max_num_seqs} requests at a time"
    )
    return llm


def say(text: str) -> None:
    """One line of progress on stderr."""
    if sys.stderr is not None:
        print(f"embedlm: {text}", file=sys.stderr, flush=True)
