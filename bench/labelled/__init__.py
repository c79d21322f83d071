"""Streams of which it is known whether something is wrong, for the detector to be measured by."""

from bench.labelled.command import main

__all__ = ["main"]
