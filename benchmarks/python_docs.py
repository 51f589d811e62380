"""Makes the text of configs/python_docs_en_es.yaml from a checkout of https://github.com/python/python-docs-es.

    git clone --branch 3.12 https://github.com/python/python-docs-es
    pip install polib
    python benchmarks/python_docs.py python-docs-es python_docs

Writes `train.tsv.gz`, `valid.tsv.gz` and `test.tsv.gz` with the columns document, section, en and es: every finished
message that is not fuzzy, in the order of its document, with white space folded. Pairs for training whose English text
stands in a document for validation or test are left out.
"""

import argparse
import gzip
from pathlib import Path

import polib

DOCUMENTS = {
    "valid": """
        c-api/concrete c-api/gcsupport distutils/_setuptools_disclaimer howto/curses howto/regex
        library/asyncio-llapi-index library/binhex library/cmd library/colorsys library/dbm library/gc
        library/linecache library/logging.handlers library/pprint library/windows using/windows""".split(),
    "test": """
        c-api/stable distutils/setupscript howto/sockets library/asyncio-extending library/asyncio-stream library/code
        library/email library/imaplib library/intro library/netrc library/profile library/rlcompleter library/telnetlib
        library/tkinter.font library/tty library/undoc library/uu library/weakref library/xml.sax.handler
        reference/compound_stmts using/configure""".split(),
}


def main() -> None:
    """Writes the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the repository")
    parser.add_argument("folder", type=Path, help="folder to write the text to")
    arguments = parser.parse_args()
    rows: dict[str, list[tuple[str, ...]]] = {"train": [], "valid": [], "test": []}
    for path in sorted(arguments.checkout.rglob("*.po")):
        document = path.relative_to(arguments.checkout).with_suffix("").as_posix()
        split = next((name for name, documents in DOCUMENTS.items() if document in documents), "train")
        for entry in polib.pofile(str(path)).translated_entries():
            pair = [" ".join(text.split()) for text in (entry.msgid, entry.msgstr)]
            if all(pair):
                rows[split].append((document, document.split("/")[0], *pair))
    held_out = {row[2] for name in DOCUMENTS for row in rows[name]}
    rows["train"] = [row for row in rows["train"] if row[2] not in held_out]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        with gzip.open(arguments.folder / f"{name}.tsv.gz", "wt", encoding="utf-8") as file:
            file.writelines("\t".join(line) + "\n" for line in [("document", "section", "en", "es"), *lines])
        print(f"{name}: {len(lines):,} pairs")


if __name__ == "__main__":
    main()
