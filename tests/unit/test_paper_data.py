"""Files of the papers' data in their real formats are read; broken ones are refused."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.paper_files import (
    LABELS,
    PIXELS,
    write_bank,
    write_cifar,
    write_imdb,
    write_posts,
)
from training_client.errors import DataError, NotFetchedError
from training_client.lab.data import DATASETS, load
from training_client.lab.data.cifar import cifar
from training_client.lab.data.imdb import VOCABULARY, imdb, imdb_sequences
from training_client.lab.data.stackoverflow import stackoverflow
from training_client.lab.data.surveys import BANK, IPUMS
from training_client.lab.models import WordModel
from training_client.lab.papers.convolutions import load_features, make_dense_layers


@pytest.mark.parametrize("binary", [True, False])
def test_cifar_is_read_in_both_formats(binary: bool, tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar10", 10, binary)
    write_cifar(tmp_path, 100, binary)
    ten, hundred = load("cifar10", tmp_path), cifar(tmp_path, 100)
    assert ten.train_examples.shape == (15, 3072)
    assert ten.train_examples[1].mul(255).round().tolist() == PIXELS[1].tolist()
    assert ten.train_labels.tolist() == LABELS[10] * 5
    assert (ten.images, ten.classes, hundred.classes) == ((3, 32, 32), 10, 100)
    assert hundred.test_labels.tolist() == LABELS[100]


class Intruder:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Path("/nowhere").with_name, ("ran",)  # type: ignore[return-value]


def test_a_pickle_runs_no_code_and_a_broken_file_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, 10, binary=False)
    file = tmp_path / "cifar-10-batches-py/data_batch_3"
    for raw, told in (
        (pickle.dumps({b"data": Intruder(), b"labels": []}), "has no place in it"),
        (b"no pickle", "data_batch_3 is not a file of CIFAR-10"),
        (pickle.dumps({b"data": PIXELS, b"labels": [0, 1, 10]}, 2), "not a file of CIFAR-10"),
    ):
        file.write_bytes(raw)
        with pytest.raises(DataError, match=told):
            cifar(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match="has no file data_batch_3"):
        cifar(tmp_path)


def test_a_binary_file_that_ends_within_an_image_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, 10, binary=True)
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").write_bytes(b"\x01" * 3000)
    with pytest.raises(DataError, match="ends within an image"):
        cifar(tmp_path)


@pytest.mark.slow
def test_features_of_cifar_come_from_convolutions_trained_on_public_images(
    tmp_path: Path,
) -> None:
    for classes in (10, 100):
        write_cifar(tmp_path, classes, binary=True)
    found = load_features(tmp_path, seed=1, epochs=1)
    assert found.train_examples.shape == (15, 4096)
    assert not found.train_examples.requires_grad
    assert torch.equal(found.train_examples[0], found.test_examples[0])  # the same image
    assert make_dense_layers(found)(found.test_examples).shape == (3, 10)


def test_reviews_are_bags_of_words(tmp_path: Path) -> None:
    write_imdb(tmp_path / "imdb")
    data = load("imdb", tmp_path)
    assert sorted(data.train_labels.tolist()) == [0, 0, 1, 1]
    assert data.inputs == 6  # a, film, bad, good, don't, miss
    torch.testing.assert_close(data.train_examples.norm(dim=1), torch.ones(4))
    assert data.frequencies is not None
    assert sorted(data.frequencies.tolist()) == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    rare = imdb(tmp_path, weigh_by_rarity=True)
    assert (rare.train_examples[:, data.frequencies == 1.0] == 0).all()  # log(n / n) = 0
    assert imdb(tmp_path, vocabulary=2).inputs == 2
    words = imdb_sequences(tmp_path, vocabulary=4, length=3)  # a, bad and film
    good = words.train_examples[words.train_labels == 1][0]
    assert (good > 0).tolist() == [False, True, True], "padding stands in front"
    assert words.train_examples.max() == 3
    model = WordModel(VOCABULARY, 2)
    assert sum(each.numel() for each in model.parameters()) == 706_690, "papers/004, Appendix B"
    (tmp_path / "imdb/aclImdb/test/pos/1_8.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"1_8\.txt is not text"):
        imdb(tmp_path)


def test_questions_are_read_from_the_data_dump(tmp_path: Path) -> None:
    write_posts(tmp_path / "stackoverflow/Posts.xml")
    data = load("stackoverflow", tmp_path)
    assert (len(data.train_labels), len(data.test_labels)) == (10, 1)  # eleven have tags
    assert data.train_labels.tolist() == [0] * 10  # python is the commonest tag
    assert data.classes == 3
    (tmp_path / "stackoverflow/Posts.xml").write_text("<posts><row")
    with pytest.raises(DataError, match="is not XML"):
        stackoverflow(tmp_path)


def test_bank_is_scaled_by_its_codebook(tmp_path: Path) -> None:
    write_bank(tmp_path / "bank/bank-full.csv")
    data = load("bank", tmp_path)
    assert (len(data.train_labels), len(data.test_labels)) == (8, 2)
    assert data.inputs == BANK.inputs == 51
    assert float(data.train_examples[0, 0]) == 0.5  # age 50 of 100
    assert (data.train_examples[:, 7:].sum(1) == len(BANK.codes)).all()  # one code per column
    assert sorted([*data.train_labels.tolist(), *data.test_labels.tolist()]) == [0] * 5 + [1] * 5


def test_ipums_is_read_from_an_extract(tmp_path: Path) -> None:
    file = tmp_path / "ipums/ipums.csv"
    file.parent.mkdir()
    names = [*IPUMS.bounds, *IPUMS.codes, "INCTOT", "SERIAL"]
    rows = [[2] * (len(names) - 2) + [income, 9] for income in (0, 300, 301, 9999, 10)]
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([names, *rows])
    data = load("ipums", tmp_path)
    labels = [*data.train_labels.tolist(), *data.test_labels.tolist()]
    assert sorted(labels) == [0, 0, 0, 1, 1]  # more than 300
    assert data.inputs == IPUMS.inputs
    file.write_text(file.read_text().replace("AGE", "OLD").replace("9999", "x"))
    with pytest.raises(DataError, match="has no column AGE"):
        load("ipums", tmp_path)
    file.write_text(file.read_text().replace("OLD", "AGE"))
    with pytest.raises(DataError, match=r"ipums\.csv:5: .*'x'"):
        load("ipums", tmp_path)


@pytest.mark.parametrize("name", [name for name, each in DATASETS.items() if each.has_files])
def test_missing_files_are_named_with_their_source(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFetchedError, match=f"{name} was not found: .*{tmp_path / name}"):
        load(name, tmp_path)
