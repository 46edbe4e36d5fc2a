"""The worker half of an instance: one rank's weights, KV pool and model steps."""
