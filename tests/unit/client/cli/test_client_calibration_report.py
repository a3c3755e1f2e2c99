"""The table of a calibration fits a screen, and shows the worst of every kind."""

import io

from rich.console import Console

from muster.client.calibration import PLAIN_RECIPE, make_table
from muster.toploc.calibration import Measurement

LEVELS = ("int4", "int5", "int6", "int8")


def way(name: str, kind: str, accepted: int = 0, judged: str = "sample") -> Measurement:
    values = {"name": name, "kind": kind, "judged": judged, "trials": 100, "accepted": accepted}
    return Measurement.model_validate(values)


def full() -> list[Measurement]:
    """A table with as many rows as the full profile measures."""
    honest = [way(f"way {n}, validated {m}", "honest", 100) for n in range(9) for m in range(9)]
    forged = [
        way(f"forger {n}{end}", "nothing", judged="chunk")
        for n in range(7)
        for end in ("", ", one token only")
    ]
    noisy = [way(f"weights with {n}.00% noise", "other", accepted=n) for n in range(9)]
    weights = [way(f"weights in {level}", "other") for level in LEVELS]
    return [*honest, *forged, *noisy, *weights, way("first quarter of the layers", "cheap")]


def printed(measured: list[Measurement]) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=80, color_system=None).print(make_table(measured, PLAIN_RECIPE))
    return output.getvalue().splitlines()


def test_a_full_calibration_fits_a_screen() -> None:
    lines = printed(full())
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert "of 109 ways" in lines[0]


def test_the_least_noticed_way_of_a_kind_is_shown() -> None:
    text = " ".join(" ".join(printed(full())).split())
    assert "weights with 8.00%" in text
    assert "92.0%" in text
    assert "weights with 1.00%" not in text


def test_a_forger_that_gets_through_is_not_hidden_by_those_that_do_not() -> None:
    caught = " ".join(printed(full()))
    assert "forger that gets through" not in " ".join(caught.split())
    lucky = [*full(), way("lucky forger", "nothing", accepted=40, judged="chunk")]
    text = " ".join(" ".join(printed(lucky)).split())
    assert "lucky forger" in text
    assert "60.0%" in text
