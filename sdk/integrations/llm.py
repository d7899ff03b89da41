"""A plugin of the ``llm`` command: ``llm -m embedlm/model.gguf "Name three rivers."``

``pip install llm`` beside embedlm is enough: an entry point makes it known. Models are those that
the command line names (``embedlm/`` and a path, a hub name, or what ``LLM`` opens otherwise), those
that ``llm embedlm add`` has noted, and the demo models that ``embedlm fetch-demo`` has fetched.
``docs/guides/frameworks.md`` shows it.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from sdk.api.errors import SdkError
from sdk.api.machine import cache_folder
from sdk.demo import GEMMA3, MINILM, SMOLLM2
from sdk.integrations.schemas import closed
from sdk.kernels.packages import needed_for

with needed_for("sdk.integrations.llm needs"):
    import click
    import llm
    from llm.parts import StreamEvent
    from pydantic import Field

if TYPE_CHECKING:  # every `llm` command imports this module, also those of other models
    from sdk import LLM

PREFIX = "embedlm/"
#: Options of a prompt that are the engine's.
_ENGINE = ("memory", "max_model_len")
_IMAGES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})


class EmbeddingError(llm.ModelError, click.ClickException):
    """An error of ``llm embed``, which shows those of click alone without a traceback."""


class Options(llm.Options):
    """``-o NAME VALUE``: what is not given is the model's own default."""

    temperature: float | None = Field(default=None, description="0: always the likeliest token")
    top_p: float | None = Field(default=None, description="Only the likeliest, up to this share")
    top_k: int | None = Field(default=None, description="Only this many of the likeliest")
    min_p: float | None = Field(default=None, description="Only those this likely, beside the best")
    max_tokens: int | None = Field(default=None, description="The longest answer")
    seed: int | None = Field(default=None, description="The same seed, the same answer")
    stop: str | None = Field(default=None, description="End the answer before this text")
    repetition_penalty: float | None = Field(default=None, description="Above 1: repeat less")
    presence_penalty: float | None = Field(default=None, description="Above 0: new words")
    frequency_penalty: float | None = Field(default=None, description="Above 0: rarer words")
    memory: str | None = Field(default=None, description="What the model may take, such as 2GiB")
    max_model_len: int | None = Field(default=None, description="Tokens of prompt and answer")


class Engine:
    """The ``LLM`` of a model, opened with its first prompt. Threads share it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._llm: LLM | None = None
        self._options: dict[str, Any] = {}

    def open(self, **options: Any) -> LLM:
        """:raises llm.ModelError: it cannot be opened, or is open with other options."""
        from sdk import LLM

        given = {name: value for name, value in options.items() if value is not None}
        with self._lock:
            if self._llm is None:
                try:
                    self._llm = LLM(self.model, **given)
                except (SdkError, OSError) as error:
                    raise llm.ModelError(str(error)) from error
                self._options = given
            changed = [name for name in given if given[name] != self._options.get(name)]
            if changed:
                raise llm.ModelError(
                    f"{', '.join(changed)}: applies to the first prompt, which opened the model"
                )
            return self._llm

    def close(self) -> None:
        """Give the memory back; the next prompt opens the model again."""
        with self._lock:
            if self._llm is not None:
                self._llm.close()
                self._llm = None


class _Shared:
    """What a model and its async twin have in common."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    attachment_types: ClassVar[frozenset[str]] = _IMAGES  # a model without them says so
    Options = Options

    def __init__(self, model: str, name: str | None = None, engine: Engine | None = None) -> None:
        self.model_id = f"{PREFIX}{name or model}"
        self.engine = engine or Engine(model)

    def close(self) -> None:
        """Give the model's memory back."""
        self.engine.close()

    def _request(self, prompt: Any) -> tuple[LLM, list[dict[str, Any]], dict[str, Any]]:
        """The engine, the conversation, and the other arguments of ``stream``."""
        given = prompt.options.model_dump(exclude_none=True)
        opened = self.engine.open(**{name: given.pop(name, None) for name in _ENGINE})
        if prompt.schema:
            from sdk import StructuredOutputsParams

            given["structured_outputs"] = StructuredOutputsParams(json=closed(prompt.schema))
        params = opened.get_default_sampling_params().clone(**given)
        tools = [_tool(tool) for tool in prompt.tools]
        messages = [one for message in prompt.messages for one in _messages(message)]
        if not messages:
            raise llm.ModelError("the prompt is empty")
        return opened, messages, {"sampling_params": params, "tools": tools}


