"""Training of a draft head for a checkpoint that came without one."""
