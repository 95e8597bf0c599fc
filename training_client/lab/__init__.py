"""Experiments: data sets, models, training runs and the command line `accountant-train`.

No other package imports this one.
"""
