"""Text that arrives token by token: decoding it, and finding where it must stop."""
