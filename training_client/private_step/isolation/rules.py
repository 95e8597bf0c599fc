"""One rule for each kind of operation on examples: where its results have the examples.

A rule gets the call of an operation of which at least one operand has examples. It returns the
place of the examples in each result: a `Place`; None for a result that all examples have together;
a `Verdict`; `Shared`; or `NOTHING`. It raises `MixingError` if examples meet others, and
`UnknownError` if it cannot tell. The trace checks that a result has the size and the memory that
its place implies, and that operands without examples do not depend on how many there are.

Operations without a rule are unknown. What PyTorch itself tags as pointwise needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from training_client.private_step.isolation.operations import Call, MixingError, UnknownError
from training_client.private_step.isolation.places import Place, counts_up, removed_before

if TYPE_CHECKING:
    from training_client.private_step.isolation.trace import Trace


class Verdict(NamedTuple):
    """The place of a result that says whether all or any of the examples have a property.

    Attributes:
        answer: that Python is given, whatever the examples are.
    """

    answer: bool


class Shared(NamedTuple):
    """The place of a result that does not depend on the examples."""


NOTHING: Final = "nothing"  # of the examples: the state of a random generator
Found = Place | Verdict | Shared | str | None
Rule = Callable[["Trace", Call], Found | list[Found]]

REDUCED: Final = "a mean or sum over examples: use reduction='none'"
MEETS: Final = "combines an example with other examples"

# Without values: only shape and type of the operand matter.
SHAPE_ONLY: Final = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_empty_strided",
})  # fmt: skip
# Operations with an argument that is, or is a multiple of, the number of examples.
SIZED: Final = frozenset(
    [
        "repeat",
        "native_group_norm",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "affine_grid_generator",
        "_ctc_loss",
    ]
)
# What Python would learn of the examples, and use in whatever it does next.
READ_BY_PYTHON: Final = frozenset(["_local_scalar_dense", "is_nonzero", "equal"])
# The answers to whether all or any examples have a property, which do not look at them. `if
# mask.all():` mostly leaves work out, `if mask.any():` does it: both take the long way. The checks
# of `torch.distributions`, which ask `_is_all_true`, must be answered by yes.
ANSWERS: Final = {"all": False, "any": True, "_is_all_true": True, "_is_any_true": True}

_POINTWISE: Final = (
    "_to_copy clone native_dropout rand_like randn_like randint_like bernoulli normal poisson "
    "uniform binomial log_normal exponential cauchy geometric random copy fill zero "
    "_standard_gamma _standard_gamma_grad threshold _prelu_kernel masked_fill isnan bucketize "
    "native_dropout_backward softplus_backward elu_backward leaky_relu_backward "
    "hardtanh_backward hardswish _prelu_kernel_backward hardswish_backward hardsigmoid_backward "
    "mish_backward log_sigmoid_forward log_sigmoid_backward gelu_backward silu_backward "
    "threshold_backward sigmoid_backward tanh_backward"
)
_LOSSES: Final = (
    "binary_cross_entropy binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss "
    "soft_margin_loss mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
    "binary_cross_entropy_backward soft_margin_loss_backward"
)
_ALONG: Final = (
    "sum mean amax amin any all _is_all_true _is_any_true prod var std var_mean std_mean logsumexp "
    "argmax argmin max min median nanmedian mode kthvalue norm linalg_vector_norm nansum cumsum "
    "cumprod logcumsumexp cummax cummin sort topk argsort _softmax _log_softmax _safe_softmax "
    "_softmax_backward_data _log_softmax_backward_data glu glu_backward flip roll aminmax "
    "count_nonzero _fft_r2c _fft_c2c _fft_c2r linalg_cross slice_scatter bincount histc trace"
)
_SORTS: Final = ("sort", "argsort")
_SCATTERED: Final = "gather scatter scatter_add scatter_reduce"
_INDEXED_ROWS: Final = "index_add index_copy index_fill index_reduce"
# How many last dimensions an operation works along; those before them are apart.
_LAST: Final = {
    "tril": 2, "triu": 2, "multinomial": 1, "pixel_shuffle": 3, "pixel_unshuffle": 3,
    "linalg_inv_ex": 2,
    "linalg_cholesky_ex": 2, "linalg_qr": 2, "_linalg_svd": 2, "_linalg_solve_ex": 2,
    "_linalg_det": 2, "linalg_lu_factor_ex": 2, "_linalg_eigh": 2,
    "_sample_dirichlet": 1,
    "linalg_lu_solve": 2, "linalg_solve_triangular": 2, "_dirichlet_grad": 1,
}  # fmt: skip
_RESIZED: Final = (
    "avg_pool", "max_pool", "_adaptive_avg_pool", "adaptive_max_pool", "reflection_pad",
    "replication_pad", "upsample_nearest", "_upsample_nearest_exact", "upsample_linear",
    "upsample_bilinear", "upsample_trilinear", "upsample_bicubic",
)  # fmt: skip
_RESIZED_ALONG: Final = [
    f"{name}{digit}d{tail}"
    for name in _RESIZED
    for digit in "123"
    for tail in ("", "_backward", "_with_indices", "_with_indices_backward")
]
_ATTENTION: Final = [
    f"_scaled_dot_product_{kind}_attention{tail}"
    for kind in ("flash", "efficient", "cudnn", "fused")
    for tail in ("", "_for_cpu", "_backward", "_for_cpu_backward")
]
# The operands with one row for each entry of the first dimension; the others are for all rows.
_ROWS: Final = {
    "convolution": "input",
    "convolution_backward": "grad_output input",
    "native_group_norm": "input",
    "native_group_norm_backward": "grad_out input mean rstd",
    "channel_shuffle": "self",
    "affine_grid_generator": "theta",
    "affine_grid_generator_backward": "grad",
    "im2col": "self",
    "col2im": "self",
    "nll_loss_forward": "self target",
    "nll_loss2d_forward": "self target",
    "nll_loss_backward": "grad_output self target",
    "nll_loss2d_backward": "grad_output self target",
    "grid_sampler_2d": "input grid",
    "grid_sampler_3d": "input grid",
    "grid_sampler_2d_backward": "grad_output input grid",
    "grid_sampler_3d_backward": "grad_output input grid",
    "multi_margin_loss": "self target",
    "multi_margin_loss_backward": "grad_output self target",
    "multilabel_margin_loss_forward": "self target",
    "multilabel_margin_loss_backward": "grad_output self target is_target",
    **dict.fromkeys(
        _ATTENTION, "grad_out grad_out_ query key value out logsumexp attn_mask attn_bias"
    ),
}
# Products by the letters of an einsum; operands before the last two are added to the result.
_PRODUCTS: Final = {
    "mm": "ik,kj->ij", "addmm": "ik,kj->ij", "_addmm_activation": "ik,kj->ij",
    "bmm": "bik,bkj->bij", "baddbmm": "bik,bkj->bij", "addbmm": "bik,bkj->ij", "mv": "ik,k->i",
    "addmv": "ik,k->i", "dot": "k,k->", "vdot": "k,k->", "addr": "i,j->ij", "ger": "i,j->ij",
}  # fmt: skip

RULES: Final[dict[str, Rule]] = {}


def rule_for(call: Call) -> Rule:
    """Return the rule for an operation; raise `UnknownError` if there is none."""
    if call.signature.is_out:
        raise UnknownError("it writes its result to a tensor that it is given")
    found = RULES.get(call.name) or (pointwise if call.signature.is_pointwise else None)
    if found is None:
        raise UnknownError("no rule says whether it keeps examples apart")
    return found


def _register(names: str | Sequence[str]) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for the operations of these names."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split() if isinstance(names, str) else names, rule))
        return rule

    return register


@_register(_POINTWISE)
def pointwise(trace: Trace, call: Call) -> Found:
    """Each element of the result depends on the elements at its place alone."""
    operands = call.tensors
    if call.name == "bucketize":
        operands = call.given(["self"])
        if any(trace.place(each) for each in call.others(operands)):
            raise UnknownError("the boundaries depend on examples")
    if call.name == "copy" and trace.place(call.get("self")) is None:
        operands = call.given(["src"])  # what is overwritten does not matter
    return trace.aligned(operands, max(each.dim() for each in call.tensors))


@_register(_LOSSES)
def elementwise_loss(trace: Trace, call: Call) -> Found:
    """A loss of each element."""
    if call.get("reduction") != 0:
        raise MixingError(REDUCED)
    return trace.aligned(call.tensors, max(each.dim() for each in call.tensors))


@_register(_ALONG)
def along_dimensions(trace: Trace, call: Call) -> Found | list[Found]:
    """It works along the dimensions that an argument names, all by default; others are apart."""
    ndim, dims = call.tensors[0].dim(), call.get("dim", call.get("dims"))
    same = [each for each in call.tensors if each.dim() == ndim]
    if any(trace.place(each) for each in call.others(same)):
        raise UnknownError("its operands have different numbers of dimensions")
    place = trace.aligned(same, ndim)
    assert place is not None
    along = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
    if place.dim in along:
        if call.name in ANSWERS and len(along) == ndim:
            return Verdict(ANSWERS[call.name])
        if call.name in _SORTS and not call.tensors[0].is_floating_point():
            raise UnknownError("sorts the examples, as for packed sequences")
        return None
    left = place._replace(dim=place.dim - removed_before(list(along), place.dim))
    return [place if out.dim() == ndim else left for out in call.outs]


@_register(_SCATTERED)
def gathered(trace: Trace, call: Call) -> Found:
    """Each example chooses, or is given, values along another dimension."""
    table, chosen = call.get("self"), trace.place(call.get("index"))
    if call.name == "gather" and trace.place(table) is None:  # of what all examples share
        assert chosen is not None
        if chosen.dim == call.get("dim") % max(1, table.dim()):
            trace.require_same(table, -1, chosen)
            return chosen
    tensors = [each for each in call.tensors if each.dim()]
    place, dim = trace.aligned(tensors, tensors[0].dim()), call.get("dim") % tensors[0].dim()
    assert place is not None
    if place.dim == dim:
        return None
    if any(each.size(place.dim) != place.size(trace.count) for each in tensors):
        raise MixingError("has values for some of the examples only")  # these do not broadcast
    return place


@_register(_INDEXED_ROWS)
def indexed_rows(trace: Trace, call: Call) -> Found:
    """Puts values at positions along a dimension; the positions are the same for all examples."""
    operands, index = call.given(["self", "source"]), call.get("index")
    place, dim = trace.aligned(operands, operands[0].dim()), call.get("dim")
    if trace.place(index) is not None or any(trace.place(v) for v in call.given(["value"])):
        raise UnknownError("examples say where")
    assert place is not None
    return None if place.dim == dim % operands[0].dim() else place


@_register([*_LAST, *_RESIZED_ALONG, "constant_pad_nd", "native_layer_norm", "_fused_rms_norm",
            "native_layer_norm_backward", "_fused_rms_norm_backward"])  # fmt: skip
def last_dimensions(trace: Trace, call: Call) -> Found | list[Found]:
    """It works along the last few dimensions; those before them are apart."""
    if any((call.get("output_mask") or [False])[1:]):
        raise MixingError("a gradient that all examples have together")
    shape, digit = call.get("normalized_shape"), re.search(r"([123])d", call.name)
    if call.name == "constant_pad_nd":
        last = max((at // 2 + 1 for at, each in enumerate(call.get("pad")) if each), default=0)
    elif shape is not None:
        last = len(shape)
    else:
        last = _LAST.get(call.name) or int(digit[1])  # type: ignore[index]
    weights = call.given(["weight", "bias"])
    rows = call.others(weights)
    ndim = max(each.dim() for each in rows)
    full = [each for each in rows if each.dim() == ndim]
    place = trace.aligned(full, ndim)
    apart = (None, place) if call.name in _LAST else (None,)  # such as pivots of each matrix
    if any(trace.place(each) not in apart for each in call.others(full)):
        raise UnknownError("its weights depend on examples")
    if place is None or place.dim >= ndim - last:
        return None
    return [place if out.dim() > place.dim and out.numel() else None for out in call.outs]


@_register("linalg_solve_triangular")
def triangular_solution(trace: Trace, call: Call) -> Found | list[Found]:
    """Each column of the right side is solved alone, by a matrix that all examples share."""
    matrix, right = call.get("self"), call.get("B")
    place = trace.place(right)
    is_left = call.get("left") is not False and trace.place(matrix) is None
    if place is None or place.dim != right.dim() - 1 or not is_left:
        return last_dimensions(trace, call)
    trace.require_same(matrix, -1, place)
    return place


@_register(list(_ROWS))
def first_dimension(trace: Trace, call: Call) -> Found | list[Found]:
    """It treats every row of the first dimension alone (in attention, of the first two)."""
    if call.get("reduction", 0) != 0:
        raise MixingError(REDUCED)
    if "native_group_norm" in call.name and call.get("N") != call.get("input").size(0):
        raise UnknownError("it is told of another number of rows than there are")
    if any((call.get("output_mask") or [False])[1:]) and "grid" not in call.name:
        raise MixingError("a gradient that all examples have together")
    rows, is_attention = call.given(_ROWS[call.name].split()), call.name in _ATTENTION
    ndim = max(each.dim() for each in rows)
    places = {place for each in rows if (place := trace.place(each)) is not None}
    is_single = call.name.startswith(("nll", "multi")) and call.get("self").dim() < 2
    if is_single or any(trace.place(each) for each in call.others(rows)):
        raise UnknownError("examples are not along the first dimension of its operands")
    place = next(iter(places), None)
    if place is None or len(places) > 1 or place.dim > is_attention:
        raise MixingError("examples are not along the first dimension of its operands")
    for each in rows:
        # a mask of attention is broadcast, and the log of a sum has no last dimension
        dim = place.dim if not is_attention else place.dim - 4 + each.dim()
        if trace.place(each) is None and (each.dim() == ndim or not is_attention) and dim >= 0:
            trace.require_same(each, dim, place)
    size, others = place.size(trace.count), None
    if is_attention:  # the state of the generator for dropout
        others = NOTHING
    return [
        place if out.dim() > place.dim and out.size(place.dim) == size else others
        for out in call.outs
    ]


@_register(list(_PRODUCTS))
def product(trace: Trace, call: Call) -> Found:
    """A sum of products: the examples must be along an index that the result has."""
    operands, result = _PRODUCTS[call.name].split("->")
    pairs = list(zip(call.tensors[-2:], operands.split(","), strict=True))
    found = {
        (letters[place.dim], place.outer, place.inner)
        for tensor, letters in pairs
        if (place := trace.place(tensor)) is not None
    }
    if not found:
        raise UnknownError("examples are added to a product")
    letter, outer, inner = found.pop()
    if found:
        raise MixingError(MEETS)
    if letter not in result:
        return None  # a sum over examples
    place = Place(result.index(letter), outer, inner)
    for tensor, letters in pairs:
        if trace.place(tensor) is None and letter in letters:
            trace.require_same(tensor, letters.index(letter), place)
    return trace.aligned(call.tensors[:-2], len(result), place)


@_register("_cdist_forward _cdist_backward")
def distances(trace: Trace, call: Call) -> Found:
    """All distances between two lists of points; the examples are in one, or before both."""
    one, other = call.given(["x1", "x2"])
    ndim = max(one.dim(), other.dim())
    places = [
        place and place._replace(dim=place.dim + ndim - each.dim())
        for each in (one, other) if (place := trace.place(each)) or True
    ]  # fmt: skip
    if not any(places) or any(place and place.dim == ndim - 1 for place in places):
        return None
    first, second = places
    is_before = all(place is None or place.dim < ndim - 2 for place in places)
    if first and second and (first != second or not is_before):
        raise MixingError(MEETS)
    found = first or second
    assert found is not None
    if is_before:
        return trace.aligned([one, other, *call.given(["grad", "cdist"])], ndim)
    is_second = first is None
    if call.name == "_cdist_forward":
        return found._replace(dim=ndim - 1) if is_second else found
    if is_second:
        return None  # the gradient of points that all examples have together
    return trace.aligned(call.given(["grad", "cdist"]), ndim, found)


@_register("diag_embed")
def diagonal(trace: Trace, call: Call) -> Found:
    """Matrices with the last dimension as their diagonals."""
    place = trace.place(call.get("self"))
    if (call.get("dim1"), call.get("dim2")) != (-2, -1):
        raise UnknownError("its matrices are not along the last dimensions")
    return place if place is not None and place.dim < call.get("self").dim() - 1 else None


@_register("_linalg_check_errors")
def checked(_: Trace, __: Call) -> list[Found]:
    """It has no result, and fails if there is none for an example."""
    return []


@_register("linalg_solve_triangular")
def solved(trace: Trace, call: Call) -> Found | list[Found]:
    """Solutions of linear equations: each column of the right-hand side is apart (or each row)."""
    matrix, sides = call.get("self"), call.get("B")
    place, column = trace.place(sides), sides.dim() - (1 if call.get("left") else 2)
    if trace.place(matrix) is None and place is not None and place.dim == column:
        return place if matrix.dim() <= sides.dim() else None
    return last_dimensions(trace, call)


@_register("mkldnn_rnn_layer mkldnn_rnn_layer_backward")
def recurrent(trace: Trace, call: Call) -> list[Found]:
    """A recurrent layer, given positions first, then examples."""
    sequences = call.given(["input", "output", "grad_output"])
    states = call.given(["hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"])
    place = trace.aligned(sequences, 3)
    if place is None or place.dim != 1 or call.get("batch_sizes"):
        raise UnknownError("examples are not along the second dimension of its sequences")
    of_states = trace.aligned(states, 2, place._replace(dim=0))
    if any(trace.place(each) for each in call.others([*sequences, *states])):
        raise UnknownError("its weights depend on examples")
    if "backward" in call.name:  # of the input, four weights, and the states
        return [place, None, None, None, None, of_states, of_states]
    return [place, of_states, of_states, NOTHING]


@_register("_trilinear")
def trilinear(trace: Trace, call: Call) -> Found:
    """A sum of products of three tensors, to each of which dimensions of size 1 are added."""
    pairs = []
    for number in "123":
        tensor = call.get(f"i{number}")
        for dim in sorted(call.get(f"expand{number}")):
            tensor = tensor.unsqueeze(dim)
        pairs.append(tensor)
    place, summed = trace.aligned(pairs, pairs[0].dim()), call.get("sumdim")
    assert place is not None
    if place.dim in summed:
        return None
    return place._replace(dim=place.dim - removed_before(summed, place.dim))


@_register("cat stack")
def joined(trace: Trace, call: Call) -> Found:
    """It puts tensors side by side, or whole batches one after another."""
    tensors = [each for each in call.tensors if each.dim() != 1 or each.numel()]
    ndim = tensors[0].dim()
    if call.name == "stack":
        place, dim = trace.aligned(tensors, ndim), call.get("dim") % (ndim + 1)
        return place and place._replace(dim=place.dim + (place.dim >= dim))
    dim, places = call.get("dim") % ndim, [trace.place(each) for each in tensors]
    known = next(place for place in places if place is not None)
    if known.dim != dim:
        return trace.aligned(tensors, ndim)
    whole = [place for place in places if place and place[::2] == known[::2]]
    if len(whole) < len(places):
        raise MixingError("puts other values beside the examples, along their dimension")
    return known._replace(outer=sum(place.outer for place in whole))


@_register("repeat")
def repeated(trace: Trace, call: Call) -> Found:
    """It repeats a tensor along its dimensions."""
    tensor, times = call.get("self"), call.get("repeats")
    place = trace.place(tensor)
    assert place is not None
    dim = place.dim + len(times) - tensor.dim()
    return Place(dim, place.outer * times[dim], place.inner)


_BATCH_NORMS: Final = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm native_batch_norm_backward cudnn_batch_norm_backward "
    "_batch_norm_with_update _batch_norm_no_update batch_norm_backward"
)


@_register(_BATCH_NORMS)
def batch_norm(trace: Trace, call: Call) -> list[Found]:
    """With fixed statistics it is pointwise; else examples must be among the channels."""
    grads = call.given(["grad_out", "grad_output"])
    rows = [*call.given(["input"]), *grads]
    place = trace.aligned(rows, rows[0].dim())
    assert place is not None
    is_fixed = "no_training" in call.name or "no_update" in call.name
    is_fixed |= call.get("training", call.get("train", call.get("update", True))) is False
    if any((call.get("output_mask") or [False])[1:]) and place.dim != 1:
        raise MixingError("a gradient that all examples have together")
    if not is_fixed and (place.dim != 1 or call.given(["running_mean"])):
        raise MixingError("normalises with statistics of the whole batch: use GroupNorm")
    for each in call.given(["weight", "bias", "running_mean", "running_var"]):
        if trace.place(each) not in (None, Place(0, *place[1:])) or (
            trace.place(each) and place.dim != 1
        ):
            raise MixingError(MEETS)
        if trace.place(each) is None and place.dim == 1:
            trace.require_same(each, 0, place)
    channels: Found = Place(0, *place[1:]) if place.dim == 1 else None
    if is_fixed:
        channels = Shared()  # the statistics that it was given
    return [place, *(channels if out.numel() else Shared() for out in call.outs[1:])]


@_register("embedding index_select")
def embedded(trace: Trace, call: Call) -> Found:
    """Rows of a table for all examples, chosen by each; or the same entries of every example."""
    index, table = call.get("indices", call.get("index")), call.get("weight", call.get("self"))
    place, chosen = trace.place(table), trace.place(index)
    dim = call.get("dim", 0) % max(1, table.dim())
    if place is not None:
        if chosen is not None:
            raise MixingError("chooses among the examples")
        return None if place.dim == dim else place
    assert chosen is not None
    return chosen._replace(dim=chosen.dim + dim)


@_register("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(trace: Trace, call: Call) -> list[Found]:
    """Bags of one length, the same number for each example."""
    index, bags = call.get("indices"), call.get("offsets")
    place, length = trace.place(index), len(index) // max(1, len(bags))
    starts = torch.arange(len(bags), device=bags.device, dtype=bags.dtype) * length
    if place is None or any(trace.place(each) for each in call.given(["weight", "offsets"])):
        raise UnknownError("its table or its bags depend on examples")
    if place.inner % length or not torch.equal(bags, starts):
        raise UnknownError("its bags differ in length")
    trace.accept(bags)
    trace.aligned(call.given(["indices", "per_sample_weights"]), 1)
    found = Place(0, place.outer, place.inner // length)
    by_size: dict[int, Found] = {len(index): place, len(bags): found}
    return [found, *(by_size.get(len(out)) for out in call.outs[1:])]


@_register("select_backward slice_backward unfold_backward")
def put_back(trace: Trace, call: Call) -> Found:
    """The gradient of a part, among zeros."""
    place, sizes = trace.place(call.tensors[0]), call.get("input_sizes")
    dim = call.get("dim") % len(sizes)
    assert place is not None
    if call.name == "select_backward":
        return place._replace(dim=place.dim + (place.dim >= dim))
    if place.dim != dim:
        return place
    block = trace.count * place.inner
    if call.name != "slice_backward" or call.get("step") != 1:
        raise MixingError("a part of the examples")
    if call.get("start") % block or sizes[dim] % block:
        raise MixingError("a part of the examples")
    return place._replace(outer=sizes[dim] // block)


@_register("_ctc_loss _ctc_loss_backward")
def ctc_loss(trace: Trace, call: Call) -> list[Found]:
    """Positions first, then examples; targets padded to one length."""
    logs = call.get("log_probs")
    others = [each for each in call.others([logs]) if each.dim() < logs.dim() or each.size(0) == 1]
    if call.get("targets").dim() != 2 or trace.place(logs) != Place(1):
        raise UnknownError("targets are not one row for each example")
    for each in others:
        if trace.place(each) not in (None, Place(0)):
            raise MixingError(MEETS)
        if trace.place(each) is None:
            trace.require_same(each, 0, Place(0))
    return [Place(1)] if "backward" in call.name else [Place(0), Place(0)]


@_register("index index_put _index_put_impl _unsafe_index _unsafe_index_put")
def indexed(trace: Trace, call: Call) -> Found:
    """Values of every example that are chosen, or set, by that example alone."""
    tensor, given = call.get("self"), list(call.get("indices"))
    if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in given):
        return _indexed_by_mask(trace, call)
    return _Indexing(trace, tensor, given).place(call)


def _indexed_by_mask(trace: Trace, call: Call) -> Found:
    """Values where a mask of the first dimensions is true are set to one number."""
    tensor, given, values = call.get("self"), call.get("indices"), call.get("values")
    mask = given[0]
    if mask is None or len([each for each in given if each is not None]) != 1 or values is None:
        raise UnknownError("the shape of the result depends on values")
    place, of_mask = trace.place(tensor), trace.place(mask)
    if place is None and of_mask is not None:
        place = of_mask
        trace.require_same(tensor, place.dim, place)
    if values.numel() != 1 or trace.place(values) is not None:
        raise UnknownError("puts values where a mask says")
    if place is None or (of_mask is None and place.dim < mask.dim()):
        raise UnknownError("puts values where a mask says")
    if of_mask not in (None, place):
        raise MixingError(MEETS)
    trace.require_same(values, -1, place)
    return place


class _Indexing:
    """Indexing by tensors of numbers: NumPy's rules for the layout of the result.

    A dimension is *paired* if its index is 0, 1, … B − 1: then each example chooses for itself.

    Attributes:
        layout: of the chosen part: a dimension of the tensor, or −1 − k for dimension k of the
            indices, all broadcast to one shape.
    """

    def __init__(self, trace: Trace, tensor: torch.Tensor, given: list[Any]) -> None:
        self.trace, self.tensor = trace, tensor
        given = given + [None] * (tensor.dim() - len(given))
        self.indices = {d: each for d, each in enumerate(given) if each is not None}
        kept, used = [d for d, each in enumerate(given) if each is None], list(self.indices)
        self.ndim = max(each.dim() for each in self.indices.values())
        is_together = used[-1] - used[0] == len(used) - 1
        before = kept[: used[0]] if is_together else []
        after = kept[len(before) :]
        self.kept = kept
        self.layout = [*before, *(-1 - k for k in range(self.ndim)), *after]
        self.paired = {
            d: list(each.shape).index(trace.count) + self.ndim - each.dim()
            for d, each in self.indices.items()
            if trace.place(each) is None and not trace.is_random(each)
            and each.numel() == trace.count == tensor.size(d) and counts_up(each, trace.count)
        }  # fmt: skip

    def place(self, call: Call) -> Found:
        """Return where the result of indexing, or of writing, has the examples."""
        trace, is_put = self.trace, "values" in call.bound
        unpaired = [each for d, each in self.indices.items() if d not in self.paired]
        row = trace.aligned(unpaired, self.ndim)
        found = self._chosen(trace.place(self.tensor), row, is_put=is_put)
        if not is_put:
            return found
        found = trace.aligned([call.get("values")], len(self.layout), found)
        if found is None:
            raise UnknownError("puts values among examples")
        at = self.layout[found.dim]
        if at < 0:
            at = next((d for d, k in self.paired.items() if k == -1 - at), -1)
            if at < 0 and row is None:
                raise MixingError("puts examples where their places say")
            if at < 0:
                raise UnknownError("puts examples where indices say")
            self._require_pair(at)
        if trace.place(self.tensor) is None:
            trace.require_same(self.tensor, at, found._replace(dim=at))
        return found._replace(dim=at)

    def _chosen(self, place: Place | None, row: Place | None, *, is_put: bool) -> Place | None:
        """Return where the chosen part has the examples."""
        if place is None and row is None:
            return None  # only the values that are written have examples
        if place is not None and place.dim in self.kept and row is None:
            return place._replace(dim=self.layout.index(place.dim))
        if place is not None and place.dim in self.paired and place[1:] == (1, 1):
            if row not in (None, Place(self.paired[place.dim])):
                raise MixingError(MEETS)
            return Place(self._require_pair(place.dim))
        if place is not None:
            if row is None and not is_put:
                return None  # a choice of examples that all have together
            raise MixingError("chooses among the examples, or puts an example beside others")
        assert row is not None
        if is_put and row.dim not in self.paired.values():
            raise UnknownError("puts examples where indices say")
        for dim in self.paired:
            self._require_pair(dim)
            self.trace.require_same(self.tensor, dim, Place(dim))
        return row._replace(dim=self.layout.index(-1 - row.dim))

    def _require_pair(self, dim: int) -> int:
        """Require of the other indices that they do not depend on the place of an example."""
        at = self.paired[dim]
        self.trace.require_counting(self.indices[dim])
        for d, each in self.indices.items():
            if d != dim and self.trace.place(each) is None:
                self.trace.require_same(each, at - self.ndim + each.dim(), Place(at))
        return self.layout.index(-1 - at)
