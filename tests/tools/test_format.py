"""A model's format is recognized from its chat template.

The templates are reduced to the parts that tell families apart; the comments name the originals.
"""

from __future__ import annotations

import pytest

from sdk.api.errors import RequestError
from sdk.tools import all_formats, format_named, format_of, reasoning_named, reasoning_of

_HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions.\n<tools>{{ tool | tojson }}</tools>\n\nFor "
    "each function call, return a json object within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_LLAMA_JSON = (
    "<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n{{- 'Respond in the "
    'format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}'
)
_V31 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments}}"

#: (name, template, format, reasoning)
TEMPLATES = [
    # Qwen/Qwen2.5-7B-Instruct, ibm-granite/granite-4.0-h-tiny
    ("qwen2.5", f"<|im_start|>system\n{_HERMES_TOOLS}", "hermes", None),
    ("granite-4", f"<|start_of_role|>system<|end_of_role|>{_HERMES_TOOLS}", "hermes", None),
    # Qwen/Qwen3-8B
    (
        "qwen3",
        f"<|im_start|>system\n{_HERMES_TOOLS}{{{{ '<think>\\n\\n</think>\\n\\n' }}}}",
        "hermes",
        "think",
    ),
    # NousResearch/Hermes-3-Llama-3.1-8B
    (
        "hermes-3",
        f"<|im_start|>system\nYou are a function calling AI.{_HERMES_TOOLS}",
        "hermes",
        None,
    ),
    # Qwen/Qwen3-Coder-30B-A3B-Instruct
    (
        "qwen3-coder",
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",
        "qwen3_coder",
        None,
    ),
    # meta-llama/Llama-3.1-8B-Instruct, Llama-3.2-3B-Instruct
    (
        "llama-3.1",
        f"{_LLAMA_JSON}{{{{- '<|python_tag|>' + name + '.call(' }}}}",
        "llama_json",
        None,
    ),
    ("llama-3.2", _LLAMA_JSON, "llama_json", None),
    # vLLM's templates for Llama 3.2 and 4, and for Gemma 3
    (
        "llama-3.2-pythonic",
        "Environment: ipython\n'Respond in the format [func_name1(params_name1=params_value1)]'",
        "pythonic",
        None,
    ),
    (
        "llama-4-pythonic",
        "<|header_start|>system<|header_end|>Use exact format: [func_name1(param1=value1)]",
        "pythonic",
        None,
    ),
    (
        "gemma-3-pythonic",
        "<start_of_turn>Example: [func_name1(a=b)]<end_of_turn>",
        "gemma_text",
        None,
    ),
    # google/gemma-3-4b-it, google/functiongemma-270m-it
    (
        "gemma-3",
        "{{ '<start_of_turn>' + role + '\\n' }}{{ '<end_of_turn>\\n' }}",
        "gemma_text",
        None,
    ),
    (
        "functiongemma",
        "<start_of_turn>developer\n<start_function_declaration>{{ '<start_function_call>call:' }}",
        "functiongemma",
        None,
    ),
    # google/gemma-4-31B-it
    (
        "gemma-4",
        "{{- '<|channel>thought\\n' + text }}{{- '<|tool_call>call:' + name + '{' }}<turn|>",
        "gemma_4",
        "channel_thought",
    ),
    # mistralai/Mistral-Small-3.1-24B-Instruct-2503, Devstral-Small-2507, Magistral-Small-2507
    (
        "mistral-3.1",
        "[INST][AVAILABLE_TOOLS] [[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS] [' }}",
        "mistral_list",
        None,
    ),
    ("devstral", "[INST]{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args", None),
    (
        "magistral",
        "Your thinking goes here: [THINK]Draft[/THINK]{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
        "mistral_args",
        "magistral",
    ),
    # openai/gpt-oss-20b
    (
        "gpt-oss",
        "# Valid channels: analysis, commentary, final.{{- '<|start|>assistant<|channel|>analysis"
        "<|message|>' + thinking + '<|end|>' }}",
        "harmony",
        "harmony",
    ),
    # deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1, DeepSeek-V3.1
    (
        "deepseek-v3",
        "{{'<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'}}",
        "deepseek_v3",
        None,
    ),
    (
        "deepseek-r1",
        "{{'<｜tool▁calls▁begin｜>' + '\\n' + '```json' + '\\n'}}{{'<｜Assistant｜><think>\\n'}}",
        "deepseek_v3",
        "think",
    ),
    ("deepseek-v3.1", f"{_V31}{{{{'<｜Assistant｜></think>'}}}}", "deepseek_v31", "think"),
    # ibm-granite/granite-3.3-8b-instruct, granite-3.2-8b-instruct, vLLM's granite-20b template
    (
        "granite-3.3",
        "<|start_of_role|>system<|end_of_role|>respond only with <|tool_call|> followed by a JSON "
        "list. Write your thoughts between <think></think>",
        "granite_list",
        "think",
    ),
    (
        "granite-3.2",
        "<|start_of_role|>Write it after 'Here is my thought process:' and the response after "
        "'Here is my response:'",
        "granite_list",
        "thought_process",
    ),
    (
        "granite-20b",
        'please output "<function_call> {"name": "no_function"}"',
        "granite_list",
        None,
    ),
    # HuggingFaceTB/SmolLM2-1.7B-Instruct, SmolLM3-3B
    (
        "smollm2",
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face",
        "smollm2",
        None,
    ),
    (
        "smollm3",
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face.\n### XML Tools\n"
        "within <tool_call></tool_call> XML tags\n### Python Tools\n<think>\\n\\n</think>",
        "smollm3",
        "think",
    ),
    # allenai/Olmo-3-7B-Instruct
    ("olmo-3", "a call wrapped in <function_calls></function_calls> XML tags", "olmo3", None),
    # ByteDance-Seed/Seed-OSS-36B-Instruct (its calls are not supported)
    ("seed-oss", "{{ '<seed:think>' + text + '</seed:think>' }}", None, "seed"),
    # a template that knows neither
    ("chatml", "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>", None, None),
]


