"""The operations a chat template may use, and the limits of each.

Every method, filter, test and operator that a template may use is in one of these tables with a
*check*. The check gets the operands before the operation runs, under the operation's parameter
names, and raises :class:`BudgetError` if the operation would take too long or too much memory: no
call into Python's C code takes more than about 0.1 s or creates more than about 100 MB. Operations
that are in no table are rejected by name.

A check returns nothing, or an operand to use instead: iterators become lists first, because the
cost of something without a length cannot be bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2.runtime import Undefined
from jinja2.utils import Cycler
from markupsafe import Markup

from sdk.loaders.templates.budget import (
    ITEM_SIZE,
    MAX_INT_BITS,
    MAX_JSON_INDENT,
    MAX_VALUE,
    MAX_WIDTH,
    VIEWS,
    Budget,
    BudgetError,
)

Check = Callable[..., Any]

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES = " \t\x1f\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.)", re.DOTALL)
MAX_PRINTED = MAX_VALUE // 4  # with escapes, a character may become ten
_MOST_WRAPPED, _MOST_PRETTY = 8192, 16_384
_FORMAT_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")
_NUMBERS = (int, float, complex)
_ITERATORS = (type(iter([0])), type(reversed([0])))
_LOOPED = (list, tuple, dict, range, Undefined, *VIEWS, *_ITERATORS)


def refuse(what: str) -> BudgetError:
    return BudgetError(f"{what}, which is not available in chat templates")


# -- Text


def text_of(budget: Budget, value: Any) -> str:
    """``str(value)``, for values that a template may print."""
    if type(value) is str:
        budget.spend(len(value))
        return value
    if isinstance(value, Undefined):
        return str(value)
    if isinstance(value, _ITERATORS) or callable(value):
        raise refuse(f"printing a {type(value).__name__}")
    weight = budget.weigh(value)
    if weight > MAX_PRINTED and not isinstance(value, str):
        raise BudgetError(f"printing a list or dict of more than {MAX_PRINTED} characters")
    budget.spend(weight)
    return budget.keep(str(value))


def _scan(budget: Budget, text: str, *args: Any, **_: Any) -> None:
    budget.spend(len(text) + budget.weigh(*args))


def _copy(budget: Budget, text: str) -> None:
    budget.admit(len(text))


def _search(budget: Budget, text: str, part: Any, *_: Any) -> None:
    budget.search(text, part)


def _search_back(budget: Budget, text: str, part: Any, *_: Any) -> None:
    budget.search_back(text, part)


def _strip(budget: Budget, text: str, chars: Any = None) -> None:
    budget.admit(len(text))
    budget.search_back(text, chars)


def _fill(budget: Budget, text: str, width: Any = 0, *_: Any) -> None:
    _check_widths(width)
    budget.admit(max(len(text), width if isinstance(width, int) else 0))


def _tabs(budget: Budget, text: str, tabsize: Any = 8) -> None:
    _check_widths(tabsize)
    budget.admit(len(text) + text.count("\t") * (tabsize if isinstance(tabsize, int) else 0))


def _split(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    if sep is None:
        cuts = sum(map(text.count, _SPACES + _LINE_ENDS)) if len(text) > MAX_WIDTH else len(text)
    elif isinstance(sep, str) and sep:
        budget.search(text, sep)
        cuts = text.count(sep)
    else:
        return  # the call itself raises
    if isinstance(maxsplit, int) and 0 <= maxsplit < cuts:
        cuts = maxsplit
    budget.keep_pieces(text, cuts + 1)


def _rsplit(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    budget.search_back(text, sep)
    _split(budget, text, sep, maxsplit)


def _lines(budget: Budget, text: str, keepends: Any = False) -> None:
    budget.keep_pieces(text, _count_lines(text))


def _count_lines(text: str) -> int:
    return 1 + sum(map(text.count, _LINE_ENDS))


def _replace(budget: Budget, text: str, old: Any, new: Any, count: Any = None) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.search(text, old)
        more = len(_unescaped(text, new)) - len(old)
        budget.admit(len(text) + max(0, text.count(old) * more))


def _unescaped(owner: str, text: str) -> str:
    """``text`` as used in an operation with ``owner``, to know its length."""
    if isinstance(owner, Markup) and not isinstance(text, Markup):
        return text + " " * (_escaped_size(text) - len(text))
    return text


def _escaped_size(text: str) -> int:
    return len(text) + 4 * sum(map(text.count, "&<>'\""))


def _join(budget: Budget, glue: str, parts: Any) -> Any:
    parts = listed(budget, parts)
    size = budget.weigh(parts) + len(glue) * len(parts)
    budget.admit(size if not isinstance(glue, Markup) else 5 * size)
    return (parts,)


def check_format(budget: Budget, template: str, args: Any, kwargs: Any) -> None:
    """``str.format``: the size of a field is bounded by its width and value."""
    if _FORMAT_FIELD.search(template):
        raise BudgetError("a format field with a nested or very large width")
    values = budget.weigh(*args, *kwargs.values())
    budget.admit(len(template) + template.count("{") * (values + 9999))


def _percent(budget: Budget, template: str, values: Any) -> None:
    weight = budget.weigh(values)
    size = len(template) + weight
    for width, precision, kind in _CONVERSION.findall(template):
        if "*" in (width, precision):
            raise BudgetError("a format width taken from the arguments")
        if max(len(width), len(precision)) > 5:
            raise BudgetError(f"a format width of more than {MAX_WIDTH}")
        size += int(width or 0) + int(precision or 0)
        if isinstance(values, dict) or kind in "ra":  # may print ten characters for one
            size += weight * (10 if kind in "ra" else 1)
    budget.admit(size if not isinstance(template, Markup) else 5 * size)


# -- Lists and numbers


def listed(budget: Budget, values: Any) -> Any:
    """``values`` with a length; only for types that a template can create."""
    if isinstance(values, _ITERATORS):
        return budget.keep(list(counted(budget, values)))
    if isinstance(values, str):
        budget.admit_items(len(values))
    elif hasattr(values, "__len__"):
        budget.spend(len(values))
    return values


def each(budget: Budget, values: Any) -> Iterator[Any]:
    """The elements of a loop."""
    if isinstance(values, str):
        budget.admit_items(len(values))
    elif hasattr(values, "__iter__") and not isinstance(values, _LOOPED):
        raise refuse(f"looping over a {type(values).__name__}")
    return counted(budget, values)


def counted(budget: Budget, values: Iterable[Any]) -> Iterator[Any]:
    """``iter(values)``, which counts each element as an operation."""
    spend = budget.spend
    for value in values:
        spend()
        yield value


def _look_up(budget: Budget, owner: Any, *args: Any) -> None:
    budget.spend(budget.weigh(owner, *args))


def _cheap(budget: Budget, *args: Any, **kwargs: Any) -> None:
    budget.weigh(*args[1:], *kwargs.values())


def _whole(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on all elements of a list; at worst it sorts them."""
    values = listed(budget, value)
    weight = budget.weigh(values)
    budget.weigh(*args, *kwargs.values())
    budget.spend(weight * 18)  # log2 of the largest number of elements
    return values


