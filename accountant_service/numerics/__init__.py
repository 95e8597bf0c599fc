"""The floor of the house: pure functions on floats and arrays, no knowledge of anything above."""
