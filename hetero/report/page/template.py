"""Renders the templates of this folder."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from hetero.printable import printable_lines

REPORT_FORMAT = 1


def rendered(template: str, **values: object) -> str:
    """The HTML of a template of this folder. The same values give the same text."""
    environment = Environment(
        loader=PackageLoader("hetero.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(report_format=REPORT_FORMAT, **values)
    # A change of direction in a name would turn what follows it around.
    return printable_lines(page)
