"""Model families, one compact file each, over shared layers."""
