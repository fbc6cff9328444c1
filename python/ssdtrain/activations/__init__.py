"""Tensors that autograd saves in forward and needs again in backward."""
