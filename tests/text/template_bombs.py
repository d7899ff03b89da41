"""Chat templates that try to use up a process, and a child process that renders them.

Run as a program it renders all of them under a limit of its address space and prints one JSON line
for each: name, seconds of CPU time, and the error.
"""

# ruff: noqa: E501 (a table of one-line templates)

from __future__ import annotations

import json
import resource
import sys
import time

SECONDS = 0.05  # what a rendering may take here; beyond it, one operation is what takes long

A = "('a' * 4000000)"
HALF = "('a' * 2000000)"
KEEP = "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + [BOMB] %}{% endfor %}"
LOOP = "{% for i in range(99999) %}{% set x = BOMB %}{% endfor %}"
WORDS = "{% set s = 'x ' * 2000000 %}"
LONG = "{% set a = 'a' * 1000000 %}{% set b = 'a' * 250000 + 'b' + 'a' * 249999 %}"
TWICE = "{% set n = namespace(s=S) %}{% for i in range(99) %}{% set n.s = STEP %}{% endfor %}"
NESTED = TWICE.replace("S)", "[1])").replace("STEP", "[n.s, n.s]")
TUPLES = TWICE.replace("S)", "(1,))").replace("STEP", "(n.s, n.s)")
DEEP = "{% set n = namespace(s=[]) %}{% for i in range(99999) %}{% set n.s = [n.s] %}{% endfor %}"


def looped(bomb: str) -> str:
    return LOOP.replace("BOMB", bomb)


def kept(bomb: str) -> str:
    return KEEP.replace("BOMB", bomb)


