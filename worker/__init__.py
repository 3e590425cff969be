"""The worker: owns one device, the weights and the KV cache on it, and runs steps of a batch."""
