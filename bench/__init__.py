"""Benchmarks: they print figures and never assert a time."""
