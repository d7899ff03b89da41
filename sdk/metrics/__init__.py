"""Numbers about requests and the engine. Modules that need other packages are imported by name."""
