"""Which data a name stands for: copies and subsets are found, and nothing about records leaves the ledger."""

import hashlib
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_stores import Place, budget, outputs, request, reserve, start

from dpllm.errors import ConfigError, Refused
from dpllm.ledger import Ledger, budgets
from dpllm.ledger.records import HASH_BYTES, Fingerprint, fingerprint, rows_among, share_in_common, words
from dpllm.text.layouts import FIELDS

KEY = b"k" * 32
ROWS = [{"text": f"patient {n} was seen on ward {n % 7}"} for n in range(200)]


def of(ledger: Ledger, rows, fields=("text",)):
    return fingerprint(rows, fields, ledger.records.key())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(texts=st.lists(st.text(), min_size=1, max_size=12), random=st.randoms(use_true_random=False))
def test_order_spacing_composition_columns_and_ids_do_not_make_new_data(texts, random):
    rows = [{"text": text} for text in texts]
    original = fingerprint(rows, ["text"], KEY)
    shuffled = [
        {"a": " \n", "b": unicodedata.normalize("NFD", text).replace(" ", "\t  "), "id": n}
        for n, text in enumerate(texts)
    ]
    random.shuffle(shuffled)
    assert fingerprint(shuffled, ["a", "b"], KEY) == original  # also where the other column is empty
    messages = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    assert fingerprint(messages, ["messages"], KEY) == original
    assert fingerprint(rows, ["text"], b"x" * 32).digest != original.digest
    more = fingerprint([*rows, {"text": "one more record than before"}], ["text"], KEY)
    assert more.digest != original.digest


@settings(derandomize=True, deadline=None, max_examples=60)
@given(one=st.sets(st.integers(0, 60)), other=st.sets(st.integers(0, 60)))
def test_the_share_in_common_is_that_of_the_smaller(one, other):
    sides = [fingerprint([{"text": str(n)} for n in side], ["text"], KEY).hashes for side in (one, other)]
    few = min(len(one), len(other))
    assert share_in_common(*sides) == share_in_common(*sides[::-1]) == (len(one & other) / few if few else 0.0)
    assert all(len(side) % HASH_BYTES == 0 for side in sides)


def test_repetitions_count_in_the_digest_and_not_in_the_overlap_and_each_ledger_has_its_own_hashes(tmp_path):
    one, two = fingerprint(ROWS, ["text"], KEY), fingerprint([*ROWS, ROWS[0]], ["text"], KEY)
    assert one.digest != two.digest
    assert share_in_common(one.hashes, two.hashes) == 1.0
    assert (one.num_records, two.num_records) == (200, 201)
    with Ledger(tmp_path / "a.sqlite") as a, Ledger(tmp_path / "b.sqlite") as b:
        one, two = of(a, ROWS), of(b, ROWS)
    assert one.digest != two.digest
    assert share_in_common(one.hashes, two.hashes) == 0.0


def test_a_renamed_copy_is_the_same_dataset(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(8.0), records=of(ledger, ROWS))
    reserve(ledger, records=of(ledger, ROWS))
    assert [entry.kind for entry in ledger.history("notes")] == ["budget", "data", "reserve"]
    copy = of(ledger, [{"a": row["text"].upper().lower()} for row in ROWS[::-1]], ["a"])
    assert ledger.records.known_as(copy) == "notes"
    with pytest.raises(Refused, match="these very records are dataset 'notes'") as refusal:
        reserve(ledger, "other", records=copy)
    assert (refusal.value.dataset, refusal.value.reason) == ("notes", "renamed")
    with pytest.raises(Refused, match="these very records"):
        budgets.set_budget(ledger, "other", budget(8.0), records=copy)
    assert ledger.datasets() == ["notes"]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:20],
        [*ROWS, *({"text": f"new {n}"} for n in range(400))],
        [*ROWS[:30], *({"text": f"new {n}"} for n in range(70))],
        [*ROWS, ROWS[0]],
    ],
    ids=["subset", "appended", "mixed", "repeated"],
)
def test_changed_copies_are_found_by_their_overlap(ledger: Ledger, rows):
    budgets.set_budget(ledger, "notes", budget(8.0), records=of(ledger, ROWS))
    with pytest.raises(Refused, match="shares records with") as refusal:
        reserve(ledger, "other", records=of(ledger, rows))
    assert "privacy.derived_from: notes" in str(refusal.value)
    assert refusal.value.reason == "overlap"
    claim = reserve(ledger, "other", records=of(ledger, rows), derived_from="notes")
    assert claim.dataset == "notes"
    assert ledger.records.account_name("other") == "notes"


