"""A standalone privacy accounting service: see README.md and docs/."""

__version__ = "0.1.0"
