"""Attention backends: how a device lays out the KV cache and attends over it."""
