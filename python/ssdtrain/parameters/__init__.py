"""Weights of models on SSDs."""
