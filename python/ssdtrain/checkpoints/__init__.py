"""Checkpoints that are written and read as streams."""
