"""`TRIFORCE_CPU_LEVEL`: a lower level of the compiled kernels than the processor has."""

import json

import pytest
from command import check_refusal, run_fork

LEVELS = ("none", "avx2", "avx512", "avx512_bf16", "amx")


def kernels_of(level: str) -> tuple[str | None, list[str]]:
    """What `triforce doctor` says of the kernels, and of what is missing of them."""
    found = json.loads(run_fork("doctor", "--json", "-", anew="triforce", TRIFORCE_CPU_LEVEL=level).out)
    return found["compiled_kernels"], [line for line in found["missing"] if line.startswith("compiled CPU kernels")]


def test_without_instructions_a_run_computes_with_pytorch():
    asked = ("generate", "--prompt", "It was", "--max-new-tokens", 3, "--json", "-")
    run = run_fork(*asked, anew="triforce", TRIFORCE_CPU_LEVEL="none")
    assert run.code == 0, run
    document = json.loads(run.out)
    assert document["kernels"] is None and document["arithmetic"] == 0


@pytest.mark.slow
def test_each_level_of_the_processor_can_be_asked_for_and_no_higher_one():
    highest, missing = kernels_of("")
    if missing:
        pytest.skip("the compiled kernels were not built")
    found = {level: kernels_of(level) for level in LEVELS}
    usable = [level for level, (_, refused) in found.items() if not refused]
    assert usable == list(LEVELS[: len(usable)]), found
    assert found[usable[-1]][0] == highest
    assert len({found[level][0] for level in usable}) == len(usable), f"two levels are called the same: {found}"
    for level in LEVELS[len(usable) :]:
        assert (
            f"TRIFORCE_CPU_LEVEL is '{level}', which the processor or the built kernels do not support"
            in found[level][1][0]
        ), found


def test_another_word_is_refused():
    run = run_fork("generate", "--prompt", "It was", anew="triforce", TRIFORCE_CPU_LEVEL="sse9")
    check_refusal(run, 2, "TRIFORCE_CPU_LEVEL is 'sse9', which is no level; here it can be: none")
