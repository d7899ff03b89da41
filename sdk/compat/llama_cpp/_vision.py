"""llama-cpp-python's handlers of chats with images: which file has the encoder, and the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.compat.llama_cpp._chat import ChatFormat
from sdk.quant.safe_repr import safe_repr

_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the human's questions."
)


def _llava(end: str) -> ChatFormat:
    """Images before the text of a message, each followed by ``end``."""
    said = (
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content if part.type == 'image' %}<image>" + end + "{% endfor %}"
        "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
    )
    return ChatFormat(
        "{% if messages[0].role != 'system' %}" + _SYSTEM + "{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '\\nUSER: ' }}" + said + "{% elif m.content %}"
        "{{ '\\nASSISTANT: ' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nASSISTANT: ' }}{% endif %}"
    )


class MTMDChatHandler:
    """``Llama(chat_handler=...)``: ``clip_model_path`` is the file with the encoder of images
    (``mmproj``). Conversations follow the model's own template.

    :raises RequestError: there is no such file.
    """

    chat_form: ChatFormat | None = None

    def __init__(self, clip_model_path: str, verbose: bool = True, use_gpu: bool = True) -> None:
        if not Path(clip_model_path).is_file():
            raise RequestError(
                f"clip_model_path: expected a file, found {safe_repr(str(clip_model_path))}"
            )
        self.clip_model_path = clip_model_path
        self.verbose = verbose
        self.use_gpu = use_gpu

    def __call__(self, *, llama: Any, messages: Any, **arguments: Any) -> Any:
        """A completion as a dict, or with ``stream=True`` an iterator of its chunks."""
        form = self.chat_form or llama._format
        return llama.answer_chat({"messages": messages, **arguments}, form)


class Llava15ChatHandler(MTMDChatHandler):
    """Of LLaVA 1.5, whose files may have no template."""

    chat_form = _llava("")


class Llava16ChatHandler(MTMDChatHandler):
    """Of LLaVA 1.6 (NeXT)."""

    chat_form = _llava("{{ '\\n' }}")


class Qwen25VLChatHandler(MTMDChatHandler):
    """Of Qwen2.5-VL."""


class Gemma4ChatHandler(MTMDChatHandler):
    """Of Gemma 4."""
