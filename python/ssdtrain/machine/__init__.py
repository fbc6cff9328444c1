"""The machine: drives, pages, private functions of torch."""
