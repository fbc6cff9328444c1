"""The demo: one small model on real text, under keep, recompute and offload, side by side."""
