"""Callbacks for trainers: the modules `transformers` and `lightning`."""
