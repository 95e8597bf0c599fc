"""Helpers of the tests: oracles, databases, pages. No test module imports another."""
