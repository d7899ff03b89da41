"""Text that arrives token by token: detokenizing it, and finding stop strings."""
