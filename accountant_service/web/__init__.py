"""Web pages: the calculator, and the ledger for holders of an API key. Rendered by the server."""
