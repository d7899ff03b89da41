"""A Jinja environment in which a hostile template can neither reach Python nor exhaust resources.

jinja2's ``ImmutableSandboxedEnvironment`` prevents access to private attributes and mutation. It
does not stop nested loops, ``'a' * 10**8``, ``9 ** 9 ** 9``, ``'%99999999d' % 1``, a quadratic
``rfind``, strings doubled in a loop or lists nested until printing one takes forever. This
environment does:

* a template may only use listed statements and expressions (``syntax.py``) and listed
  methods, filters, tests and operators (``operations.py``); everything else is rejected by
  name;
* each operation is checked before it runs, so that no single one takes more than 0.1 s;
* the total is limited: operations, CPU time of the rendering thread, and bytes of all values
  (``budget.py``).

A separate process with system limits would need no lists. But this library starts no process unless
asked to, starting one takes longer (60 ms) than nearly every rendering (below 1 ms), and two of the
three systems that Python supports have no such limits.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from sdk.loaders.templates.budget import Budget, BudgetError
from sdk.loaders.templates.operations import (
    COMPARISONS,
    FILTERS,
    LAZY,
    METHODS,
    TESTS,
    check_binop,
    check_format,
    counted,
    each,
    listed,
    refuse,
    text_of,
)
from sdk.loaders.templates.syntax import Checkpoints, Compiler, Generation


class _Namespace(Namespace):  # type: ignore[misc]
    """jinja2's namespace, but printing it never prints its values."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise BudgetError("a namespace attribute with a leading underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Format:
    """``str.format`` of one text, as jinja2 wraps it."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self.text = text
        self.function = function


class TemplateSandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """The environment; use it between :meth:`start` and :meth:`stop`. One budget per thread."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    code_generator_class = Compiler

    def __init__(self, raise_exception: Callable[[str], None]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants folded by the compiler would bypass the budget
            extensions=[loopcontrols, Generation],
            finalize=self._printed,
        )
        self._local = threading.local()
        self._raise_exception = raise_exception
        known = {**DEFAULT_FILTERS, "tojson": _to_json}
        self.filters = {
            name: self._checked(check, known[name], name in LAZY)
            for name, check in FILTERS.items()
            if name in known
        }
        self.tests: dict[str, Any] = {
            name: self._checked(check, DEFAULT_TESTS[name])
            for name, check in TESTS.items()
            if name in DEFAULT_TESTS
        }
        self.tests["in"] = lambda value, seq: self.compared(value, "in", seq)
        functions: dict[str, Callable[..., Any]] = {
            "cycler": self._cycler,
            "dict": self._dict,
            "joiner": self._joiner,
            "namespace": _Namespace,
            "raise_exception": self._raise,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }
        self.globals = functions
        self._functions = frozenset(functions.values())

    @property
    def budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def start(self, num_messages: int = 0) -> None:
        """Begin a rendering in this thread with a new budget."""
        self._local.budget = Budget(num_messages)

    def stop(self) -> None:
        """Discard the budget, which keeps the values it has weighed alive."""
        del self._local.budget

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        tree = Checkpoints().visit(source)
        tree.set_environment(self)
        return super()._generate(tree, *args, **kwargs)

    # Called by the rewritten tree.

    def each(self, values: Any) -> Iterable[Any]:
        return each(self.budget, values)

    def joined(self, *values: Any) -> str:
        budget = self.budget
        parts = [text_of(budget, value) for value in values]
        budget.admit(sum(map(len, parts)))
        return budget.keep("".join(parts))

    def compared(self, left: Any, *steps: Any) -> Any:
        """``left op right``, or a chain; ``steps`` alternates operators and operands."""
        budget, result = self.budget, True
        for name, right in zip(steps[::2], steps[1::2], strict=True):
            check, operation = COMPARISONS[name]
            budget.spend()
            use = check(budget, left, right)
            result = operation(left, right if use is None else use)
            if not result:
                break
            left = right
        return result

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.budget.spend(len(value) if hasattr(value, "__len__") else 0)
        return self.budget.keep(value[start:stop:step])

    def literal(self, value: Any) -> Any:
        self.budget.weigh(value)
        return self.budget.keep(value)

    def key(self, value: Any) -> Any:
        self.budget.weigh(value)  # hashing a tuple traverses it
        return value

    def unpacked(self, values: Any) -> Any:
        return listed(self.budget, values)

    # Called by jinja2.

    def concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.budget.admit(sum(map(len, parts)))
        return self.budget.keep("".join(parts))

    @pass_context  # type: ignore[untyped-decorator]
    def _printed(self, _: Context, value: Any) -> Any:
        # With the context as an argument, jinja2 cannot evaluate it at compile time.
        return text_of(self.budget, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget = self.budget
        budget.spend()
        if not isinstance(argument, (str, int)):
            budget.weigh(argument)  # it may be hashed, or printed in an error
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        function = super().wrap_str_format(value)
        return None if function is None else _Format(value.__self__, function)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.spend()
        if isinstance(function, Undefined):
            return function()  # raises with its name
        if isinstance(function, (Macro, LoopContext)):
            if isinstance(function, LoopContext) and args:
                args = (self.each(args[0]), *args[1:])
            budget.enter()
            try:
                return super().call(context, function, *args, **kwargs)
            finally:
                budget.calls -= 1
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if isinstance(function, _Format):
            check_format(budget, function.text, args, kwargs)
            return budget.keep(function.function(*args, **kwargs))
        if getattr(function, "__hash__", None) and function in self._functions:
            return budget.keep(function(*args, **kwargs))
        if isinstance(function, Joiner):
            return function()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, LoopContext):  # cycle, changed
            budget.weigh(*args)
            return function(*args, **kwargs)
        use = _method_check(owner, name)(budget, owner, *args, **kwargs)
        return budget.keep(function(*(args if use is None else use), **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        check_binop(budget, operator, left, right)
        result = budget.keep(super().call_binop(context, operator, left, right))
        if operator == "+" and isinstance(result, (list, tuple)):
            budget.add_up(result, left, right)
        return result

    # Functions of templates.

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.budget.weigh(*args)
        return dict(*(listed(self.budget, values) for values in args), **kwargs)

    def _cycler(self, *items: Any) -> Cycler:
        self.budget.weigh(*items)
        return Cycler(*items)

    def _joiner(self, sep: Any = ", ") -> Joiner:
        return Joiner(text_of(self.budget, sep))

    def _raise(self, message: Any) -> None:
        self._raise_exception(text_of(self.budget, message))

    def _checked(
        self, check: Callable[..., Any], function: Callable[..., Any], lazy: bool = False
    ) -> Callable[..., Any]:
        """A filter or test of jinja2 that runs its check first."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.spend()
            use = check(budget, *args[skip:], **kwargs)
            if use is not None:
                args = (*args[:skip], use, *args[skip + 1 :])
            result = function(*args, **kwargs)
            return budget.keep(iter(list(counted(budget, result))) if lazy else result)

        return checked


def _method_check(owner: Any, name: str) -> Callable[..., Any]:
    for kind, methods in METHODS.items():
        if isinstance(owner, kind) and name in methods:
            return methods[name]
    what = type(owner).__name__ if owner is not None else "value"
    raise refuse(f"calling {name or 'it'} of a {what}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise BudgetError("a date format with a width")
    return datetime.now().strftime(form)
