"""A PyTorch client that trains with differential privacy, within a budget kept by a service.

- `plan`, `errors`: what a step does and costs; what can stop a run.
- `client`, `retry`: the typed HTTP client of the accounting service.
- `budget`, `phased_budget`: budgets that permit steps.
- `run_report`: the guarantee and certificates of a run.
- `private_step`: per-example gradients, clipping and noise; the only code that sees private data.
- `optimizers`: private optimizers.
- `integrations`: Opacus, Lightning and Hugging Face.
- `lab`: experiments, and the command line `accountant-train`.
"""
