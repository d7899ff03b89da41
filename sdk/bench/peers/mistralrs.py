"""mistral.rs on a CPU, through its streams of text; its environment has threads and KV type.

Its Python class takes text alone, so the prompts are words that are one token each. Release 0.9.5
fails when it computes several prompts of a GGUF file in one batch, and it batches prompts that are
equally long. So they get shorter by a token each. A step then adds the next prompt to the requests
that have reached its length, and all of them decode together from the longest prompt's length on.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .opening import Opening
from .timing import Timing

#: The ids in which words are looked for: frequent tokens, without control tokens and bytes.
_COMMON = range(1000, 5000)
#: Passes a prompt on as it is: only chat requests can be streamed.
_TEMPLATE = "{{ messages[0]['content'] }}"
#: Its own default is float16; the variable MISTRALRS_CPU_KV_F32 of its process sets it.
KV = {"auto": "f16", "float16": "f16", "float32": "f32"}


class MistralRs:
    def __init__(self, opening: Opening) -> None:
        import mistralrs

        if opening.prefix_cache:
            raise ValueError("its prefix cache is not measured")
        file = Path(opening.model)
        start = time.perf_counter()
        self.api = mistralrs
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
            template.write(_TEMPLATE)
            template.flush()
            self.runner = mistralrs.Runner(
                which=mistralrs.Which.GGUF(str(file.parent), file.name),
                max_seqs=opening.requests,
                prefix_cache_n=0,
                jinja_explicit=template.name,
            )
        opened = time.perf_counter() - start
        self.words = words_of(self.runner)
        self.hello = {
            "name": f"mistral.rs {version('mistralrs')}",
            "kv": KV[opening.kv],
            "vocab_size": 2**31,  # any id becomes a word
            "open_s": opened,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        timing = Timing(len(prompts))
        # The shortest first: it may begin before the others come.
        asked = [prompt[cut:] for cut, prompt in enumerate(prompts)][::-1]
        streams = [self._stream(prompt, output_len) for prompt in asked]
        with ThreadPoolExecutor(len(streams)) as pool:
            found = list(pool.map(read, streams))
        for prompt, (_, usage) in zip(asked, found, strict=True):
            if (usage.prompt_tokens, usage.completion_tokens) != (len(prompt), output_len):
                raise RuntimeError(
                    f"expected a prompt of {len(prompt)} tokens and an answer of {output_len}, "
                    f"found {usage.prompt_tokens} and {usage.completion_tokens}"
                )
        for now, outputs in steps([times for times, _ in found], output_len):
            timing.step(outputs, now)
        return timing.times()

    def _stream(self, prompt: Sequence[int], output_len: int) -> Any:
        request = self.api.ChatCompletionRequest(
            messages="".join(self.words[token % len(self.words)] for token in prompt),
            model="default",
            max_tokens=output_len,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
        )
        return self.runner.send_chat_completion_request(request)


def words_of(runner: Any) -> list[str]:
    """Words that are one token each after another word, with the space before them."""
    found = []
    for token in _COMMON:
        word = runner.detokenize_text([token], False).strip()
        if re.fullmatch("[a-z]{2,}", word) and runner.tokenize_text(f" {word}", False, None) == [
            token
        ]:
            found.append(f" {word}")
    if not found:
        raise RuntimeError("mistral.rs: the vocabulary has no words that are one token")
    return found


def read(stream: Any) -> tuple[list[float], Any]:
    """When each chunk of a stream came, and the usage that the last one has."""
    times, usage = [], None
    for chunk in stream:
        times.append(time.perf_counter())
        usage = chunk.usage
    return times, usage


def steps(
    streams: Sequence[Sequence[float]], output_len: int
) -> Iterator[tuple[float, list[tuple[int, float, bool]]]]:
    """The engine's steps by the times at which chunks came: when, and the outputs of each.

    A step brings at most one chunk to each stream. Most chunks are one token. Where some are more,
    because a character was not complete, all chunks of the stream count alike.
    """
    events = sorted(
        (at, number, place == len(times) - 1)
        for number, times in enumerate(streams)
        for place, at in enumerate(times)
    )
    outputs: dict[int, tuple[int, float, bool]] = {}
    now = 0.0
    for at, number, last in events:
        if number in outputs:
            yield now, list(outputs.values())
            outputs = {}
        now = at
        outputs[number] = (number, output_len / len(streams[number]), last)
    yield now, list(outputs.values())
