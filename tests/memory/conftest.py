"""The module that measures, importable by the tests beside it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("peak", Path(__file__).parent / "peak.py")
assert _spec is not None and _spec.loader is not None
peak = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("peak", peak)
_spec.loader.exec_module(peak)
