"""Near matches and personal details in texts: counted as their definitions say."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.auditing import personal, verbatim
from dpllm.canaries import carriers

# Near matches.


def naive_distance(first, second):
    """By its recursion: what the last step can have been."""

    @cache
    def of(i, j):
        if not i or not j:
            return i + j
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (first[i - 1] != second[j - 1]))

    return of(len(first), len(second))


texts = st.text(alphabet="abc", max_size=80)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(texts, texts)
def test_the_edit_distance_is_the_definitions(first, second):
    assert verbatim.edit_distance(first, second) == naive_distance(first, second)
    assert verbatim.edit_distance(tuple(map(ord, first)), list(map(ord, second))) == naive_distance(first, second)
    assert verbatim.edit_share(first, second) <= 1


@settings(derandomize=True, deadline=None)
@given(texts, texts)
def test_the_common_share_is_the_longest_run(text, target):
    longest = max(
        (
            end - start
            for start in range(len(target))
            for end in range(start + 1, len(target) + 1)
            if target[start:end] in text
        ),
        default=0,
    )
    assert verbatim.common_share(text, target) == (longest / len(target) if target else 0.0)


def test_what_counts_as_near():
    target = "0123456789"
    found = verbatim.compare((1, 2, 9), " 0123456780", (1, 2, 3), f"{target} ")
    assert found == verbatim.Match(exact=False, near_tokens=False, near_characters=True, common_share=0.9)
    assert verbatim.compare((1, 2), "99", (1, 2), "99") == verbatim.Match(True, True, True, 1.0)
    assert not verbatim.compare((1, 2), "0123456", (1, 2, 3), "01234567").near_characters
    ten = tuple(range(10))
    assert verbatim.compare((*ten[:9], 99), "", ten, "x").near_tokens


# Personal details.


@pytest.mark.parametrize(
    ("text", "details"),
    [
        ("call (555) 555-0142 now", {("phone", "5555550142")}),
        ("+1 555-555-0142", {("phone", "5555550142")}),
        ("5555550142.", {("phone", "5555550142")}),
        ("card 4000 1234 5678 9010", {("card", "4000123456789010")}),
        ("4000123456789010", {("card", "4000123456789010")}),
        ("4000-1234-5678-901", {("card", "400012345678901")}),
        ("Ann.Lee+x@Mail.example.org,", {("email", "ann.lee+x@mail.example.org")}),
        ("a5555550142@example.org", {("email", "a5555550142@example.org")}),
        ("in 2024 we saw 12345678 and 1,000,000", set()),
        ("a.b@ c@d and 555-0142", set()),
        ("x@example.org or 555 555 0199", {("email", "x@example.org"), ("phone", "5555550199")}),
    ],
)
def test_details_are_found_however_they_are_written(text, details):
    assert personal.find(text) == details


def test_the_planted_details_are_recognised_as_what_they_are():
    for sentence, detail in carriers.draw(200, random.Random(0)):
        kind = next(kind for kind, start in carriers.SENTENCES.items() if start[:8] == sentence[:8])
        assert {found for found, _ in personal.find(detail)} == {kind}
        assert not personal.find(sentence)
        assert len(personal.find(f"{sentence} {detail}.")) == 1


def test_details_are_counted_with_their_owners():
    secrets = ["555-555-0101", "555-555-0102", "555-555-0103"]
    prompts = ["The phone of Ann is", "The phone of Bob, not 555-555-0199, is", "The phone of Cyd is"]
    written = [
        ["it is 555-555-0101", "(555) 555-0101 or 555-555-0102"],  # her own, once, and another's
        ["555-555-0199 again", "555 555 0150"],  # what the prompt says does not count; one that is nobody's
        ["nothing"],
    ]
    found = personal.count(secrets, prompts, written, secrets[:2])
    assert found == personal.Found(prompts=3, own=1, details=3, planted=2, precision=2 / 3)
    assert personal.count([], [], [], []).precision is None
