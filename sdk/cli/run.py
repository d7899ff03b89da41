"""Answer one prompt, or chat in the terminal, token by token.

Only the answer goes to stdout. The summary goes to stderr, on a terminal or with ``--stats``.
Ctrl-C ends the current answer; at the prompt Ctrl-C or Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.api.input_files import reading
from sdk.api.load_progress import is_terminal
from sdk.cli.engine_arguments import add_engine_arguments, as_arguments, engine_options
from sdk.cli.lora_arguments import OFF, add_adapters, add_lora_argument, named_adapters
from sdk.cli.structure_arguments import add_structure_arguments, structure
from sdk.demo import demo_model

if TYPE_CHECKING:
    from sdk.api.outputs import RequestOutput
    from sdk.api.params import SamplingParams
    from sdk.llm import LLM

Message = dict[str, Any]

HELP = """/clear   forget the conversation
/image   PATH: an image for the next message; several times for several
/lora    the adapters of --lora; /lora NAME switches to one, /lora off to none
/help    this text
/exit    leave (or Ctrl-D)
Ctrl-C ends an answer; the conversation keeps the part so far."""


@dataclass(slots=True)
class Answer:
    """One finished answer and the times of its pieces, in seconds of a monotonic clock."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def summary(self) -> str:
        """``54 tokens, 31.2 tokens/s; 42 prompt tokens in 0.21 s (0 cached); stop``"""
        speed = "-"
        if self.num_tokens > 1 and self.last > self.first:
            speed = f"{(self.num_tokens - 1) / (self.last - self.first):.1f}"
        return (
            f"{self.num_tokens} tokens, {speed} tokens/s; {self.num_prompt_tokens} prompt tokens, "
            f"first token after {max(self.first - self.started, 0):.2f} s "
            f"({self.num_cached_tokens} cached); {self.finish_reason or 'interrupted'}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the model (default: the demo model)")
    parser.add_argument("text", nargs="?", help="the prompt, as --prompt")
    parser.add_argument("--model", help="the model, as an option")
    parser.add_argument("--prompt", "-p", help="answer this and exit; - reads standard input")
    parser.add_argument("--system", help="the system message of the conversation")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="an image before the prompt, or before the first message of a chat; several are "
        "allowed",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the context)")
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token")
    parser.add_argument(
        "--top-p", type=float, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    add_structure_arguments(parser)
    add_engine_arguments(parser)
    add_lora_argument(parser, "of which the first one answers")
    parser.add_argument("--threads", type=int, help="default: the CPUs of this process")
    parser.add_argument("--stats", action="store_true", help="print tokens per second to stderr")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    named = named_model(args)
    return [] if named is None else [named]


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    if args.raw and (prompt is None or args.system is not None):
        raise RequestError("--raw: expected --prompt or piped text, and no --system")
    if args.raw and args.image:
        raise RequestError("--image: expected a conversation, found --raw; leave one out")
    for path in args.image:
        check_image(path)
    params = sampling_params(args)
    adapters = named_adapters(args.lora)
    with opened(args, list(adapters.values())) as llm:
        lora = add_adapters(llm, adapters)
        llm._job_maker.check_generates()
        if not args.raw and llm.get_tokenizer().chat_template is None:
            raise RequestError(
                "the model has no chat template, so it cannot chat; use --raw --prompt TEXT to "
                "continue a text"
            )
        if args.image and llm._reader.images is None:
            raise RequestError("--image: this model reads text only; load one that reads images")
        if prompt is not None:
            messages = opening(args.system, prompt, args.image)
            answer = write_answer(llm, prompt if args.raw else messages, params(llm), lora)
            if args.stats or is_terminal(sys.stderr):
                print(answer.summary(), file=sys.stderr)
            return 0 if answer.finish_reason is not None else 130
        return chat(llm, args, params(llm), lora)


def named_model(args: argparse.Namespace) -> str | None:
    """The model the user named. :raises RequestError: there are two, or it is a prompt."""
    if args.file is not None and args.model is not None:
        raise RequestError(
            f"model: expected one, found {args.file!r} and --model {args.model!r}; leave one out "
            "(a prompt is --prompt TEXT)"
        )
    if args.file is not None and args.text is None and is_prompt(args.file):
        raise RequestError(
            f"model: expected a path or a hub id, found {args.file!r}; to ask the demo model: "
            "embedlm run --prompt TEXT"
        )
    return args.model if args.file is None else str(args.file)


def is_prompt(word: str) -> bool:
    """Whether it is rather a text than the name of a file that is missing."""
    return " " in word and "/" not in word and not Path(word).suffix and not Path(word).exists()


def opened(args: argparse.Namespace, adapters: Sequence[str] = ()) -> LLM:
    """The model for one user: one request at a time.

    :raises OutOfMemoryError: with advice as arguments of this command.
    """
    from sdk.llm import LLM

    options = engine_options(args)
    if args.threads is not None:
        options["num_threads"] = args.threads
    if adapters:
        from sdk.memory.weights import adapter_options

        options |= {**adapter_options(adapters), "lora_dtype": args.lora_dtype}
    try:
        return LLM(named_model(args) or str(demo_model()), max_num_seqs=1, **options)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(as_arguments(str(error), args)) from error


def sampling_params(args: argparse.Namespace) -> Any:
    """A function that overrides the loaded model's default parameters with the user's.

    The user's values are checked here, before the model is loaded.
    """
    from sdk.api.params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if (form := structure(args)) is not None:
        given["structured_outputs"] = form
    SamplingParams(**given)

    def of(llm: LLM) -> SamplingParams:
        return llm.get_default_sampling_params().clone(**given)

    return of


def read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt of a single answer; ``None`` for a chat.

    Piped text is the prompt if there is no ``--prompt``, or with ``--prompt -``.
    """
    if args.text is not None:
        if args.prompt is not None:
            raise RequestError(
                f"--prompt: expected one prompt, found {args.prompt!r} and {args.text!r}; leave "
                "one out"
            )
        args.prompt = args.text
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    if args.prompt is None and is_terminal(sys.stdin):
        return None
    text = "" if sys.stdin is None else sys.stdin.read().strip()
    if not text:
        raise RequestError("standard input: expected a prompt, found nothing (use --prompt TEXT)")
    return text


def opening(system: str | None, prompt: str, images: Sequence[Path] = ()) -> list[Message]:
    """The first messages of a conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, asked(prompt, images)]


