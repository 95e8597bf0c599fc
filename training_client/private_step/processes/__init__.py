"""The processes that make a step together, the calls between them, and the budget they share."""
