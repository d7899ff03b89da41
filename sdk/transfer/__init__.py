"""Keys and values of prompts, handed over between engines: docs/hand_over.md."""

from __future__ import annotations

from sdk.transfer.connector import KVConnector, KVListener, KVSource
from sdk.transfer.engine_pages import EnginePages, HandedOver
from sdk.transfer.receiver import HandOverReceiver
from sdk.transfer.sender import HandOverSender
from sdk.transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from sdk.transfer.store import FolderStore, KVStore, MemoryStore, StoreConnector
from sdk.transfer.tcp import TcpConnector, TcpListener

__all__ = [
    "EnginePages",
    "FolderStore",
    "HandOverReceiver",
    "HandOverSender",
    "HandedOver",
    "KVConnector",
    "KVListener",
    "KVSource",
    "KVStore",
    "MemoryStore",
    "SharedMemoryConnector",
    "SharedMemoryListener",
    "StoreConnector",
    "TcpConnector",
    "TcpListener",
]
