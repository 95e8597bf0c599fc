"""Forward passes of PyTorch's recurrent layers, one position at a time.

PyTorch's own passes are one operation each, whose parameters are used at every position. Here each
use is a matrix product with a recorded input and output, so that the per-example gradients are sums
of outer products over positions (`sequence_products`). The numbers are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from training_client.private_step.gradients.example_gradients import ExampleGradients
from training_client.private_step.layers.layer_uses import (
    EnginePath,
    Tensors,
    UseRecorder,
    projection_gradients,
)

State = tuple[torch.Tensor, ...]  # hidden state; LSTM: and cell state


@dataclass(slots=True)
class _RecordedProduct:
    """A linear map that is applied at every position of a sequence, and recorded once for all.

    Attributes:
        weight, bias: of the product.
        offsets: zeros that are added to the outputs, one per position: their gradients are those
            of the outputs.
        inputs: the inputs so far, by position.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    whole: torch.Tensor
    offsets: tuple[torch.Tensor, ...]
    inputs: list[torch.Tensor | None]

    @classmethod
    def over(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
    ) -> _RecordedProduct:
        """Make the product for sequences shaped like `rows`: (examples, positions, width)."""
        whole = weight.new_zeros(*rows.shape[:2], len(weight), requires_grad=True)
        return cls(weight, bias, whole, whole.unbind(1), [None] * rows.shape[1])

    def __call__(self, position: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return the linear map's output for the inputs at a position."""
        self.inputs[position] = inputs.detach()
        return linear(inputs, self.weight, self.bias) + self.offsets[position]

    def record(self, recorder: UseRecorder, layer: nn.Module) -> None:
        """Record the inputs and outputs of all positions as one use of the layer."""
        inputs = torch.stack([each for each in self.inputs if each is not None], 1)
        differentiate = partial(_product_gradients, self.weight, self.bias, recorder.path)
        recorder.record_use(layer, (inputs,), self.whole, differentiate)


def _product_gradients(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    path: EnginePath | None,
    inputs: Tensors,
    gradients: Tensors,
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of the weight and bias of a linear map."""
    return projection_gradients(weight, bias, inputs[0], gradients[0], path=path)


def _rnn_step(
    activation: Callable[[torch.Tensor], torch.Tensor],
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    _: State,
) -> State:
    """Return a plain RNN's next state from its linearly mapped input and hidden state."""
    return (activation(of_input + of_hidden),)


def _lstm_step(of_input: torch.Tensor, of_hidden: torch.Tensor, state: State) -> State:
    """Return an LSTM's next hidden and cell state from its mapped input and hidden state."""
    first, forget, cell, last = (of_input + of_hidden).chunk(4, -1)
    cells = forget.sigmoid() * state[1] + first.sigmoid() * cell.tanh()
    return last.sigmoid() * cells.tanh(), cells


def _gru_step(of_input: torch.Tensor, of_hidden: torch.Tensor, state: State) -> State:
    """Return a GRU's next state from its linearly mapped input and hidden state."""
    reset_in, update_in, new_in = of_input.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = of_hidden.chunk(3, -1)
    reset, update = (reset_in + reset_hidden).sigmoid(), (update_in + update_hidden).sigmoid()
    new = (new_in + reset * new_hidden).tanh()
    return (new + update * (state[0] - new),)


Step = Callable[[torch.Tensor, torch.Tensor, State], State]


def _step_of(layer: nn.RNNBase | nn.RNNCellBase) -> Step:
    """Return the function that computes the next state of this recurrent layer (RNN, LSTM, GRU)."""
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return _lstm_step
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru_step
    activation = torch.relu if getattr(layer, "nonlinearity", "tanh") == "relu" else torch.tanh
    return partial(_rnn_step, activation)


def run_recurrent_cell(
    recorder: UseRecorder, layer: nn.RNNCellBase, inputs: torch.Tensor, state: Any = None
) -> Any:
    """Run `RNNCell`, `LSTMCell` or `GRUCell`; record its linear maps for per-example gradients.

    Raises:
        UnsupportedModelError: the inputs are not one row per example.
    """
    if inputs.dim() != 2:
        raise recorder.unsupported_error(layer, "must be given one row per example")
    is_lstm = isinstance(layer, nn.LSTMCell)
    if state is None:
        zeros = inputs.new_zeros(len(inputs), layer.hidden_size)
        state = (zeros, zeros) if is_lstm else zeros
    before = tuple(state) if is_lstm else (state,)
    of_input = recorder.project(layer, inputs, layer.weight_ih, _bias(layer, "bias_ih"))
    of_hidden = recorder.project(layer, before[0], layer.weight_hh, _bias(layer, "bias_hh"))
    after = _step_of(layer)(of_input, of_hidden, before)
    return after if is_lstm else after[0]


def run_recurrent_layer(
    recorder: UseRecorder, layer: nn.RNNBase, inputs: Any, state: Any = None
) -> tuple[Any, Any]:
    """Run `RNN`, `LSTM` or `GRU`; record its linear maps for per-example gradients.

    Args:
        recorder: records the uses.
        layer: the layer.
        inputs: a batch of sequences, packed or padded, in the layout that the layer expects.
        state: the first state, as the layer expects it; zeros by default.

    Raises:
        UnsupportedModelError: the inputs are not a batch of sequences, or the first state has
            another number of rows.
    """
    lengths = None
    if isinstance(inputs, PackedSequence):
        rows, lengths = pad_packed_sequence(inputs, batch_first=True)
    else:
        if inputs.dim() != 3:
            raise recorder.unsupported_error(
                layer, "must be given one sequence per example, in a batch"
            )
        rows = inputs if layer.batch_first else inputs.transpose(0, 1)
    states = state if isinstance(layer, nn.LSTM) else (state,)
    if state is not None and any(each.shape[1:-1] != rows.shape[:1] for each in states):
        raise recorder.unsupported_error(
            layer,
            "is given a first state of another number of rows than sequences: give it one row "
            "for each example",
        )
    valid = None
    if lengths is not None:
        positions = torch.arange(rows.shape[1], device=rows.device)
        valid = positions[None] < lengths.to(rows.device)[:, None]
    ends: list[State] = []
    directions = 2 if layer.bidirectional else 1
    for depth in range(layer.num_layers):
        found = []
        for direction in range(directions):
            first = _first_state(layer, rows, state, depth * directions + direction)
            output, end = _run_direction(recorder, layer, rows, first, valid, depth, direction)
            found.append(output)
            ends.append(end)
        rows = torch.cat(found, -1) if directions == 2 else found[0]
        if layer.dropout and depth < layer.num_layers - 1:
            rows = dropout(rows, layer.dropout, layer.training)
    last = tuple(torch.stack(column) for column in zip(*ends, strict=True))
    result = last if isinstance(layer, nn.LSTM) else last[0]
    if lengths is not None:
        return pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False), result
    return (rows if layer.batch_first else rows.transpose(0, 1)), result


def _first_state(layer: nn.RNNBase, rows: torch.Tensor, state: Any, index: int) -> State:
    """Return the initial state of one direction of one of the stacked recurrent layers."""
    if state is not None:
        return (
            tuple(each[index] for each in state) if isinstance(layer, nn.LSTM) else (state[index],)
        )
    hidden = rows.new_zeros(len(rows), layer.proj_size or layer.hidden_size)
    if isinstance(layer, nn.LSTM):
        return hidden, rows.new_zeros(len(rows), layer.hidden_size)
    return (hidden,)


def _run_direction(
    recorder: UseRecorder,
    layer: nn.RNNBase,
    rows: torch.Tensor,
    state: State,
    valid: torch.Tensor | None,
    depth: int,
    direction: int,
) -> tuple[torch.Tensor, State]:
    """Run one stacked layer forwards or backwards in time; return outputs and final state."""
    suffix = f"_l{depth}" + ("_reverse" if direction else "")
    of_inputs = recorder.project(
        layer, rows, getattr(layer, f"weight_ih{suffix}"), _bias(layer, f"bias_ih{suffix}")
    ).unbind(1)
    hidden = _RecordedProduct.over(
        getattr(layer, f"weight_hh{suffix}"), _bias(layer, f"bias_hh{suffix}"), rows
    )
    last = None
    if layer.proj_size:
        last = _RecordedProduct.over(getattr(layer, f"weight_hr{suffix}"), None, rows)
    step, outputs = _step_of(layer), list[torch.Tensor]([state[0]] * len(of_inputs))
    positions: Sequence[int] = range(len(of_inputs))
    for position in reversed(positions) if direction else positions:
        after = step(of_inputs[position], hidden(position, state[0]), state)
        if last is not None:
            after = (last(position, after[0]), *after[1:])
        outputs[position] = after[0]
        if valid is not None:
            here = valid[:, position, None]
            outputs[position] = after[0] * here
            pairs = zip(after, state, strict=True)
            after = tuple(torch.where(here, new, old) for new, old in pairs)
        state = after
    for each in (hidden, last):
        if each is not None:
            each.record(recorder, layer)
    return torch.stack(outputs, 1), state


def _bias(layer: nn.Module, name: str) -> torch.Tensor | None:
    """Return the bias of this name of a recurrent layer; None if it has none."""
    found: torch.Tensor | None = getattr(layer, name, None)
    return found
