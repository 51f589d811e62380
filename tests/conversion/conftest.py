"""Fixtures of the conversion's tests."""

from .marian_folders import spms

__all__ = ["spms"]
