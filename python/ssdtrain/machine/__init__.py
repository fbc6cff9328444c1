"""What there is on this machine: its drives, its pages, its torch."""
