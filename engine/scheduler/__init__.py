"""The scheduler: which rows compute how many tokens in each step. NumPy only, no torch."""
