"""Grammars of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.structured_params import StructuredOutputsParams
from sdk.quant.safe_repr import safe_repr
from sdk.structured.gbnf import is_gbnf


class LlamaGrammar:
    """A grammar in GBNF, or the schema of JSON answers."""

    def __init__(self, *args: Any, _grammar: str, **kwargs: Any) -> None:
        self._grammar = _grammar
        self._schema: dict[str, Any] | None = None

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF. It is read when a request uses it."""
        return cls(_grammar=grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """:meth:`from_string` with the text of a file."""
        return cls.from_string(Path(file).read_text(encoding="utf-8"), verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Answers that follow a JSON schema. :raises RequestError: the text is not a schema."""
        grammar = cls(_grammar=json_schema)
        grammar._schema = StructuredOutputsParams(json=json_schema).json
        return grammar

    @property
    def structure(self) -> StructuredOutputsParams:
        """The grammar as ``SamplingParams`` take it."""
        if self._schema is not None:
            return StructuredOutputsParams(json=self._schema)
        if not is_gbnf(self._grammar):  # would be read as Lark's notation
            raise RequestError(
                f"grammar: expected rules in GBNF (name ::= ...), found {safe_repr(self._grammar)}"
            )
        return StructuredOutputsParams(grammar=self._grammar)
