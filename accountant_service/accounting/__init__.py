"""The methods, their answers, and the solvers and planners that ask them."""
