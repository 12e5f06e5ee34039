"""The pages as a site: it is built without a warning, and what is made from the code is that of the code."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.site.docstrings import in_markdown
from docs.site.hooks import ELSEWHERE, turned_links, with_plain_bars
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.helpers import reference_tables
from tests.helpers.sources import ROOT, name, text
from tests.test_docs import is_defined

DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and a navigation that reaches every page: ``--strict`` makes each an error. Some 5 s."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = {path.stem for path in DOCS} - {"README"} | {Path(page).stem for page in ELSEWHERE}
    assert {path.stem for path in tmp_path.glob("*.html")} == pages | {"404"}
    assert not (tmp_path / "site").exists(), "its own code is no page"
    assert "recompute_num_layers" in (tmp_path / "search/search_index.json").read_text(encoding="utf-8")
    api = (tmp_path / "python_api.html").read_text(encoding="utf-8")
    assert 'id="hetero.cost.simulation.simulator.simulate"' in api
    assert ":class:" not in api
    assert "mixed_cluster.svg" in (tmp_path / "index.html").read_text(encoding="utf-8")
    html = [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")]
    assert [
        found for each in html for found in re.findall(r"(?:src|href)=\"(https?://[^\"]*\.(?:js|css|woff2?))", each)
    ] == []


def pages_in(navigation: object) -> Iterator[str]:
    """The files of a navigation, in order."""
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, list):
        for each in navigation:
            yield from pages_in(each)
    elif isinstance(navigation, dict):
        yield from pages_in(list(navigation.values()))


def test_the_navigation_reaches_every_page() -> None:
    """So does the page that lists them by reader."""
    config = text(ROOT / "mkdocs.yml").replace("!!python/object/apply:pymdownx.slugs.slugify", "")
    reached = list(pages_in(yaml.safe_load(config)["nav"]))
    assert sorted(reached) == sorted([*ELSEWHERE, *(path.name for path in DOCS if path.name != "README.md")])
    listed = set(re.findall(r"^\| \[(.*\.md)\]", text(ROOT / "docs/README.md"), re.MULTILINE))
    unlisted = {"elastic_protocol.md", "planted_faults.md"}  # of developers, and reached from elastic.md and testing.md
    assert {path.name for path in DOCS} - listed - unlisted == {"README.md"}


@pytest.mark.parametrize("page", reference_tables.TABLES, ids=name)
def test_tables_are_those_of_the_code(page: Path) -> None:
    assert reference_tables.written(page) == reference_tables.TABLES[page](), (
        "run python -m tests.helpers.reference_tables"
    )


def test_every_field_of_a_plan_is_explained() -> None:
    rows = [row.strip("| ").split(" | ") for row in reference_tables.plan_format().splitlines() if row[:3] == "| `"]
    assert [row[0] for row in rows if len(row) < 4 or not row[3].strip()] == []
    assert len(rows) > 60


def test_the_api_page_names_what_there_is() -> None:
    page = text(ROOT / "docs/python_api.md")
    found = re.findall(r"^::: ([\w.]+)(?:\n    options: \{members: \[([^]]*)\])?", page, re.MULTILINE)
    names = [f"{module}.{member}" for module, members in found for member in filter(None, members.split(", "))]
    assert [each for each in [*(module for module, _ in found), *names] if not is_defined(each)] == []
    assert len(names) > 15


@pytest.mark.parametrize(
    ("page", "link", "turned"),
    [
        ("index.md", "[all](docs/README.md)", "[all](pages.md)"),
        ("index.md", "![plan](docs/images/mixed_cluster.svg)", "![plan](images/mixed_cluster.svg)"),
        ("index.md", "[a](docs/measured.md#predictions)", "[a](measured.md#predictions)"),
        ("testing.md", "[`pool`](../tests/helpers/rank_pool.py)", "`pool`"),
        ("pages.md", "[change](../CONTRIBUTING.md#commits)", "[change](contributing.md#commits)"),
        ("launch.md", "[gone](nowhere.md)", "[gone](nowhere.md)"),
        ("launch.md", "[there](https://ui.perfetto.dev)", "[there](https://ui.perfetto.dev)"),
    ],
)
def test_links_lead_to_where_the_site_has_it(page: str, link: str, turned: str) -> None:
    on_site = {*ELSEWHERE, *(path.name for path in DOCS), "images/mixed_cluster.svg"}
    assert turned_links(f"See {link}.", page, on_site) == f"See {turned}."


def test_bars_in_code_are_plain_in_tables() -> None:
    assert with_plain_bars("| `a\\|b` | c \\| d |\n`e\\|f`\n") == "| `a|b` | c \\| d |\n`e\\|f`\n"


def test_docstrings_become_markdown() -> None:
    docstring = "See :func:`~hetero.plan.validate`, ``tp``.\n\nfirst, second: two of\n    them.\nlast: one."
    assert (
        in_markdown(docstring)
        == "See `hetero.plan.validate`, `tp`.\n\n- `first`, `second`: two of\n    them.\n- `last`: one."
    )


@pytest.mark.parametrize("page", [*DOCS, *ELSEWHERE.values()], ids=name)
def test_lists_are_lists_for_every_reader(page: Path) -> None:
    """GitHub begins a list in the middle of a paragraph, MkDocs does not."""
    lines = re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.MULTILINE | re.DOTALL).splitlines()
    begins = re.compile(r"[*-] |\d+\. ")
    wrong = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if begins.match(line) and before and not begins.match(before) and not before.startswith((" ", "#"))
    ]
    assert wrong == []


def test_the_picture_is_of_the_plan_that_ships() -> None:
    """The README's figure and picture, by the simulator as it is now."""
    plans = ROOT / "scripts/presets/plans"
    cluster = load(ClusterSpec, ROOT / "scripts/presets/clusters/quickstart.yaml")
    steps = []
    for file in ("mixed_cluster.json", "mixed_cluster_uniform.json"):
        plan = load(Plan, plans / file)
        costs = model_costs(plan.model, seq_length=plan.seq_length, precision=plan.precision, where=cluster)
        steps.append(simulate(plan, cluster, costs).step_s)
    ours, uniform = steps
    said = text(ROOT / "README.md")
    assert f"**{uniform / ours:.2f} times as fast" in said, "plan again, as docs/testing.md says"
    assert f"{ours:.3f} s per step instead of {uniform:.3f} s" in said
    assert f">{ours:.4g} s (" in text(ROOT / "docs/images/mixed_cluster.svg")
