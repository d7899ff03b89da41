"""What an engine occupies: planned from headers, fitted to a budget, lent, moved and given back."""
