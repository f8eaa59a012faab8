"""The fit of alpha and beta, and the file that carries it."""

import pytest

from paceline.comm.cost import Cost, cost
from paceline.comm.link_benchmark import bandwidths
from paceline.comm.link_profile import Line, LinkProfile, Pair, Point, fit_line
from paceline.errors import DataError

SIZES = (64, 4096, 65536, 1 << 20, 1 << 24)


def measured(alpha: float, beta: float, world: int = 4) -> list[Point]:
    asked = [cost("all_reduce", size, world) for size in SIZES]
    return [Point(c.sent_bytes, c.rounds, c.rounds * alpha + c.sent_bytes * beta) for c in asked]


@pytest.mark.capability("G13")
def test_the_fit_finds_what_the_points_were_made_of_and_predicts() -> None:
    line = fit_line(measured(2e-3, 8e-8))
    assert line.alpha_seconds == pytest.approx(2e-3) and line.bits_per_second == pytest.approx(1e8)
    assert line.residual < 1e-9
    assert line.seconds(Cost(1000.0, 1000.0, 3)) == pytest.approx(6e-3 + 8e-5)


def test_noise_shows_in_the_residual_and_nothing_becomes_negative() -> None:
    noisy = [
        Point(p.sent_bytes, p.rounds, p.seconds * f)
        for p, f in zip(measured(1e-3, 1e-8), (1, 2, 1, 2, 1), strict=True)
    ]
    assert 0.1 < fit_line(noisy).residual < 1
    falling = [Point(1.0, 1, 1.0), Point(1000.0, 1, 0.5)]
    assert fit_line(falling).beta_seconds_per_byte == 0.0 and fit_line(falling).bits_per_second == float(
        "inf"
    )
    rising = [Point(1.0, 1, 1e-9), Point(1000.0, 1, 1.0)]
    assert fit_line(rising).alpha_seconds == 0.0


def test_algbw_counts_the_tensor_and_busbw_what_a_rank_sends() -> None:
    algbw, busbw = bandwidths(Point(1.5e6, 6, 1.0), 4)
    assert (algbw, busbw) == (pytest.approx(8e6), pytest.approx(1.2e7))


def test_a_profile_survives_its_file_and_another_file_is_refused(tmp_path) -> None:
    line = fit_line(measured(2e-3, 8e-8))
    profile = LinkProfile(("h0", "h1"), (Pair(0, 1, line), Pair(1, 0, Line(1.0, 2.0, 0.5, ()))), line)
    profile.save(tmp_path / "links.json")
    assert LinkProfile.load(tmp_path / "links.json") == profile
    bare = '{"format": 2, "hosts": [], "pairs": [], "all_reduce": %s, "routes": []}'
    line = '{"alpha_seconds": 1, "beta_seconds_per_byte": 1, "residual": 0, "points": []}'
    for text in ("{}", "[]", '{"format": 2}', "no", bare % line, bare % "[]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError):
            LinkProfile.load(tmp_path / "other.json")
