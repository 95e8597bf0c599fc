"""Comparisons of every engine, in each direction by itself, with balls that hold the truth."""
