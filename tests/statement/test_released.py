"""The figure of a folder of clusters or of a classifier: what is drawn where, and that no name breaks out of it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from dpllm.privacy import embedded
from dpllm.statement.released import Statistics, figure

HOSTILE = "</text><script>alert(1)</script> & \u202egnol\x07" + "w" * 80
SIZES = {f"01 {HOSTILE}": -60, "02 letter": 900, "03 cough": 40}


def clusters(sigma: float = 8.0, sizes: dict[str, int] | None = None) -> Statistics:
    sizes = sizes or SIZES
    declared = {"clusters": len(sizes), "encoder": "tiny", "max_length": 64, "dimensions": 16, "units": 900}
    release = {
        "statistic": "clusters of texts",
        "declared": declared,
        "mechanism": embedded.NAMES["clusters"],
        "event": embedded.event_of("clusters", sigma, 5).to_json(),
        "error_95": embedded.error_of(sigma),
        "error_of": embedded.COUNTED,
        "value": sizes,
        "entry": "0" * 16,
    }
    about = {"dataset": "notes", "unit": "example", "max_examples_per_unit": 1, "neighbouring_relation": "zero_out"}
    cost = {"epsilon": 1.0, "delta": 1e-5, "date": "2026-11-26", "software": {"dpllm": "0"}}
    return Statistics.pick({**about, **cost, "releases": [release]})


@pytest.mark.parametrize("sizes", [SIZES, {"01 a": 500, "02 letter": 900}])
def test_bars_and_errors_lie_where_the_numbers_do(sizes: dict[str, int]) -> None:
    """Bars begin at 0, end at the count; errors reach as far on both sides; numbers are written out."""
    text, error = figure(clusters(sizes=sizes)), embedded.error_of(8.0)
    zero = float(re.findall(r'<line x1="([\d.]+)"', text)[0])
    bars = [(float(x), float(width)) for x, width in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', text)]
    ends = [(float(low), float(high)) for low, high in re.findall(r'<path d="M([\d.]+) \d+H([\d.]+)M', text)]
    scale = (bars[1][0] + bars[1][1] - zero) / 900
    for (x, width), (low, high), size in zip(bars, ends, sizes.values(), strict=True):
        assert (x, x + width) == pytest.approx(sorted((zero, zero + size * scale)), abs=0.2)
        assert (low, high) == pytest.approx((zero + (size - error) * scale, zero + (size + error) * scale), abs=0.2)
        assert f">{size}</text>" in text
        assert 300 - 0.1 <= low < high <= 556.1
    assert f"± {error:.0f} units with 95% probability" in text


def test_no_name_breaks_out_and_equal_statistics_are_equal_bytes() -> None:
    text = figure(clusters())
    assert [one.tag.rpartition("}")[2] for one in ElementTree.fromstring(text).iter()].count("script") == 0
    assert "\u202e" not in text
    assert "\x07" not in text
    assert max(map(len, re.findall(r">01 ([^<]*)</text>", text))) < 70
    assert text == figure(clusters())
    assert text != figure(clusters(9.0))


@pytest.mark.parametrize(
    "sizes", [{"01 a": 0, "02 b": 0}, {"01 a": -5, "02 b": -7}, {f"{n:02} {n}": n for n in range(1, 100)}]
)
def test_odd_sizes_are_drawn(sizes: dict[str, int]) -> None:
    text = figure(clusters(0.001, sizes))
    assert ElementTree.fromstring(text) is not None
    assert "nan" not in text
