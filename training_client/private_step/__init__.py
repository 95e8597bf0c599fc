"""One private step: everything that sees private data, from the batch drawn to the noisy mean.

In the order of a step, with what each part guarantees and where that is shown:

1. `sampling` draws the Poisson batch. Every record is in it with probability q, never more. Its
   random bits, and those of the noise, are a `keystream`.
2. `layers/`: `model_pass` runs the batch (`batches`) through the model once. `layer_recorder`
   records how each trained layer is used (`layer_uses`): most are observed, `recurrent_layers` and
   `attention_layers` are run as linear maps, and `replayed_layers` runs any other layer again for
   each example. `clippable_layers` says which layers are refused. `model_checks` proves in every
   step whose operations are new that examples are apart (`isolation`), and that no gradient
   bypasses its layer; `whole_model` runs models whose layers do not show their gradients.
3. `gradients/`: `example_gradients` holds the per-example gradients of one parameter: in full, or
   as two factors (`gradient_factors`) whose outer product they are; `sequence_products` as factors
   over a sequence, `token_gradients` as rows of a table, `summed_gradients` as a sum of several
   forms. `chunked_gradients` computes a few examples' gradients at a time.
4. `transform` says what is clipped (u = D∘(∇ + b), a ball or a box of bound B) and why one example
   then moves the sum by at most B.
5. `clipper` finds the weights min(1, B/‖u‖), and `clipped_sum` adds up the weighted gradients.
   `rounding_bounds` keeps that bound true in floating point: its docstring lists every rounding,
   underflow and overflow, and what pays for it.
6. `rounded_gaussian` rounds the sum to a grid and adds exact noise; `noise` has the keys that it is
   drawn with. `private_sum` takes the step from the budget and is the only exit: it adds noise to
   each `blocks.Block` of the sum and returns nothing else.

`trained_parameters` gathers the parameters of a model that `fully_shard` sharded, and finds a
process's own rows. In `processes/`, `step_processes` shares a step out among processes,
`shared_budget` has them ask one budget, and `process_group` has the calls between them;
`single_process` refuses processes without a shared budget. `model_fixes` replaces layers that
cannot be clipped. `model_state` is for the use of a model between steps, and `kernels` has the CPU
loops: they compute and bound nothing.

Tests in `tests/unit`: `test_clipped_sums.py`, `test_record_influence.py` and
`test_rounding_of_clipped_sums.py` check the sums and the bound on a record's influence, also for
extreme numbers; `test_refused_models.py` checks what is refused, `test_rounded_gaussian.py` and
`test_noise_and_sampling.py` the noise and the sample rate. `test_matmul_kernel.py`,
`test_sparse_kernel.py` and `test_compiled_kernels.py` check that kernels agree with PyTorch and
with exact arithmetic. `tests/conformance` checks the clipped sums of every kind of layer, and the
noise of every optimizer.
"""

from training_client.private_step.blocks import Block, flatten_tensors
from training_client.private_step.clipped_sum import AccumulatedSum, BlockwiseSum, ClippedSum
from training_client.private_step.clipper import Clipper
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.layers.model_pass import Loss
from training_client.private_step.transform import Transform

__all__ = [
    "AccumulatedSum",
    "AffineMap",
    "Block",
    "BlockwiseSum",
    "ClippedSum",
    "Clipper",
    "Loss",
    "Transform",
    "flatten_tensors",
]
