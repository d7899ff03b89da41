"""Addresses for programs that start several processes themselves."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """A TCP port that no program listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
