"""Recipes by which saved tensors are made again from other saved tensors and weights."""
