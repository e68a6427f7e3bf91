"""Salts of cached prefixes: equal for those who may share, different for everybody else."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.auth.authenticator import PUBLIC, UNIDENTIFIED, Caller, PrefixSalt

NAMES = st.text("ab\n", max_size=3) | st.text(max_size=6)  # few letters, so that parts often join to the same


def caller(tenant: str, group: str | None = None) -> Caller:
    return Caller(name="k", tenant=tenant, scopes=frozenset(), sharing_group=group)


def test_where_nobody_is_asked_who_they_are_salts_are_left_alone() -> None:
    assert PrefixSalt("secret").of(UNIDENTIFIED, "mine") == "mine"


def test_the_same_secret_gives_the_same_salts_and_another_one_others() -> None:
    one, again, other, drawn = PrefixSalt("a"), PrefixSalt("a"), PrefixSalt("b"), PrefixSalt()
    salts = [each.of(caller("t"), "s") for each in (one, again, other, drawn)]
    assert salts[0] == salts[1]
    assert len(set(salts[1:])) == 3


def test_tenants_of_a_group_share_and_nobody_else_does() -> None:
    salt = PrefixSalt("a")
    assert salt.of(caller("one", "family"), "s") == salt.of(caller("two", "family"), "s")
    separate = [caller("one"), caller("two"), caller("family"), caller("one", "family"), PUBLIC]
    assert len({salt.of(each, "s") for each in separate}) == 5


def test_moving_a_letter_from_one_part_to_the_next_gives_another_salt() -> None:
    salt = PrefixSalt("a")
    assert len({salt.of(caller(tenant), own) for tenant, own in (("ab", "c"), ("a", "bc"), ("abc", ""))}) == 3


@given(parts=st.lists(st.tuples(NAMES, st.none() | NAMES, NAMES), min_size=2, max_size=6, unique=True))
def test_different_owners_or_salts_never_meet(parts: list[tuple[str, str | None, str]]) -> None:
    """Not by moving a border between the parts either."""
    salt = PrefixSalt("a")
    for (tenant, group, own), (tenant2, group2, own2) in itertools.combinations(parts, 2):
        owner = ("tenant", tenant) if group is None else ("group", group)
        owner2 = ("tenant", tenant2) if group2 is None else ("group", group2)
        same = salt.of(caller(tenant, group), own) == salt.of(caller(tenant2, group2), own2)
        assert same == ((owner, own) == (owner2, own2))


def test_a_tenants_label_is_its_own_the_same_everywhere_and_says_nothing() -> None:
    one, again, other = PrefixSalt("a"), PrefixSalt("a"), PrefixSalt("b")
    assert one.label_of(UNIDENTIFIED) == ""
    assert one.label_of(caller("acme")) == again.label_of(caller("acme", "family")) != other.label_of(caller("acme"))
    labels = {one.label_of(each) for each in (caller("acme"), caller("zen"), caller("family"), PUBLIC)}
    assert len(labels) == 4
    assert not any("acme" in label or label in one.of(caller("acme"), "") for label in labels)
