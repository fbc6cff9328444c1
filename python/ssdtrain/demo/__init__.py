"""The demo: trains a small model under keep, recompute and offload, and compares them."""
