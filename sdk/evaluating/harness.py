"""Runs lm-eval (EleutherAI's harness) on this engine: ``--model embedlm``.

    python -m sdk.evaluating.harness run --model embedlm --model_args pretrained=m.gguf --tasks ...

is the ``lm_eval`` command with this model registered. Releases of lm-eval newer than 0.4.13 look
for entry points (group ``lm_eval.models``) and find the model themselves. ``model_args`` are
options of :class:`sdk.LLM`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.kernels.packages import needed_for
from sdk.llm import LLM

with needed_for("sdk.evaluating.harness needs"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model
    from lm_eval.utils import get_rolling_token_windows

#: Options that lm-eval's command line passes to every model; the engine makes its own batches.
_UNUSED = ("batch_size", "max_batch_size", "device")
#: Concurrent requests: each stores one number per prompt token until its score is computed.
_AT_ONCE = 512
#: A text, a continuation, and the tokens of both.
Pair = tuple[tuple[str, str], list[int], list[int]]


class EmbedLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's model interface, implemented with :meth:`sdk.LLM.generate`.

    Args:
        pretrained: a GGUF file, a folder with safetensors, or a hub id.
        max_gen_toks: the most tokens to generate if a task does not say.
        max_length: tokens of one request (``max_model_len``).
        options: of :class:`sdk.LLM`: ``compute=exact,kv_cache_dtype=int8,memory=2GiB``.

    Raises:
        RequestError: ``pretrained`` is missing, or the model has no tokenizer, or neither BOS nor
            EOS.
    """

    def __init__(
        self,
        pretrained: str = "",
        max_gen_toks: int = 256,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not pretrained:
            raise RequestError("model_args: expected pretrained=MODEL, found none")
        for name in _UNUSED:
            options.pop(name, None)
        self._llm = LLM(pretrained, max_model_len=max_length, **options)
        self._name = str(pretrained)
        self._text = self._llm.get_tokenizer()
        self._max_gen_toks = max_gen_toks
        begin = self._text.encode("a")[:1]
        #: BOS, if the engine begins the model's texts with it.
        self._bos = begin if begin == [self._text.bos_token_id] else []
        if self._text.bos_token_id is None and not self._text.eos_token_ids:
            raise RequestError(f"{pretrained}: expected BOS or EOS to begin a text, found neither")

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's request caches."""
        return self._name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return min(self._text.eos_token_ids)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, as for lm-eval's other models, also where
        texts do not begin with it."""
        bos = self._text.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The most tokens that can be scored; scoring also generates one token."""
        return self._llm.max_model_len - 1

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, after exactly one BOS unless ``add_special_tokens=False``."""
        ids = self._text.encode(string, add_special_tokens=False)
        if add_special_tokens is False or ids[:1] == self._bos:
            return ids
        return self._bos + ids

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, for lm-eval's records."""
        return (self._text.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, through the model's chat template."""
        return self._text.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    # ---- scoring ---------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would produce it."""
        asked = []
        for _, context, continuation in requests:
            if len(continuation) >= self.max_length:
                raise RequestError(
                    f"continuation: expected fewer than {self.max_length} tokens (max_length), "
                    f"found {len(continuation)}"
                )
            asked.append(((context + continuation)[-self.max_length :], len(continuation)))
        found = []
        for (pair, _, _), score in zip(requests, self._scores(asked, disable_tqdm), strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, score)
            found.append(score)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts; parts of long ones overlap by one token."""
        asked: list[tuple[list[int], int]] = []
        parts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            before = len(asked)
            windows = get_rolling_token_windows(
                tokens, self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            asked += [([*read, followed[-1]], len(followed)) for read, followed in windows]
            parts.append(len(asked) - before)
        scores = self._scores(asked, disable_tqdm)
        found = []
        for request, count in zip(requests, parts, strict=True):
            total = sum(next(scores)[0] for _ in range(count))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            found.append(total)
        return found

    def _scores(
        self, asked: Sequence[tuple[list[int], int]], quiet: bool
    ) -> Iterator[tuple[float, bool]]:
        """For each list of ids: log-probability of its last ``n``, and whether all have rank 1."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        for start in range(0, len(asked), _AT_ONCE):
            some = asked[start : start + _AT_ONCE]
            prompts = [{"prompt_token_ids": ids} for ids, _ in some]
            outputs = self._llm.generate(prompts, params, use_tqdm=not quiet)
            for (ids, count), output in zip(some, outputs, strict=True):
                _check(output)
                rows = output.prompt_logprobs or []
                last = list(zip(ids, rows, strict=True))[len(ids) - count :]
                scored = [row[token] for token, row in last if row is not None]
                yield sum(one.logprob for one in scored), all(one.rank == 1 for one in scored)

    # ---- generating ------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a string in ``until``; greedy unless ``do_sample``."""
        prompts, params = [], []
        for context, settings in (request.args for request in requests):
            one = self._params(settings)
            room = max(self._llm.max_model_len - (one.max_tokens or 1), 1)
            prompts.append({"prompt_token_ids": self.tok_encode(context)[-room:]})
            params.append(one)
        found = []
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            _check(output)
            text = output.outputs[0].text
            self.cache_hook.add_partial("generate_until", request.args, text)
            found.append(text)
        return found

    def _params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters for a task's ``generation_kwargs``.

        :raises RequestError: one of them is unknown.
        """
        given = dict(settings)
        until = given.pop("until", None) or []
        stop = [until] if isinstance(until, str) else list(until)
        if not given.pop("do_sample", given.get("temperature", 0) > 0):
            given["temperature"] = 0
        limit = given.pop("max_gen_toks", self._max_gen_toks)
        unknown = given.keys() - {field.name for field in fields(SamplingParams)}
        if unknown:
            raise RequestError(
                f"generation_kwargs: expected until, max_gen_toks, do_sample or fields of "
                f"SamplingParams, found {', '.join(sorted(unknown))}"
            )
        room = max(self._llm.max_model_len - 1, 1)
        return SamplingParams(stop=stop, max_tokens=min(limit, room), **given)


def _check(output: RequestOutput) -> None:
    """:raises RequestError: the request failed."""
    answer = output.outputs[0]
    if answer.finish_reason == "error":
        raise RequestError(f"request {output.request_id} failed: {answer.stop_reason}")


#: Not as a decorator: where an entry point of this package has registered the name already, lm-eval
#: imports this module for it, and compares the module's name, which is another one there.
if "embedlm" not in MODEL_REGISTRY:
    register_model("embedlm")(EmbedLM)

if __name__ == "__main__":
    cli_evaluate()
