import sys

import pytest

from finetune.examples import installed, quickspacer


def test_a_missing_package_is_an_error_that_says_how_to_install_it():
    with pytest.raises(ModuleNotFoundError, match=r"not_a_package.*finetune-elements\[examples\]"):
        installed.package_file("not_a_package", "vocab.txt")


def test_a_file_that_the_installed_version_lacks_is_named_with_those_it_has():
    with pytest.raises(FileNotFoundError, match=r"`relative` \(weights\.bin\).*'decoder\.py'"):
        installed.package_file("json", "weights.bin")


def test_a_real_package_is_read_without_being_imported():
    imported = set(sys.modules)

    assert len(quickspacer.vocabulary()) == 4250

    assert "quickspacer" not in set(sys.modules) - imported
