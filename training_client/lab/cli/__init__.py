"""The command line of the training client, one file per command."""

from training_client.lab.cli.app import app, load_command

__all__ = ["app", "load_command"]
