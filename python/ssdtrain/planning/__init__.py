"""What is worth a write, decided from measured times; knows numbers, no tensors."""
