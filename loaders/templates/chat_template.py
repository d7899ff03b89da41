"""Chat templates: render a list of messages to the text format a model was trained on.

A template comes with the model file, so it is untrusted: at most 64 KiB, rendered in a sandbox with
limits (``sandbox.py``), at most 4 MiB of output, and every failure is a
:class:`TemplateError`. Hugging Face's extensions are supported: blocks trim their line,
``break``/``continue``, ``raise_exception``, ``strftime_now``, plain ``tojson``,
``{% generation %}``.

Messages are untrusted too: they are checked to be plain data before a template sees them, and
:class:`ControlTextGuard` keeps control tokens typed by a user from becoming real ones.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sdk.kernels.packages import package
from sdk.loaders.tokenizer.special import SpecialSplitter
from sdk.quant.errors import SdkError
from sdk.quant.safe_repr import is_value_error, safe_repr

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_DEPTH = 32
#: Limits of one conversation; values that occur twice count twice.
MAX_VALUES = 2**18
MAX_CHARACTERS = 4 * 2**20
_MAX_INTEGER_BITS = 14_000  # Python prints no integer of more than 4,300 digits

# Variables that callers must not replace through keyword arguments.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "namespace",
        "range",
    }
    | {"raise_exception", "strftime_now", "dict", "loop", "self", "caller", "return_dict"}
    | {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: What other formats call them.
_OTHER_ROLES = {
    "human": "user",
    "person": "user",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
# Switches of several model families: accepted with every template, used by some.
_WELL_KNOWN = frozenset(
    {"documents", "enable_thinking", "thinking", "reasoning_effort", "date_string"}
    | {"builtin_tools", "tools_in_user_message", "add_vision_id", "controls", "tool_choice"}
)
_NOT_READ = "the chat template of this model does not use"


class TemplateError(SdkError):
    """A conversation cannot be rendered: bad messages, a broken template, or one over budget."""


class ChatTemplate:
    """A compiled template. Immutable; may render in several threads at once."""

    def __init__(self, source: str) -> None:
        """:raises TemplateError: the template is too large or does not compile."""
        package("jinja2", "a chat template needs")
        from jinja2 import TemplateError as JinjaError, meta

        from sdk.loaders.templates.budget import BudgetError
        from sdk.loaders.templates.sandbox import TemplateSandbox
        from sdk.loaders.templates.syntax import check_syntax

        size = len(source.encode("utf-8", "replace"))
        if size > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"chat template of {size} bytes: at most {MAX_TEMPLATE_BYTES} are allowed"
            )
        self._source = source
        self._sandbox = TemplateSandbox(_raise_exception)
        # An environment refers to its filters and extensions, and they to it: 0.65 MiB until
        # Python's collector runs.
        environment: dict[str, Any] = self._sandbox.__dict__
        weakref.finalize(self, environment.clear).atexit = False
        self._sandbox.start()
        try:
            tree = self._sandbox.parse(source)
            check_syntax(tree)
            self._names = meta.find_undeclared_variables(tree)
            self._reads_parts = _iterates_content(tree)
            self._words = _words(tree)
            self._template = self._sandbox.from_string(tree)
            compiled = self._template.root_render_func.__globals__  # the functions are in it
            weakref.finalize(self, compiled.clear).atexit = False
        except JinjaError as error:
            line = getattr(error, "lineno", None)
            where = f" at line {line}" if line else ""
            raise TemplateError(f"chat template does not compile{where}: {error}") from None
        except BudgetError as error:
            raise TemplateError(f"chat template rejected: it uses {error}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TemplateError(f"chat template does not compile: {_named(error)}") from None
        finally:
            self._sandbox.stop()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        image: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as text.

        ``special_tokens``: bos_token, eos_token, ..., which the template may print. ``kwargs``:
        other variables of the template (``enable_thinking=False``), plain data only.
        ``continue_final_message``: end the text with the content of the last message.
        ``image``: messages may have parts ``{"type": "image"}``; a template that does not know
        these gets this text in their place.

        :raises TemplateError: rendering failed, or exceeded a limit.
        """
        check_conversation(messages, tools, kwargs, images=image is not None)
        self._check_read(messages, tools, kwargs)
        mark = ""
        if continue_final_message:
            mark = unused_character([*_texts([messages, tools, kwargs]), self._source])
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        values = {
            "bos_token": "",
            "eos_token": "",
            "documents": None,
            **(special_tokens or {}),
            **kwargs,
            "messages": [self._fitted(message, image) for message in messages],
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._rendered(values)
        if tools and self._without_tools(values) == text:
            raise TemplateError(f"tools: {_NOT_READ} tools in this conversation")
        return _cut_at(text, mark, messages[-1]) if mark else text

    def _without_tools(self, values: Mapping[str, Any]) -> str | None:
        try:
            return self._rendered({**values, "tools": None})
        except TemplateError:
            return None

    def _rendered(self, values: Mapping[str, Any]) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        from sdk.loaders.templates.budget import MAX_OUTPUT, BudgetError

        self._sandbox.start(len(values["messages"]))
        chunks: list[str] = []
        length = 0
        try:
            for chunk in self._template.generate(values):
                length += len(chunk)
                if length > MAX_OUTPUT:
                    raise BudgetError(f"more than {MAX_OUTPUT} characters of output")
                chunks.append(chunk)
        except TemplateError:
            raise
        except BudgetError as error:
            raise TemplateError(f"chat template stopped: it used {error}") from None
        except Exception as error:
            if not (isinstance(error, JinjaError) or is_value_error(error)):
                raise
            raise TemplateError(f"chat template failed: {_named(error)}") from None
        finally:
            self._sandbox.stop()
        return "".join(chunks)

    def _fitted(self, message: Mapping[str, Any], image: str | None) -> dict[str, Any]:
        """Parts joined to one string, for templates that only support strings; images as text for
        those that write none."""
        content = message.get("content")
        if content is None and not _calls(message):
            # An answer of reasoning or a refusal alone, or an empty one: most templates would
            # write "None".
            return {**message, "content": message.get("refusal") or ""}
        if isinstance(content, (list, tuple)):
            known = self._reads_parts and "image" in self._words
            content = [_plain_part(part, None if known else image) for part in content]
        if isinstance(content, (list, tuple)) and self._reads_parts:
            return {**message, "content": content}
        if isinstance(content, str) or content is None:
            # In the caller's order, which templates that dump a message show.
            return {**message} if "content" in message else {**message, "content": None}
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _check_read(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        """:raises TemplateError: the conversation has parts that this template would ignore."""
        if tools and "tools" not in self._words:
            raise TemplateError(f"tools: {_NOT_READ} tools; describe them in a message instead")
        if self._words.isdisjoint({"tool_calls", "tojson", "items"}):  # the latter dump messages
            for index, message in enumerate(messages):
                if message.get("tool_calls"):
                    raise TemplateError(
                        f"messages[{index}].tool_calls: {_NOT_READ} them; write them as content"
                    )
        for index, message in enumerate(messages):
            if (meant := _meant_role(message["role"], self._words)) is not None:
                raise TemplateError(
                    f"messages[{index}].role: {safe_repr(message['role'])} is not a role that the "
                    f"chat template knows; did you mean {meant!r}?"
                )
        for name in kwargs:
            if name in _RESERVED or name.startswith("_"):
                raise TemplateError(f"{name} cannot be set by chat template arguments")
            known = (self._names - _RESERVED) | _WELL_KNOWN
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TemplateError(f"the chat template has no argument {safe_repr(name)}{hint}")


def check_conversation(
    messages: object,
    tools: object = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    images: bool = False,
) -> None:
    """:raises TemplateError: a part is not plain data, or the conversation is too large."""
    data = _PlainData()
    check_messages(messages, data, images=images)
    if tools is not None:
        data.check(tools, "tools", 0)
    for name, value in (kwargs or {}).items():
        data.check(value, name, 0)


def check_messages(
    messages: object, data: _PlainData | None = None, *, images: bool = False
) -> None:
    """``images``: there may be parts ``{"type": "image"}``.

    :raises TemplateError: ``messages`` is not a conversation of plain data.
    """
    data = data or _PlainData()
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        raise TemplateError(f"messages: expected a list of messages, found {found}")
    if not messages:
        raise TemplateError("messages: expected at least one message, found none")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise TemplateError(f"{where}: expected a dict, found {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise TemplateError(f"{where}: expected a role (a string), found {safe_repr(role)}")
        _check_content(message, where, images)
        data.check(message, where, 0)


def _calls(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in ("tool_calls", "function_call"))


def _plain_part(part: Mapping[str, Any], image: str | None) -> dict[str, str]:
    """A part of a content as templates know it."""
    if part["type"] == "image":
        return {"type": "image"} if image is None else {"type": "text", "text": image}
    return {"type": "text", "text": part[part["type"]]}


def _check_content(message: Mapping[str, Any], where: str, images: bool) -> None:
    content = message.get("content")
    if content is None:
        if _calls(message) or message.get("role") == "assistant":  # what an answer looks like
            return
        raise TemplateError(f"{where}: expected content (a string or text parts), found none")
    if isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        kind = type(content).__name__
        raise TemplateError(f"{where}.content: expected a string or a list of parts, found {kind}")
    for number, part in enumerate(content):
        found = part.get("type") if isinstance(part, Mapping) else None
        if images and part == {"type": "image"}:
            continue
        known = ("text", "refusal") if message.get("role") == "assistant" else ("text",)
        if found not in known or not isinstance(part.get(found), str):
            shape = f"type {safe_repr(found)}" if found else type(part).__name__
            media = "audio and files" if images else "images, audio and files"
            only = "" if found in (None, "text") else f" ({media} are not supported)"
            expected = '{"type": "text", "text": ...}'
            raise TemplateError(
                f"{where}.content[{number}]: expected {expected}, found {shape}{only}"
            )


class _PlainData:
    """Checks that a template gets only data that JSON can hold, no objects with methods.

    It also counts values: nested lists that share one list may hold more than memory can.
    """

    def __init__(self) -> None:
        self._values = MAX_VALUES
        self._characters = MAX_CHARACTERS

    def check(self, value: object, where: str, depth: int) -> None:
        """:raises TemplateError: not plain data; names the first such position after ``where``."""
        if depth > MAX_DEPTH:
            raise TemplateError(f"{where}: nested more than {MAX_DEPTH} deep")
        self._values -= 1
        if self._values < 0:
            raise TemplateError(f"{where}: more than {MAX_VALUES} values in one conversation")
        if type(value) is str:
            self._count(value, where)
        elif type(value) is dict:
            for key, item in value.items():
                if type(key) is not str:
                    kind = type(key).__name__
                    raise TemplateError(f"{where}: expected string keys, found {kind}")
                self._count(key, where)
                self.check(item, f"{where}.{key[:40]}", depth + 1)
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):  # type: ignore[arg-type]
                self.check(item, f"{where}[{index}]", depth + 1)
        elif type(value) is int:
            if value.bit_length() > _MAX_INTEGER_BITS:
                raise TemplateError(f"{where}: expected a shorter number, found {safe_repr(value)}")
        elif value is not None and type(value) not in (float, bool):
            raise TemplateError(f"{where}: expected plain data, found {type(value).__name__}")

    def _count(self, text: str, where: str) -> None:
        self._characters -= len(text)
        if self._characters < 0:
            raise TemplateError(
                f"{where}: more than {MAX_CHARACTERS} characters in one conversation"
            )


def _meant_role(role: str, known: Container[str]) -> str | None:
    """The role that was meant, if it is misspelt or another library's name for it.

    A template writes most roles as they are, so that ``usr`` would become a turn of nobody. Roles
    that a template names, and those that look like no other, are left alone.
    """
    if role in _ROLES or role in known:
        return None
    plain = role.strip().lower()
    if plain in _OTHER_ROLES:
        return _OTHER_ROLES[plain]
    near = difflib.get_close_matches(plain, _ROLES, n=1, cutoff=0.75)
    return near[0] if near else None


def _raise_exception(message: str) -> None:
    raise TemplateError(f"chat template: {message}")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _words(tree: Any) -> frozenset[str]:
    """Names, attributes, filters and string constants of a template: everything it can read from a
    conversation."""
    from jinja2 import nodes

    names = {node.name for node in tree.find_all((nodes.Name, nodes.Filter))}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(names | attributes | texts)


def _iterates_content(tree: Any) -> bool:
    """Whether a template loops over a message's content, i.e. supports a list of parts."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        over = loop.iter
        while isinstance(over, nodes.Filter):
            over = over.node
        if isinstance(over, nodes.Getattr):
            name: object = over.attr
        elif isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Const):
            name = over.arg.value
        else:
            name = getattr(over, "name", None)
        if name in ("content", "contents"):
            return True
    return False


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with ``mark`` and a space after its text.

    The space shows whether the template strips the text (transformers does the same).
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{mark} "}
    if not content or content[-1]["type"] == "image":
        raise TemplateError("continue_final_message: the last message has no text to continue")
    *others, last = content
    text = f"{last[last['type']]}{mark} "
    return {**message, "content": [*others, {"type": "text", "text": text}]}


def _cut_at(text: str, mark: str, message: Mapping[str, Any]) -> str:
    """The rendered ``text`` up to the end of its last message, which was marked."""
    content = message["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    end = text.rfind(mark)
    if end < 0 or last.rpartition(mark)[0].strip() not in text:
        raise TemplateError(
            "continue_final_message: the chat template changes the last message or leaves it out, "
            "so it cannot be continued; shorten the message to the part that the template keeps"
        )
    kept = text[:end]
    return kept if text.startswith(f"{mark} ", end) else kept.rstrip()


#: The last private-use characters of Unicode: unlikely in any text, and checked to be absent.
_CANDIDATES = tuple(chr(point) for point in range(0x10FFFD, 0x10FFBD, -1))


def unused_character(texts: Sequence[str]) -> str:
    """A private-use character that is in none of ``texts``."""
    for candidate in _CANDIDATES:
        if not any(candidate in text for text in texts):
            return candidate
    raise TemplateError(
        "messages: expected some unused private-use character from U+10FFBE to U+10FFFD, "
        "found all of them in use"
    )


class ControlTextGuard:
    """Finds control tokens spelled in messages and breaks them up with a private-use character.

    A complete spelling is broken up. Because a template may concatenate two texts, so is the first
    part of a spelling at the end of a text, and the last part at its beginning.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        known = [text for text in spellings if len(text) > 1]
        self._known = frozenset(known)
        self._with: dict[str, ControlTextGuard] = {}
        self._splitter = SpecialSplitter(dict.fromkeys(known, 0))
        # Parts count only at a bracket or the like: a role that ends in a letter is not changed.
        opening = [text for text in known if not text[0].isalnum()]
        closing = [text for text in known if not text[-1].isalnum()]
        self._heads = {text[:length] for text in opening for length in range(1, len(text))}
        self._tails = {text[length:] for text in closing for length in range(1, len(text))}
        self._longest = max(map(len, known), default=1)

    def with_spelling(self, text: str) -> ControlTextGuard:
        """The same, which also breaks up ``text``."""
        if text in self._known:
            return self
        if text not in self._with:
            self._with[text] = ControlTextGuard([*self._known, text])
        return self._with[text]

    def choose_breaker(self, values: object, template: str) -> str | None:
        """A character that occurs nowhere, or None if there is nothing to break up."""
        texts = list(_texts(values))
        if not any(map(self._must_break, texts)):
            return None
        return unused_character([*texts, template])

    def break_up(self, values: Any, breaker: str) -> Any:
        """``values`` with the breaker in every spelling, in strings and keys at any depth."""
        if isinstance(values, str):
            return self._broken(values, breaker)
        if isinstance(values, Mapping):
            return {
                self._inside(key, breaker): self.break_up(item, breaker)
                for key, item in values.items()
            }
        if isinstance(values, (list, tuple)):
            return [self.break_up(item, breaker) for item in values]
        return values

    def _broken(self, text: str, breaker: str) -> str:
        broken = self._inside(text, breaker)
        reach = range(1, min(self._longest, len(text) + 1))
        if any(text[-length:] in self._heads for length in reach):
            broken += breaker
        if any(text[:length] in self._tails for length in reach):
            broken = breaker + broken
        return broken

    def _must_break(self, text: str) -> bool:
        spelled = next(self._splitter.find(text), None) is not None
        return spelled or self._broken(text, "\0") != text

    def _inside(self, text: str, breaker: str) -> str:
        """``text`` with a breaker after the first character of each spelling."""
        while starts := [start for start, _, _ in self._splitter.find(text)]:
            cuts = [0, *(start + 1 for start in starts), len(text)]
            text = breaker.join(text[i:j] for i, j in pairwise(cuts))
        return text


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, item in values.items():
            yield key
            yield from _texts(item)
    elif isinstance(values, (list, tuple)):
        for item in values:
            yield from _texts(item)
