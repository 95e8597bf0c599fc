"""The pages: the calculator, and the ledger for who has a key. Server-rendered, nothing inline."""
