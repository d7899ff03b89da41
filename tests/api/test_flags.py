"""Options that are on or off take nothing but True and False."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    BeamSearchParams,
    LoRARequest,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from sdk.api.config import EngineConfig
from sdk.serving import create_app
from sdk.serving.guard import ByKey, GuardedAccess
from sdk.testing import FakeLLM
from sdk.tools import AssistantMessage, run_tools

WRONG = ["no", "false", "True", "", 0, 1, [], 0.0]


def flags_of(owner: type[Any]) -> list[str]:
    return [one.name for one in dataclasses.fields(owner) if one.type == "bool"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_every_flag_of_options_and_parameters(tiny_path: Path, value: object) -> None:
    makers: list[tuple[Any, dict[str, Any]]] = [
        (EngineConfig, {"model": str(tiny_path)}),
        (SamplingParams, {}),
        (StructuredOutputsParams, {"regex": "a"}),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 2}),
        (LoRARequest, {"lora_name": "a", "lora_int_id": 1}),
    ]
    for make, given in makers:
        names = flags_of(make)
        assert names, make
        for name in names:
            with pytest.raises(RequestError, match=f"{name}.* True or False"):
                make(**given, **{name: value})
    with pytest.raises(RequestError, match="json_object"):
        StructuredOutputsParams(regex="a", json_object=value)  # type: ignore[arg-type]


def test_a_string_for_an_option_of_the_engine(tiny_path: Path) -> None:
    with pytest.raises(RequestError, match="enable_prefix_caching: expected True or False"):
        LLM(tiny_path, enable_prefix_caching="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_flags_of_calls_and_servers(value: Any) -> None:
    llm = FakeLLM("hi")
    ask = [{"role": "user", "content": "x"}]
    calls = {
        "add_generation_prompt": lambda: llm.chat(ask, add_generation_prompt=value),
        "continue_final_message": lambda: llm.chat(ask, continue_final_message=value),
        "parallel_tool_calls": lambda: llm.chat(ask, parallel_tool_calls=value),
        "normalize": lambda: llm.encode("a", normalize=value),
        "page": lambda: create_app(llm, page=value),
        "share_prefixes": lambda: ByKey(["key"], share_prefixes=value),
        "audit_requests": lambda: GuardedAccess(audit_requests=value),
        "parsed_arguments": lambda: run_tools(
            lambda messages: AssistantMessage(content="x"), ask, [], parsed_arguments=value
        ),
    }
    for name, call in calls.items():
        with pytest.raises(RequestError, match=f"{name}: expected True or False"):
            call()
    llm.close()
