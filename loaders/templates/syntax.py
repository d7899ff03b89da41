"""The statements and expressions that a chat template may use, and limits of its size.

Everything that is not listed is rejected by name. The rest is rewritten: operations that compiled
templates leave to Python (loops, comparisons, slices, ``~``, literals) call the environment, which
checks them first (``sandbox.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from sdk.loaders.templates.budget import (
    MAX_BLOCK_DEPTH,
    MAX_NODES,
    MAX_SCOPES,
    MAX_TOKENS,
    MAX_TREE_DEPTH,
    BudgetError,
)

_BLOCKS = (nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With)
_ALLOWED = frozenset(
    {
        *_BLOCKS,
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Assign, nodes.AssignBlock),
        *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair),
        *(nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem),
        *(nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Add),
        *(nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.And),
        *(nodes.Or, nodes.Not, nodes.Neg, nodes.Pos, nodes.Break, nodes.Continue, nodes.Scope),
    }
)


class Generation(Extension):  # type: ignore[misc]
    """``{% generation %}...{% endgeneration %}`` marks training targets; it renders as its body.

    It also counts tokens, because extensions see them before the parser.
    """

    tags = frozenset({"generation"})

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count > MAX_TOKENS:
                raise BudgetError(f"more than {MAX_TOKENS} words and symbols (line {token.lineno})")
            yield token

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_syntax(tree: nodes.Template) -> None:
    """:raises BudgetError: the template uses unlisted syntax, or is too large.

    The compiler takes 0.1 ms per node, copies all names at each branch, and recurses.
    """
    names: set[str] = set()
    count = branches = 0
    waiting: list[tuple[nodes.Node, int, int]] = [(tree, 0, 0)]
    while waiting:
        node, depth, blocks = waiting.pop()
        kind = type(node)
        if kind not in _ALLOWED:
            what = f"{{% {kind.__name__.lower()} %}}"
            raise BudgetError(f"{what}, which is not available (line {node.lineno})")
        count += 1
        if isinstance(node, _BLOCKS):
            branches, blocks = branches + 1, blocks + 1
        elif isinstance(node, nodes.Name):
            names.add(node.name)
        if count > MAX_NODES:
            raise BudgetError(f"more than {MAX_NODES} statements and expressions")
        if depth > MAX_TREE_DEPTH or blocks > MAX_BLOCK_DEPTH:
            raise BudgetError(f"expressions or blocks nested too deeply (line {node.lineno})")
        waiting += [(child, depth + 1, blocks) for child in node.iter_child_nodes()]
    if branches * len(names) > MAX_SCOPES:
        raise BudgetError(f"{branches} branches and {len(names)} names")


class Checkpoints(NodeTransformer):  # type: ignore[misc]
    """Replaces operations of Python by calls of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("each", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        pairs = [part for step in node.ops for part in (nodes.Const(step.op), step.expr)]
        return _call("compared", [node.expr, *pairs], node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        cut = node.arg
        if not isinstance(cut, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (cut.start, cut.stop, cut.step)]
        return _call("sliced", [node.node, *ends], node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        for name in ("dyn_args", "dyn_kwargs"):
            if getattr(node, name) is not None:
                setattr(node, name, _call("unpacked", [getattr(node, name)], node))
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _call("key", [pair.key], node)
        return _call("literal", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node], node) if node.ctx == "load" else node


def _call(name: str, arguments: list[Any], at: nodes.Node) -> nodes.Node:
    function = nodes.EnvironmentAttribute(name)
    return nodes.Call(function, arguments, [], None, None, lineno=at.lineno)


class Compiler(CodeGenerator):  # type: ignore[misc]
    """Calls the environment's functions directly; a template's calls go through ``call``."""

    def visit_Call(self, node: nodes.Call, frame: Any, **kwargs: Any) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, **kwargs)
            return
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")
