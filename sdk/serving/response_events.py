"""The events of a streamed response of ``/v1/responses``: items that begin, grow and end."""

from __future__ import annotations

import json
from typing import Any, Protocol

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.errors import check_ended
from sdk.serving.openai.items import call_item, message_item, new_id, reasoning_item, text_part


class Described(Protocol):
    """The object of a response (``ResponseObject``)."""

    def begun(self) -> dict[str, Any]: ...
    def ended(
        self, output: RequestOutput, answer: CompletionOutput, items: list[dict[str, Any]]
    ) -> dict[str, Any]: ...


class ResponseEvents:
    """See :class:`sdk.serving.events.ChatEvents`. One item is open at a time."""

    def __init__(self, response: Described) -> None:
        self._response = response
        self._number = 0
        self._items: list[dict[str, Any]] = []  # those that have ended
        self._kind: str | int | None = None  # of the open item: a call has its number
        self._id = self._call_id = self._name = ""
        self._text: list[str] = []
        self._last: CompletionOutput | None = None

    def of(self, number: int, output: RequestOutput) -> bytes:
        parts: list[bytes] = []
        if self._number == 0:
            for kind in ("created", "in_progress"):
                parts.append(self._event(f"response.{kind}", response=self._response.begun()))
        for answer in output.outputs:
            check_ended(answer)
            self._last = answer
            if not isinstance(answer, MessageAnswer):
                parts += self._text_delta("message", answer.text)
                continue
            found = answer.delta
            parts += self._text_delta("reasoning", found.reasoning)
            parts += self._text_delta("message", found.content)
            for call in found.tool_calls:
                if self._kind != call.index:
                    parts += self._close()
                    self._call_id, self._name = call.id or new_id("call"), call.name or ""
                    parts += self._open(call.index)
                if call.arguments:
                    self._text.append(call.arguments)
                    kind = "response.function_call_arguments.delta"
                    parts.append(self._event(kind, **self._place(), delta=call.arguments))
        return b"".join(parts)

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        parts = [] if self._items or self._kind is not None else self._open("message")
        parts += self._close()
        [output] = outputs.values()
        assert self._last is not None
        response = self._response.ended(output, self._last, self._items)
        parts.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(parts)

    # ---- items -----------------------------------------------------------------------------------

    def _text_delta(self, kind: str, text: str) -> list[bytes]:
        if not text:
            return []
        parts = []
        if self._kind != kind:
            parts = [*self._close(), *self._open(kind)]
        self._text.append(text)
        named = "output_text" if kind == "message" else "reasoning_text"
        place = {**self._place(), "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*parts, self._event(f"response.{named}.delta", **place, delta=text, **more)]

    def _open(self, kind: str | int) -> list[bytes]:
        self._kind, self._text = kind, []
        self._id = new_id({"message": "msg", "reasoning": "rs"}.get(str(kind), "fc"))
        place = {"output_index": len(self._items)}
        item = self._item("in_progress")
        parts = [self._event("response.output_item.added", **place, item=item)]
        if kind == "message":
            part = text_part("")
            place = {**self._place(), "content_index": 0}
            parts.append(self._event("response.content_part.added", **place, part=part))
        return parts

    def _close(self) -> list[bytes]:
        """The events that end the open item."""
        if self._kind is None:
            return []
        text, place = "".join(self._text), self._place()
        inside = {**place, "content_index": 0}
        parts = []
        if self._kind == "message":
            done = {**inside, "text": text, "logprobs": []}
            parts.append(self._event("response.output_text.done", **done))
            part = text_part(text)
            parts.append(self._event("response.content_part.done", **inside, part=part))
        elif self._kind == "reasoning":
            parts.append(self._event("response.reasoning_text.done", **inside, text=text))
        else:
            done = {**place, "name": self._name, "arguments": text}
            parts.append(self._event("response.function_call_arguments.done", **done))
        item = self._item("completed")
        index = len(self._items)
        parts.append(self._event("response.output_item.done", output_index=index, item=item))
        self._items.append(item)
        self._kind = None
        return parts

    def _item(self, status: str) -> dict[str, Any]:
        text = "".join(self._text)
        if self._kind == "message":
            return message_item(self._id, text, status)
        if self._kind == "reasoning":
            return reasoning_item(self._id, text, status)
        return call_item(self._id, self._call_id, self._name, text, status)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items)}

    def _event(self, kind: str, **values: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        data = json.dumps(value, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()
