"""CPU kernels: matrix products, sparse products, row sums, elementwise formulas."""
