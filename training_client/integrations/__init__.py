"""For those who train with something else: the accounting, and nothing else, is exchanged."""