class Chat(_Shared, llm.Model):
    """A chat model: ``Chat("model.gguf").prompt("Name three rivers.")``."""

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[StreamEvent]:
        """The answer in pieces. With ``stream=False`` llm collects them."""
        try:
            opened, messages, options = self._request(prompt)
            generated = 0
            for output in opened.stream(messages, **options):
                generated += len(output.outputs[0].token_ids)
                yield from _events(output)
        except SdkError as error:
            raise llm.ModelError(str(error)) from error
        _finish(response, output, generated)


class AsyncChat(_Shared, llm.AsyncModel):
    """:class:`Chat` for an event loop."""

    async def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """The answer in pieces."""
        try:
            opened, messages, options = self._request(prompt)
            generated = 0
            async for output in opened.astream(messages, **options):
                generated += len(output.outputs[0].token_ids)
                for event in _events(output):
                    yield event
        except SdkError as error:
            raise llm.ModelError(str(error)) from error
        _finish(response, output, generated)


class Embedding(llm.EmbeddingModel):
    """An embedding model: ``llm embed -m embedlm/FOLDER -c "a text"``. Texts longer than the
    context lose their end."""

    batch_size = 64

    def __init__(self, model: str, name: str | None = None) -> None:
        self.model_id = f"{PREFIX}{name or model}"
        self.engine = Engine(model)

    def embed_batch(self, items: Iterable[Any], *, key: str | None = None) -> Iterator[list[float]]:
        """A vector for each text."""
        try:
            opened = self.engine.open()
            found = opened.embed(list(items), truncate_prompt_tokens=-1, use_tqdm=False)
        except (SdkError, llm.ModelError) as error:
            raise EmbeddingError(str(error)) from error
        yield from (one.embedding for one in found)


# ---- prompts and answers -------------------------------------------------------------------------


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, llm.Tool):
        raise llm.ModelError(f"{type(tool).__name__}: tools of a provider do not run here")
    parameters = closed({"properties": {}, **(tool.input_schema or {"type": "object"})})
    function = {"name": tool.name, "parameters": parameters}
    return {"type": "function", "function": {**function, "description": tool.description or ""}}


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """A message of llm in the form of OpenAI's API. Each result of a tool is one of its own."""
    results = [part for part in message.parts if part.to_dict()["type"] == "tool_result"]
    for part in results:
        yield {
            "role": "tool",
            "tool_call_id": part.tool_call_id,
            "name": part.name,
            "content": part.output if part.exception is None else f"Error: {part.exception}",
        }
    content: list[dict[str, Any]] = []
    calls = []
    for part in message.parts:
        kind = part.to_dict()["type"]
        if kind == "text":
            content.append({"type": "text", "text": part.text})
        elif kind == "attachment":
            content.append({"type": "image_url", "image_url": {"url": _url(part.attachment)}})
        elif kind == "tool_call":
            function = {"name": part.name, "arguments": json.dumps(part.arguments)}
            calls.append({"id": part.tool_call_id, "type": "function", "function": function})
    if not content and not calls:
        return
    plain = all(part["type"] == "text" for part in content)
    said: Any = "".join(part["text"] for part in content) if plain else content
    yield {"role": message.role, "content": said, **({"tool_calls": calls} if calls else {})}


def _url(attachment: Any) -> str:
    content = base64.b64encode(attachment.content_bytes()).decode()
    return f"data:{attachment.resolve_type()};base64,{content}"


