"""The written form of numbers, names, JSON, commands and answers."""
