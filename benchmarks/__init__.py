"""Measurements of this project, each a program of its own."""
