"""Scheduler and KV cache: token ids in, token ids out."""
