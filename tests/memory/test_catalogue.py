from pathlib import Path

import pytest

from elastic_memory.memory import MEMORIES
from elastic_memory.report import catalogue

ROOT = Path(__file__).parents[2]
ANEW = "out of date: run python -m elastic_memory.report.catalogue"


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/catalogue.md").read_text(encoding="utf-8") == catalogue.page(), ANEW


@pytest.mark.parametrize(("name", "kind"), MEMORIES.items())
def test_a_memory_says_what_it_is(name, kind):
    """What the catalogue shows of it, and what its constructor can be asked for."""
    assert kind.info.source and kind.info.phrase and kind.__doc__
    assert f"| `{name}` |" in (ROOT / "docs/catalogue.md").read_text(encoding="utf-8")
    # These mean the same everywhere, and are explained with the configuration.
    shared = {"order", "points", "sampling", "sampling_options", "algorithm"}
    named = {option.strip("`").split("=")[0] for option in catalogue.options(kind)}
    assert not {option for option in named - shared if f"`{option}`" not in kind.__doc__}


def test_a_text_without_a_place_for_it_is_refused():
    with pytest.raises(ValueError, match="no place for the catalogue"):
        catalogue.insert("# A page", "| table |")
