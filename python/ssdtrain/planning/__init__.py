"""Decides from measured times which tensors are worth a write; has numbers, no tensors."""
