"""What IPython shows of our objects: HTML tables in notebooks, short lines on a terminal.

IPython looks for ``_repr_html_`` and ``_repr_pretty_``; nothing of it is imported here. All text is
escaped: prompts, answers and file names may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

#: Characters of a text, and numbers of a vector, that are shown.
MOST_TEXT = 300
_MOST_NUMBERS = 4
_LEFT = 'style="text-align:left;vertical-align:top"'
_PRE = 'style="text-align:left;vertical-align:top;white-space:pre-wrap"'


def html_table(
    rows: Iterable[Sequence[object]], header: Sequence[str] = (), title: str = ""
) -> str:
    """A table of texts; line breaks and spaces stay. The first cell of a row is its name, unless
    there is a ``header``."""
    lines = ["<table>"]
    if title:
        lines.append(f"<caption {_LEFT}>{escape(title)}</caption>")
    if header:
        lines.append(
            "<tr>" + "".join(f"<th {_LEFT}>{escape(one)}</th>" for one in header) + "</tr>"
        )
    for row in rows:
        cells = [escape(str(cell)) for cell in row]
        first = [f"<td {_PRE}>{cells[0]}</td>" if header else f"<th {_LEFT}>{cells[0]}</th>"]
        others = [f"<td {_PRE}>{cell}</td>" for cell in cells[1:]]
        lines.append(f"<tr>{''.join([*first, *others])}</tr>")
    return "\n".join([*lines, "</table>"])


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """A text, in the middle of which something may be left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[-most // 2 :]}"


def numbers(values: Sequence[float]) -> str:
    """The first numbers of a vector and its length."""
    shown = ", ".join(f"{value:.4g}" for value in values[:_MOST_NUMBERS])
    return f"[{shown}{', ...' if len(values) > _MOST_NUMBERS else ''}] ({len(values)} numbers)"


class Explanation(str):
    """The text of ``LLM.explain()``: a string that a notebook and a prompt show as it reads."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return html_table((name, "\n".join(lines)) for name, lines in self._sections())

    def _sections(self) -> list[tuple[str, list[str]]]:
        """Each name in the first column with its lines."""
        found: list[tuple[str, list[str]]] = []
        for line in self.splitlines():
            name, rest = line[:11].strip(), line[11:]
            if line[10:11].strip():  # a longer name, alone on its line
                name, rest = line, ""
            if line.startswith(" ") and found:
                found[-1][1].append(line[2:] if len(found[-1][0]) > 10 else line[11:])
            elif found and found[-1][0] == name:
                found[-1][1].append(rest)
            else:
                found.append((name, [rest] if rest else []))
        return found


def request_line(output: Any) -> str:
    """One line for each answer of a request."""
    kind = type(output).__name__
    prompt = "" if output.prompt is None else f", prompt={shortened(output.prompt, 60)!r}"
    answers = ", ".join(answer_line(answer) for answer in output.outputs)
    return f"{kind}({output.request_id!r}{prompt}, outputs=[{answers}])"


def answer_line(answer: Any) -> str:
    return (
        f"{type(answer).__name__}({shortened(answer.text)!r}, {len(answer.token_ids)} tokens, "
        f"finish_reason={answer.finish_reason!r})"
    )


def request_html(output: Any) -> str:
    """The prompt, and a row for each answer."""
    prompt = output.prompt
    if prompt is None:
        prompt = f"{len(output.prompt_token_ids)} token ids"
    rows: list[tuple[object, ...]] = [("prompt", shortened(prompt, 2000), "", "")]
    rows += [
        (f"answer {answer.index}", answer.text, len(answer.token_ids), answer.finish_reason or "")
        for answer in output.outputs
    ]
    return html_table(rows, header=("", "text", "tokens", "ended by"), title=output.request_id)


def llm_facts(llm: Any) -> list[tuple[str, str]]:
    """What an LLM is, as pairs of name and text. Waits for nothing."""
    from sdk.api.errors import SdkError
    from sdk.api.sizes import format_bytes

    config = llm.model_config
    facts = [
        ("model", repr(str(llm.config.model))),
        ("architecture", f"{config.model_type} of {config.num_layers} layers"),
        ("device", llm._served.facts.runner_config.device),
        ("context", f"{llm.max_model_len} tokens"),
    ]
    try:
        llm._driver.check_usable()
        facts.append(("memory", format_bytes(llm.memory_plan.total)))
    except SdkError as error:
        facts.append(("state", str(error)))
    return [*facts, *(("warning", text) for text in llm.load_warnings)]
