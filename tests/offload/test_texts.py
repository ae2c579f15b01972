"""Random histories of requests, on this machine and on a simulated GPU, on one and two ranks: each text is the one it
has alone."""

import pytest
import texts


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return texts.save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("where", ["here", "simulated"])
@pytest.mark.slow(keep=("here-0", "here-1", "here-3", "simulated-0", "simulated-5"))
def test_each_text_is_the_one_it_has_alone(models, where, seed):
    """2,000 histories in a campaign: `python tests/support/simulator/texts.py`."""
    assert texts.play(models, seed, real=where == "here")


@pytest.mark.parametrize("where", ["here", "simulated"])
@pytest.mark.slow
def test_of_two_ranks_too(models, where):
    assert texts.play(models, 7, ranks=2, real=where == "here")


@pytest.mark.slow
def test_a_process_holds_no_more_after_many_requests(models):
    """20,000 in a campaign: `python tests/support/simulator/texts.py --requests 20000`."""
    found = []
    texts.play_long(models, 500, 100, found.append)
    first, *_, last = found
    assert last.descriptors <= first.descriptors + 2
    assert (last.objects - first.objects) / (last.requests - first.requests) < 2, "objects are kept of each request"
