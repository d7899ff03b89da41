"""A Jinja environment in which a hostile template can neither reach Python nor use it up.

jinja2's ``ImmutableSandboxedEnvironment`` keeps templates away from attributes and mutation. It
does not stop nested loops, ``'a' * 10**8``, ``9 ** 9 ** 9``, ``'%99999999d' % 1``, strings doubled
in a loop or lists nested until printing one takes forever. This environment does, by three budgets
of one rendering:

* **fuel**: loop rounds, calls, filters, operators and printed expressions cost one unit each, large
  values one more per 4,096 characters handled;
* **CPU time of the rendering thread**, looked at every 32 units (CPU time, so that a busy machine
  does not make a good template fail);
* **characters made**, over all intermediate values; and a size limit for each single value, checked
  *before* the operation where the operation itself could explode.

Everything a template does must therefore pass a checkpoint: the syntax tree is rewritten so that
loops, ``~`` and list literals call the environment, operators are intercepted, filters come from a
list of harmless ones, and no constant is folded at compile time.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from sdk.loaders.template_budget import (
    ITEM_SIZE,
    MAX_INT_BITS,
    MAX_JSON_INDENT,
    MAX_WIDTH,
    Budget,
    BudgetError,
)

# fmt: off
_FILTERS = (
    "abs", "attr", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse",
    "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim",
    "truncate", "unique", "upper",
)
# Filters that look at the elements of a list one by one, or not at all.
_SHALLOW = frozenset({
    "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map", "max",
    "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique",
    "groupby",
})
# fmt: on
# Methods that make much out of little, or take quadratic time, and that no template needs.
_REFUSED_METHODS = frozenset(
    {"translate", "maketrans", "to_bytes", "from_bytes", "striptags", "unescape"}
)
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_FORMAT_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")


class _Namespace(Namespace):  # type: ignore[misc]
    """jinja2's, but printing it never descends into what it holds."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise BudgetError("a namespace attribute with a leading underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}...{% endgeneration %}`` marks training targets; here it is its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Checkpoints(NodeTransformer):  # type: ignore[misc]
    """Lets loops, ``~`` and literals of lists and dicts pass through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call("each", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._call("literal", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._call("literal", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._call("literal", [node], node) if node.ctx == "load" else node

    @staticmethod
    def _call(name: str, arguments: list[Any], at: nodes.Node) -> nodes.Node:
        function = nodes.EnvironmentAttribute(name)
        return nodes.Call(function, arguments, [], None, None, lineno=at.lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """The environment; use it within :meth:`rendering`. One budget per rendering thread."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, raise_exception: Callable[[str], None]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants folded while compiling would escape the budget
            extensions=[loopcontrols, _Generation],
            finalize=self._printed,
        )
        self._local = threading.local()
        known = {**DEFAULT_FILTERS, "tojson": _to_json}
        self.filters = {
            name: self._guarded(name, known[name]) for name in _FILTERS if name in known
        }
        self.tests: dict[str, Any] = {
            name: self._counted(test) for name, test in DEFAULT_TESTS.items()
        }
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = _strftime_now

    @property
    def budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def start(self) -> None:
        """Begin a rendering in this thread with a fresh budget."""
        self._local.budget = Budget()

    def stop(self) -> None:
        """Forget the budget, which holds on to the values it has weighed."""
        del self._local.budget

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        tree = _Checkpoints().visit(source)
        tree.set_environment(self)
        return super()._generate(tree, *args, **kwargs)

    # What the rewritten tree calls.

    def each(self, values: Any) -> Iterator[Any]:
        spend = self.budget.spend
        for value in values:
            spend()
            yield value

    def joined(self, *values: Any) -> str:
        parts = [self._text(value) for value in values]
        self.budget.admit(sum(map(len, parts)))
        return "".join(parts)

    def literal(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    # What jinja2 calls.

    def concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.budget.admit(sum(map(len, parts)))
        return "".join(parts)

    @pass_context  # type: ignore[untyped-decorator]
    def _printed(self, _: Context, value: Any) -> Any:
        # With the context as an argument jinja2 cannot evaluate it while compiling.
        return self._text(value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        owner = getattr(function, "__self__", None)
        if owner is self:
            return function(*args)  # kwargs are jinja2's own, _loop_vars and _block_vars
        if isinstance(owner, (str, bytes, int)):
            args = self._checked_method(owner, function.__name__, args, kwargs)
        formatted = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        if isinstance(formatted, str):
            own = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            self._check_format(formatted, args, own)
        result = super().call(context, function, *args, **kwargs)
        return self._made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        if operator == "*":
            budget.admit(_product_size(left, right))
        elif operator == "**":
            integers = isinstance(left, int) and isinstance(right, int)
            if integers and max(left.bit_length(), 1) * abs(right) > MAX_INT_BITS:
                raise BudgetError(f"an integer of more than {MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_percent(left, right)
        elif isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
            budget.admit(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (list, tuple)) and operator == "+":
            budget.admit(len(result))
            budget.remember(result, budget.weigh(left) + budget.weigh(right))
        elif isinstance(result, (list, tuple, int)):
            budget.weigh(result)
        return result

    # Checks.

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.budget.weigh(value)
        text = str(value)
        self.budget.spend(len(text))
        return text

    def _made(self, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            self.budget.admit(len(value))
        elif isinstance(value, int):
            self.budget.weigh(value)
        elif isinstance(value, (list, tuple, dict)):
            self.budget.admit(len(value) * ITEM_SIZE)
        return value

    def _checked_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Arguments of a method of a str, bytes or int that cannot make it explode."""
        if name in _REFUSED_METHODS:
            raise BudgetError(f"the method {name} is not available")
        _check_widths(args, kwargs)
        if name == "replace" and len(args) >= 2:
            self.budget.admit(_replaced_size(owner, args[0], args[1]))
        elif name == "expandtabs":
            self.budget.admit(len(owner) + owner.count("\t") * (args[0] if args else 8))
        elif name == "join" and args:
            parts = list(args[0])
            self.budget.admit(self.budget.weigh(parts) + len(owner) * len(parts))
            return (parts,)
        return args

    def _check_format(
        self, template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if _FORMAT_FIELD.search(template):
            raise BudgetError("a format field with a nested or very large width")
        fields = template.count("{")
        self.budget.admit(
            len(template)
            + fields * (self.budget.weigh(args) + self.budget.weigh(kwargs))
            + fields * 9999
        )

    def _check_percent(self, template: Any, values: Any) -> None:
        text = template.decode("latin-1") if isinstance(template, bytes) else template
        size = len(text)
        for width, precision in _CONVERSION.findall(text):
            if "*" in (width, precision):
                raise BudgetError("a format width taken from the arguments")
            if max(len(width), len(precision)) > 5:
                raise BudgetError(f"a format width of more than {MAX_WIDTH}")
            size += int(width or 0) + int(precision or 0) + self.budget.weigh(values)
        self.budget.admit(size)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend()
            value, rest = args[skip], args[skip + 1 :]
            if name not in ("default", "d"):
                _check_widths(rest, kwargs)
            self._check_filter(name, value, rest, kwargs)
            return self._made(function(*args, **kwargs))

        return guarded

    def _counted(self, test: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(test)
        def counted(*args: Any, **kwargs: Any) -> Any:
            sizes = (len(value) for value in args if isinstance(value, (str, list, tuple, dict)))
            self.budget.spend(sum(sizes) * ITEM_SIZE)
            return test(*args, **kwargs)

        return counted

    def _check_filter(
        self, name: str, value: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """What a filter would make, where that can be far more than it was given."""
        given = dict(zip(_PARAMETERS.get(name, ()), rest, strict=False))
        given.update(kwargs)
        if name not in _SHALLOW and not isinstance(value, str):
            self.budget.weigh(value)
        if name == "replace":
            self.budget.admit(_replaced_size(self._text(value), given.get("old"), given.get("new")))
        elif name == "indent":
            width = given.get("width", 4)
            lines = self._text(value).count("\n") + 1
            self.budget.admit(lines * (width if isinstance(width, int) else len(str(width))))
        elif name == "format":
            self._check_percent(self._text(value), (rest, kwargs))
        elif name in ("int", "float") and isinstance(value, str) and len(value) > MAX_INT_BITS:
            raise BudgetError(f"a number of {len(value)} digits")
        elif name == "sum" and not isinstance(given.get("start", 0), (int, float)):
            raise BudgetError("sum works on numbers only")
        elif name == "tojson" and isinstance(given.get("indent"), int):
            if given["indent"] > MAX_JSON_INDENT:
                raise BudgetError(f"tojson with an indent of more than {MAX_JSON_INDENT}")
        elif name == "join":
            glue = given.get("d", "")
            if hasattr(value, "__len__"):
                self.budget.admit(len(value) * len(str(glue)))


_PARAMETERS = {
    "replace": ("old", "new", "count"),
    "indent": ("width", "first", "blank"),
    "sum": ("attribute", "start"),
    "tojson": ("ensure_ascii", "indent"),
    "join": ("d", "attribute"),
}


def _check_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise BudgetError(f"an argument of more than {MAX_WIDTH}")


def _product_size(left: Any, right: Any) -> int:
    """Size of ``left * right``: bits for integers are refused here, sequences are measured."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise BudgetError(f"an integer of more than {MAX_INT_BITS} bits")
        return 0
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(sequence, "__len__"):
            size = len(sequence) * max(times, 0)
            return size if isinstance(sequence, (str, bytes)) else size * ITEM_SIZE
    return 0


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    kinds = {type(part) for part in (text, old, new)} - {Markup}
    if kinds != {str} and kinds != {bytes}:
        return 0  # the call itself will complain
    return len(text) + int(text.count(old)) * len(new)


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
