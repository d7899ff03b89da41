"""Engines under the bench's load, each in a process of its own.

``python .../bench/peers`` runs in any interpreter that has the engine. So nothing here imports from
this project, and modules import each other by relative names; only ``embedlm.py`` imports what an
application would. ``worker.py`` has the protocol; each other module is one engine.
"""
