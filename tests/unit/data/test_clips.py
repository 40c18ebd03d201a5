"""What is taken from a clip: which frames at which rate, how many, and from where."""

from fractions import Fraction

import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data.samples import is_slower, make_clip_plan, show_at
from devicebridge.data.video import ClipInfo, probe_clip
from devicebridge.families.spec import LatentSpec
from devicebridge.families.wan import WAN
from devicebridge.tests.clips import plain_frames, save_video

FOLDER = (FolderConfig("somewhere"),)


def _even(count, fps):
    return ClipInfo((32, 48), count, tuple(i / fps for i in range(count)), count / fps)


def _plan(**settings):
    return make_clip_plan(DataConfig(FOLDER, **settings), WAN.latent)


@pytest.mark.parametrize("count, source", [(1, 16), (33, 16), (49, 24), (60, 30), (10, 8), (7, 23.976), (100, 59.94)])
def test_a_tick_shows_the_last_frame_that_has_begun(count, source):
    rate = Fraction(source).limit_denominator(1001)
    shown = show_at(_even(count, float(rate)), 16)
    expected = []
    time, slack = Fraction(0), Fraction(15, 10000)
    while time + slack < Fraction(count) / rate:  # as long as the last frame is on screen
        expected.append(max(i for i in range(count) if i / rate <= time + slack))
        time += Fraction(1, 16)
    assert shown == expected


def test_a_variable_rate_comes_out_even():
    info = ClipInfo((32, 48), 5, (0.0, 0.1, 0.3, 0.31, 0.9), 1.2)
    assert show_at(info, 10) == [0, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("name", ("a.webm", "a.mp4", "a.mkv"))
@pytest.mark.parametrize("fps", (16, 24, 30))
def test_times_that_a_container_rounds_lose_no_frame(tmp_path, name, fps):
    info = probe_clip(save_video(tmp_path / name, plain_frames(20, (16, 16)), fps=fps))
    assert show_at(info, fps) == list(range(20))
    assert show_at(info, fps / 2) == list(range(0, 20, 2))


def test_without_a_rate_or_without_times_all_frames_are_taken():
    assert show_at(_even(5, 30), None) == show_at(ClipInfo((32, 48), 5), 16) == [0, 1, 2, 3, 4]


def test_slow_clips_are_told():
    assert is_slower(_even(20, 12), 16)
    assert not is_slower(_even(20, 15), 16)
    assert not is_slower(_even(20, 12), None) and not is_slower(ClipInfo((32, 48), 5), 16)


@pytest.mark.parametrize("count, length", [(17, 17), (32, 17), (33, 33), (48, 33), (80, 33), (81, 81), (500, 81)])
def test_a_clip_gets_the_longest_length_that_fits(count, length):
    (frames,) = _plan(frames=(81, 1, 33, 17)).cut(_even(count, 16)).values()
    assert frames == tuple(range(length)) and (length - 1) % 4 == 0


def test_a_clip_that_is_too_short_is_refused_and_never_padded():
    with pytest.raises(ValueError, match=r"its 20 frames \(14 at 16 per second\) are fewer than 17"):
        _plan().cut(_even(20, 24))
    with pytest.raises(ValueError, match=r"its 16 frames \(all of them\) are fewer than 17"):
        _plan().cut(ClipInfo((32, 48), 16))


def test_windows():
    info = _even(50, 16)
    assert _plan(window="centre").cut(info) == {8: tuple(range(8, 41))}
    starts = list(_plan(window="uniform", num_windows=3).cut(info))
    assert starts == [0, 9, 17]
    assert [frames[-1] for frames in _plan(window="uniform", num_windows=2).cut(info).values()] == [32, 49]
    of_short = _plan(window="uniform", num_windows=4)
    assert len(of_short.cut(_even(33, 16))) == 1 and list(of_short.cut(_even(34, 16))) == [0, 1]
    assert _plan(frames=(1,)).cut(_even(20, 24)) == {0: (0,)}
    assert _plan(frames=(1,), window="centre").cut(_even(21, 16)) == {10: (10,)}
    for settings in ({"window": "uniform"}, {"num_windows": 2}, {"window": "centre", "num_windows": 2}):
        with pytest.raises(ValueError, match="num_windows above 1 belongs to"):
            _plan(**settings)


def test_the_rate_is_the_models_the_users_or_the_clips_own():
    info = _even(99, 48)
    assert _plan().cut(info)[0][:3] == (0, 3, 6)
    assert _plan(fps=24).cut(info)[0][:3] == (0, 2, 4)
    assert _plan(fps="source").cut(info)[0][:3] == (0, 1, 2)
    (five_b,) = (variant for variant in WAN.variants if variant.name == "wan2.2-ti2v-5b")
    assert make_clip_plan(DataConfig(FOLDER), WAN.latent_of(five_b)).cut(info)[0][:3] == (0, 2, 4)


def test_clips_may_grow_by_several_latent_frames_at_once() -> None:
    """MiniMax H3's 17n + 5 video frames are 5n + 2 latent frames, and one is one."""
    latent = LatentSpec(24, 16, frame_stride=17, clip_steps=(5, 2, 5), fps=24)
    lengths = [n for n in range(1, 80) if latent.is_length(n)]
    assert lengths == [1, 5, 22, 39, 56, 73]
    cells = [latent.num_latent_frames(n) for n in lengths]
    assert cells == [1, 2, 7, 12, 17, 22] and [latent.num_frames(n) for n in cells] == lengths
    with pytest.raises(ValueError, match=r"data\.frames has 4, 30, .*nearest are 1, 5, 22, 39"):
        make_clip_plan(DataConfig(FOLDER, frames=(4, 30)), latent)
