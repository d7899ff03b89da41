"""The operating system that this process runs on: ``SYSTEM``, see ``services.py``."""

from __future__ import annotations

import sys

from sdk.kernels.system.services import MemoryLimit as MemoryLimit, Services

if sys.platform == "win32":
    from sdk.kernels.system.windows import Windows as _Own
elif sys.platform == "darwin":
    from sdk.kernels.system.macos import MacOS as _Own
else:
    from sdk.kernels.system.linux import Linux as _Own

SYSTEM: Services = _Own()
