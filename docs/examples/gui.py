"""A window with a chat, for Tk: python docs/examples/gui.py [model.gguf]

The window's thread never waits for the model. A thread of ``Answers`` listens to the answer and
puts its pieces into a queue, which the window empties fifty times a second.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from sdk import LLM, SamplingParams, demo_model


class Answers:
    """Runs one question at a time; ``poll`` returns what arrived since the last call."""

    def __init__(self, llm: LLM, params: SamplingParams | None = None) -> None:
        self._llm = llm
        self._params = params or SamplingParams(max_tokens=400)
        self._messages: list[dict[str, str]] = []
        self._pieces: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ask(self, text: str) -> None:
        """Start an answer; the caller makes sure that none is running."""
        self._messages.append({"role": "user", "content": text})
        self._stop.clear()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the answer; what has arrived stays in the conversation."""
        self._stop.set()

    def poll(self) -> str:
        text = ""
        while not self._pieces.empty():
            text += self._pieces.get()
        return text

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _listen(self) -> None:
        answer = ""
        try:
            # Leaving the loop aborts the request.
            for piece in self._llm.stream(self._messages, self._params):
                answer += piece.outputs[0].text
                self._pieces.put(piece.outputs[0].text)
                if self._stop.is_set():
                    break
        except Exception as error:  # shown in the window: this thread has no other reader
            self._pieces.put(f"[{error}]")
        self._messages.append({"role": "assistant", "content": answer})


def run_window(answers: Answers, on_close: Callable[[], None]) -> None:
    """The window: a text, a line for questions, a button that asks or stops."""
    import tkinter as tk

    root = tk.Tk()
    root.title("embedlm")
    shown = tk.Text(root, wrap="word", state="disabled")
    line = tk.Entry(root)
    button = tk.Button(root, text="Ask")

    def show(text: str) -> None:
        shown.configure(state="normal")
        shown.insert("end", text)
        shown.configure(state="disabled")
        shown.see("end")

    def pressed(_event: object = None) -> None:
        if answers.busy:
            answers.stop()
        elif text := line.get().strip():
            line.delete(0, "end")
            show(f"\n> {text}\n")
            answers.ask(text)

    def tick() -> None:
        show(answers.poll())
        button.configure(text="Stop" if answers.busy else "Ask")
        root.after(20, tick)

    button.configure(command=pressed)
    line.bind("<Return>", pressed)
    shown.pack(fill="both", expand=True)
    line.pack(side="left", fill="x", expand=True)
    button.pack(side="right")
    tick()
    root.mainloop()
    on_close()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model())
    with LLM(model, memory="2GiB", max_model_len=4096) as llm:
        answers = Answers(llm)
        run_window(answers, on_close=answers.close)


if __name__ == "__main__":
    main()
