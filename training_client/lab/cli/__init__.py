"""The command line of the training client, one file per command."""

from training_client.lab.cli import compare, data, lists, run, together
from training_client.lab.cli.app import app

__all__ = ["app", "compare", "data", "lists", "run", "together"]
