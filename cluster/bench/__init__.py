"""Benchmarks behind `blockferry bench`; every figure is a median of several runs."""