def asked(text: str, images: Sequence[Path]) -> Message:
    """A message of the user."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "image": path} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def check_image(path: Path) -> None:
    """:raises RequestError: there is no such file, or it cannot be read."""
    with reading("--image", path, "an image"):
        path.stat()
        if not path.is_file():  # opening a pipe would wait
            raise RequestError(f"--image: expected a file, found {str(path)!r}")
        path.open("rb").close()


def write_answer(
    llm: LLM, prompt: str | list[Message], params: SamplingParams, lora: str | None = None
) -> Answer:
    """Stream one answer to stdout; Ctrl-C ends it and returns the part so far."""
    answer = Answer(started=time.monotonic())
    try:
        how: dict[str, Any] = {} if lora is None else {"lora_request": lora}
        stream = llm.stream(prompt, params, **how)
    except RequestError as error:  # with advice that fits this command
        text, full, _ = str(error).partition("; shorten")
        more = "; shorten it, or start with a larger --max-model-len or more --memory"
        raise RequestError(text + more if full else text) from error
    try:
        _collect(stream, answer)
    except KeyboardInterrupt:
        pass
    finally:
        close = getattr(stream, "close", None)  # a generator aborts its request when closed
        if close is not None:
            close()
    print(flush=True)
    return answer


def _collect(stream: Iterable[RequestOutput], answer: Answer) -> None:
    for output in stream:
        [piece] = output.outputs
        now = time.monotonic()
        if piece.token_ids:
            answer.last = now
            if not answer.num_tokens:
                answer.first = now
        answer.num_tokens += len(piece.token_ids)
        answer.num_prompt_tokens = len(output.prompt_token_ids or ())
        answer.num_cached_tokens = output.num_cached_tokens or 0
        answer.text += piece.text
        answer.finish_reason = piece.finish_reason
        print(piece.text, end="", flush=True)


def chat(
    llm: LLM, args: argparse.Namespace, params: SamplingParams, lora: str | None = None
) -> int:
    """Read a line, answer it, keep the history; until Ctrl-D, Ctrl-C or /exit."""
    print("Ctrl-C ends an answer, Ctrl-D leaves, /help has more.", file=sys.stderr)
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    history, images = list(first), list(args.image)
    params = params.clone(truncate_prompt_tokens=-1)  # drop the oldest turns when it is full
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line == "/exit":
            return 0
        if line == "/clear":
            history, images = list(first), []
        if line.split()[:1] == ["/image"]:
            print(_attached(llm, line, images), file=sys.stderr)
            continue
        if line.split()[:1] == ["/lora"]:
            lora, said = _switched(llm, line, lora)
            print(said, file=sys.stderr)
            continue
        if line.startswith("/"):
            print(_command(line), file=sys.stderr)
            continue
        if not line:
            continue
        turn = [*history, asked(line, images)]
        try:
            answer = write_answer(llm, turn, params, lora)
        except RequestError as error:
            # A message that is too long must not end the program.
            print(f"embedlm: {error}", file=sys.stderr)
            continue
        history, images = [*turn, {"role": "assistant", "content": answer.text}], []
        for said in _remarks(llm, turn, answer, params):
            print(f"embedlm: {said}", file=sys.stderr)
        if args.stats or is_terminal(sys.stderr):
            print(answer.summary(), file=sys.stderr)


def _attached(llm: LLM, line: str, images: list[Path]) -> str:
    """The reply to ``/image PATH``, which adds to ``images``; without a path it names them."""
    given = line.split(maxsplit=1)[1:]
    if llm._reader.images is None:
        return "this model reads text only"
    if given:
        try:
            check_image(path := Path(given[0]).expanduser())
        except RequestError as error:
            return str(error).replace("--image", "/image")
        images.append(path)
    return f"with the next message: {', '.join(map(str, images)) or 'no image; /image PATH'}"


def _switched(llm: LLM, line: str, lora: str | None) -> tuple[str | None, str]:
    """The adapter after ``/lora`` or ``/lora NAME``, and the reply."""
    names = [known.name for known in llm.list_loras()]
    asked = line.split(maxsplit=1)[1:]
    if asked == [OFF]:
        return None, "no adapter answers"
    if asked and asked[0] in names:
        return asked[0], f"{asked[0]} answers"
    there = ", ".join(names) or "none; start with --lora NAME=PATH"
    now = f"{lora or 'no adapter'} answers"
    return lora, f"no such adapter; there are {there}" if asked else f"{now}; there are {there}"


def _command(line: str) -> str:
    """The reply to a line that begins with a slash."""
    if line == "/clear":
        return "the conversation is forgotten"
    return HELP if line == "/help" else f"no such command: {line.split()[0]}\n{HELP}"


def _is_longer(llm: LLM, turn: list[Message], num_tokens: int) -> bool:
    """Whether a conversation has more tokens than that, so that its oldest turns were dropped."""
    from sdk.api.params import SamplingParams
    from sdk.requests.prompts.images import image_parts
    from sdk.requests.prompts.kinds import ChatOptions

    if not any(True for message in turn for _ in image_parts(message)):
        whole = llm.get_tokenizer().apply_chat_template(turn, add_generation_prompt=True)
        return num_tokens < len(whole)
    try:
        read = llm._reader.read_chat(turn, SamplingParams(), ChatOptions())
    except RequestError:  # it is longer than the context
        return True
    return num_tokens < len(read.token_ids)


def _remarks(
    llm: LLM, turn: list[Message], answer: Answer, params: SamplingParams
) -> Iterator[str]:
    """What a user should know about an answer: it was cut, or the prompt was."""
    if _is_longer(llm, turn, answer.num_prompt_tokens):
        yield (
            f"the context of {llm.max_model_len} tokens is full: this answer does not see the "
            "oldest turns. /clear starts over, --max-model-len makes the context larger"
        )
    used = answer.num_prompt_tokens + answer.num_tokens
    if answer.finish_reason == "length" and used >= llm.max_model_len:
        yield "the answer ends here because the context is full. /clear starts over"
    elif answer.finish_reason == "length":
        yield f"the answer ends here because of --max-tokens {params.max_tokens}"
