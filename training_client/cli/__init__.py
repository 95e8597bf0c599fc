"""The command line of the training client: one file a command."""

from training_client.cli import compare, fetch, listing, run, together
from training_client.cli.app import app

__all__ = ["app", "compare", "fetch", "listing", "run", "together"]
