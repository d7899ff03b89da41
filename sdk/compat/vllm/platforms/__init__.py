"""What a program asks about the machine. Engines run on the CPU unless ``device="cuda"`` is given.

``current_platform`` answers for the default, so that programs leave out what is for cards.
"""

from __future__ import annotations

from sdk.kernels.system import SYSTEM


class Platform:
    """The CPU."""

    device_type = "cpu"
    device_name = "cpu"

    def is_cpu(self) -> bool:
        """Always."""
        return True

    def is_cuda(self) -> bool:
        """Never; see :class:`Platform`."""
        return False

    is_rocm = is_tpu = is_xpu = is_cuda_alike = is_out_of_tree = is_cuda

    def get_device_name(self, device_id: int = 0) -> str:
        """The processor's architecture."""
        return SYSTEM.machine()

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of the machine's memory."""
        return SYSTEM.installed_ram()


current_platform = Platform()
