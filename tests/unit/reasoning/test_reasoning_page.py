"""The lesson's page: it has the result file's figures, and says where a stage adds nothing."""

import pytest
from benchmarks.reasoning.page import PAGE, difference_of, read_result, render


def share(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def test_a_difference_has_the_interval_of_newcombe() -> None:
    """Newcombe (1998), table II, example (a): 56 of 70 against 48 of 80, 0.0524 to 0.3339."""
    before, after = share(0.6, 0.4905, 0.7004), share(0.8, 0.6918, 0.8770)
    assert difference_of(before, after) == pytest.approx((0.2, 0.0525, 0.3337), abs=2e-3)


def test_the_page_is_the_one_that_the_result_file_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read_result())


def test_a_stage_that_adds_nothing_is_said_to() -> None:
    result = read_result()
    stages = result["detail"]["stages"]
    stages["reinforced"] = stages["fine-tuned"]
    page = render(result)
    [row] = [
        r for r in page.splitlines() if r.startswith("| reinforced, over fine-tuned | sampled")
    ]
    assert row.count("nothing: +0.00") == 4