@pytest.mark.parametrize(
    ("template", "format", "reasoning"),
    [row[1:] for row in TEMPLATES],
    ids=[row[0] for row in TEMPLATES],
)
def test_a_template_shows_format_and_reasoning(
    template: str, format: str | None, reasoning: str | None
) -> None:
    found, how = format_of(template), reasoning_of(template)
    assert (found.name if found else None) == format
    assert (how.name if how else None) == reasoning


def test_every_format_is_found_by_a_template() -> None:
    assert {row[2] for row in TEMPLATES} - {None} == {one.name for one in all_formats()}


def test_formats_have_different_orders() -> None:
    orders = [one.order for one in all_formats()]
    assert orders == sorted(set(orders))


@pytest.mark.parametrize(
    ("tokens", "format", "reasoning"),
    [
        (["<s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"], "mistral_args", "magistral"),
        (["<s>", "[TOOL_CALLS]"], "mistral_list", None),
        (["<|channel|>", "<|message|>", "<|call|>"], "harmony", "harmony"),
        (["<|im_start|>", "<tool_call>", "<think>"], "hermes", "think"),
        (["<|python_tag|>"], "llama_json", None),
        (["<|python_start|>", "<|python_end|>"], "pythonic", None),
        (["<｜tool▁calls▁begin｜>"], "deepseek_v31", None),
        (["<start_of_turn>", "<start_function_call>"], "functiongemma", None),
        (["<start_of_turn>"], "gemma_text", None),
        (["<|tool_call|>"], "granite_list", None),
        (["<s>", "</s>"], None, None),
    ],
)
def test_special_tokens_decide_without_a_template(
    tokens: list[str], format: str | None, reasoning: str | None
) -> None:
    found, how = format_of(None, tokens), reasoning_of(None, tokens)
    assert (found.name if found else None) == format
    assert (how.name if how else None) == reasoning


def test_a_template_counts_more_than_tokens() -> None:
    # Fine-tunes of Llama keep its tokens, whatever they write.
    found = format_of(_HERMES_TOOLS, ["<|python_tag|>"])
    assert found is not None and found.name == "hermes"


def test_formats_have_names() -> None:
    assert format_named("hermes").name == "hermes"
    with pytest.raises(RequestError, match=r"found 'herms'; did you mean 'hermes'\?"):
        format_named("herms")
    with pytest.raises(RequestError, match="use one of harmony, functiongemma"):
        format_named("xyz")
    assert reasoning_named("think").opening == ("<think>",)
    with pytest.raises(RequestError, match=r"expected one of harmony, seed, .* found 'xyz'"):
        reasoning_named("xyz")


def test_marks_that_must_stay_in_the_text_are_listed() -> None:
    assert format_named("mistral_args").marks == ("[TOOL_CALLS]",)
    assert format_named("granite_list").marks == (
        *("<|tool_call|>", "<tool_call>", "<function_call>", "</tool_call>"),
    )
