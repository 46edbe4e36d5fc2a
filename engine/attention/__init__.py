"""Attention backends, one per file, behind one protocol."""
