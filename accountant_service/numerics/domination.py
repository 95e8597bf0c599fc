"""Stub until the real module is merged."""

import math, numpy as np
from accountant_service.numerics.trade_off import direction_curve
from accountant_service.numerics import certified_interval


def _c(c, xs):
    return [direction_curve(c, d, xs) for d in ("removing", "adding")]


def dominates(larger, smaller, slack, deadline):
    if slack <= 0:
        return False
    xs = np.linspace(
        0, certified_interval.epsilon_bounds(smaller, slack, 1e-3).upper * 1.0001 + 1e-9, 64
    )
    return all((b.upper <= a.lower + slack).all() for a, b in zip(_c(larger, xs), _c(smaller, xs)))


def fewest_repetitions(block, step, slack, most, deadline):
    rep = lambda n: [(r, c * n) for r, c in step]
    if most < 1 or not dominates(rep(most), block, slack, deadline):
        return None
    lo, hi = 0, most
    while hi - lo > max(1, lo // 500):
        m = (lo + hi) // 2
        if dominates(rep(m), block, slack, deadline):
            hi = m
        else:
            lo = m
    return hi


def most_repetitions(step, larger, slack, most, deadline):
    rep = lambda n: [(r, c * n) for r, c in step]
    lo, hi = 0, 1
    while hi <= most and dominates(larger, rep(hi), slack, deadline):
        lo, hi = hi, hi * 2
    while hi - lo > max(1, lo // 500):
        m = (lo + hi) // 2
        if dominates(larger, rep(m), slack, deadline):
            lo = m
        else:
            hi = m
    return min(lo, most)
