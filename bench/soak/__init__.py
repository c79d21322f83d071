"""Keeps the real daemon under agentic traffic for as long as one likes, and fails on what was not promised."""

from bench.soak.command import main

__all__ = ["main"]
