"""What to write instead of a name that a call does not have: one line, with the right call.

Imported when such a name is met; ``names_keywords`` adds 0.3 us to a call.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from sdk.api.other_names import ATTRIBUTES, CALLS, ENGINE, SAMPLING
from sdk.quant.safe_repr import safe_repr

#: Methods with sampling parameters whose other keywords are those of conversations.
_STREAMS = ("stream", "astream", "generate", "enqueue", "as_completed", "estimate")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def names_keywords(method: _Method) -> _Method:
    """Make a method without ``**kwargs`` say what to write instead of an unknown keyword.

    Type checkers and ``inspect.signature`` see the method as it is.
    """
    known = frozenset(inspect.signature(method).parameters)
    name = method.__name__

    def check(given: Mapping[str, Any]) -> None:
        for keyword in given:
            if keyword not in known:
                raise unknown_keyword(name, keyword, given[keyword], known)

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def acall(*args: Any, **given: Any) -> Any:
            check(given)
            return await method(*args, **given)

        return acall  # type: ignore[return-value]

    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        check(given)
        return method(*args, **given)

    return call  # type: ignore[return-value]


def unknown_keyword(method: str, name: str, value: object, known: Iterable[str]) -> TypeError:
    """The error of a call of ``LLM.<method>(..., name=value)``. ``known``: its keywords."""
    text = f"{method}() got an unexpected keyword argument {name!r}"
    chat = "chat" in method or "tools" in method
    if (hint := CALLS.get(name)) is not None:
        return TypeError(f"{text}: {hint}")
    samples = chat or "sampling_params" in known or method in _STREAMS
    if not samples and (name in _sampling_fields() or name in SAMPLING):
        return TypeError(f"{text}: it generates no text, so it has no sampling parameters")
    if name in _sampling_fields():
        shown = f"SamplingParams({name}={safe_repr(value)})"
        return TypeError(f"{text}: pass it as {method}(..., {shown})")
    if name in SAMPLING:
        return TypeError(f"{text}: {SAMPLING[name]}, in {method}(..., SamplingParams(...))")
    if (option := _engine_hint(name)) is not None:
        return TypeError(f"{text}: {option}")
    if name in _chat_fields() and not chat:
        return TypeError(f"{text}: it applies to conversations, which chat() takes")
    others = sorted(name for name in known if name not in ("self", "template"))
    near = difflib.get_close_matches(name, [*others, *_sampling_fields()], n=1, cutoff=0.6)
    if near and near[0] not in others and samples:
        return TypeError(f"{text}; did you mean SamplingParams({near[0]}=...)?")
    hint = f"did you mean {near[0]!r}? " if near and near[0] in others else ""
    return TypeError(f"{text}; {hint}it takes {', '.join(others)}")


def unknown_parameter(name: str, known: Iterable[str]) -> TypeError:
    """The error of ``SamplingParams(name=...)``."""
    text = f"SamplingParams has no parameter {name!r}"
    if name in SAMPLING:
        return TypeError(f"{text}: {SAMPLING[name]}")
    if name in CALLS:
        return TypeError(f"{text}: {CALLS[name]}")
    if (option := _engine_hint(name)) is not None:
        return TypeError(f"{text}: {option}")
    if name in _chat_fields() or name in ("returns", "lora_request", "use_tqdm"):
        return TypeError(f"{text}: it is a keyword of the call, such as chat(..., {name}=...)")
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return TypeError(text + (f"; did you mean {near[0]!r}?" if near else ""))


def option_of_a_call(name: str, value: object) -> str | None:
    """What to write instead of ``LLM(..., name=value)`` if ``name`` belongs to a call."""
    field = name if name in _sampling_fields() else None
    if field is not None:
        shown = f"{field}={safe_repr(value)}"
        return (
            f"it is a parameter of a call: llm.generate(prompts, SamplingParams({shown})), or for "
            f"calls without parameters LLM(..., override_generation_config={{{field!r}: "
            f"{safe_repr(value)}}})"
        )
    if name in SAMPLING:
        return f"it is a parameter of a call, SamplingParams(...): {SAMPLING[name]}"
    if name in _chat_fields() or name in ("returns", "lora_request"):
        return f"it is a keyword of a call: llm.chat(messages, {name}=...)"
    return None


def no_attribute(owner: object, name: str) -> NoReturn:
    """:raises AttributeError: always; says what ``owner`` calls it."""
    kind = type(owner).__name__
    hints = [ATTRIBUTES.get(one.__name__, {}).get(name) for one in type(owner).__mro__]
    hint = next(filter(None, hints), None)
    text = f"{kind!r} object has no attribute {name!r}"
    if hint is not None:
        text += f": {hint}"
    elif name[0] != "_" and (near := difflib.get_close_matches(name, dir(type(owner)), n=1)):
        text += f"; did you mean {near[0]!r}?"
    raise AttributeError(text, name=name, obj=owner)


def _sampling_fields() -> Iterable[str]:
    return _fields("sdk.api.params", "SamplingParams")


def _chat_fields() -> Iterable[str]:
    return _fields("sdk.requests.prompts.kinds", "ChatOptions")


def _fields(module: str, name: str) -> Iterable[str]:
    """The fields of a dataclass of ours, whose module imports this one."""
    found: dict[str, object] = getattr(import_module(module), name).__dataclass_fields__
    return found.keys()


def _engine_hint(name: str) -> str | None:
    if name in _fields("sdk.api.config", "EngineConfig"):
        return f"it is an option of the model, LLM(..., {name}=...)"
    known = ENGINE.get(name)
    if known is None or not known.here:
        return None
    return f"for the model, LLM(...), {known.here}"
