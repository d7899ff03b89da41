"""Keys and values of prompts, handed over between engines: docs/cluster/hand_over.md."""

from __future__ import annotations

from sdk.cluster.transfer.connector import KVConnector, KVListener, KVSource
from sdk.cluster.transfer.engine_pages import EnginePages, HandedOver
from sdk.cluster.transfer.receiver import HandOverReceiver
from sdk.cluster.transfer.sender import HandOverSender
from sdk.cluster.transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from sdk.cluster.transfer.store import FolderStore, KVStore, MemoryStore, StoreConnector
from sdk.cluster.transfer.tcp import TcpConnector, TcpListener

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
