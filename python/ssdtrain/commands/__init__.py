"""The commands about a directory: which setting is best for its drive, and what is wrong there."""
