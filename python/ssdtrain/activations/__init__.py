"""What autograd saves in forward and needs again in backward: the first user of the store."""
