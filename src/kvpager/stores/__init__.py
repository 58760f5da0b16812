"""Stores: complete blocks that outlive the process, by key; see docs/stores.md."""
