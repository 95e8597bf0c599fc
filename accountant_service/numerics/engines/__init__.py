"""Engines: each bounds δ(ε) of a composition from both sides in its own way.

saddle_point: the Rényi bound, and the tilt at which the other engines are accurate.
line_integral: one integral of the characteristic function along a vertical line.
rare_events: the same integral over the rare outcomes only; the others are bounded.
fft_lattice: upper and lower bounds by FFT convolution of discretised privacy losses.
lattice_refinement: a lattice that is made finer until its bounds are narrow enough.
small_noise: closed-form bounds for sampled Gaussian releases with very little noise.
"""
