"""The KV ledger: accounts for every block of every cache type. NumPy only, no torch."""
