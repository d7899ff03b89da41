"""What callers give and get, and what every room needs to check it: sizes, errors, the machine."""
