"""What one client's hostile, or merely large, request does to a stream and to a probe beside it."""

from bench.hostile.command import main

__all__ = ["main"]