CHATS = [
    [{"role": "user", "content": f"question {n} of ward"}, {"role": "assistant", "content": f"answer {n}"}]
    for n in range(9)
]


def test_a_message_in_parts_is_the_same_text():
    def in_parts(turn, *texts):
        return {**turn, "content": [{"type": "text", "text": text} for text in texts]}

    plain = fingerprint(({"messages": turns} for turns in CHATS), ["messages"], KEY)
    halves = [[in_parts(turn, turn["content"][:7], turn["content"][7:]) for turn in turns] for turns in CHATS]
    for copy in ([[in_parts(turn, turn["content"]) for turn in turns] for turns in CHATS], halves):
        assert fingerprint(({"messages": turns} for turns in copy), ["messages"], KEY) == plain


PAIRS = [{"prompt": f"ask {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(100)]


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_side_of_pairs_is_no_new_dataset(ledger: Ledger, side: str):
    pairs, fields = of(ledger, PAIRS, FIELDS["preference"]), ("prompt", side)
    budgets.set_budget(ledger, "pairs", budget(8.0), records=pairs)
    answers = of(ledger, PAIRS[:30], fields)
    assert share_in_common(pairs.hashes, answers.hashes) == 1.0
    with pytest.raises(Refused, match="shares records with"):
        reserve(ledger, "answers", records=answers)
    assert rows_among(PAIRS, FIELDS["preference"], ledger.records.key(), answers) == 30
    assert rows_among(PAIRS, fields, ledger.records.key(), pairs) == 100


def test_pairs_of_answers_that_are_known_are_new_labels():
    whole = [fingerprint(pairs, FIELDS["preference"], KEY, pairs_whole=True) for pairs in (PAIRS, _other_pairs())]
    assert share_in_common(*(pairs.hashes for pairs in whole)) == 0.0
    assert share_in_common(*(fingerprint(p, FIELDS["preference"], KEY).hashes for p in (PAIRS, _other_pairs()))) >= 0.3


def _other_pairs():
    return [{**pair, "rejected": f"worse {n}"} for n, pair in enumerate(PAIRS)]


def test_a_few_common_records_are_taken_for_chance(ledger: Ledger):
    reserve(ledger, records=of(ledger, ROWS))
    reserve(ledger, "other", records=of(ledger, [ROWS[0], *({"text": f"new {n}"} for n in range(300))]))
    assert ledger.datasets() == ["notes", "other"]


def test_the_same_name_may_grow(ledger: Ledger):
    for rows in (ROWS[:50], ROWS, ROWS[100:]):
        reserve(ledger, records=of(ledger, rows))
    assert len(ledger.records.of_account("notes")) == 3
    with pytest.raises(Refused):
        reserve(ledger, "other", records=of(ledger, ROWS[120:140]))
    assert ledger.verify() == []


def test_derived_data_charge_the_parent_and_grandparents(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(8.0), records=of(ledger, ROWS))
    for dataset, parent, rows in (("sub", "notes", ROWS[:100]), ("subsub", "sub", ROWS[:50])):
        claim = reserve(ledger, dataset, records=of(ledger, rows), derived_from=parent)
        assert claim.dataset == ledger.records.account_name(dataset) == "notes"
    assert len(ledger.runs("notes")) == len(ledger.runs("subsub")) == 2
    # What was declared once holds when it is not declared again, with or without records.
    assert reserve(ledger, "subsub").dataset == "notes"
    assert reserve(ledger, "sub", records=of(ledger, ROWS[:100])).dataset == "notes"
    reserved = [entry.facts["data"] for entry in ledger.history("notes") if entry.kind == "reserve"]
    assert reserved == ["sub", "subsub", "subsub", "sub"]
    # A copy of the derived data under a new name is found too.
    with pytest.raises(Refused, match="these very records"):
        reserve(ledger, "new", records=of(ledger, ROWS[:50]))


def test_derivation_is_no_way_out_of_an_account(ledger: Ledger):
    budgets.set_budget(ledger, "notes", budget(0.01), records=of(ledger, ROWS))
    reserve(ledger, "rich")
    reserve(ledger, "plain")
    with pytest.raises(Refused, match="is in the ledger already"):
        reserve(ledger, "notes", derived_from="rich")
    with pytest.raises(Refused, match="is in the ledger already"):
        reserve(ledger, "plain", derived_from="rich")
    reserve(ledger, "sub", derived_from="rich")
    with pytest.raises(Refused, match="is in the ledger already"):
        reserve(ledger, "sub", derived_from="plain")
    with pytest.raises(Refused, match="these very records"):
        reserve(ledger, "copy", records=of(ledger, ROWS), derived_from="rich")
    with pytest.raises(Refused, match="shares records with"):
        reserve(ledger, "copy", records=of(ledger, ROWS[:50]), derived_from="rich")
    for parent, what in (("nobody", "knows no dataset"), ("copy", "knows no dataset"), ("notes", "from itself")):
        with pytest.raises(ConfigError, match=what):
            reserve(ledger, "notes" if parent == "notes" else "copy", derived_from=parent)
    with pytest.raises(ConfigError, match="from itself"):
        reserve(ledger, "rich", derived_from="sub")
    accounts = [ledger.records.account_name(name) for name in ("notes", "plain", "sub", "copy")]
    assert accounts == ["notes", "plain", "rich", "copy"]


def test_two_names_for_the_same_records_at_once_cannot_both_succeed(place: Place):
    code = """
from dpllm.ledger.records import fingerprint
from dpllm.ledger.budgets import reserve_all
rows = [{"text": f"row {n}"} for n in range(3000)]
name = arguments[0]
with open_ledger(location) as ledger:
    records = fingerprint(rows[int(arguments[1]):], ["text"], ledger.records.key())
    try:
        reserve_all(ledger, name, [claim], records=records)
        print("reserved")
    except Refused as error:
        assert error.reason in ("renamed", "overlap"), error
"""
    place.open().close()
    printed = outputs([start(place, code, name, skip) for name, skip in (("one", 0), ("two", 0), ("three", 1000))])
    assert sum("reserved" in out for out in printed) == 1
    with place.open() as ledger:
        assert len(ledger.datasets()) == 1
        assert ledger.verify() == []


def test_nothing_of_the_records_leaves_the_ledger(ledger: Ledger, place: Place):
    budgets.set_budget(ledger, "notes", budget(8.0), records=of(ledger, ROWS))
    results = []
    for name, rows in (("a", ROWS), ("b", ROWS[:20]), ("c", ROWS[:3])):
        with pytest.raises(Refused) as refusal:
            reserve(ledger, name, records=of(ledger, rows))
        results.append(str(refusal.value))
    reserve(ledger, records=of(ledger, ROWS))
    shown = json.dumps(ledger.chain.export()) + "".join(results) + "".join(entry.payload for entry in ledger.history())
    shown += repr(ledger.outlook("notes", [request()]))
    [(digest, nonce, hashes)] = place.raw("SELECT fingerprint, nonce, hashes FROM records")
    key = ledger.records.key().hex()
    hashes = bytes(hashes)
    secrets = {digest, nonce, key, *(hashes[n : n + HASH_BYTES].hex() for n in range(0, len(hashes), HASH_BYTES))}
    assert not [secret for secret in secrets if secret in shown]
    assert "patient 3" not in shown
    commitments = [e.facts["commitment"] for e in ledger.history() if e.kind == "data"]
    assert commitments == [of(ledger, ROWS).commitment(nonce, ledger.records.key())]


# --- the fingerprint of a corpus larger than memory is the one that ledgers already hold ---------------------------------


def in_memory(rows, fields) -> Fingerprint:
    """The definition, over all texts at once; a stored digest must not change."""

    def hashed(texts):
        return sorted(hashlib.blake2b(text.encode(), key=KEY, digest_size=32).digest() for text in texts)

    records = hashed([words(row, fields) for row in rows])
    digest = hashlib.blake2b(b"".join(records), key=KEY, digest_size=32).hexdigest()
    return Fingerprint(digest, b"".join(sorted({record[:HASH_BYTES] for record in records})), len(records))


TEXT = st.sampled_from(["", " ", "a", "a ", "b  b", "c", "d", "e\u0301", "\u00e9", "label"])
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT, "messages": TURNS}), max_size=12))
def test_reading_once_gives_what_all_texts_at_once_gave(rows):
    for fields in (["prompt", "completion"], ["messages"], ["prompt"]):
        assert fingerprint(iter(rows), fields, KEY) == in_memory(rows, fields)


def test_a_known_dataset_keeps_its_fingerprint():
    rows = [{"prompt": f"question {number}", "completion": f"answer {number % 3}"} for number in range(20)]
    records = fingerprint(rows, ["prompt", "completion"], KEY)
    assert records.digest == "9c8548944177e2b83d77c1d61d25d146eb12beb1e7a03f676c6e565c02efc6f5"
    assert hashlib.blake2b(records.hashes, digest_size=8).hexdigest() == "4687fbd448c176f2"
