"""Connectors move KV bytes between pools. They know block ids and byte regions, never requests' text."""
