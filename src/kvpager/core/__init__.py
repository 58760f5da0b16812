"""The pager's heart: NumPy only, no torch, no I/O of its own."""
