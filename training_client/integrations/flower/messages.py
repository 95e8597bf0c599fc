"""The names in the messages between the Flower client and the strategy."""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 1  # changes whenever the meaning of a message does
TRAIN: Final = "train"
END_RUN: Final = "query.end_run"
# records of a message from the server: its round, and the model's parameters
ROUND: Final = "round"
ARRAYS: Final = "arrays"
# the record of a reply, and the states in it
OUTCOME: Final = "outcome"
CONTRIBUTED: Final = "contributed"
SPENT: Final = "spent"
ENDED: Final = "ended"
