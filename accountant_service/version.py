"""The version of the package, in a module that imports nothing.

What computes imports the version from here: the package itself names functions that stand above
it.
"""

__version__ = "0.1.0"
