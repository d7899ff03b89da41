"""The modules that measure and write models, importable by the tests beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("peak", "folders"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parent / f"{_name}.py")
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules.setdefault(_name, _module)
    _spec.loader.exec_module(_module)
