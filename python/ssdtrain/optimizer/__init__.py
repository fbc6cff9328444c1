"""The state of an optimizer on SSDs, brought back for its update."""
