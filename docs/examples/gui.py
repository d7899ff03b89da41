"""A window with a chat, for Tk: python docs/examples/gui.py [model.gguf]

The window's thread never waits for the model. A thread of ``Chat`` loads it and listens to answers;
what happens goes into a queue, which the window empties fifty times a second.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import tkinter as tk
from pathlib import Path
from tkinter import ttk
from typing import Literal, NamedTuple

from sdk import LLM, LoadCancelled, SamplingParams, SdkError, demo_model


class Event(NamedTuple):
    """What happened. ``text``: a piece of an answer, or an error. ``part``: of a load, 0 to 1."""

    kind: Literal["loading", "ready", "piece", "ended", "failed", "interrupted"]
    text: str = ""
    part: float = 0


class Chat:
    """A model and one conversation, in a thread; ``events`` says what happened."""

    def __init__(self, model: str | Path, params: SamplingParams | None = None) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._model = model
        # -1: if the conversation is too long, its oldest turns are left out
        self._params = params or SamplingParams(max_tokens=400, truncate_prompt_tokens=-1)
        self._messages: list[dict[str, str]] = []
        self._questions: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="chat")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether ``close`` has yet to be called, and the model loaded."""
        return self._thread.is_alive()

    def ask(self, text: str) -> None:
        """Put a question; pieces of its answer follow, and one ``ended``."""
        self._stop.clear()
        self._questions.put(text)

    def stop(self) -> None:
        """End the answer. What has arrived stays in the conversation."""
        self._stop.set()

    def clear(self) -> None:
        """Forget the conversation; the caller makes sure that no answer is running."""
        self._messages.clear()

    def close(self) -> None:
        """End the thread, also in the middle of a load or of an answer, and free the model."""
        self._closed = True
        self.stop()
        self._questions.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with LLM(
                self._model, memory="2GiB", max_model_len=4096, on_progress=self._progress
            ) as llm:
                self.events.put(Event("ready"))
                while (question := self._questions.get()) is not None:
                    self._answer(llm, question)
        except LoadCancelled:
            pass  # the window is gone
        except (SdkError, OSError) as error:
            self.events.put(Event("failed", str(error)))

    def _progress(self, stage: str, done: int, total: int) -> bool:
        self.events.put(Event("loading", stage, done / max(total, 1)))
        return not self._closed  # False cancels the load

    def _answer(self, llm: LLM, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in llm.stream(self._messages, self._params):
                answer += piece.outputs[0].text
                self.events.put(Event("piece", piece.outputs[0].text))
                if self._stop.is_set() or self._closed:
                    break  # leaving the loop aborts the request
        except SdkError as error:
            self._messages.pop()  # it would fail again with the next question
            self.events.put(Event("ended", f"[{error}]"))
            return
        self._messages.append({"role": "assistant", "content": answer})
        self.events.put(Event("ended"))


class Window:
    """A text, a bar while the model loads, a line for questions, and buttons."""

    def __init__(self, root: tk.Tk, chat: Chat) -> None:
        self.root, self.chat = root, chat
        self.busy = True  # while the model loads or answers
        root.title("embedlm")
        root.protocol("WM_DELETE_WINDOW", self.close)
        self.shown = tk.Text(root, wrap="word", state="disabled", width=80, height=24)
        self.bar = ttk.Progressbar(root, maximum=1.0)
        below = ttk.Frame(root)
        self.line = ttk.Entry(below)
        self.button = ttk.Button(below, text="Stop", command=self.press, state="disabled")
        self.new = ttk.Button(below, text="New", command=self.clear, state="disabled")
        self.line.bind("<Return>", lambda _: None if self.busy else self.press())
        self.shown.pack(fill="both", expand=True)
        self.bar.pack(fill="x")
        below.pack(fill="x")
        self.line.pack(side="left", fill="x", expand=True)
        self.new.pack(side="right")
        self.button.pack(side="right")
        self.line.focus_set()
        self._tick()

    def press(self) -> None:
        """The button: ask what the line says, or stop the answer."""
        if self.busy:
            self.chat.stop()
        elif text := self.line.get().strip():
            self.line.delete(0, "end")
            self._show(f"> {text}\n")
            self._set_busy(True)
            self.chat.ask(text)

    def clear(self) -> None:
        """Begin a new conversation."""
        self.chat.clear()
        self.shown.configure(state="normal")
        self.shown.delete("1.0", "end")
        self.shown.configure(state="disabled")

    def close(self) -> None:
        self.chat.close()
        self.root.destroy()

    def _tick(self) -> None:
        while not self.chat.events.empty():
            event = self.chat.events.get()
            if event.kind == "interrupted":
                self.close()
                return
            self._happened(event)
        self.root.after(20, self._tick)

    def _happened(self, event: Event) -> None:
        if event.kind == "loading":
            self.bar.configure(value=event.part)
        elif event.kind in ("piece", "failed"):  # without a model, only closing is left
            self._show(event.text)
        else:
            self.bar.pack_forget()
            self._show(f"{event.text}\n\n" if event.kind == "ended" else "")
            self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        self.busy = busy
        self.button.configure(text="Stop" if busy else "Ask", state="normal")
        self.new.configure(state="disabled" if busy else "normal")

    def _show(self, text: str) -> None:
        self.shown.configure(state="normal")
        self.shown.insert("end", text)
        self.shown.configure(state="disabled")
        self.shown.see("end")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model()
    root = tk.Tk()
    chat = Chat(model)
    Window(root, chat)
    # Tk would show the KeyboardInterrupt of a Ctrl-C in the terminal, and go on without its timer
    signal.signal(signal.SIGINT, lambda *_: chat.events.put(Event("interrupted")))
    try:
        root.mainloop()
    finally:
        chat.close()  # its thread would keep the process alive


if __name__ == "__main__":
    main()
