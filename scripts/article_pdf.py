"""Write the article on the five papers as a PDF.

python -m scripts.article_pdf build/five-papers.pdf
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

ARTICLE: Final = Path(__file__).parents[1] / "docs" / "papers" / "five-papers.md"
_SITE: Final = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")  # links within the documentation
_STYLE: Final = (
    "@page { size: A4; margin: 25mm } body { font: 10.5pt/1.45 serif } "
    "h1 { font-size: 18pt } h2 { font-size: 13pt } code { font-size: 9pt }"
)


def render_html(text: str) -> str:
    """Return the article as HTML, without the links that work only on the site."""
    from markdown import markdown

    body = markdown(_SITE.sub(r"\1", text), extensions=["tables"], output_format="html")
    title = text.splitlines()[0].lstrip("# ")
    return (
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>"
    )


def main() -> None:
    """Write the PDF that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.article_pdf", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, help="the PDF to write")
    file: Path = parser.parse_args().file
    from weasyprint import HTML

    file.parent.mkdir(parents=True, exist_ok=True)
    HTML(string=render_html(ARTICLE.read_text())).write_pdf(file)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
