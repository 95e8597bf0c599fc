"""The budget ledger: what a dataset may give out, what it has given, and the proof of both."""
