"""Small helpers that programs import."""

import uuid

from sdk.compat.vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser


def random_uuid() -> str:
    """A new name for a request: 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]
