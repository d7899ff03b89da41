"""For type checkers, ``torch`` and ``Tensor`` are torch's: see ``lazy_torch.py``."""

import torch as torch
from torch import Tensor as Tensor

def loaded() -> bool: ...
def type_name(dtype: torch.dtype | str) -> str: ...
