"""Moves bytes to the store and back; a file for each kind of memory."""
