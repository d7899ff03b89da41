"""A class that changes logits, a function for one request, and configuration objects."""

import sys

import torch
from vllm import LLM, SamplingParams
from vllm.config import AttentionConfig, CompilationConfig, CompilationMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

MODEL = sys.argv[1]
logger = init_logger(__name__)


def only(target: int, row: torch.Tensor) -> torch.Tensor:
    kept = row[target].item()
    row[:] = float("-inf")
    row[target] = kept
    return row


class Batch(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target {target} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        assert vllm_config.model_config is not None
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets,
            batch_update,
            lambda params, prompt, output: (params.extra_args or {}).get("target"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, target in self.targets.items():
            logits[index] = only(target, logits[index])
        return logits


class First(AdapterLogitsProcessor):
    """Repeats the prompt's first token, and the second one after that."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if not (params.extra_args or {}).get("first"):
            return None
        return lambda prompt, output, row: only(prompt[min(len(output), 1)], row)


if current_platform.is_rocm():
    attention = AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)
else:
    attention = AttentionConfig(backend=AttentionBackendEnum.FLEX_ATTENTION)
llm = LLM(
    model=MODEL,
    max_model_len=128,
    enforce_eager=True,
    logits_processors=[Batch, First],
    trust_remote_code=True,
    compilation_config=CompilationConfig(mode=CompilationMode.NONE),
    **({} if current_platform.is_cpu() else {"attention_config": attention}),
)
asked = ({"target": 67}, {}, {"first": True}, {"first": True})
texts = ("the cat sat", "the cat sat", "a dog ran", "once there was")
params = [SamplingParams(temperature=0.0, max_tokens=4, extra_args=extra) for extra in asked]
outputs = llm.generate(list(texts), params)
forced, free, *repeated = [list(output.outputs[0].token_ids) for output in outputs]
assert forced == [67] * len(forced)
assert free != forced
for output, answer in zip(outputs[2:], repeated, strict=True):
    first, second, *_ = output.prompt_token_ids
    assert answer == [first, second, second, second][: len(answer)], (answer, output)
try:
    llm.generate(texts[0], SamplingParams(extra_args={"target": "x"}))
except ValueError as error:
    assert "target x is not int" in str(error)
else:
    raise SystemExit("accepted")
logger.debug("done")
