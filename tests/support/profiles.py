"""How many examples Hypothesis tries, by which tests run."""

from typing import Any

from hypothesis import settings

SHARES = {"fast": 0.2, "sample": 0.2, "full": 1.0, "campaign": 50.0}
"""Of the examples of a full run, by the profile that tests/conftest.py loads."""


def profile_name() -> str:
    """One of `SHARES`."""
    return settings.get_current_profile_name()


def share(full: int, least: int = 5) -> int:
    """How many examples a test tries that a full run shows `full`; `least` or more. A campaign shows no more."""
    return max(least, round(full * min(1.0, SHARES.get(profile_name(), 1.0))))


def examples(full: int, **options: Any) -> settings:
    """Hypothesis' settings for a test that a full run shows `full` examples; at least 5."""
    share = SHARES.get(profile_name(), 1.0)
    return settings(max_examples=max(5, round(full * share)), **options)
