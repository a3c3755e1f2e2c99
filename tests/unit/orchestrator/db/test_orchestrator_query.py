"""Statements: their parameters, refusals, and the indexes that answer them."""

import re
from collections.abc import Mapping

import pytest
from orchestrator_bench import Bench
from sqlalchemy import bindparam, select

from muster.orchestrator.db import statements
from muster.orchestrator.db.query import Query, Statement, columns, plain
from muster.orchestrator.db.statements import SubmissionRow
from muster.orchestrator.db.tables import batches, submissions

COUNTED = Query(select(batches.c.count).where(batches.c.root == bindparam("root")).limit(3))


def test_statement_has_each_databases_words_and_all_values() -> None:
    asked = COUNTED(root=b"x")
    assert asked.sql.sqlite.endswith("WHERE batches.root = :root LIMIT :param_1 OFFSET :param_2")
    assert asked.sql.postgresql.endswith("root = %(root)s LIMIT %(param_1)s::INTEGER")
    assert asked.values == {"root": b"x", "param_1": 3, "param_2": 0}
    assert asked.sql.has_rows
    assert not plain("DELETE FROM batches").sql.has_rows


@pytest.mark.parametrize("values", [{}, {"rot": b""}, {"root": b"", "param_1": 4}])
def test_statement_refuses_other_values_than_it_has(values: Mapping[str, object]) -> None:
    with pytest.raises(TypeError, match=r"has values \['root'\], not "):
        COUNTED(**values)


def test_statement_about_a_column_that_is_not_there_cannot_be_written() -> None:

    assert [each.name for each in columns(submissions, SubmissionRow)][:2] == [
        "sequence",
        "file_hash",
    ]
    with pytest.raises(AttributeError, match="no_such_column"):
        _ = submissions.c.no_such_column


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    ("asked", "index"),
    [
        (statements.unfilled_leases(worker="x", since=1), "ix_leases_unfilled"),
        (statements.unfilled(now=1), "ix_leases_"),
        (statements.waiting_units(worker="x"), "ix_submissions_waiting"),
        (statements.waiting_submissions(), "ix_submissions_"),
        (statements.open_batches(), "ix_batches_is_judged"),
    ],
)
async def test_index_answers_what_every_lease_asks(
    bench: Bench, asked: Statement, index: str
) -> None:
    explained = plain(f"EXPLAIN QUERY PLAN {asked.sql.sqlite}", **asked.values)
    [plan] = await bench.services.database.ask(explained)
    assert re.search(rf"USING (COVERING )?INDEX {index}", plan[0][3]), plan
