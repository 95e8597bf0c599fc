"""The pages of the five papers and the article say what the results file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.results import papers
from scripts import article_pdf
from training_client.lab.papers.store import Store

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/papers"
RESULTS = ROOT / "docs/training-results.jsonl"


def render(results: Path) -> dict[str, str]:
    """Return the pages that follow from a results file."""
    return dict(papers.render_paper_pages(Store(results), papers.read_audit()))


@pytest.mark.slow
def test_the_pages_are_what_the_results_file_says() -> None:
    """If this fails, `python benchmarks/training_results.py report` writes them again."""
    rendered = render(RESULTS)
    assert rendered.keys() == {each.name for each in PAGES.glob("*.md")}
    for name, text in rendered.items():
        assert (PAGES / name).read_text() == text, name
        assert not set("{}") & set(text)


@pytest.mark.slow
def test_every_figure_of_a_result_follows_from_its_runs(tmp_path: Path) -> None:
    """With other scores, every number of ours in a table and in a sentence is another."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "run" and line["experiment"].startswith("mnist/figure-2/adadp"):
            line["score"] = round(line["score"] - 0.05 * line["seed"], 4)
    other = tmp_path / "results.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, after = render(RESULTS), render(other)
    row = next(each for each in before["000.md"].splitlines() if "lead over DP-SGD" in each)
    ours = row.split(" | ")[2:4]
    assert all(re.match(r"[+−][\d.]+ \([+−][\d.]+ to [+−][\d.]+\)", each) for each in ours)
    for cell in ours:
        assert cell in before["five-papers.md"]
        assert cell not in after["five-papers.md"]
        assert cell not in after["000.md"]


def test_the_index_counts_every_row_once() -> None:
    index = (PAGES / "index.md").read_text()
    rows = re.findall(r"^\| \[papers/\d+\].*", index, re.MULTILINE)
    counts = [[int(cell) for cell in re.findall(r"(?<=\| )\d+(?= \|)", row)] for row in rows]
    assert all(total == sum(rest) for total, *rest in counts)
    total = sum(each for each, *_ in counts)
    assert f"is a row: {total} rows" in index
    assert f"print {total} results and claims" in (PAGES / "five-papers.md").read_text()


def test_a_plot_tells_of_crosses_only_where_the_paper_prints_scores(tmp_path: Path) -> None:
    """papers/000, Figure 2 prints leads, and no score; papers/001, Figure 5 prints scores."""
    store = Store(tmp_path / "results.jsonl")
    for name in ("mnist/figure-2/adadp/8", "mnist-784/figure-5/dp_sgd/8"):
        (experiment,) = [each for each in papers.list_experiments(
            "000" if "figure-2" in name else "001") if each.name == name]  # fmt: skip
        known = {"kind": "run", "experiment": name, "seed": 1, "steps": experiment.steps}
        store.add({**known, "score": 0.9, "seconds": 9.0, "curve": [[experiment.steps, 0.9]]})
    pages = dict(papers.render_paper_pages(store, papers.read_audit()))
    assert "![Figure 2, ours](" in pages["000.md"]
    assert "![Figure 5, ours; crosses are what the paper prints](" in pages["001.md"]


def test_the_article_states_no_verdict_and_no_figure_of_its_own() -> None:
    """Verdicts and figures of the summary and the findings are placeholders of rows."""
    template = (papers.TEMPLATES / f"papers_{papers.ARTICLE}").read_text()
    for title in ("Summary", "Findings"):
        _, _, text = template.partition(f"## {title}\n")
        text = re.sub(r"\{[^{}]*\}", "", text.partition("\n## ")[0])
        settings = r"papers/\d{3}|Theorem \d|(?:accuracy|[σεq] =) [\d.]*\d"
        assert not re.search(r"\d", re.sub(settings, "", text)), title
        said = re.findall(r"\b(?:not )?(?:reproduced|refuted|misprinted|confirmed)\b", text)
        assert not said, title
        assert not re.search(r"\b(?:carries|twice|beats|ahead|better|worse)\b", text), title


def test_a_placeholder_that_names_no_single_row_is_refused() -> None:
    with pytest.raises(ValueError, match="0 printed results begin with"):
        papers._fill("{ours:000 Figure 99: }", papers.judge_all(Store(RESULTS), {}), Store(RESULTS))


@pytest.mark.slow
def test_the_article_is_cited_and_becomes_a_pdf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = article_pdf.ARTICLE.read_text()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"][0]
    assert text.startswith(f"# {cited['title']}\n")
    html = article_pdf.render_html(text)
    assert "<h2>Findings</h2>" in html
    assert "audit.md" not in html  # a link of the site
    pytest.importorskip("weasyprint")
    file = tmp_path / "new/article.pdf"
    monkeypatch.setattr("sys.argv", ["article_pdf", str(file)])
    article_pdf.main()
    assert file.read_bytes().startswith(b"%PDF")
    assert str(file) in capsys.readouterr().out
