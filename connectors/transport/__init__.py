"""Transports: one-sided reads and writes between registered memory regions."""
