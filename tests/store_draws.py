"""What the state machine of the store's index draws from: small, so that histories meet."""

from __future__ import annotations

from hypothesis import strategies as st

from store_model import SESSIONS

Places = tuple[int, ...]

ranges = st.builds(lambda a, n: range(a, min(a + n, 6)), st.integers(0, 5), st.integers(1, 6))
chains = st.sampled_from([0, 1, 2])
seldom = st.integers(0, 7)  # what ends a history that could grow, so that most do grow
sessions = st.sampled_from(SESSIONS)
groups = st.sampled_from([range(0, 2), range(0, 1), range(1, 2)])
holds = st.sampled_from(["", "", "", "j0", "j1", "j2", "j3"])
wrongs = st.sampled_from([(), (), (), (0,), (1, 3)])  # of a put's blocks, by their places
readings = st.sampled_from([(), (), (0,), (1, 2), (0, 2)])  # chains that are read meanwhile
