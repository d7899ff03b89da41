"""A helper of processors under its name."""

from sdk.compat.vllm.v1.sample.logits_processor.interface import (
    process_dict_updates as process_dict_updates,
)
