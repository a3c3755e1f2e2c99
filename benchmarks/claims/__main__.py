"""Measure the claims of the papers behind Muster again, and write docs/claims.md.

    make claims                          all studies, then the page
    make claims ARGS="clip filters"      some
    make claims ARGS=page                the page alone, of the figures that there are

Each study adds its figures to results/claims.json.
"""

import argparse
import logging
import time
from collections.abc import Callable, Mapping

import torch
from benchmarks.claims import clip, filters, lengths, proofs, swarm
from benchmarks.claims.page import write_page
from benchmarks.claims.study import Study
from benchmarks.report import add_part

STUDIES: Mapping[str, Callable[[], Study]] = {
    "clip": clip.measure,
    "filters": filters.measure,
    "lengths": lengths.measure,
    "proofs": proofs.measure,
    "swarm": swarm.measure,
}


def main() -> None:
    """Run the chosen studies, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, "page"], metavar="STUDY")
    asked = parser.parse_args().studies or list(STUDIES)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in asked:
        if name in STUDIES:
            began = time.process_time()
            study = STUDIES[name]()
            spent = {"cpu_s": round(time.process_time() - began)}
            add_part("claims", name, study.metrics, study.detail | spent)
    write_page()


if __name__ == "__main__":
    main()
