"""The budget ledger: each dataset's privacy budget, its use, and a verifiable record of both."""
