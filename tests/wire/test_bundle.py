"""Tokenizer bundles: the digest names exactly these files, and only such that belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.wire.bundle import BUNDLE_FILES, BundleError, bundle_digest, check_bundle

bundles = st.dictionaries(st.sampled_from(BUNDLE_FILES), st.binary(max_size=8), min_size=1, max_size=4)


@given(bundles, bundles)
def test_two_bundles_have_one_digest_only_if_they_are_equal(files: dict[str, bytes], others: dict[str, bytes]) -> None:
    assert (bundle_digest(files) == bundle_digest(others)) is (files == others)


def test_contents_cannot_move_between_name_and_neighbour() -> None:
    assert bundle_digest({"a": b"bc"}) != bundle_digest({"ab": b"c"})
    assert bundle_digest({"a": b"", "b": b""}) != bundle_digest({"a": b"b"})


def test_order_does_not_matter() -> None:
    assert bundle_digest({"a": b"1", "b": b"2"}) == bundle_digest({"b": b"2", "a": b"1"})


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/passwd", "tokenizer.py", "sub/tokenizer.json", ""])
def test_names_that_do_not_belong_are_refused(name: str) -> None:
    files = {name: b"x"}
    with pytest.raises(BundleError, match="unexpected file"):
        check_bundle(files, bundle_digest(files))


def test_a_wrong_digest_and_an_empty_bundle_are_refused() -> None:
    files = {"tokenizer.json": b"{}"}
    check_bundle(files, bundle_digest(files))
    with pytest.raises(BundleError, match="digest"):
        check_bundle(files, bundle_digest({"tokenizer.json": b"[]"}))
    with pytest.raises(BundleError, match="no files"):
        check_bundle({}, bundle_digest({}))
