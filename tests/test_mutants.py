"""The list of `make mutants` is about the code as it is: each piece occurs once, and its tests exist."""

import pytest

from tests.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.old[:40]}")
def test_a_mutant_changes_one_place(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert (ROOT / mutant.tests).is_file()
    assert mutant.old != mutant.new
