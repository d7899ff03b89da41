"""Clients with the interfaces of other packages, on an LLM in this process."""
