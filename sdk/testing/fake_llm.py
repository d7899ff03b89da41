"""``FakeLLM``: an :class:`sdk.LLM` without a model.

Prompts, parameters, streams, aborts and errors go through the code of any ``LLM``: the reader, the
scheduler, the engine and its thread. Only the executor is different: its tokens come from a script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.api.display import html_table
from sdk.api.errors import RequestError
from sdk.api.image_options import ImageFetcher
from sdk.api.options import EngineOptions, takes_options
from sdk.api.params import SamplingParams
from sdk.api.scheduling_policy import PolicyName, SchedulingPolicy
from sdk.llm import LLM
from sdk.requests.prompts.images import ImageReader
from sdk.testing.fake_executor import ScriptedExecutor
from sdk.testing.fake_tokenizer import IMAGE, IMAGE_MODEL, FakeTokenizer
from sdk.testing.script import Answers, FakeRequest, Script
from sdk.testing.served_script import ServedScript, needs_weights

if TYPE_CHECKING:  # Unpack: in typing from Python 3.11 on
    from typing_extensions import Unpack

    from sdk.memory.plan import MemoryPlan

_ANSWER = "This is the answer of a fake model."


class FakeLLM(LLM):
    """An :class:`sdk.LLM` for unit tests: its answers come from a script instead of a model.

    ``answers`` is one of:

    * a text: every request gets it;
    * a list: request ``i`` gets item ``i`` (with ``n=2`` a request takes two items);
    * a dict by prompt; for a conversation by the content of its last message;
    * a function of the prompt: of the text, or of the list of messages.

    An answer is a text, a :class:`FakeAnswer` or an exception. ``errors={2: error}`` replaces the
    answer of the third request. The call raises an exception before anything runs, as ``LLM`` does
    for an invalid request; an :class:`EngineDeadError` instead stops the engine. A request for
    which the script has no answer raises an ``AssertionError``.

    A token is a word. ``max_tokens``, ``stop``, ``n``, ``logprobs`` (every token has probability
    1), deadlines, priorities, tenants and ``max_waiting`` work; parameters that would change the
    model's choice, among them structured outputs and banned strings, have no effect.
    ``embeddings`` maps a text to a vector; by default texts with the same words are similar.
    Vectors have length 1, and every ``pooling`` except ``"token"`` means the same. ``requests``
    lists what was asked.

    A step takes ``seconds_per_token``, and ``seconds_to_first_token`` more for a new prompt.
    With ``images=True`` it is a model of text and images: images are decoded, resized and checked
    as for a real one (which needs the extra ``vision``), and each has 4 tokens.

    ``clock`` and ``sleep`` replace the system's (:class:`ManualClock` has both), except in
    ``pump``.

    Methods that need weights (``snapshot``, ``explain``, ...) raise an :class:`UnsupportedError`.
    """

    def __init__(
        self,
        answers: Answers = _ANSWER,
        *,
        errors: Mapping[int, Exception] | None = None,
        seconds_per_token: float = 0.0,
        seconds_to_first_token: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        embeddings: Callable[[str], Sequence[float]] | None = None,
        default_sampling_params: SamplingParams | None = None,
        max_model_len: int = 4096,
        max_num_seqs: int = 64,
        max_waiting: int | None = None,
        scheduling_policy: PolicyName | SchedulingPolicy = "fcfs",
        tenant_weights: Mapping[str, float] | None = None,
        images: bool = False,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        image_fetcher: ImageFetcher | None = None,
        allowed_local_media_path: str | PathLike[str] = "",
    ) -> None:
        for name, value in (
            ("seconds_per_token", seconds_per_token),
            ("seconds_to_first_token", seconds_to_first_token),
        ):
            if not value >= 0:
                raise RequestError(f"{name}: expected at least 0, found {value!r:.80}")
        self.config = EngineConfig(
            model="fake",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            scheduling_policy=scheduling_policy,
            tenant_weights=tenant_weights,
            limit_mm_per_prompt=limit_mm_per_prompt,
            image_fetcher=image_fetcher,
            allowed_local_media_path=allowed_local_media_path,  # type: ignore[arg-type]
        )
        reads_images = images and self.config.most_images > 0
        tokenizer = FakeTokenizer(images=reads_images)
        executor = ScriptedExecutor(
            tokenizer,
            seconds_per_token=seconds_per_token,
            seconds_to_first_token=seconds_to_first_token,
            sleep=sleep,
            embeddings=embeddings,
        )
        params = default_sampling_params or SamplingParams()
        script = Script(answers, errors)
        reader = _image_reader(self.config, tokenizer) if reads_images else None
        served = ServedScript(self.config, script, tokenizer, executor, clock, params, reader)
        self._accepted = served.jobs.accepted
        self._open(served)

    @property
    def requests(self) -> list[FakeRequest]:
        """The accepted requests, in order."""
        return list(self._accepted)

    def __repr__(self) -> str:
        return f"FakeLLM(max_model_len={self.max_model_len}, {len(self.requests)} requests)"

    def _repr_html_(self) -> str:
        context = f"{self.max_model_len} tokens"
        return html_table(
            [("model", "fake"), ("context", context), ("requests", len(self.requests))]
        )

    # What reads a model's files without asking the parts of this object for them:

    @staticmethod
    @takes_options
    def plan(model: str | PathLike[str], **options: Unpack[EngineOptions]) -> MemoryPlan:
        """Not supported."""
        needs_weights("plan")

    def quantize(self, out: str | PathLike[str], scheme: str | None = None, **options: Any) -> Path:
        """Not supported."""
        needs_weights("quantize")


def _image_reader(config: EngineConfig, tokenizer: FakeTokenizer) -> ImageReader:
    """As the model of ``IMAGE_MODEL`` reads images."""
    from sdk.images.processors import image_processor

    sides = {"height": 28, "width": 28}
    processor = image_processor(IMAGE_MODEL, {"size": {"shortest_edge": 28}, "crop_size": sides})
    token_id = tokenizer.token_to_id(IMAGE)
    assert token_id is not None
    return ImageReader.of(config, processor, token_id)
