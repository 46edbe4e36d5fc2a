"""The engine: decides what is computed and computes it. Knows nothing of Ray or HTTP."""