def _elements(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    budget.weigh(*args, *kwargs.values())
    return listed(budget, value)


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise BudgetError(f"an argument of more than {MAX_WIDTH}")


METHODS: dict[type, dict[str, Check]] = {
    str: {
        **dict.fromkeys(
            ("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
            _copy,
        ),
        **{f"is{kind}": _scan for kind in ("alnum", "alpha", "ascii", "decimal", "digit")},
        **{f"is{kind}": _scan for kind in ("lower", "numeric", "space", "title", "upper")},
        **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _scan),
        **dict.fromkeys(("count", "find", "index", "partition"), _search),
        **dict.fromkeys(("rfind", "rindex", "rpartition"), _search_back),
        **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _fill),
        "expandtabs": _tabs,
        "split": _split,
        "rsplit": _rsplit,
        "splitlines": _lines,
        "replace": _replace,
        "join": _join,
    },
    list: {"count": _look_up, "index": _look_up},
    tuple: {"count": _look_up, "index": _look_up},
    Cycler: {"next": _cheap, "reset": _cheap},
    dict: {"get": _cheap, "items": _cheap, "keys": _cheap, "values": _cheap, "copy": _look_up},
}


# -- Filters: their operand first, then their parameters by jinja2's names


def _text_filter(budget: Budget, value: Any) -> None:
    budget.admit(len(text_of(budget, value)))


def _escape_filter(budget: Budget, value: Any) -> None:
    budget.admit(_escaped_size(text_of(budget, value)))


def _title_filter(budget: Budget, s: Any) -> None:
    budget.admit_items(len(text_of(budget, s)))  # jinja2 cuts it into words


def _trim_filter(budget: Budget, value: Any, chars: Any = None) -> None:
    _strip(budget, text_of(budget, value), chars)


def _center_filter(budget: Budget, value: Any, width: Any = 80) -> None:
    _fill(budget, text_of(budget, value), width)


