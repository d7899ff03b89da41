"""The engine for an event loop, and the one that is stepped by hand."""
