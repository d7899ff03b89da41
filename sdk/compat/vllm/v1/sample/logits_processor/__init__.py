"""Processors of logits as classes: ``LLM(model, logits_processors=[Class])``."""

from sdk.compat.vllm.v1.sample.logits_processor.interface import (
    AdapterLogitsProcessor as AdapterLogitsProcessor,
    BatchUpdate as BatchUpdate,
    LogitsProcessor as LogitsProcessor,
    MoveDirectionality as MoveDirectionality,
    RequestLogitsProcessor as RequestLogitsProcessor,
    process_dict_updates as process_dict_updates,
)
