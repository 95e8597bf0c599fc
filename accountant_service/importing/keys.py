"""The keys of a document: each format has a table that says what each key does.

A key acts, is checked against others, or is harmless. A reader asks its `Fields` for a key by the
first of its names, which must be in the table; whatever a document holds and no reader asked for
is a finding, and takes "proven" away. The page of keys in the documentation is the same tables.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from accountant_service.importing.document import CLASS_NAME, DocumentError, Part, shorten
from accountant_service.importing.findings import Finding

# Names of a run's length, one of which each section that describes a run has.
_LENGTHS: Final = frozenset({"steps", "epochs", "iterations", "train_steps", "num_rounds"})
_UNREAD_MAX: Final = 20  # findings about unread keys, each by itself


class Role(StrEnum):
    """The role of a key of a document: it acts, is checked against others, or is harmless."""

    ACTS = "acts"
    CHECKED = "checked"
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a format knows.

    Attributes:
        names: its names in documents; the first is the one that readers use.
        role: what it does.
        meaning: what it changes, what it is compared with, or why it changes nothing.
        is_whole: whether an object may be its value; an object under any other key is a section,
            whose keys count as the document's own.
        values: a pattern of the values with which the key is harmless, if not with every one.
    """

    names: tuple[str, ...]
    role: Role
    meaning: str
    is_whole: bool = False
    values: str | None = None

    def allows(self, value: object) -> bool:
        """Return whether the key does with this value what its meaning says."""
        if self.values is None or value is None:
            return True
        return isinstance(value, str) and re.fullmatch(self.values, value, re.I) is not None


Table = Sequence[Key]


def acts(names: str, meaning: str, *, is_whole: bool = False) -> Key:
    """Return a key that changes the answer; `names` are separated by spaces."""
    return Key(tuple(names.split()), Role.ACTS, meaning, is_whole)


def checked(names: str, meaning: str) -> Key:
    """Return a key that must agree with others; `names` are separated by spaces."""
    return Key(tuple(names.split()), Role.CHECKED, meaning)


def harmless(names: str, meaning: str, *, is_whole: bool = False, values: str | None = None) -> Key:
    """Return a key that changes nothing with these or all values; spaces separate `names`."""
    return Key(tuple(names.split()), Role.HARMLESS, meaning, is_whole, values)


def join(*keys: Key) -> Table:
    """Return a table of keys, in which a name means what the first row with it says."""
    taken: set[str] = set()
    rows = []
    for key in keys:
        names = tuple(name for name in key.names if name not in taken)
        taken.update(names)
        if names:
            rows.append(replace(key, names=names))
    return tuple(rows)


