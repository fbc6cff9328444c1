"""How bytes go to the store and come back: one file per kind of memory."""