BOMBS = {
    # Loops
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "four loops": "{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}{% for l in range(999) %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "a sort in a loop": looped("range(99999)|sort"),
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "range without an end": "{{ range(0, 2**4000)|list }}",
    "a filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "letters": "{% for c in " + A + " %}{% endfor %}",
    "letters counted": "{% for c in " + HALF + " %}{{ loop.length }}{% endfor %}",
    "a recursive loop": "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "a recursive loop over much": "{% for i in range(99) recursive %}{% if loop.depth < 60 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "changed": "{% set l = range(99999)|list %}{% for i in range(99999) %}{{ loop.changed(l, i) }}{% endfor %}",
    "cycle": "{% for i in range(99999) %}{% set x = loop.cycle(*range(99999)) %}{% endfor %}",
    # Recursion
    "a macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro twice in itself": "{% macro m(i) %}{% if i < 50 %}{{ m(i + 1) }}{{ m(i + 1) }}{% endif %}{% endmacro %}{{ m(0) }}",
    "two macros": "{% macro a(i) %}{{ b(i) }}{% endmacro %}{% macro b(i) %}{{ a(i) }}{% endmacro %}{{ a(1) }}",
    "a caller": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 30
    + "x"
    + "{% endcall %}" * 30,
    "a macro of itself": "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}",
    "a default argument": "{% macro m(x='a' * 10**9) %}{% endmacro %}{{ m() }}",
    # Arithmetic
    "repeated string": "{{ 'a' * 10**8 }}",
    "repeated the other way": "{{ 10**8 * 'a' }}",
    "repeated list": "{{ ([1] * 10**8)|length }}",
    "repeated tuple": "{{ ((1, 2) * 10**8)|length }}",
    "power": "{{ 9 ** 999999 }}",
    "power of powers": "{{ 9 ** 99 ** 99 ** 99 }}",
    "a power of two": "{{ 2 ** 99999999 }}",
    "a negative power": "{{ (2 ** 4000) ** -99999999 }}",
    "a boolean power": "{{ (true + true) ** 99999999 }}",
    "squares": TWICE.replace("S)", "9)").replace("STEP", "n.s * n.s"),
    "digits of a large number": "{{ (10 ** 1200 * 10 ** 1200)|string }}",
    "a literal of digits": "{{ " + "9" * 60000 + " }}",
    "digits": "{{ ('9' * 99999)|int }}",
    "digits of a base": "{{ ('z' * 99999)|int(base=36) }}",
    "digits as a float": "{{ ('9' * 4000000)|float }}",
    "rounding": "{{ 1.5|round(99999999) }}",
    "rounding up": "{{ 1.5|round(99999, 'ceil') }}",
    "doubling": TWICE.replace("S)", "'ab')").replace("STEP", "n.s + n.s"),
    "joining": TWICE.replace("S)", "'ab')").replace("STEP", "n.s ~ n.s"),
    "doubling lists": TWICE.replace("S)", "[1])").replace("STEP", "n.s + n.s"),
    "doubling with escapes": TWICE.replace("S)", "'<'|e)").replace("STEP", "n.s + (n.s|string)"),
    "tilde of a list": TWICE.replace("S)", "[1])").replace("STEP", "[n.s ~ n.s]"),
    "a sum": "{{ range(99999)|map('string')|sum(start='') }}",
    "sum of lists": "{{ ([[1]] * 9999)|sum(start=[]) }}",
    "sums in a loop": looped("range(99999)|sum"),
    # Formatting
    "percent": "{{ '%100000000d' % 1 }}",
    "percent star": "{{ '%*d' % (99999999, 1) }}",
    "percent precision": "{{ '%.100000000f' % 1 }}",
    "percent star precision": "{{ '%.*f' % (99999999, 1.5) }}",
    "percent of a name": "{{ '%(a)99999999d' % {'a': 1} }}",
    "percent of one name": "{{ ('%(a)s' * 60000) % {'a': 'a' * 60000} }}",
    "percent with flags": "{{ '%#0+ -99999999x' % 1 }}",
    "many percents": "{{ '%99999d' * 99 % (1,) }}",
    "percent of a nested list": NESTED + "{{ '%s' % n.s }}",
    "percent repr": "{{ '%r' % ('\\x00' * 2000000) }}",
    "format filter": "{{ '%100000000d'|format(1) }}",
    "format filter by name": "{{ '%(a)99999999d'|format(a=1) }}",
    "format": "{{ '{:>100000000}'.format(1) }}",
    "format precision": "{{ '{:.100000000f}'.format(1.5) }}",
    "nested format": "{{ '{:{}}'.format(1, 10**8) }}",
    "format of a name": "{{ '{a:{b}}'.format(a=1, b=10**8) }}",
    "many formats": "{{ ('{0}' * 20000).format('a' * 60000) }}",
    "format of a nested list": NESTED + "{{ '{}'.format(n.s) }}",
    "format_map": "{{ '{a:>99999999}'.format_map({'a': 1}) }}",
    "format by attr": "{{ ('{:>99999999}'|attr('format'))(1) }}",
    "format by item": "{{ '{:>99999999}'['format'](1) }}",
    "an odd text": "{{ '%100000000d' is odd }}",
    "an even text": "{{ '%100000000d' is even }}",
    "a text is divisible": "{{ '%100000000d' is divisibleby 1 }}",
    "tests of texts": "{{ ['%100000000d']|select('odd')|list }}",
    "date width": "{{ strftime_now('%99999999Y') }}",
    "date": "{{ strftime_now('%Y' * 999999) }}",
    "numbers formatted": looped("'%9999.9999f' % 1.5"),
    # Methods of texts
    "rfind": LONG + "{{ a.rfind(b) }}",
    "rindex": LONG + "{{ (b + a).rindex(b) }}",
    "rsplit": LONG + "{{ a.rsplit(b)|length }}",
    "rsplit by name": LONG + "{{ a.rsplit(sep=b, maxsplit=5)|length }}",
    "rpartition": LONG + "{{ a.rpartition(b)|length }}",
    "find": looped("('a' * 29000).find('a' * 14000 + 'b' + 'a' * 10000)"),
    "count": looped(A + ".count('aaaab')"),
    "strip": "{% set a = 'a' * 4000000 %}{{ a.strip('b' * 1000000 + 'a') }}",
    "lstrip": "{% set a = 'a' * 4000000 %}{{ a.lstrip('b' * 1000000 + 'a') }}",
    "rstrip": "{% set a = 'a' * 4000000 %}{{ a.rstrip('b' * 1000000 + 'a') }}",
    "trim": "{% set a = 'a' * 4000000 %}{{ a|trim('b' * 1000000 + 'a') }}",
    "trim by name": "{% set a = 'a' * 4000000 %}{{ a|trim(chars='b' * 1000000 + 'a') }}",
    "replace filter": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "replace of escapes": "{{ (('<' * 99999)|safe).replace('<', '<' * 9999) }}",
    "split": looped("('a ' * 99999).split()"),
    "split of much": WORDS + "{{ s.split()|length }}",
    "split at one letter": WORDS + "{{ s.split(' ')|length }}",
    "split by name": WORDS + "{{ s.split(sep='x')|length }}",
    "splitlines": "{{ ('\\r' * 4000000).splitlines()|length }}",
    "splitlines of separators": "{{ ('\\u2028' * 4000000).splitlines()|length }}",
    "kept pieces": kept("('a ' * 99999).split()"),
    "join filter": "{{ range(99999)|join('a' * 99999) }}",
    "join of an iterator": "{{ range(99999)|map('string')|join('a' * 99999) }}",
    "join by name": "{{ range(99999)|map('string')|join(d='a' * 99999) }}",
    "join of attributes": "{{ ([{'x': 'a' * 99999}] * 9999)|join('', attribute='x') }}",
    "join method": "{{ ('a' * 99999).join('b' * 99999) }}",
    "join method of an iterator": "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "join of nested lists": NESTED + "{{ [n.s]|join }}",
    "indent": "{{ ('\\n' * 99999)|indent(99999) }}",
    "indent of carriage returns": "{{ ('\\r' * 99999)|indent(99999, blank=true) }}",
    "indent of form feeds": "{{ ('\\f' * 99999)|indent(width=9999, first=true, blank=true) }}",
    "indent with a text": "{{ ('x\\n' * 9999)|indent('a' * 99999) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "tabs by name": "{{ ('\\t' * 99999).expandtabs(tabsize=99999) }}",
    "center filter": "{{ 'a'|center(10**8) }}",
    "center by name": "{{ 'a'|center(width=10**8) }}",
    "center method": "{{ 'a'.center(10**8) }}",
    "ljust": "{{ 'a'.ljust(10**8) }}",
    "rjust": "{{ 'a'.rjust(10**8, 'b') }}",
    "zfill": "{{ 'a'.zfill(10**8) }}",
    "truncate": "{{ 'a'|truncate(10**9, end='b' * 10**9) }}",
    "title": "{{ (" + A + " ~ ' ')|title }}",
    "title in a loop": looped("('a b' * 60000)|title"),
    "upper": looped("('\\u0390' * 4000000).upper()"),
    "casefold": looped("('\\ufb03' * 4000000).casefold()"),
    "capitalize": looped(A + ".capitalize()"),
    "swapcase": looped(A + "|string|upper|lower"),
    "predicates": looped(A + ".isalnum()"),
    "startswith": looped(A + ".startswith(" + A + ")"),
    "startswith many": looped("'a'.startswith(('b',) * 99999)"),
    "escape": "{{ ('<' * 4000000)|e|e|e }}",
    "escape in a loop": TWICE.replace("S)", "'<<')").replace("STEP", "(n.s ~ n.s)|forceescape"),
    "encode": "{{ ('\\u00e9' * 200000).encode('punycode') }}",
    "encode idna": "{{ ('\\u00e9' * 200000).encode('idna') }}",
    "bytes": "{{ ('a' * 200000).encode().rfind('b'.encode()) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 99999}) }}",
    "maketrans": "{{ ''.maketrans('a' * 99999, 'b' * 99999) }}",
    "striptags": "{{ (('<' * 99999)|safe).striptags() }}",
    "unescape": "{{ (('&amp;' * 99999)|safe).unescape() }}",
    "kept slices": "{% set s = 'a' * 4000000 %}" + kept("s[i:]"),
    "kept wide texts": kept("'\\U0001f600' * 9999"),
    "kept numbers": kept("'%9999d' % i"),
    "reversed": "{% set s = 'a' * 4000000 %}" + looped("s[::-1]"),
    "kept reversals": "{% set s = 'a' * 4000000 %}" + kept("s|reverse"),
    # Lists and dicts
    "letters listed": "{{ (" + A + "|list)|length }}",
    "wide letters listed": "{{ (('\\u1234' * 200001 + 'x') * 9)|list|length }}",
    "nested lists": NESTED + "{{ n.s }}",
    "nested lists in a text": NESTED + "{{ 'x' ~ n.s }}",
    "nested lists as JSON": NESTED + "{{ n.s|tojson }}",
    "nested dicts": TWICE.replace("S)", "1)").replace("STEP", "{'a': n.s, 'b': n.s}")
    + "{{ n.s|tojson }}",
    "nested lists in an error": NESTED + "{{ raise_exception(n.s) }}",
    "nested lists as a name": NESTED + "{{ {}[n.s].x }}",
    "nested tuples as keys": TUPLES + "{{ {n.s: 1} }}",
    "nested tuples looked up": TUPLES + "{{ {1: 1}[n.s] }}",
    "nested tuples got": TUPLES + "{{ {1: 1}.get(n.s) }}",
    "nested tuples in a dict": TUPLES + "{{ dict([(n.s, 1)]) }}",
    "nested tuples are unique": TUPLES + "{{ [n.s]|unique|list }}",
    "nested tuples in": TUPLES + "{{ n.s in {1: 1} }}",
    "comparing": "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    "comparing order": "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a < n.b }}",
    "comparing by a test": "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a is eq n.b }}",
    "long lists compared": "{% set a = range(99999)|list %}{% set b = range(99999)|list %}"
    + looped("a == b"),
    "long lists searched": "{% set a = range(99999)|list %}" + looped("-1 in a"),
    "long texts searched": "{% set a = ['a' * 30000] * 100 %}" + looped("('a' * 29999 ~ 'b') in a"),
    "not in": "{% set a = range(99999)|list %}" + looped("-1 not in a"),
    "in by a test": "{% set a = range(99999)|list %}" + looped("-1 is in a"),
    "a range searched": looped("'x' in range(99999)"),
    "a quadratic test": "{{ range(99999)|select('in', range(99999)|list)|list }}",
    "list.index": "{% set a = range(99999)|list %}" + looped("a.index(99998)"),
    "list.count": "{% set a = range(99999)|list %}" + looped("a.count(99998)"),
    "a deep list": DEEP + "{{ n.s }}",
    "a deep list compared": DEEP + "{{ n.s == [n.s] }}",
    "a deep list as JSON": DEEP + "{{ n.s|tojson }}",
    "a deep dict": DEEP.replace("[n.s]", "{'a': n.s}") + "{{ n.s|string }}",
    "deep iterators": "{% set n = namespace(s=[1]) %}{% for i in range(99999) %}{% set n.s = n.s|map('string') %}{% endfor %}{{ n.s|list }}"
    + looped("1"),
    "kept iterators": kept("range(99)|map('string')"),
    "kept lists": kept("range(9999)|list"),
    "kept dicts": kept("dict(messages[0])"),
    "kept macros": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% macro m(x=i) %}{% endmacro %}{% set n.l = n.l + [m] %}{% endfor %}",
    "kept methods": kept("'x'.upper"),
    "kept namespaces": kept("namespace(a=i)"),
    "kept undefined": kept("{}[i]"),
    "dict": "{{ dict(range(99999)|map('string')|map('list')) }}",
    "dict.fromkeys": "{{ dict.fromkeys(range(99999), 'a' * 99999) }}",
    "dict.copy": "{% set d = dict(range(9999)|map('center', 2)) %}" + kept("d.copy()"),
    "sets of keys": "{% set d = dict(messages[0]) %}" + looped("d.keys() - d.keys()"),
    "arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}{{ m(*" + A + ") }}",
    "unpacking": "{% set s = 'a' * 4000000 %}{% for a, b in [s] * 99 %}{% endfor %}",
    "mapped fill": "{{ range(99999)|map('center', 99999)|list }}",
    "mapped replacements": "{{ (['a' * 9999] * 99)|map('replace', 'a', 'b' * 9999)|list }}",
    "a map of maps": looped("range(9999)|map('string')|map('upper')|map('lower')|list"),
    "sorting texts": looped("(['a' * 9999] * 99)|sort(case_sensitive=false)"),
    "sorting": looped("range(99999)|sort(reverse=true)"),
    "grouping": looped("([{'a': 1}] * 9999)|groupby('a')"),
    "unique": looped("range(99999)|unique|list"),
    "largest": looped("range(99999)|max"),
    "dictsort": looped("messages[0]|dictsort")
    + NESTED
    + "{{ {'a': n.s, 'b': n.s}|dictsort(by='value') }}",
    "select": looped("range(99999)|select|list"),
    "reject": looped("range(99999)|reject('odd')|list"),
    "an attribute of much": looped("range(99999)|map(attribute='real')|list"),
    "batch": "{{ range(99999)|batch(1, 'a' * 99999)|list }}",
    "slice": "{{ range(9)|slice(10**9)|list }}",
    # JSON
    "json indent": "{{ [1]|tojson(indent=99999) }}",
    "json text indent": "{{ ([[1]] * 9999)|tojson(indent='a' * 99999) }}",
    "json separators": "{{ range(99999)|list|tojson(separators=('a' * 99999, ':')) }}",
    "json of escapes": looped("('\\x00' * 2000000)|tojson"),
    "json of emoji": looped("('\\U0001f600' * 2000000)|tojson(ensure_ascii=true)"),
    "json in depth": "{{ [[[[[[[[[[range(19999)|list]]]]]]]]]]|tojson(indent=16) }}",
    # Names and buffers
    "a buffered block": "{% macro m() %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "a captured block": "{% for i in range(99999) %}{% set y %}{{ 'a' * 999999 }}{% endset %}{% endfor %}",
    "a filtered block": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfilter %}",
    "output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "literal output": "{% for i in range(99999) %}" + "a" * 999 + "{% endfor %}",
    "captured literals": "{% set y %}{% for i in range(99999) %}"
    + "a" * 999
    + "{% endfor %}{% endset %}",
    "numbers in a buffer": "{% set y %}{% for i in range(99999) %}{{ i * 2**4000 }}{% endfor %}{% endset %}",
    # What is not there
    "lipsum": "{{ lipsum(n=9999, html=false) }}",
    "cycler": looped("cycler(*range(99999)).next()"),
    "joiner": "{{ joiner('a' * 10**9)() }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as x %}",
    "from import": "{% from 'x' import y %}",
    "extends": "{% extends 'x' %}",
    "a block": "{% block b %}{{ self.b() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '<' * 9 }}{% endautoescape %}",
    "pprint": "{{ range(99999)|pprint }}",
    "wordwrap": "{{ ('a ' * 999999)|wordwrap(1) }}",
    "wordcount": looped("('a ' * 999999)|wordcount"),
    "batches of batches": looped("range(99999)|batch(1)|list"),
    "filled batches": looped("[1]|batch(99999, 'a' * 9999)|list"),
    "slices": looped("[]|slice(99999)|list"),
    "urlencode": "{{ ('ä' * 999999)|urlencode }}",
    "spaces in wordwrap": looped("(' ' * 8192)|wordwrap(1)"),
    "pretty lists": looped("range(700)|list|pprint"),
    "urlize": "{{ ('www.a.b ' * 99999)|urlize }}",
    "xmlattr": "{{ dict(a='b' * 9999999)|xmlattr }}",
    "random": looped("range(99999)|random"),
    "filesizeformat": "{{ (2 ** 4000)|filesizeformat }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by attr": "{{ (''|attr('__class__')).x }}",
    "classes by format": "{{ '{0.__class__}'.format('') ~ '{0.__class__.x}'.format(1) }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "a closure": "{{ raise_exception.__func__.__globals__ }}",
    "append": "{% for i in range(9) %}{{ messages.append(i) }}{% endfor %}",
    "update": "{{ messages[0].update(a=1) }}",
    "printing an iterator": "{{ messages|map('string') }}",
    "printing a function": "{{ range }}",
    # Compiling
    "many outputs": "{{1}}" * 13000,
    "many names": "".join(f"{{{{a{i}}}}}" for i in range(7000)),
    "many branches": "{% if x %}a{% endif %}" * 2900,
    "branches and names": "".join(
        f"{{% if a{i} %}}{{% set b{i}=1 %}}{{% endif %}}" for i in range(1300)
    ),
    "names, then branches": "".join(f"{{% set b{i}=1 %}}" for i in range(1700))
    + "{% if x %}{% endif %}" * 1500,
    "nested loops of many": "".join(f"{{% for a{i} in x %}}" for i in range(19))
    + "{% set q=1 %}{{ z }}" * 2000
    + "{% endfor %}" * 19,
    "nested macros": "".join(f"{{% macro a{i}() %}}" for i in range(90))
    + "{{ z }}{% set k=1 %}" * 1000
    + "{% endmacro %}" * 90,
    "a long list": "{{ [" + "1," * 30000 + "] }}",
    "a long sum": "{{ 1" + "+1" * 30000 + " }}",
    "many parentheses": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "many negations": "{{ " + "not " * 15000 + "1 }}",
    "many filters": "{{ x" + "|upper" * 10000 + " }}",
    "many conditions": "{{ " + "1 if 1 else " * 5000 + "1 }}",
}


def main(limit: int) -> None:
    from sdk.loaders.templates import budget as template_budget
    from sdk.loaders.templates.chat_template import ChatTemplate, TemplateError

    template_budget.MAX_SECONDS = SECONDS

    messages = [{"role": "user", "content": "Hi"}]
    ChatTemplate("{{ messages[0].content|trim }}").render(messages)  # what is imported once
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
    for name, source in BOMBS.items():
        begin = time.process_time()
        try:
            error = f"no error: {ChatTemplate(source).render(messages)[:80]!r}"
        except TemplateError as refused:
            error = f"TemplateError: {refused}"
        except BaseException as other:
            error = f"{type(other).__name__}: {other}"
        print(json.dumps([name, time.process_time() - begin, error[:300]]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
