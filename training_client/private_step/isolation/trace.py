"""Follows the examples of a batch through every operation of a forward and backward pass.

Each storage with values of examples has one number, its *step*: the byte at offset o is of
example (o // step) mod B. Sizes, strides and offset of a tensor then say which dimension runs over
the examples (`places.find_place`). So views need no rules, and what is written in place, detached
or saved for the backward pass is followed. An operation without examples needs no rule either: what
it computes is the same for all of them. Any other has a rule (`rules`), or the pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from training_client.private_step.isolation.functions import Functions, Watcher, describe_exit
from training_client.private_step.isolation.operands import Operands
from training_client.private_step.isolation.operations import (
    Call,
    DrawnError,
    MixingError,
    StateChangeError,
    UnknownError,
    calling_line,
    note_arguments,
    note_layer,
    signature_of,
    tensors_in,
)
from training_client.private_step.isolation.places import (
    Place,
    are_equal_along,
    counts_up,
    find_place,
    rows_of_examples,
)
from training_client.private_step.isolation.rules import (
    ANSWERS,
    MEETS,
    NOTHING,
    READ_BY_PYTHON,
    SHAPE_ONLY,
    SIZED,
    Shared,
    Verdict,
    rule_for,
)

HOOK_OF_TENSOR: Final = "a hook of a tensor"
_SEQUENCES: Final = (list, tuple)
_PLAIN: Final = (bool, int, float, str, list, type(None))
# and what PyTorch tags as pointwise
_ELEMENTWISE: Final = frozenset([
    "clone", "_to_copy", "copy", "native_dropout", "poisson", "binomial",
    "_standard_gamma", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
    "bernoulli", "normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal",
])  # fmt: skip
_TABLES: Final = frozenset(["embedding", "index", "index_select", "gather"])
_MATRIX_PRODUCTS: Final = frozenset(["mm", "addmm"])
# Of the elementwise ones, in place, what is overwritten does not matter.
_OVERWRITING: Final = frozenset([
    "copy", "bernoulli", "normal", "uniform", "random", "exponential", "geometric", "cauchy",
    "log_normal",
])  # fmt: skip
_CONSTANT: Final = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "fill", "zero")


class Together(NamedTuple):
    """The tag of values that all examples have together, such as a mean over them.

    Attributes:
        line: of the program that computed it.
        summed: how many flags or whole numbers of examples were added up; 0 for something else.
    """

    line: str
    summed: int = 0


class Asked(NamedTuple):
    """The tag of an answer to whether all or any examples have a property.

    Attributes:
        answer: that Python is given.
    """

    answer: bool


class Tiled(NamedTuple):
    """The tag of what all examples share, if its memory repeats: equal by construction.

    Attributes:
        period: after how many elements.
    """

    period: int


class Drawn(NamedTuple):
    """The tag of random numbers, each drawn alone, if their distributions repeat.

    Attributes:
        period: after how many elements.
    """

    period: int


# text: "shared"; "empty"; or "random", drawn in another way
Tag = int | str | Tiled | Drawn | Together | Asked


_OF_EXAMPLES: Final = (int, Together, Asked)


class Check(NamedTuple):
    """A condition on the values of an operand, to be checked in every pass.

    Attributes:
        operand: which of the operation's tensors.
        dim: along which it must be the same for all examples; None if it must count them.
        place: where the examples are along it.
        is_whole: whether this holds of its whole storage, of which it is a part.
    """

    operand: int
    dim: int | None
    place: Place
    is_whole: bool = False

    def holds(self, tensor: torch.Tensor, count: int) -> bool:
        """Return whether the condition holds for a batch of `count` examples."""
        if self.is_whole:
            return _is_equal_beside(tensor, self.place, count)
        if self.dim is None:
            return counts_up(tensor, count)
        if tensor.size(self.dim) != self.place.size(count):
            return tensor.size(self.dim) == 1
        rows = rows_of_examples(tensor, self.dim, self.place, count)
        return are_equal_along(rows, self.dim + 1)


class Entry(NamedTuple):
    """The arguments of an operation, and its results.

    Attributes:
        name: of the operation.
        given: its arguments that are no tensors, by name.
        shapes: of its results, without the number of examples.
    """

    name: str
    given: tuple[tuple[str, Any], ...]
    shapes: tuple[Any, ...]

    def is_alike(self, other: Entry, count: int, other_count: int) -> bool:
        """Return whether two entries differ in the number of examples alone."""
        if self == other:
            return True
        if self[::2] != other[::2] or len(self.given) != len(other.given):
            return False
        is_sized = self.name in SIZED or self.name.endswith("_backward")
        return all(
            one == another or (
                one[0] == another[0] and (is_sized or one[0] == "size")
                and _is_multiple(one[1], another[1], count, other_count)
            )
            for one, another in zip(self.given, other.given, strict=True)
        )  # fmt: skip


def _is_multiple(one: Any, other: Any, count: int, other_count: int) -> bool:
    """Return whether whole numbers are equal, or the same multiples of numbers of examples."""
    if isinstance(one, _SEQUENCES) and isinstance(other, _SEQUENCES):
        if (len(one), len(other)) == (count, other_count):  # a number for each example
            return len({*one, *other}) == 1
        return len(one) == len(other) and all(
            _is_multiple(*pair, count, other_count) for pair in zip(one, other, strict=True)
        )
    if one == other or type(one) is not int or type(other) is not int:
        return bool(one == other)
    return one * other_count == other * count and one % count == 0


class Trace(Watcher, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows `count` examples through a pass.

    Attributes:
        count: the number of examples, at least two: one cannot be told from a dimension of size 1.
        error: the first error; it is kept because the program may catch it.
        functions: the operations, in their order.
        made_of_examples: for each of them, whether a result depends on the examples.
        log: what operations on examples are given, apart from tensors, and the shapes of their
            results, in a form that does not depend on the number of examples.
        given: whole numbers, flags and names that the operations are given.
        factors: other numbers that they are given.
        operands: the tensors that they are given.
        values: the values that all examples share, wherever these meet examples.
        answers: of the questions whether all or any examples have a property, by the number of the
            operation that hands the answer to Python. They do not depend on the examples.
        checks: conditions on operands, by the number of the operation.
        reads: the numbers that Python read of what no example decides, in their order.
        observed: how many of the operations, and of what they are given, every step compares:
            numbers of entries in `functions`, `given`, `factors` and `operands`.
        has_backward_part: whether the program takes part in the backward part.

    Args:
        count: see above.
        owned: parameters and buffers of the model.
        stale: storages that earlier passes made of their examples.
        flipped: the questions, by their numbers, that are answered the other way round.
        drawn: what Python read in another pass, and reads again where it is drawn at random.
    """

    def __init__(
        self,
        count: int,
        owned: Sequence[torch.Tensor],
        stale: Mapping[int, StorageWeakRef],
        flipped: frozenset[int] = frozenset(),
        drawn: Sequence[Any] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._flipped, self._drawn = count, flipped, drawn
        self.reads: list[Any] = []
        self.observed: tuple[int, ...] = (0, 0, 0, 0)
        self.has_backward_part = False
        self._owned = {each.untyped_storage()._cdata: each for each in owned}
        self._stale = {key: ref for key, ref in stale.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        self._tags: dict[int, tuple[StorageWeakRef, Tag]] = {}  # the reference keeps the key in use
        self.error: Exception | None = None
        self.functions: list[Any] = []
        self.made_of_examples: list[bool] = []
        self.log: list[Entry] = []
        self.given: list[Any] = []
        self.factors: list[Any] = []
        self.operands = Operands(owned)
        self.values: list[torch.Tensor] = []
        self.answers: dict[int, bool] = {}
        self.checks: dict[int, list[Check]] = {}
        self._call: Call | None = None
        self._met: list[torch.Tensor] = []  # what examples share, of the operands of this call
        self._is_own = False
        self._hooks = 0

    # --- tags
    def tag(self, tensor: torch.Tensor, tag: Tag | Place) -> None:
        """Tag the storage of a tensor that was made in this pass."""
        storage = tensor.untyped_storage()
        found: Any = tag
        if isinstance(tag, Place):
            found = _step(tensor, tag) * tensor.element_size() if tensor.numel() else "shared"
        self._tags[storage._cdata] = StorageWeakRef(storage), found  # type: ignore[no-untyped-call]
        if isinstance(tag, Place) and tensor.numel() and self.place(tensor) != tag:
            shape = tuple(tensor.shape)
            raise UnknownError(f"its result has an unexpected shape or memory: {shape}")

    def tag_of(self, tensor: torch.Tensor) -> Tag | None:
        """Return the tag of a tensor's storage; None if it was not made in this pass."""
        key = tensor.untyped_storage()._cdata
        found = self._tags.get(key)
        if found is None:
            if key in self._stale:
                raise MixingError("uses a tensor that an earlier pass computed from its examples")
            return None
        return found[1]

    def is_random(self, tensor: torch.Tensor) -> bool:
        """Return whether the values of a tensor are drawn at random."""
        return _is_drawn(self.tag_of(tensor))

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor has the examples; None if it does not depend on them.

        Raises:
            MixingError: it has a part of them, or pairs them with others.
        """
        step = self.tag_of(tensor)
        if not isinstance(step, int) or not tensor.numel():
            return None
        found = self._find_place(tensor, step)
        if found is None:
            raise MixingError("uses some of the examples, or pairs an example with another")
        return found

    def _find_place(self, tensor: torch.Tensor, step: int) -> Place | None:
        step, rest = divmod(step, tensor.element_size())
        offset = tensor.storage_offset()
        return None if rest else find_place(
            tensor.size(), tensor.stride(), offset, step, self.count
        )  # fmt: skip

    def storages_of_examples(self) -> dict[int, StorageWeakRef]:
        """Return the storages that depend on the examples, and that something still holds."""
        return {
            key: ref for key, (ref, tag) in self._tags.items()
            if isinstance(tag, _OF_EXAMPLES) and not ref.expired()  # type: ignore[no-untyped-call]
        }  # fmt: skip

    # --- what rules require
    def aligned(
        self, tensors: Sequence[torch.Tensor], ndim: int, found: Place | None = None
    ) -> Place | None:
        """Return where a broadcast of tensors to `ndim` dimensions has the examples.

        Args:
            tensors: those that are broadcast; what all examples share must be the same for all.
            ndim: of the result.
            found: where another operand of the result has them.

        Raises:
            MixingError: one of them has the examples elsewhere, or depends on their places.
        """
        for tensor in tensors:
            if (place := self.place(tensor)) is not None:
                place = place._replace(dim=place.dim + ndim - tensor.dim())
                if found not in (None, place):
                    raise MixingError(MEETS)
                found = place
        if found is not None:
            for tensor in tensors:
                if self.place(tensor) is None:
                    self.require_same(tensor, found.dim - ndim + tensor.dim(), found)
        return found

    def require_same(self, tensor: torch.Tensor, dim: int, place: Place) -> None:
        """Raise unless what all examples share is the same for each, along a dimension.

        Args:
            tensor: without examples.
            dim: its dimension that meets the examples; below 0 if there is none.
            place: where the examples are that it meets.
        """
        tag, value = self.tag_of(tensor), tensor
        self._met.append(tensor)
        if dim >= 0 and tensor.size(dim) != 1:
            if tensor.size(dim) != place.size(self.count):
                raise MixingError(f"{tensor.size(dim)} values meet {self.count} examples")
            rows = rows_of_examples(tensor, dim, place, self.count)
            value = rows.select(dim + 1, 0)
            jump = tensor.stride(dim) * place.inner
            if not (jump == 0 or _repeats(jump, tag)):
                by_chance = _is_drawn(tag) and not tensor.is_floating_point()
                if by_chance or not are_equal_along(rows, dim + 1):
                    kind = DrawnError if _is_drawn(tag) else MixingError
                    raise kind("its values depend on the place of an example in its batch")
                self._add_check(tensor, Check(-1, dim, place))
        if tag == "empty" and not (self._call and self._call.signature.written):
            raise MixingError("reads memory before anything is written to it")
        if _is_drawn(tag):
            self.log.append(Entry("a random draw", (), (tuple(value.shape),)))
        elif tag != "empty" and tensor.untyped_storage()._cdata not in self._owned:
            self.values.append(value.detach().clone())

    def require_counting(self, index: torch.Tensor) -> None:
        """Note that an index must be 0, 1, … in every pass, as it is in this one."""
        self._met.append(index)
        self._add_check(index, Check(-1, None, Place(0)))

    def accept(self, tensor: torch.Tensor) -> None:
        """Note that a rule requires nothing more of an operand that all examples share."""
        self._met.append(tensor)

    @_disable_current_modes()
    def require_rows(self, tensor: torch.Tensor) -> None:
        """Raise unless a tensor has one row for each example, in their order, or equal rows."""
        if isinstance(tag := self.tag_of(tensor), Together | Asked):
            raise MixingError(_of_all(tag))
        place = self.place(tensor)
        if place is None:
            if tensor.dim():
                self.require_same(tensor, 0, Place(0))
        elif place != Place(0):
            raise MixingError("is not given one row for each example, along its first dimension")

    @_disable_current_modes()
    def has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor with B rows has one for each example, or equal ones."""
        if self.place(tensor) is not None or isinstance(self.tag_of(tensor), Together | Asked):
            return True  # `require_rows` says what is wrong, if anything is
        return are_equal_along(tensor, 0)

    @_disable_current_modes()
    def require_shared(self, tensor: torch.Tensor) -> None:
        """Raise if a tensor that is taken to be the same for all examples depends on them."""
        if isinstance(tag := self.tag_of(tensor), Together | Asked):
            raise MixingError(_of_all(tag))
        if self.place(tensor) is not None:
            raise MixingError("has values of examples beside those of all")
        self.require_same(tensor, -1, Place(0))

    def _add_check(self, tensor: torch.Tensor, check: Check) -> None:
        if self._call is None:
            return  # of what a layer is given, which meets examples in an operation too
        at = next((n for n, each in enumerate(self._call.tensors) if each is tensor), None)
        if at is None or self._is_own:
            raise UnknownError("its values are equal for all examples, and no step can check it")
        of_call = self.checks.setdefault(len(self.functions) - 1, [])
        of_call.append(check._replace(operand=at))

    # --- operations
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; tag its results."""
        kwargs = kwargs or {}
        if not self._is_own:
            self.functions.append(func)
            self.made_of_examples.append(False)
            note_arguments(func, args, kwargs, self.given, self.factors)
            self.operands.note(args, kwargs)
        if signature_of(func).is_view:
            result = func(*args, **kwargs)  # of the same storage, so its tag holds
            self._name(result)
            first = next(tensors_in(args, kwargs), None)
            if first is not None and self._depends(first):
                self.made_of_examples[-1] = True
                self._note_views(signature_of(func).name, tensors_in([result], {}))
            elif first is not None:
                self._forget_period(first, result)
            return result
        self._met = []
        self._call = call = Call(func, args, kwargs)
        try:
            result = self._run(call, args, kwargs)
            self._name(result)
            return result
        except (MixingError, UnknownError) as error:
            self.error = type(error)(f"{call.name} in {calling_line()}: {error}")
            raise self.error from None
        except StateChangeError as error:
            self.error = error
            raise
        finally:
            self._call = None

    def _name(self, results: Any) -> None:
        """Name the results of an operation, by which later ones are given them."""
        if not self._is_own:
            for each in tensors_in([results], {}):
                self.operands.note_result(len(self.functions) - 1, each)

    def _forget_period(self, tensor: torch.Tensor, view: Any) -> None:
        """Forget after how many elements values repeat, if a view has elements of another type."""
        tag, is_one = self.tag_of(tensor), isinstance(view, torch.Tensor)
        if isinstance(tag, Tiled | Drawn) and is_one and view.dtype != tensor.dtype:
            self.tag(tensor, "shared" if isinstance(tag, Tiled) else "random")

    def _depends(self, tensor: torch.Tensor) -> bool:
        found = self._tags.get(tensor.untyped_storage()._cdata)
        return found is not None and isinstance(found[1], _OF_EXAMPLES)

    def _run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that is no view."""
        tags = [self.tag_of(each) for each in call.tensors]
        ignored = call.get("total_weight")  # PyTorch divides by it only if losses are averaged
        together = next(
            (
                tag for tag, each in zip(tags, call.tensors, strict=True)
                if isinstance(tag, Together | Asked) and each is not ignored
            ),
            None,
        )  # fmt: skip
        has_examples = any(
            isinstance(tag, int) and each.numel()
            for tag, each in zip(tags, call.tensors, strict=True)
        )
        if self.is_one_hot and call.name in READ_BY_PYTHON:
            return call.func(*args, **kwargs)
        if call.name in READ_BY_PYTHON and (has_examples or together is not None):
            return self._answer(tags)
        if call.name in READ_BY_PYTHON:
            return self._read(call.func(*args, **kwargs), tags)
        if together is not None and has_examples:
            raise MixingError(_of_all(together))
        is_new = not call.signature.written
        places: list[Any] = []
        if not is_new:
            call.outs = tuple(call.given(call.signature.written))
            places = self._places(call, has_examples)
            for each, place in zip(call.outs, places, strict=True):
                self._write(each, place, call, tags, together, has_examples=has_examples)
        before = {each.untyped_storage()._cdata for each in call.tensors}
        result = call.func(*args, **kwargs)
        if is_new:
            found = result if isinstance(result, _SEQUENCES) else (result,)
            call.outs = tuple(each for each in found if isinstance(each, torch.Tensor))
            places = self._places(call, has_examples)
            for out, place in zip(call.outs, places, strict=True):
                if out.untyped_storage()._cdata not in before:
                    tag = self._tag_of_result(call, out, place, tags, together, has_examples)
                    self.tag(out, tag)
        self.made_of_examples[-1] |= any(map(self._depends, call.outs))
        self._note(call, tags, places, has_examples=has_examples)
        return result

    def _answer(self, tags: Sequence[Tag | None]) -> bool:
        """Answer a question about the examples, without looking at them."""
        if not isinstance(tags[0], Asked):
            raise MixingError("Python, and so what it does next, depends on values of examples")
        found = tags[0].answer != (len(self.answers) in self._flipped)
        self.answers[len(self.functions) - 1] = found
        return found

    def _read(self, value: Any, tags: Sequence[Tag | None]) -> Any:
        """Return what Python reads: equal draws in every pass, as a branch may depend on them."""
        at = len(self.reads)
        if at < len(self._drawn) and any(map(_is_drawn, tags)):
            value = self._drawn[at]
        self.reads.append(value)
        return value

    def _places(self, call: Call, has_examples: bool) -> list[Any]:
        """Return where each result has the examples."""
        if not has_examples or call.name in SHAPE_ONLY:
            return [None] * len(call.outs)
        rule = rule_for(call)
        try:
            found = rule(self, call)
        except (AttributeError, TypeError, IndexError, StopIteration, ValueError) as error:
            raise UnknownError(f"its rule expects other operands ({error})") from error
        places = found if isinstance(found, list) else [found] * len(call.outs)
        if any(isinstance(place, Place) for place in places):
            self._require_shared_operands(call)
        return places

    def _require_shared_operands(self, call: Call) -> None:
        """Note what examples share of the operands of which the rule required nothing."""
        for each in _sources(call):
            is_met = any(each is other for other in self._met)
            if not is_met and not isinstance(self.tag_of(each), _OF_EXAMPLES):
                self.require_same(each, -1, Place(0))

    def _tag_of_result(
        self,
        call: Call,
        out: torch.Tensor,
        place: Any,
        tags: Sequence[Tag | None],
        together: Tag | None,
        has_examples: bool,
    ) -> Tag | Place:
        """Return the tag of a new result."""
        if isinstance(place, Place):
            return place
        if isinstance(place, Verdict):
            return Asked(place.answer)
        if isinstance(place, Shared):
            return "shared"
        if call.name in SHAPE_ONLY:
            return "empty" if "empty" in call.name else Tiled(1)
        if place == NOTHING or not out.numel():
            return "random"
        if has_examples:
            first = call.tensors[0]
            is_count = call.name == "sum" and not out.dim() and not first.is_floating_point()
            return Together(calling_line(), first.numel() if is_count else 0)
        summed = together.summed if isinstance(together, Together) else 0
        if summed and call.name == "eq" and call.get("other") == summed:
            return Asked(ANSWERS["all"])  # as Transformers asks whether all are set
        if together is not None:
            return together
        return self._shared_tag(call, tags)

    def _shared_tag(self, call: Call, tags: Sequence[Tag | None]) -> Tag:
        """Return the tag of a result without examples."""
        if "empty" in call.name:
            return "empty"
        if call.name in _CONSTANT:
            return Tiled(1)
        period = _period(call, [self.tag_of(each) for each in _sources(call)])
        if call.signature.is_random or any(map(_is_drawn, tags)):
            return Drawn(period) if period and "random" not in tags else "random"
        return Tiled(period) if period else "shared"

    def _write(
        self,
        target: torch.Tensor,
        place: Any,
        call: Call,
        tags: Sequence[Tag | None],
        together: Tag | None,
        *,
        has_examples: bool,
    ) -> None:
        """Update the tag of a tensor that is written to."""
        key, tag = target.untyped_storage()._cdata, self.tag_of(target)
        if key in self._owned:
            raise StateChangeError(self._owned[key])
        if has_examples and not isinstance(place, Place):
            place, together = None, together or Together(calling_line())
        if tag is None and (place is not None or together is not None):
            raise MixingError("writes values of examples to a tensor that outlives the pass")
        if together is not None:
            self.tag(target, together)
        elif isinstance(tag, int):
            self.place(target)  # raises if it is a part of the examples
        elif place is not None:
            self._spread(target, place, tag)
        elif tag is not None and not isinstance(tag, Together | Asked):
            whole = target.numel() == target.untyped_storage().nbytes() // target.element_size()
            found = self._shared_tag(call, tags)
            if not whole:
                found = "random" if _is_drawn(found) or _is_drawn(tag) else "shared"
            self.tag(target, found)

    def _spread(self, target: torch.Tensor, place: Place, tag: Tag | None) -> None:
        """Tag a storage without examples to a part of which examples are written."""
        step = _step(target, place)
        whole = target.detach().new_empty(0).set_(target.untyped_storage())
        self.tag(target, place)
        if tag == "empty" or target.numel() == len(whole):
            return
        if isinstance(tag, Tiled) and step % tag.period == 0:
            return
        if _is_drawn(tag) or len(whole) % (step * self.count):
            raise UnknownError("writes values of examples to a part of others")
        if not _is_equal_beside(target, place, self.count):
            raise MixingError("writes values of examples beside others that depend on their place")
        self._add_check(target, Check(-1, None, place, is_whole=True))

    def _note(
        self, call: Call, tags: Sequence[Any], places: Sequence[Any], *, has_examples: bool
    ) -> None:
        """Log an operation in a form that does not depend on the number of examples."""
        is_drawn = call.signature.is_random or any(map(_is_drawn, tags))
        if not has_examples and not is_drawn:
            return
        given = () if call.name in SHAPE_ONLY else tuple(
            (name, v if isinstance(v, _PLAIN) else str(v)) for name, v in call.bound.items()
            if not isinstance(v, torch.Tensor)
            and not (isinstance(v, _SEQUENCES) and any(isinstance(e, torch.Tensor) for e in v))
        )  # fmt: skip
        if has_examples:
            pairs = zip(call.outs, places, strict=True)
            shapes = [_folded(out, place) for out, place in pairs if isinstance(place, Place)]
        else:
            is_apart = call.outs and isinstance(self.tag_of(call.outs[0]), Drawn)
            shapes = [] if is_apart else [tuple(each.shape) for each in call.tensors]
            self._note_values(call)
        self.log.append(Entry(call.name, given, tuple(shapes)))

    def _note_values(self, call: Call) -> None:
        """Note the values that random numbers are drawn by, or are combined with."""
        for each in _sources(call):
            if not (_is_drawn(tag := self.tag_of(each)) or tag == "empty"):
                is_same = each.dim() and isinstance(tag, Tiled) and not each.stride(0) % tag.period
                is_same = is_same or (each.dim() and each.stride(0) == 0)
                self.values.append((each[:1] if is_same else each).detach().clone())

    def _note_views(self, name: str, views: Iterable[torch.Tensor]) -> None:
        """Log the views of examples: which part they are of each example's values."""
        for each in views:
            step = self.tag_of(each)
            if not isinstance(step, int) or not each.numel():
                continue
            if (place := self._find_place(each, step)) is None:
                continue  # refused where it is used
            whole = _step(each, place) * self.count
            numbers = [int(each.storage_offset())]
            numbers += [s for s, n in zip(each.stride(), each.shape, strict=True) if n > 1]
            geometry = tuple(divmod(number, whole) for number in numbers)
            self.log.append(Entry(name, (("geometry", geometry),), (_folded(each, place),)))

    # --- the passes of a model
    @contextmanager
    def forward_part(self) -> Iterator[None]:
        """Context manager for the forward part of a pass."""
        hooks = RemovableHandle.next_id
        yield
        self._hooks = RemovableHandle.next_id - hooks
        self._note_observed()

    @contextmanager
    def backward_part(self, losses: torch.Tensor, hooks: int) -> Iterator[None]:
        """Context manager for the backward part of a pass, in which the program may take part."""
        found = describe_backward(losses, self._hooks - hooks)
        self.has_backward_part = found is not None
        if found is not None:
            self.functions.append(found)
            self.made_of_examples.append(False)
        yield
        if found is not None:
            self._note_observed()

    def _note_observed(self) -> None:
        counted = self.functions, self.given, self.factors, self.operands.found
        self.observed = tuple(map(len, counted))

    # --- functions that Python sees
    def leave(self, name: str, tensor: torch.Tensor) -> None:
        """Note that Python gets the values of a tensor; raise if they are of examples."""
        if not self._is_own:
            self.functions.append(describe_exit(name))
            self.made_of_examples.append(False)
        if isinstance(tensor, torch.Tensor) and self._depends(tensor):
            self.error = MixingError(
                f"{name} in {calling_line()}: Python, and so what it does next, depends on values "
                "of examples"
            )
            raise self.error

    @contextmanager
    def own_part(self, layer: nn.Module, given: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
        """Context manager for a layer that the engine runs: one operation, with these results."""
        self.functions.append(type(layer).__name__)
        note_layer(layer, self.given, self.factors)
        self.made_of_examples.append(True)
        self.operands.note(given)
        self._is_own = True
        results: list[Any] = []
        try:
            yield results
        finally:
            self._is_own = False
        self._name(results)


def _chooses_rows(call: Call) -> bool:
    """Return whether an operation chooses rows of a table by one index."""
    if call.name == "index":
        return len(call.get("indices")) == 1 and len(call.tensors) == 2
    if call.name == "gather":
        return bool(call.get("self").dim() == 1)
    return call.name == "embedding" or call.get("dim") == 0


def _is_drawn(tag: Tag | None) -> bool:
    """Return whether a tag says that values are drawn at random."""
    return isinstance(tag, Drawn) or tag == "random"


def _sources(call: Call) -> list[torch.Tensor]:
    """Return the operands whose values matter."""
    if call.name.endswith("_like"):
        return []
    if call.name in _OVERWRITING and call.signature.written:
        return call.others(call.given(call.signature.written))
    return call.tensors


def _step(tensor: torch.Tensor, place: Place) -> int:
    """Return how many elements are from one example to the next."""
    return tensor.stride(place.dim) * place.inner


def _folded(tensor: torch.Tensor, place: Place) -> tuple[Any, ...]:
    """Return the shape of a tensor without the number of examples."""
    return tuple(
        (place.outer, place.inner) if d == place.dim else n for d, n in enumerate(tensor.shape)
    )


def _is_equal_beside(part: torch.Tensor, place: Place, count: int) -> bool:
    """Return whether the storage of a part with examples has the same values for each of them."""
    step = _step(part, place)
    whole = part.detach().new_empty(0).set_(part.untyped_storage())
    return not len(whole) % (step * count) and are_equal_along(whole.view(-1, count, step), 1)


def describe_backward(losses: torch.Tensor, hooks: int) -> str | None:
    """Return what parts of a backward pass the program computes in Python; None for none.

    Args:
        losses: whose graph it is.
        hooks: that the program registered for it.
    """
    own = sum(isinstance(each, BackwardCFunction) for each in _nodes_of(losses))
    return f"backward pass with {own} functions and {hooks} hooks" if own or hooks else None


def python_in_backward(losses: torch.Tensor, hooks: int) -> list[str]:
    """Return the names of the program's own functions in a backward pass, and of its hooks.

    Args:
        losses: whose graph it is.
        hooks: that the program registered for it.
    """
    kinds = [
        each._forward_cls  # type: ignore[attr-defined]
        for each in _nodes_of(losses)
        if isinstance(each, BackwardCFunction)
    ]
    names = [
        "a hook of a module" if kind is BackwardHookFunction else kind.__name__
        for kind in kinds
        if kind is BackwardHookFunction or not kind.__module__.startswith("torch.")
    ]
    return sorted({*names, *([HOOK_OF_TENSOR] if hooks else [])})


def _nodes_of(losses: torch.Tensor) -> set[Any]:
    """Return the operations of a backward pass."""
    nodes: list[Any] = [losses.grad_fn]
    found = {losses.grad_fn}
    while nodes:
        node = nodes.pop()
        more = {each for each, _ in node.next_functions if each is not None} - found if node else ()
        found |= set(more)
        nodes += more
    return found


def _period(call: Call, tags: Sequence[Tag | None]) -> int:
    """Return after how many elements the memory of a result repeats; 0 if that is not known.

    Args:
        call: of operands that examples share.
        tags: of the operands whose values matter.
    """
    out, pairs = call.outs[0], list(zip(_sources(call), tags, strict=True))
    if call.signature.is_pointwise or call.name in _ELEMENTWISE:
        if all(each.numel() == 1 or _repeats(1, tag) for each, tag in pairs):
            return 1 if pairs or call.signature.is_random else 0
    elif call.name in _MATRIX_PRODUCTS:
        pairs = pairs[:-1]  # the weights are the same for every row
    elif call.name in _TABLES and _chooses_rows(call):
        pairs = pairs[1:]  # and so is a table
    elif call.name == "repeat" and out.dim():
        times = call.get("repeats")
        at = next((d for d, each in enumerate(times) if each > 1), 0)
        is_first = out.shape[:at].numel() == 1 and all(each == 1 for each in times[at + 1 :])
        return call.tensors[0].numel() if is_first else 0
    else:
        return 0
    if not pairs or not out.is_contiguous() or not out.dim():
        return 0
    ndim = max(each.dim() for each, _ in pairs)
    is_repeated = all(
        each.dim() < ndim or each.size(0) == 1 or each.stride(0) == 0
        or _repeats(each.stride(0), tag)
        for each, tag in pairs
    )  # fmt: skip
    return out[0].numel() if is_repeated else 0


def _repeats(jump: int, tag: Tag | None) -> bool:
    """Return whether elements so far from each other are equal, or have one distribution."""
    return isinstance(tag, Tiled | Drawn) and jump % tag.period == 0


def _of_all(tag: Together | Asked) -> str:
    """Return what is wrong with a use of values that all examples have together."""
    if isinstance(tag, Asked):
        return "it uses whether all or any of the examples have a property"
    return f"it uses a result of all examples, computed in {tag.line}"


@contextmanager
def followed(trace: Trace) -> Iterator[None]:
    """Context manager for a pass that a trace follows; it raises what the program caught."""
    with torch.compiler.set_stance("force_eager"), Functions(trace), trace:
        yield
    if trace.error is not None:
        raise trace.error