def _replace_filter(budget: Budget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    _replace(budget, text_of(budget, s), text_of(budget, old), text_of(budget, new))


def _indent_filter(
    budget: Budget, s: Any, width: Any = 4, first: Any = False, blank: Any = False
) -> None:
    _check_widths(width)
    text = text_of(budget, s)
    lines = _count_lines(text)
    budget.keep_pieces(text, lines)
    budget.admit(len(text) + lines * (width if isinstance(width, int) else len(str(width))))


def _truncate_filter(
    budget: Budget,
    s: Any,
    length: Any = 255,
    killwords: Any = False,
    end: Any = "...",
    leeway: Any = None,
) -> None:
    _check_widths(length, leeway)
    budget.admit(len(text_of(budget, s)) + len(text_of(budget, end)))


def _join_filter(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> Any:
    values = listed(budget, value)
    count = len(values) if hasattr(values, "__len__") else 0
    budget.admit(budget.weigh(values) + count * len(text_of(budget, d)))
    return values


def _json_filter(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    if isinstance(indent, int) and indent > MAX_JSON_INDENT:
        raise BudgetError(f"tojson with an indent of more than {MAX_JSON_INDENT}")
    weight, height = budget.measure(value)
    if weight > MAX_VALUE // 2:
        raise BudgetError(f"tojson of more than {MAX_VALUE // 2} characters")
    margin = indent if isinstance(indent, int) else len(text_of(budget, indent or ""))
    per_item = margin * (height + 1) + budget.weigh(*(separators or ()))
    budget.admit(weight + weight // ITEM_SIZE * per_item)


def _digits_filter(
    budget: Budget, value: Any, default: Any = 0, base: Any = 10, binary: Any = False
) -> None:
    if isinstance(value, str) and len(value) > MAX_INT_BITS:
        raise BudgetError(f"a number of {len(value)} digits")


def _round_filter(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > 400:
        raise BudgetError(f"round to {precision} places")


def _format_filter(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    _percent(budget, text_of(budget, value), kwargs or args)


def _sum_filter(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, _NUMBERS):
        raise BudgetError("sum works on numbers only")
    return listed(budget, iterable)


def _number(budget: Budget, value: Any, *args: Any) -> None:
    for operand in (value, *args):
        if not isinstance(operand, (*_NUMBERS, Undefined)):
            raise BudgetError(f"arithmetic with a {type(operand).__name__}")
        budget.weigh(operand)


def _batch_filter(budget: Budget, value: Any, linecount: Any, fill_with: Any = None) -> Any:
    _check_widths(linecount)
    budget.weigh(fill_with)
    values = listed(budget, value)
    size = len(values) if hasattr(values, "__len__") else 0
    budget.admit_items(size + (linecount if isinstance(linecount, int) else 0))
    return values


def _words_filter(budget: Budget, s: Any) -> None:
    budget.admit_items(len(text_of(budget, s)) // 2)  # jinja2 lists them


def _wrap_filter(
    budget: Budget,
    s: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> None:
    """Python's ``textwrap`` is quadratic in runs of spaces: 8,192 take 0.1 s."""
    text = text_of(budget, s)
    if len(text) > _MOST_WRAPPED:
        raise BudgetError(f"wordwrap of more than {_MOST_WRAPPED} characters")
    budget.admit(len(text) * (1 + len(text_of(budget, wrapstring or ""))))


def _tags_filter(budget: Budget, value: Any) -> None:
    text = text_of(budget, value)
    budget.search_back(text, "<" * text.count("<"))  # each tag copies the rest
    budget.admit(len(text))


def _url_filter(budget: Budget, value: Any) -> None:
    budget.admit(12 * budget.weigh(value))  # %XX for each byte


def _attributes_filter(budget: Budget, d: Any, autospace: Any = True) -> None:
    budget.admit(6 * budget.weigh(d))


def _print_filter(budget: Budget, value: Any) -> None:
    weight = budget.weigh(value)
    if weight > _MOST_PRETTY:
        raise BudgetError(f"pprint of more than {_MOST_PRETTY} characters")
    if callable(value) or isinstance(value, _ITERATORS):
        raise refuse(f"printing a {type(value).__name__}")
    budget.admit(10 * weight)


#: Those of jinja2 that are missing: ``random`` (the same conversation would get other answers) and
#: ``urlize`` (searches text for links with slow patterns, to write HTML).
FILTERS: dict[str, Check] = {
    **dict.fromkeys(("attr", "count", "d", "default", "first", "items", "last", "length"), _cheap),
    **dict.fromkeys(("capitalize", "lower", "safe", "string", "upper"), _text_filter),
    **dict.fromkeys(("e", "escape", "forceescape"), _escape_filter),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _elements),
    **dict.fromkeys(("list", "reverse"), _elements),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _whole),
    **dict.fromkeys(("batch", "slice"), _batch_filter),
    "abs": _number,
    "center": _center_filter,
    "filesizeformat": _digits_filter,
    "float": _digits_filter,
    "format": _format_filter,
    "indent": _indent_filter,
    "int": _digits_filter,
    "join": _join_filter,
    "pprint": _print_filter,
    "replace": _replace_filter,
    "round": _round_filter,
    "striptags": _tags_filter,
    "sum": _sum_filter,
    "title": _title_filter,
    "tojson": _json_filter,
    "trim": _trim_filter,
    "truncate": _truncate_filter,
    "urlencode": _url_filter,
    "wordcount": _words_filter,
    "wordwrap": _wrap_filter,
    "xmlattr": _attributes_filter,
}
#: Filters whose result jinja2 computes lazily, element by element. Here it is computed at once,
#: because a chain of 100,000 unfinished iterators would overflow the C stack.
LAZY = ("map", "reject", "rejectattr", "select", "selectattr", "items", "batch", "slice")


# -- Comparisons and tests


def _compare(budget: Budget, left: Any, right: Any) -> None:
    if not (isinstance(left, _SCALARS) or isinstance(right, _SCALARS)):
        budget.spend(min(budget.weigh(left), budget.weigh(right)))
    elif isinstance(left, str) and isinstance(right, str):
        budget.spend(min(len(left), len(right)))


_SCALARS = (str, int, float, complex, type(None))


def _is_in(budget: Budget, value: Any, seq: Any) -> Any:
    if isinstance(seq, str):
        budget.search(seq, value)
        return None
    values = listed(budget, seq)
    if not isinstance(value, _SCALARS):
        budget.weigh(value)  # its hash and comparisons may traverse it
    budget.spend(0 if isinstance(seq, dict) else budget.weigh(values))
    return values


TESTS: dict[str, Check] = {
    **dict.fromkeys(("boolean", "callable", "defined", "escaped", "false", "filter"), _cheap),
    **dict.fromkeys(("float", "integer", "iterable", "mapping", "none", "number"), _cheap),
    **dict.fromkeys(("sameas", "sequence", "string", "test", "true", "undefined"), _cheap),
    **dict.fromkeys(("lower", "upper"), _text_filter),
    **dict.fromkeys(("divisibleby", "even", "odd"), _number),
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne"), _compare),
    **dict.fromkeys((">", "gt", "greaterthan", "ge", ">="), _compare),
    **dict.fromkeys(("<", "lt", "lessthan", "<=", "le"), _compare),
    "in": _is_in,
}
#: By jinja2's names for the operators.
COMPARISONS: dict[str, tuple[Check, Callable[[Any, Any], Any]]] = {
    "eq": (_compare, lambda left, right: left == right),
    "ne": (_compare, lambda left, right: left != right),
    "gt": (_compare, lambda left, right: left > right),
    "gteq": (_compare, lambda left, right: left >= right),
    "lt": (_compare, lambda left, right: left < right),
    "lteq": (_compare, lambda left, right: left <= right),
    "in": (_is_in, lambda left, right: left in right),
    "notin": (_is_in, lambda left, right: left not in right),
}


# -- Arithmetic

_OPERANDS = (str, *_NUMBERS, list, tuple, dict, range, Undefined, type(None))


def check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """:raises BudgetError: the result of ``left operator right`` would be too large."""
    for operand in (left, right):
        if not isinstance(operand, _OPERANDS):
            raise refuse(f"{operator!r} with a {type(operand).__name__}")
    if operator == "%" and isinstance(left, str):
        _percent(budget, left, right)
    elif isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(budget, operator, left, right)
        budget.spend()
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, str):
                budget.admit(len(sequence) * max(times, 0))
            elif isinstance(times, int) and isinstance(sequence, (list, tuple)):
                budget.admit_items(len(sequence) * max(times, 0))
    elif isinstance(left, str) and isinstance(right, str):
        both = Markup if isinstance(left, Markup) else type(right)
        sizes = (_escaped_size(side) if both is Markup else len(side) for side in (left, right))
        budget.admit(sum(sizes))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.admit_items(len(left) + len(right))
    else:
        budget.spend()


def _check_bits(budget: Budget, operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = max(left.bit_length(), 1) * abs(right)
    if bits > MAX_INT_BITS:
        raise BudgetError(f"an integer of more than {MAX_INT_BITS} bits")
