"""Tensors that stay the same objects while their bytes are on SSDs."""
