"""Figures in words: every unit has its text, unknown is a question mark, and no byte of a trainer steers the terminal."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from fleetd.screens import words
from policies.facts import GIB, MIB


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (3599, "59 min"),
        (3900, "1 h 05 min"),
        (86400 * 3 + 4 * 3600, "3 d 4 h"),
        (-5, "0 s"),
        (None, "?"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


def test_an_age_is_now_only_while_it_is_fresh_and_unknown_is_never_now() -> None:
    assert [words.age(each) for each in (0.0, 1.9, 2.0, 12.7, None)] == ["now", "now", "2 s ago", "12 s ago", "?"]


def test_a_deadline_that_passed_says_so() -> None:
    assert words.until(61) == "in 61 s"
    assert words.until(-180) == "passed 3 min ago"
    assert words.until(None) == "?"


def test_sizes_are_binary_and_a_share_speaks_the_unit_of_its_cap() -> None:
    assert [words.size(each) for each in (None, 0, 900, 512 * MIB, int(1.2 * GIB), 110 * GIB)] == [
        "?",
        "0 B",
        "900 B",
        "512 MiB",
        "1.20 GiB",
        "110 GiB",
    ]
    assert words.share(int(1.2 * GIB), 2 * GIB) == "1.20/2.00 GiB"
    assert words.share(None, 2 * GIB) == "?/2.00 GiB"
    assert words.share(100 * MIB, 512 * MIB) == "100/512 MiB"
    assert words.share(GIB, None) == "1.00 GiB/?"


def test_losses_rates_and_perplexities_keep_their_digits_and_name_what_is_not_finite() -> None:
    assert [words.loss(each) for each in (None, 5.2314, 1055.0, float("nan"))] == ["?", "5.231", "1,055.0", "nan"]
    assert [words.rate(each) for each in (None, 0.0341, 2.134, 120.4)] == ["?", "0.034", "2.13", "120"]
    assert [words.perplexity(each) for each in (None, 2.0, 6.96, 900.0)] == ["?", "7.4", "1,054", "?"]


def test_a_moment_names_its_day_only_when_it_is_another_one() -> None:
    now = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
    assert words.moment("2026-11-30T13:15:00.000000Z", now) == "13:15:00 UTC"
    assert words.moment("2026-12-01T02:15:00+02:00", now) == "2026-12-01 00:15 UTC"
    assert words.moment(None, now) == "?"


def test_text_of_others_loses_every_control_character() -> None:
    assert words.one_line("a\x1b[31mred\x1b[0m\n\tb\x07\x9b2J") == "a[31mred[0m b2J"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("1h30m", 5400.0), ("2d", 172800.0), (" 1 h 5 min ", 3900.0), ("0.5", 0.5)]
)
def test_a_timeout_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert words.duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1x", "5 m later", "-3", "m", "1h" * 50])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write seconds"):
        words.duration_seconds(text)
