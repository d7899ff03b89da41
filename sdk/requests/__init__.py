"""From what callers ask to an engine's requests, and back to any thread or event loop."""
