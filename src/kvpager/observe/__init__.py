"""Seeing inside: an engine's figures as Prometheus knows them; see docs/observing.md."""

from kvpager.observe.metrics import CONTENT_TYPE, Snapshot, families, render

__all__ = ["CONTENT_TYPE", "Snapshot", "families", "render"]
