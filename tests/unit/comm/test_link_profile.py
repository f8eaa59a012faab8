"""The fit of alpha and beta, and the file that carries it."""

import pytest

from paceline.comm.collective_cost import CollectiveCost, native_cost
from paceline.comm.link_benchmark import bandwidths
from paceline.comm.link_profile import LinkModel, LinkProfile, LinkSample, RankPair, fit_link_model
from paceline.errors import DataError

SIZES = (64, 4096, 65536, 1 << 20, 1 << 24)


def measured(alpha: float, beta: float, world: int = 4) -> list[LinkSample]:
    asked = [native_cost("all_reduce", size, world) for size in SIZES]
    return [LinkSample(c.sent_bytes, c.rounds, c.rounds * alpha + c.sent_bytes * beta) for c in asked]


@pytest.mark.capability("G13")
def test_the_fit_finds_what_the_points_were_made_of_and_predicts() -> None:
    line = fit_link_model(measured(2e-3, 8e-8))
    assert line.alpha_seconds == pytest.approx(2e-3) and line.bits_per_second == pytest.approx(1e8)
    assert line.residual < 1e-9
    assert line.seconds(CollectiveCost(1000.0, 1000.0, 3)) == pytest.approx(6e-3 + 8e-5)


def test_noise_shows_in_the_residual_and_nothing_becomes_negative() -> None:
    noisy = [
        LinkSample(p.sent_bytes, p.rounds, p.seconds * f)
        for p, f in zip(measured(1e-3, 1e-8), (1, 2, 1, 2, 1), strict=True)
    ]
    assert 0.1 < fit_link_model(noisy).residual < 1
    falling = [LinkSample(1.0, 1, 1.0), LinkSample(1000.0, 1, 0.5)]
    assert fit_link_model(falling).beta_seconds_per_byte == 0.0 and fit_link_model(
        falling
    ).bits_per_second == float("inf")
    rising = [LinkSample(1.0, 1, 1e-9), LinkSample(1000.0, 1, 1.0)]
    assert fit_link_model(rising).alpha_seconds == 0.0


def test_algbw_counts_the_tensor_and_busbw_what_a_rank_sends() -> None:
    algbw, busbw = bandwidths(LinkSample(1.5e6, 6, 1.0), 4)
    assert (algbw, busbw) == (pytest.approx(8e6), pytest.approx(1.2e7))


def test_a_profile_survives_its_file_and_another_file_is_refused(tmp_path) -> None:
    line = fit_link_model(measured(2e-3, 8e-8))
    profile = LinkProfile(
        ("h0", "h1"), (RankPair(0, 1, line), RankPair(1, 0, LinkModel(1.0, 2.0, 0.5, ()))), line
    )
    profile.save(tmp_path / "links.json")
    assert LinkProfile.load(tmp_path / "links.json") == profile
    bare = '{"format": 2, "hosts": [], "pairs": [], "all_reduce": %s, "routes": []}'
    line = '{"alpha_seconds": 1, "beta_seconds_per_byte": 1, "residual": 0, "points": []}'
    for text in ("{}", "[]", '{"format": 2}', "no", bare % line, bare % "[]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError):
            LinkProfile.load(tmp_path / "other.json")
