"""Floating point: functions that stay accurate, rounding that stays on the safe side.

special_functions: logarithms, normal tails and binomials without cancellation or overflow.
rounding: bounds moved up or down, past the floating-point error of their formulas.
bounds: proved intervals, their width, and the check that they are not empty.
search: bracketing searches that return the feasible side of a boundary.
"""
