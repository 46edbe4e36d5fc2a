"""Speculation: who drafts tokens, and which of them the model confirms."""
