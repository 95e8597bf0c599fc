"""Integrations: train with another framework, and let the accounting service permit every step.

By framework:

- Opacus: `opacus`, whose `accountant` charges every step of `PrivacyEngine` before it is made.
- Lightning: `lightning`, a callback that ends a fit before the step that does not fit the budget.
- Hugging Face: `huggingface`, the same for a `Trainer`.
- Lightning and Hugging Face with this project's engine, without Opacus: `lightning_engine` and
  `huggingface_engine`, which share `framework_optimizer`.
- Flower: `flower`, whose `client_app` charges each round of federated training and whose `strategy`
  is the server's average (`federated_average`). `round_budget` asks the ledger, and `messages` has
  the names in the messages.

In `opacus/`, the callbacks share `step_gate`, which checks every step of Opacus' optimizer. By what
is refused:

- `checks`: loaders that sample neither by Poisson nor by balls in bins, optimizers without noise,
  adaptive or ghost clipping, accumulation over batches. No guarantee covers them.
- `batch_counting`: a second step of a batch, which is charged as one of a batch of its own; and a
  batch without a step, which can reveal a record.
- `split_batches`: a pass that ends within a batch that `BatchMemoryManager` splits, since its
  records could count twice.
- `secret_generators`: noise or batches from a generator whose state others may know.
- `skipped_steps`: a `GradScaler` and gradients that are not finite, by which one record can skip a
  step or reach all parameters; half precision, whose rounding removes noise.

`exact_noise` has Opacus' optimizers add the engine's exact noise. `balls_in_bins` makes loaders
that use every record once an epoch. `batch_draws` and `prefetching` count the batches that loaders
draw. Every change made to another library is in `patches`.
"""
