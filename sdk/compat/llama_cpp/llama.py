"""``Llama``: the high-level interface of llama-cpp-python on an :class:`sdk.LLM`, in this process.

A program that was written for llama-cpp-python changes only its import line. ``Llama.llm`` is the
LLM with everything that llama-cpp-python has no name for. docs/compat/compat.md lists the
differences.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from sdk import LLM
from sdk.api.errors import RequestError
from sdk.api.lora import LoRARequest
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.compat.llama_cpp._chat import (
    FALLBACK,
    ChatFormat,
    chat_dict,
    chat_format,
    chat_responses,
    check_named,
    chunk_dicts,
    tool_arguments,
)
from sdk.compat.llama_cpp._completions import (
    CompletionError as CompletionError,
    TextCompletions,
    check_ended,
    without_end,
)
from sdk.compat.llama_cpp._options import (
    LLAMA_ATTENTION_TYPE_UNSPECIFIED,
    LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
    LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    LLAMA_SPLIT_MODE_LAYER,
    OLD,
    POOLINGS,
    check_unscaled,
    in_llama_words,
    llm_options,
)
from sdk.compat.llama_cpp._parts import (
    Ids,
    LlamaState as LlamaState,
    LogitsProcessor as LogitsProcessor,
    LogitsProcessorList as LogitsProcessorList,
    MinTokensLogitsProcessor as MinTokensLogitsProcessor,
    StoppingCriteria as StoppingCriteria,
    StoppingCriteriaList as StoppingCriteriaList,
    metadata_of,
    token_ids,
)
from sdk.compat.llama_cpp._sampling import Callbacks, sampling_params
from sdk.compat.llama_cpp._tokens import LlamaTokens
from sdk.compat.llama_cpp.llama_cache import (
    BaseLlamaCache as BaseLlamaCache,
    LlamaCache as LlamaCache,
    LlamaDiskCache as LlamaDiskCache,
    LlamaRAMCache as LlamaRAMCache,
)
from sdk.compat.llama_cpp.llama_grammar import LlamaGrammar as LlamaGrammar
from sdk.compat.llama_cpp.llama_speculative import LlamaDraftModel as LlamaDraftModel
from sdk.compat.llama_cpp.llama_tokenizer import LlamaTokenizer as LlamaTokenizer
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import is_conversation
from sdk.serving.openai.requests import structure_of
from sdk.serving.openai.responses import Responses

_NOT_GIVEN = ("self", "__class__", "kwargs")


class Llama(LlamaTokens):
    """A model with the methods and results of llama-cpp-python's ``Llama``.

    ``model_path`` is a GGUF file, or anything else that ``LLM`` loads. ``kwargs`` are options of
    ``LLM`` (``memory="2GiB"``).

    :raises RequestError: an argument cannot be honored; the message names it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = LLAMA_SPLIT_MODE_LAYER,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        seed: int = LLAMA_DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
        pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED,
        attention_type: int = LLAMA_ATTENTION_TYPE_UNSPECIFIED,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Any = None,
        draft_model: LlamaDraftModel | None = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self._start(_given(locals()), kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a ``Llama`` is its arguments: unpickling loads the model again."""
        return _loaded, (type(self), self._arguments)

    def _start(self, given: dict[str, Any], more: Mapping[str, Any]) -> None:
        self._arguments = {**given, **more}
        self.model_path: str = given["model_path"]
        self.chat_format: str | None = given["chat_format"]
        self.chat_handler: Any = given["chat_handler"]
        self.last_n_tokens_size: int = given["last_n_tokens_size"]
        self.n_batch = min(given["n_batch"], given["n_ctx"] or given["n_batch"])
        self.spm_infill: bool = given["spm_infill"]
        self.verbose: bool = given["verbose"]
        self.cache: BaseLlamaCache | None = None
        self._pooling: int = given["pooling_type"]
        self._format = chat_format(self.chat_format)
        options = llm_options(given)
        if given["lora_path"] is not None and not Path(given["lora_path"]).exists():
            raise RequestError(
                f"lora_path: expected a LoRA adapter, found {safe_repr(given['lora_path'])}"
            )
        if not Path(self.model_path).exists():
            raise RequestError(f"model_path: expected a file, found {safe_repr(self.model_path)}")
        check_named(self.chat_format, lambda: self.metadata)
        check_unscaled(given["rope_freq_scale"], lambda: self.metadata)
        more = {name: value for name, value in more.items() if name not in OLD}
        with in_llama_words():
            self.llm = LLM(self.model_path, **{**options, **more})
        if given["lora_path"] is not None:
            adapter = LoRARequest("lora", 1, given["lora_path"], lora_scale=given["lora_scale"])
            self.llm._job_maker.adapters.default = self.llm.add_lora(adapter, pin=True).lora_name
        if self._format is None and not self._has_template():
            self.chat_format, self._format = FALLBACK, chat_format(FALLBACK)
        self._tokens: list[int] = []  # of the last request; eval adds to them
        self.set_seed(given["seed"] or LLAMA_DEFAULT_SEED)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Download a file of a repository on the hub and load it; ``filename`` may be a pattern.

        The other parts of a split model are downloaded too, so ``additional_files`` has no effect.
        """
        from sdk.loaders.hub.hub import HubAccess
        from sdk.loaders.open import locate

        folder = local_dir if local_dir is not None else cache_dir
        hub = HubAccess(None, False, None if folder is None else str(folder))
        return cls(model_path=str(locate(repo_id, filename, hub)), **kwargs)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and free the model."""
        self.llm.close()

    # ---- text ------------------------------------------------------------------------------------

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
    ) -> Any:
        """A completion as a dict, or with ``stream=True`` an iterator of its chunks.

        :raises RequestError: an argument is invalid or the prompt is too long (a ``ValueError``).
        :raises CompletionError: the request failed while it ran (a ``RuntimeError``).
        """
        given = _given(locals())
        asked = self._prompt(prompt, suffix)
        callbacks = None
        if Callbacks.needed(given):
            with in_llama_words():
                read = self.llm._job_maker.read(asked, None).prompts[0]
            callbacks = Callbacks(given, read.token_ids, self.last_n_tokens_size)
        params = self._params(given, callbacks)
        tokenizer = self.llm.get_tokenizer()
        text = prompt if isinstance(prompt, str) else tokenizer.decode(asked["prompt_token_ids"])
        made = TextCompletions(model or self.model_path, tokenizer, text, callbacks)
        if stream:
            return made.chunks(self._watched(asked, params))
        if echo and logprobs is not None:
            params = params.clone(prompt_logprobs=params.logprobs)
        with in_llama_words():
            [output] = self.llm.generate(asked, params, use_tqdm=False)
        self._remember(output)
        return made.whole(output, echo=echo)

    __call__ = create_completion

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Iterator[int]:
        """The tokens that follow ``tokens``, EOS included, until the context is full.

        ``reset=False``: they follow the tokens of the last request.
        """
        given = {**_given(locals()), "temperature": temp}
        prompt = [*([] if reset else self._tokens), *token_ids("tokens", tokens)]
        callbacks = Callbacks(given, prompt, self.last_n_tokens_size)
        needed = callbacks if Callbacks.needed(given) else None
        params = self._params(given, needed).clone(ignore_eos=True)
        for output in self._watched({"prompt_token_ids": prompt}, params):
            [answer] = output.outputs
            yield from answer.token_ids
            if answer.finished and not callbacks.stopped:
                check_ended(answer)

    def eval(self, tokens: Sequence[int]) -> None:
        """Add tokens to the context. They are computed when the next token is sampled."""
        self._tokens += token_ids("tokens", tokens)

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        idx: int | None = None,
    ) -> int:
        """A token that follows the context. It is not added to it."""
        if idx is not None:
            raise RequestError(f"idx={safe_repr(idx)} is not supported: leave it out")
        given = {**_given(locals()), "temperature": temp}
        needed = Callbacks.needed(given)
        callbacks = Callbacks(given, self._tokens, self.last_n_tokens_size) if needed else None
        params = self._params(given, callbacks).clone(max_tokens=1, ignore_eos=True)
        with in_llama_words():
            [output] = self.llm.generate({"prompt_token_ids": self._tokens}, params, use_tqdm=False)
        check_ended(output.outputs[0])
        return output.outputs[0].token_ids[0]

    # ---- chats -----------------------------------------------------------------------------------

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: list[Any] | None = None,
        function_call: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """A chat completion as a dict, or with ``stream=True`` an iterator of its chunks."""
        given = _given(locals())
        if self.chat_handler is not None:
            return self.chat_handler(llama=self, **given)
        return self.answer_chat(given, self._format)

    def answer_chat(self, given: Mapping[str, Any], form: ChatFormat | None) -> Any:
        """:meth:`create_chat_completion` with the arguments ``given`` and the format ``form``."""
        made, found = self._chat(given, form)
        if given["stream"]:
            choice = tool_arguments(given).get("tool_choice")
            return chunk_dicts(made, found, self._shown, forced=isinstance(choice, Mapping))
        return chat_dict(made.chat(found))

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`create_chat_completion` with the objects of OpenAI's API instead of dicts."""
        bound = inspect.signature(self.create_chat_completion).bind(*args, **kwargs)
        bound.apply_defaults()
        made, found = self._chat(bound.arguments, self._format)
        if bound.arguments["stream"]:
            return (made.chunk(self._shown(piece)) for piece in found)
        return made.chat(found)

    def _chat(self, given: Mapping[str, Any], form: ChatFormat | None) -> tuple[Responses, Any]:
        """The output of a chat, or with ``stream`` its pieces."""
        messages, template = given["messages"], tool_arguments(given)
        if not is_conversation(messages):
            raise RequestError(
                f"messages: expected a list of messages, found {safe_repr(messages)}"
            )
        if form is not None:
            template["chat_template"] = form.template
            template["add_generation_prompt"] = form.add_generation_prompt
        callbacks = None
        if Callbacks.needed(given):
            with in_llama_words():
                chats = self.llm._job_maker.read_chats(
                    "create_chat_completion", messages, None, template
                )
            callbacks = Callbacks(given, chats.prompts[0].token_ids, self.last_n_tokens_size)
        top = given["top_logprobs"] or 0
        params = self._params({**given, "logprobs": top if given["logprobs"] else None}, callbacks)
        if given["response_format"] is not None:
            structure = structure_of(given["response_format"])
            params = params.clone(structured_outputs=structure or params.structured_outputs)
        if form is not None:
            ends = (*(params.stop_token_ids or ()), *form.stop_token_ids)
            stop = (*(params.stop or ()), *form.stop)
            params = params.clone(stop=stop, stop_token_ids=ends)
        made = chat_responses(self.llm, given["model"] or self.model_path, params.logprobs)
        if given["stream"]:
            return made, self._watched(messages, params, **template)
        with in_llama_words():
            [output] = self.llm.chat(messages, params, use_tqdm=False, **template)
        self._remember(output)
        return made, self._shown(output)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        return without_end(output, self.llm.get_tokenizer().eos_token_ids)

    # ---- embeddings ------------------------------------------------------------------------------

    def create_embedding(self, input: str | list[str], model: str | None = None) -> dict[str, Any]:
        """The embeddings of one or more texts in the form of OpenAI's API."""
        texts = [input] if isinstance(input, str) else input
        vectors, count = self.embed(texts, return_count=True)
        data = [
            {"object": "embedding", "embedding": vector, "index": index}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": usage}

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The embedding of a text, or those of a list of texts.

        ``pooling_type`` says what an embedding is; without one, a vector for each token, unless the
        file names a type. ``truncate`` keeps the first ``n_batch`` tokens.
        """
        texts = [input] if isinstance(input, str) else input
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise RequestError(f"input: expected a text or a list of them, found {input!r:.80}")
        rows = [self.tokenize(text.encode()) for text in texts]
        if truncate:
            rows = [row[: self.n_batch] for row in rows]
        for row in rows:
            if len(row) > self.n_batch:
                raise RequestError(f"input: {len(row)} tokens, but n_batch is {self.n_batch}")
        with in_llama_words():
            outputs = self.llm.encode(
                [{"prompt_token_ids": row} for row in rows],
                pooling=POOLINGS[self.pooling_type()],  # type: ignore[arg-type]
                normalize=normalize,
                use_tqdm=False,
            )
        vectors = [output.outputs.data.tolist() for output in outputs]
        found = vectors[0] if isinstance(input, str) else vectors
        return (found, sum(map(len, rows))) if return_count else found

    def pooling_type(self) -> int:
        """The pooling type that was asked for, or that the file names."""
        if self._pooling != LLAMA_POOLING_TYPE_UNSPECIFIED:
            return self._pooling
        architecture = self.metadata.get("general.architecture")
        named = int(self.metadata.get(f"{architecture}.pooling_type", LLAMA_POOLING_TYPE_NONE))
        return named if named in POOLINGS else LLAMA_POOLING_TYPE_NONE

    # ---- facts and state -------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """The length of the context."""
        return self.llm.max_model_len

    def n_embd(self) -> int:
        """The length of an embedding."""
        return self.llm.model_config.hidden_size

    def n_vocab(self) -> int:
        """The number of tokens."""
        return self.llm.get_tokenizer().vocab_size

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The numbers and texts of a GGUF file's header; empty for other checkpoints."""
        return metadata_of(Path(self.model_path))

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the context."""
        return len(self._tokens)

    @property
    def input_ids(self) -> Ids:
        """The tokens of the last request, answer included; a copy."""
        return np.array(self._tokens, np.intc)

    def reset(self) -> None:
        """Forget the context. Cached prefixes stay."""
        self._tokens = []

    def set_seed(self, seed: int) -> None:
        """The seed from which those of requests without one are drawn."""
        self._seed = seed
        self._seeds = random.Random(seed)

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Accepted: the prefix cache is always on."""
        self.cache = cache

    def save_state(self) -> LlamaState:
        """The context with its keys and values."""
        snapshot = None
        adapted = self.llm.config.enable_lora  # snapshots are of the model alone
        if len(self._tokens) > self.llm.config.block_size and not adapted:
            snapshot = self.llm.snapshot({"prompt_token_ids": self._tokens})
        return LlamaState(self.input_ids, self.n_tokens, self._seed, snapshot)

    def load_state(self, state: LlamaState) -> None:
        """Go back to a saved context."""
        if not isinstance(state, LlamaState):
            raise RequestError(f"state: expected a LlamaState, found {safe_repr(state)}")
        if state.snapshot is not None:
            self.llm.restore(state.snapshot)
        self._tokens = state.input_ids.tolist()
        self.set_seed(state.seed)

    # ---- inside ----------------------------------------------------------------------------------

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> Any:
        if suffix is not None:
            order = {"suffix_first": True} if self.spm_infill else {}
            return {"prompt": prompt, "suffix": suffix, **order}
        if not isinstance(prompt, str):
            return {"prompt_token_ids": token_ids("prompt", prompt)}
        bos = self.token_bos()
        return {"prompt_token_ids": [bos]} if not prompt and bos >= 0 else prompt

    def _has_template(self) -> bool:
        chosen = self.llm.config.chat_template
        return (chosen or self.llm.get_tokenizer().chat_template) is not None

    def _params(self, given: Mapping[str, Any], callbacks: Callbacks | None) -> SamplingParams:
        if (seed := given.get("seed")) is not None:
            self.set_seed(seed)
        else:
            seed = self._seeds.getrandbits(32)
        return sampling_params(given, seed, callbacks)

    def _watched(
        self, prompt: Any, params: SamplingParams, **template: Any
    ) -> Generator[RequestOutput, None, None]:
        """The pieces of a stream, whose tokens become the context. The request starts now."""
        with in_llama_words():
            pieces = self.llm.stream(prompt, params, **template)
        return self._remembering(pieces)

    def _remembering(self, pieces: Any) -> Generator[RequestOutput, None, None]:
        context: list[int] = []
        try:
            for output in pieces:
                if not context:
                    context = self._tokens = list(output.prompt_token_ids)
                context += output.outputs[0].token_ids
                yield output
        finally:
            pieces.close()

    def _remember(self, output: RequestOutput) -> None:
        self._tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]


def _loaded(kind: type[Llama], arguments: dict[str, Any]) -> Llama:
    return kind(**arguments)


def _given(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method: its ``locals()`` before it has others."""
    return {name: value for name, value in names.items() if name not in _NOT_GIVEN}
