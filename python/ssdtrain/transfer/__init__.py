"""Sizes and rates of the memory that bytes go through; the compiled part moves them."""
