"""The memory of an engine: planned from file headers, fitted to a budget, shared and returned."""