class Fields:
    """A document's keys as one format's table knows them; it remembers which were read.

    Attributes:
        root: the whole document.
        class_name: the class of the tool that the document is about, if it names one.
        faults: keys that are stated twice with different values.
    """

    def __init__(
        self,
        root: Part,
        table: Table,
        constructors: Mapping[str, tuple[str, ...]] | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        """Find the keys of `table` in a document and its sections.

        Args:
            root: the document; one that is no object, or an event, has no keys.
            table: the keys that the format knows.
            constructors: names of the positional arguments of each class that the format knows.
            prefixes: that may stand before each name of the table, such as `dp_`.
        """
        self.root = root
        self.faults: list[tuple[str, str]] = []
        self._table = {
            prefix + name: key for prefix in ("", *prefixes) for key in table for name in key.names
        }
        self._own_names = {key.names[0] for key in table}
        self._known: dict[str, Part] = {}
        self._others: list[tuple[str, Part]] = []
        self._read: set[str] = set()
        self._spelled: set[str] = set()
        self._with_length: dict[str, Part] = {}
        self._inner: list[Fields] = []
        known = constructors or {}
        names = known.get(root.class_name or "")
        if isinstance(root.value, dict) and not is_event(root):
            self._add(root.named_arguments(names) if names else root)
        named = self._known.get(CLASS_NAME)
        self.class_name = named.value if named and isinstance(named.value, str) else None
        if self.class_name in known:
            self._read.add(CLASS_NAME)

    def _add(self, section: Part) -> None:
        """Add the keys of an object, and those of the objects in it that are sections."""
        for name, value in section.entries():
            key = self._table.get(_normalize(name))
            self._spelled.add(_normalize(name))
            is_whole = (key is not None and key.is_whole) or is_event(value)
            if isinstance(value.value, dict) and value.value and not is_whole:
                self._add(value)
            elif key is None or not key.allows(value.value):
                self._others.append((name, value))
            elif value.value is not None:
                self._add_known(key, value)

    def _add_known(self, key: Key, value: Part) -> None:
        """Add the value of a known key; note a fault if it is stated before, and differs."""
        before = self._known.setdefault(key.names[0], value)
        if key.names[0] in _LENGTHS:
            self._with_length.setdefault(value.pointer.rpartition("/")[0], value)
        if key.role is Role.HARMLESS:
            self._read.add(key.names[0])
        elif before.value != value.value:
            stated = f"is {shorten(value.value)}, and {before.pointer} is {shorten(before.value)}"
            self.faults.append((value.pointer, f"{stated}: correct one of them"))

    def require_agreement(self) -> None:
        """Raise DocumentError if a key is stated twice with different values."""
        if self.faults:
            raise DocumentError(*self.faults)

    def has(self, *names: str) -> bool:
        """Return whether the document has all of these keys; this does not count as reading."""
        return all(name in self._known for name in names)

    def has_any_spelled(self, *spellings: str) -> bool:
        """Return whether the document has one of these keys in exactly this spelling."""
        return not self._spelled.isdisjoint(spellings)

    def find(self, name: str) -> Part | None:
        """Return the value of a key of the table, or None if it is missing or null."""
        if name not in self._own_names:
            raise KeyError(name)  # a reader may ask for keys of its table only
        self._read.add(name)
        return self._known.get(name)

    def find_known(self, name: str) -> Part | None:
        """Return the value of a key that not every table has, or None."""
        return self.find(name) if name in self._own_names else None

    def field(self, name: str) -> Part:
        """Return the value of a key of the table; raise DocumentError if it is missing."""
        found = self.find(name)
        if found is None:
            close = self._suggest(name, [other for other, _ in self._others])
            also = f"; is {close} meant to be it?" if close else ""
            raise DocumentError((f"{self.root.pointer}/{name}", f"is required{also}"))
        return found

    def inside(self, part: Part, table: Table) -> Fields:
        """Return the keys of an object in the document; what is not read there is a finding too.

        Raises:
            DocumentError: the value is no object, or states a key twice with different values.
        """
        part.fields()
        inner = Fields(part, table)
        inner.require_agreement()
        self._inner.append(inner)
        if part.pointer == self.root.pointer:  # one object holds the keys of both tables
            inner._others.clear()
            self._others = [e for e in self._others if _normalize(e[0]) not in inner._table]
            self._read |= inner._known.keys()
        return inner

    def find_event(self) -> Part | None:
        """Return the only event under a key that the table does not name, if there is one."""
        found = [entry for entry in self._others if is_event(entry[1])]
        if len(found) != 1 or "event" in self._known:
            return None
        self._others.remove(found[0])
        return found[0][1]

    def has_event(self) -> bool:
        """Return whether some key of the document has an event as its value."""
        every = [*self._known.values(), *(part for _, part in self._others)]
        return any(is_event(part) for part in every)

    def find_second_length(self) -> Part | None:
        """Return the length that a second section states: it may be that of another run."""
        return next(iter([*self._with_length.values()][1:]), None)

    def report_unread(self) -> tuple[Finding, ...]:
        """Return a finding for each key that was not read; those past twenty share one."""
        unread = list(self._list_unread())
        found = tuple(owner._report(name, part) for owner, name, part in unread[:_UNREAD_MAX])
        if len(unread) <= _UNREAD_MAX:
            return found
        rest = unread[_UNREAD_MAX:]
        message = f"{len(rest)} more keys are unknown, or have no part in what is computed here"
        return (*found, Finding("unknown-key", rest[0][2].pointer, message, _REMOVE))

    def _list_unread(self) -> Iterator[tuple[Fields, str, Part]]:
        """Yield each key that was not read, of the document and of objects in it."""
        for name, part in self._known.items():
            if name not in self._read:
                yield self, name, part
        for name, part in self._others:
            yield self, name, part
        for inner in self._inner:
            yield from inner._list_unread()

    def _report(self, name: str, part: Part) -> Finding:
        """Return the finding that a key was not read; of an unknown one, with a name like it."""
        key = self._table.get(_normalize(name))
        if key is not None and not key.allows(part.value):
            message = f"{shorten(part.value)} may be another mechanism than is computed here"
            return Finding("unused-key", part.pointer, message, _REMOVE)
        if key is not None:
            message = f"{name} has no part in what is computed here"
            return Finding("unused-key", part.pointer, message, _REMOVE)
        known = [each for key in self._table.values() for each in key.names]
        close = self._suggest(_normalize(name), known)
        instead = f"is it {close}? " if close else ""
        message = f"the import does not know what {shorten(name)} does to the cost"
        return Finding("unknown-key", part.pointer, message, instead + _REMOVE)

    @staticmethod
    def _suggest(name: str, known: Sequence[str]) -> str | None:
        """Return the known name that is most like a name, if one is."""
        return next(iter(difflib.get_close_matches(name[:64], known, 1, 0.75)), None)


_REMOVE: Final = "leave it out if it changes neither noise, sampling nor length"


def _normalize(name: str) -> str:
    """Return a key as the tables write it: in lower case, with underscores."""
    return name.replace("-", "_").lower()


def is_event(part: Part) -> bool:
    """Return whether a value is an event of dp_accounting."""
    return (part.class_name or "").endswith("DpEvent")


# Keys that every format knows.
CLAIM: Final = (
    acts("delta target_delta", "δ of the answer, and of the claim"),
    acts(
        "epsilon target_epsilon", "a claimed ε; without noise, the ε that the noise is solved for"
    ),
    acts(
        "neighbouring_relation neighboring_relation",
        "which datasets are neighbours: add_or_remove_one, replace_one or zero_out_one, or the "
        "name that dp_accounting has for it",
    ),
)
SAMPLING: Final = (
    acts("sampling", "how batches are drawn: poisson, fixed_size, shuffled or none"),
    acts(
        "poisson_sampling",
        "true: Poisson samples. false: shuffled batches, unless `sampling` says otherwise",
    ),
    acts(
        "shuffle",
        "true: shuffled batches. false: batches in a fixed order, which cost the same, unless "
        "another key says how batches are drawn",
    ),
    checked("replacement", "must be false: no cost is proved for samples with replacement"),
)
SIZES: Final = (
    acts(
        "dataset_size train_size num_examples number_of_examples n_train num_train_examples",
        "number of records",
    ),
    acts(
        "batch_size lot_size train_batch_size expected_batch_size",
        "expected number of records in a batch",
    ),
)
UNIT: Final = (
    acts(
        "records_per_user max_examples_per_user max_records_per_user examples_per_user",
        "number of records of one person, who is then protected as a whole",
    ),
    checked(
        "privacy_unit unit_of_privacy",
        "the cost is that of one record; of another unit with `records_per_user` only",
    ),
)
# Optimizers that read noisy gradients; DP-FTRL, for one, has noise of another kind.
_OPTIMIZERS: Final = (
    r"([\w.]+\.)?(dp|vectorized|private|keras|fused|_)*"
    r"(sgd|adam|adamw|adamax|nadam|radam|adagrad|adadelta|adafactor|rmsprop|lamb|lars|lion|yogi)"
    r"(_torch|_hf|_fused|_8bit|_bnb|_?optimizer)*"
)
POST_PROCESSING: Final = (
    harmless(
        "optimizer optimizer_name",
        "an optimizer by name, such as SGD or DPKerasAdamOptimizer, reads the noisy gradients "
        "only; another name is a finding",
        values=_OPTIMIZERS,
    ),
    harmless(
        "learning_rate lr base_lr momentum weight_decay lr_scheduler lr_schedule scheduler "
        "warmup_steps warmup_ratio adam_beta1 adam_beta2 adam_epsilon betas "
        "ema_decay",
        "the optimizer's input is the noisy gradient only: it is post-processing",
    ),
    harmless(
        "max_grad_norm max_per_sample_grad_norm clipping_norm l2_norm_clip l2_clip_norm clip_norm "
        "clipping_threshold",
        "the noise multiplier is relative to the clipping norm, which must be public",
    ),
    harmless(
        "name title description comment notes version source url author date id run_name "
        "experiment_name project tags",
        "says what the document is about",
    ),
    harmless(
        "model model_name architecture dataset dataset_name data_dir data_path data_root "
        "output_dir save_dir checkpoint_dir model_dir log_dir log_interval logging_steps "
        "save_steps device accelerator num_workers pin_memory verbose",
        "which model and data, where they are, and what is logged",
    ),
    harmless(
        "loss_reduction batch_first criterion loss module data_loader grad_sample_mode wrap_model "
        "max_physical_batch_size physical_batch_size",
        "how per-record gradients are computed and summed, not what they are",
    ),
)
SEED: Final = acts(
    "seed random_seed random_state noise_seed noise_generator",
    "a warning: who knows the seed can subtract the noise",
)
_CLASS_NAMES: Final = harmless(
    "module_name _type_ _target_", "the module of the class that `class_name` names"
)
CLASS: Final = (acts(CLASS_NAME, "which object of the tool it is"), _CLASS_NAMES)
