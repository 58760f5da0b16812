"""Kernels: attention over pages that lie scattered in frames."""