def _events(output: Any) -> Iterator[StreamEvent]:
    delta = output.outputs[0].delta
    if delta.reasoning:
        yield StreamEvent("reasoning", delta.reasoning)
    if delta.content:
        yield StreamEvent("text", delta.content)


def _finish(response: Any, output: Any, generated: int) -> None:
    """Calls and usage of a whole answer, whose last piece is ``output``."""
    answer = output.outputs[0]
    for call in answer.message.tool_calls:
        if call.error is not None:
            raise llm.ModelError(f"the call of {call.name} is broken: {call.error}")
        arguments = json.loads(call.arguments)
        response.add_tool_call(llm.ToolCall(call.name, arguments, tool_call_id=call.id))
    details = {"cached_tokens": output.num_cached_tokens} if output.num_cached_tokens else None
    response.set_usage(input=len(output.prompt_token_ids), output=generated, details=details)
    response.response_json = {"finish_reason": answer.finish_reason}


# ---- which models there are ----------------------------------------------------------------------


class Noted(TypedDict):
    """A model of ``llm embedlm add``."""

    model: str
    embedding: bool


def _file() -> Path:
    return Path(llm.user_dir()) / "embedlm.json"


def _noted() -> dict[str, Noted]:
    """By name.

    :raises llm.ModelError: the file is damaged.
    """
    try:
        found = json.loads(_file().read_text("utf-8"))
        return {n: Noted(model=v["model"], embedding=v["embedding"]) for n, v in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise llm.ModelError(f"{_file()}: cannot be read; delete it and add models anew") from error


def _named(arguments: Sequence[str]) -> Iterator[str]:
    """Names of models on a command line: ``llm`` finds only what is registered before."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        value = argument.partition("=")[2] if argument.startswith("--model=") else argument
        names = before in ("-m", "--model") or value is not argument
        if names and value.startswith(PREFIX):
            yield value.removeprefix(PREFIX)


def _models(embedding: bool) -> dict[str, str]:
    """What ``LLM`` opens, by name."""
    demos = (MINILM,) if embedding else (SMOLLM2, GEMMA3)
    paths = [cache_folder() / demo.file_name for demo in demos]
    found = {path.name: str(path) for path in paths if path.exists()}
    found |= {n: one["model"] for n, one in _noted().items() if one["embedding"] == embedding}
    return {**{name: name for name in _named(sys.argv[1:])}, **found}


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Chat models."""
    for name, model in _models(embedding=False).items():
        chat = Chat(model, name)
        register(chat, AsyncChat(model, name, chat.engine))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    """Embedding models."""
    for name, model in _models(embedding=True).items():
        register(Embedding(model, name))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """``llm embedlm``."""

    @cli.group(name="embedlm")
    def group() -> None:
        """Note models that run in this process"""

    @group.command()
    @click.argument("model")
    @click.option("--name", help="How to call it; default: the file's name without its ending")
    @click.option("--embedding", is_flag=True, help="It is for `llm embed`")
    def add(model: str, name: str | None, embedding: bool) -> None:
        """Note MODEL, a file, a folder or a hub name, for -m embedlm/NAME"""
        from sdk.loaders.open import check_there  # for this command alone

        path = Path(model).expanduser()
        try:
            check_there(path if path.exists() else model)
        except (SdkError, OSError) as error:
            raise click.ClickException(str(error)) from error
        if path.exists():
            model = str(path.resolve())
        name = name or (path.stem if path.is_file() else path.name)
        _write({**_noted(), name: Noted(model=model, embedding=embedding)})
        click.echo(f"llm {'embed ' if embedding else ''}-m {PREFIX}{name}")

    @group.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget the model NAME; its files stay"""
        noted = _noted()
        if noted.pop(name.removeprefix(PREFIX), None) is None:
            raise click.ClickException(
                f"{name}: is not noted; there are: {', '.join(noted) or 'none'}"
            )
        _write(noted)


def _write(noted: dict[str, Noted]) -> None:
    part = _file().with_suffix(".part")
    part.write_text(json.dumps(noted, indent=2), "utf-8")
    part.replace(_file())
